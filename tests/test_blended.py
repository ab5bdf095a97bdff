"""Quantised weights that are blended in, after a part of the training in float."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import expit
from torch import Tensor, nn

import softstair as ss
from softstair import Schedule

BITS = {"2": "int4:32/int4:token", "*": "ternary/int8:token"}


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
    return model, ss.quantise(model, BITS)


def train(net: nn.Module, steps: range, annealer: ss.Annealer | None) -> list[Tensor]:
    """Train by SGD with data of each step; return the outputs of the forward passes."""
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    outputs = []
    for step in steps:
        x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(step))
        if annealer is not None:
            annealer.step()
        outputs.append(net(x))
        optimiser.zero_grad()
        outputs[-1].square().mean().backward()
        optimiser.step()
    return outputs


def test_the_share_of_hard_values_rises_along_the_curve() -> None:
    _, net = network()
    times = np.linspace(0, 300, 61)
    u = np.clip((times - (100 + 0.1 * 200)) / (0.4 * 200), 0, 1)
    s = lambda x: expit(10 * (x - 0.5))
    curves = {
        "linear": u,
        "cosine": np.sin(np.pi * u / 2) ** 2,
        "sigmoid": (s(u) - s(0)) / (s(1) - s(0)),
    }
    for curve, expected in curves.items():
        schedule = Schedule.blended(net, 300, float_share=1 / 3, curve=curve)
        for layer in range(2):
            shares = [schedule.share(layer, float(t)) for t in times]
            np.testing.assert_allclose(shares, expected, atol=1e-12)
            assert schedule(layer, 150.0) == (0.0, schedule.std0)
        assert Schedule.from_json(json.dumps(schedule.to_json())) == schedule
    one = Schedule.blended(net, 100, interval="partition")
    assert [one.share(layer, 30) for layer in range(2)] == [1.0, 0.0]
    assert "blend" not in Schedule(layers=1, period=1).to_json()


def test_a_network_computes_in_float_then_blends_then_is_quantised() -> None:
    model, net = network()
    annealer = ss.Annealer(net, Schedule.blended(net, 40, float_share=0.25, start=0.1, end=0.5))
    in_float, outputs = train(model, range(10), None), train(net, range(10), annealer)
    assert all(map(torch.equal, in_float, outputs))
    for key, value in model.state_dict().items():
        assert torch.equal(net.state_dict()[key], value)
    x = torch.randn(2, 64)
    assert torch.equal(net.eval()(x), model.eval()(x))
    net.train()
    annealer.step()  # the quanta are now those of the weights as they are
    fitted = ss.quantise(model, BITS)
    for name in ("0", "2"):
        own, other = (each.get_submodule(name).integers_and_quanta() for each in (net, fitted))
        assert torch.equal(own.integers, other.integers)
        assert torch.equal(own.quanta, other.quanta)
    # Before blending, a weight within two quanta is itself; features are rounded.
    layer = net[0]
    line = (layer.weight / layer.weight_stair.quanta()).clamp(-2, 2) * layer.weight_stair.quanta()
    torch.testing.assert_close(layer.quantised_weight(), line)
    train(net, range(11, 40), annealer)
    in_training = net(x)
    assert torch.equal(in_training, net.eval()(x))
    for layer in (net[0], net[2]):
        integers, quanta = layer.integers_and_quanta()
        weight = (integers.reshape(*quanta.shape, -1) * quanta[..., None]).reshape(64, 64)
        x_rounded = layer.rounding(x)
        torch.testing.assert_close(layer(x), F.linear(x_rounded, weight, layer.bias))


@pytest.mark.parametrize("stop", [5, 10, 11, 25])
def test_an_interrupted_training_is_the_same_training(stop: int) -> None:
    _, net = network()
    schedule = Schedule.blended(net, 40, float_share=0.25)
    whole = copy.deepcopy(net)
    train(whole, range(30), ss.Annealer(whole, schedule))
    annealer = ss.Annealer(net, schedule)
    train(net, range(stop), annealer)
    state, clock = copy.deepcopy(net.state_dict()), annealer.state_dict()
    _, again = network()
    annealer = ss.Annealer(again, schedule)
    again.load_state_dict(state)
    annealer.load_state_dict(json.loads(json.dumps(clock)))
    train(again, range(stop, 30), annealer)
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_what_cannot_blend_is_refused() -> None:
    plain = ss.quantise(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "ternary")
    schedule = Schedule.blended(plain, 10)
    with pytest.raises(ValueError, match=r"^schedule blends, which needs"):
        ss.Annealer(plain, schedule)
    _, net = network()
    for wrong in ({"end": 0.05}, {"float_share": 2}, {"curve": "square"}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong)).replace('curve', 'blend')} "):
            Schedule.blended(net, 10, **wrong)
    with pytest.raises(ValueError, match=r"^float_until must be 0"):
        Schedule(layers=1, period=1, float_until=1)


def test_noise_is_annealed_in_such_networks_too() -> None:
    """The gradient is then that of the operator, and ends with the noise."""
    _, net = network()
    annealer = ss.Annealer(net, Schedule.for_network(net, period=2, interval="overlapped"))
    train(net, range(2), annealer)
    assert net[0].weight.grad.abs().max() > 0
    train(net, range(2, 6), annealer)
    assert annealer.annealed == (0, 1)
    assert net[0].weight.grad is None or net[0].weight.grad.abs().max() == 0
