"""The small network for the digits of scikit-learn: 8×8 pixels, ten classes."""

from collections import OrderedDict

from torch import nn

__all__ = ["digits"]


def digits(classes: int = 10) -> nn.Module:
    """The float network; with its last layer skipped, three layers are there to be quantised.

    (N, 1, 8, 8) -> (N, classes). Three linear layers of 256 with batch normalisation, and a linear
    one: 147,456 quantised weights, which are 36 KiB of ternary ones at two bits each.

    >>> sum(parameter.numel() for parameter in digits().parameters())
    151562
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (8 * 8, 256, 256):
        layers += [nn.Linear(inputs, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU()]
    last = nn.Linear(256, classes)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(OrderedDict(features=nn.Sequential(*layers), classifier=last))
