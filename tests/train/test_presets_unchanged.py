"""The untrained networks of presets, and those of the zoo, are the same in every release."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from softstair import zoo
from softstair.models import build
from softstair.nn import stair_modules
from softstair.train.network import stair_network
from softstair.train.recipe import PRESETS

INPUTS = {"cifar10": (3, 32, 32), "svhn": (3, 32, 32), "speech": (1, 49, 10), "digits": (1, 8, 8)}
SMALL = ("digits", "paper-speech", "best-speech", "best-speech-ternary")
DIGESTS = {
    "digits": "bd9586953c28d907",
    "paper-cifar10": "fd297d0ec06d6451",
    "paper-svhn": "fd297d0ec06d6451",
    "paper-speech": "0269375d8f262122",
    "best-cifar10": "3f36e65b8947b07f",
    "best-cifar10-ternary": "fd297d0ec06d6451",
    "best-cifar10-int4": "a105589a1dfdc567",
    "best-svhn": "3f36e65b8947b07f",
    "best-svhn-ternary": "fd297d0ec06d6451",
    "best-svhn-int4": "a105589a1dfdc567",
    "best-speech": "afd4f98621212b73",
    "best-speech-ternary": "c2053d1b696e187f",
    "cifar10-vgg8": "0ab8014ebb42912e",
    "cifar10-vgg8-ternary": "7a2a4b41863e7040",
    "speech-dscnn-int4": "aab760de12525802",
    "speech-dscnn-ternary": "fa40999fe09446b4",
}


def digest(net: nn.Module) -> str:
    """Parameters, buffers and stairs of a network, by name."""
    result = hashlib.sha256()
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        result.update(name.encode() + tensor.detach().numpy().tobytes())
    for name, module in stair_modules(net):
        about = (
            name,
            module.stair.to_json(),
            module.strategy,
            module.layer,
            module.gradient_margin,
        )
        result.update(repr((*about, repr(module.noise))).encode())
    return result.hexdigest()[:16]


def untrained(name: str) -> nn.Module:
    """The network of a preset, with weights that are the same on every machine."""
    recipe = PRESETS[name]
    shape = INPUTS[recipe.data.name]
    model = build("digits" if recipe.network.model == "auto" else recipe.network.model, 12, shape)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 7):
            values = (torch.arange(parameter.numel()) * number) % 257 - 128
            parameter.copy_(values.view_as(parameter) / 256)
    torch.manual_seed(0)
    return stair_network(model, recipe, torch.zeros(2, *shape))


@pytest.mark.parametrize(
    "name",
    [name if name in SMALL else pytest.param(name, marks=pytest.mark.nightly) for name in PRESETS],
)
def test_the_network_of_a_preset_is_unchanged(name: str) -> None:
    assert digest(untrained(name)) == DIGESTS[name]


@pytest.mark.parametrize("name", zoo.names())
def test_the_networks_of_the_zoo_are_unchanged(name: str) -> None:
    assert digest(zoo.load(name)) == DIGESTS[name]
