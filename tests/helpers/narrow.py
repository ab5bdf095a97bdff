"""The network for digits with narrow layers, for tests of what is around the network."""

from collections import OrderedDict
from dataclasses import replace

from torch import nn

from softstair.models import NETWORKS, Entry

__all__ = ["WIDTH", "narrow_entry"]

WIDTH = 48


def narrow_entry() -> Entry:
    """Return the entry of the network for digits, with layers of `WIDTH` instead of 256."""
    return replace(NETWORKS["digits"], make=_digits)


def _digits(classes: int, channels: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (8 * 8, WIDTH, WIDTH):
        layers += [nn.Linear(inputs, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    features = nn.Sequential(*layers)
    return nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(WIDTH, classes)))
