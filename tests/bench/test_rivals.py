"""The naive rival computes what torch's own fake quantisation does, in the same topology."""

import importlib.util

import pytest
import torch
from torch import nn

from softstair import Stair
from softstair.bench.rivals import brevitas_network, naive_network
from softstair.bench.subject import SUBJECTS, subject
from softstair.models import last_layer


@pytest.mark.parametrize(("bits", "quantum"), [(2, 0.5), (4, 0.07)])
def test_naive_rounding_is_fake_quantisation(bits: int, quantum: float) -> None:
    stair = Stair.linear(bits, signed=True, quantum=quantum, thresholds="midpoint")
    net = naive_network(nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), stair, stair)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    levels = stair.integers
    assert levels is not None
    expected = torch.fake_quantize_per_tensor_affine(x, quantum, 0, min(levels), max(levels))
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    found = net[0](x)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    assert 0 < (gradient == 0).float().mean() < 1


@pytest.mark.parametrize("model", SUBJECTS)
def test_the_naive_network_has_the_same_topology(model: str) -> None:
    one = subject(model)
    stair = Stair.ternary()
    naive, twin = naive_network(one.network(), stair, stair), one.network()
    last = last_layer(twin)
    quantised = 0
    for name, module in twin.named_modules():
        other = naive.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.Linear):
            whole = set(other.weight.detach().unique().tolist()) <= {-1.0, 0.0, 1.0}
            assert whole == (name != last)
            quantised += whole
        assert not isinstance(other, nn.ReLU)
    assert quantised == {"vgg8": 7, "dscnn": 9, "digits": 3}[model]
    assert naive(torch.randn(2, *one.shape)).shape == (2, one.classes)


@pytest.mark.skipif(importlib.util.find_spec("brevitas") is None, reason="needs Brevitas")
@pytest.mark.parametrize("model", SUBJECTS)
def test_brevitas_has_the_same_topology(model: str) -> None:
    one = subject(model)
    recipe = one.recipe(8)
    net = brevitas_network(one.network(), recipe.stair("weights"), recipe.stair("features"))
    assert net(torch.randn(2, *one.shape)).shape == (2, one.classes)
    names = [type(module).__name__ for module in net.modules()]
    assert names.count("QuantConv2d") + names.count("QuantLinear") == len(
        [module for module in one.network().modules() if isinstance(module, nn.ReLU)]
    )
