"""Learned quanta: their gradient, what eval() and export read, and what is saved."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import networks
import oracle
import softstair as ss
from softstair._errors import SoftstairError
from softstair.nn import StairActivation, StairWeight
from softstair.train.metrics import stair_health
from softstair.train.optimiser import (
    OptimiserOptions,
    clip_latent,
    latent_bounds,
    parameter_groups,
)

STAIRS = {
    "ternary": ss.Stair.ternary(),
    "int2": ss.Stair.linear(2, signed=True),
    "uint3": ss.Stair.linear(3),
    "int4 floor": ss.Stair.linear(4, signed=True, thresholds="floor"),
    "int8": ss.Stair.linear(8, signed=True),
    "uneven": ss.Stair((0.0, 1.0, 4.0), (0.5, 2.5)),
}
LSQ_STD = 0.5 / math.sqrt(3)  # uniform noise on half a quantum to either side: slope 1 within


def inputs(stair: ss.Stair, shape: tuple[int, ...], quanta: torch.Tensor) -> torch.Tensor:
    """Values from below the first threshold to above the last, none on a kink of the noise."""
    low, high = stair.levels[0] - 1.5, stair.levels[-1] + 1.5
    u = low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(1))
    return u.double() * quanta


def gradient(module: ss.nn.StairModule, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """∂(Σ g·y)/∂ ln ε without the scale of the gradient."""
    ratio = module.log_ratio
    assert ratio is not None
    (module(x) * g).sum().backward()
    count = x.numel() if isinstance(module, StairWeight) else x[0].numel()
    highest = module.stair.with_quantum(1.0).levels[-1]
    assert ratio.grad is not None
    return ratio.grad.double() * math.sqrt(count // ratio.numel() * highest)


@pytest.mark.nightly(keep=23)
@pytest.mark.parametrize("stair", STAIRS.values(), ids=STAIRS)
@pytest.mark.parametrize("name", oracle.NAMES)
@pytest.mark.parametrize("kind", ["features", "layer", "channel"])
def test_the_gradient_is_that_of_the_expectation(stair, name, kind):
    """Against central differences of the float64 oracle, at a quantum that training has moved."""
    quantum = (0.3, 0.07, 2.0) if kind == "channel" else 0.3
    scaled = stair.with_quantum(quantum, axis=0) if kind == "channel" else stair.with_quantum(0.3)
    mean, std = (0.1, 0.4) if name == "normal" else (0.0, LSQ_STD)
    make = StairActivation if kind == "features" else StairWeight
    module = make(scaled, name, "expectation", mean=mean, std=std)
    ratio = module.learn_quantum()
    with torch.no_grad():
        ratio.copy_(torch.linspace(-0.2, 0.3, 3) if ratio.dim() else torch.tensor(0.2))
    quanta = module.present_quantum().detach().double().reshape(-1, *[1] * (ratio.dim()))
    x = inputs(stair, (3, 40), quanta)
    g = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moments = (float(module.mean), float(module.std))

    def value(factor: float) -> np.ndarray:
        eps = quanta.numpy() * factor
        levels, thresholds = stair.levels, stair.thresholds
        return eps * oracle.expectation(x.numpy() / eps, levels, thresholds, name, *moments)

    h = 1e-6
    slope = torch.from_numpy((value(1 + h) - value(1 - h)) / (2 * h))
    wanted = (slope * g).sum(1) if ratio.dim() else (slope * g).sum()
    torch.testing.assert_close(gradient(module, x, g), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("bits", "signed"), [(2, True), (3, False), (4, True), (8, True)])
@pytest.mark.parametrize("kind", [StairActivation, StairWeight])
def test_with_the_noise_of_lsq_it_is_lsq(bits, signed, kind):
    """Value, gradient of x and scaled gradient of the step size, by the published formula."""
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    stair = ss.Stair.linear(bits, signed, quantum=0.25)
    module = kind(stair, "uniform", "hard", std=LSQ_STD)
    ratio = module.learn_quantum()
    step = torch.tensor(0.25, requires_grad=True)
    x = inputs(stair.with_quantum(1.0), (6, 50), torch.tensor(0.25)).float()
    g = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    count = 300 if kind is StairWeight else 50

    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y = module(ours)
    (y * g).sum().backward()
    scale = 1 / math.sqrt(count * highest)
    scaled = (step - step * scale).detach() + step * scale
    clipped = (theirs / scaled).clamp(lowest, highest)
    rounded = (clipped.round() - clipped).detach() + clipped
    lsq = rounded * scaled
    (lsq * g).sum().backward()

    torch.testing.assert_close(y, lsq)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ratio.grad is not None
    assert step.grad is not None
    # d/d ln ε = ε·d/dε
    torch.testing.assert_close(ratio.grad, step.grad * 0.25, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learned_stair_computes_the_fixed_one(forward, dtype):
    """At first; with a quantum that is a power of two, to the bit."""
    stair = ss.Stair.linear(4, signed=True, quantum=0.25)
    fixed, learned = (StairActivation(stair, "normal", forward) for _ in range(2))
    learned.learn_quantum()
    x = (3 * torch.randn(500, generator=torch.Generator().manual_seed(0))).to(dtype)
    values = []
    for module in (fixed, learned):
        torch.manual_seed(0)
        values.append(module(x.clone().requires_grad_()))
    assert values[1].dtype == dtype
    torch.testing.assert_close(values[0], values[1])


def test_without_noise_the_quantum_stands_still():
    """Whether the backward pass is truncated there or not."""
    for annealed in (False, True):
        module = StairActivation(ss.Stair.ternary(0.5), std=0.0)
        ratio, x = module.learn_quantum(), torch.linspace(-2, 2, 50, requires_grad=True)
        module.annealed = annealed
        y = module(x)
        assert torch.equal(y, ss.Stair.ternary(0.5)(x))
        if not annealed:
            y.sum().backward()
            assert ratio.grad == 0
        assert y.requires_grad is not annealed


def test_eval_and_the_state_have_the_learned_quantum_in_float32():
    module = StairWeight(ss.Stair.linear(4, True, [0.1, 0.3], axis=0))
    with torch.no_grad():
        module.learn_quantum().copy_(torch.tensor([0.7, -1.3]))
    state = copy.deepcopy(module).state_dict()
    assert module.stair.quantum == (0.1, 0.3)  # until then: reading it waits for the device
    module.eval()
    expected = torch.tensor([0.1, 0.3]).double() * torch.tensor([0.7, -1.3]).double().exp()
    assert module.stair.quantum == tuple(expected.float().double().tolist())
    assert torch.equal(state["_extra_state"], module.stair.to_tensor())
    torch.testing.assert_close(module.present_quantum().double(), expected, rtol=1e-6, atol=0)


def test_the_parameter_keeps_its_precision_and_its_sharing():
    """In bfloat16 a step of 0.1 % would be lost."""
    first, second = (StairActivation(ss.Stair.ternary()) for _ in range(2))
    second.learn_quantum(first.learn_quantum())
    with torch.no_grad():
        first.log_ratio.fill_(0.001)  # type: ignore[union-attr]
    net = copy.deepcopy(nn.Sequential(first, second)).to(torch.bfloat16)
    assert len(list(net.parameters())) == 1
    assert net[0].log_ratio.dtype == torch.float32
    assert net[1].log_ratio == torch.tensor(0.001)


def mixed() -> nn.Module:
    """Convolutions, a shortcut without weights, an average and a linear layer."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU()
            self.conv, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
            self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))
            self.pool, self.flat, self.last = nn.AvgPool2d(3), nn.Flatten(), nn.Linear(24, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(self.norms[0](self.stem(x)))
            x = self.second(self.norms[1](self.conv(x))) + x
            return self.last(self.flat(self.pool(x)))

    return Residual()


def learned(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    weights, features = (ss.Stair.linear(4, signed, quantum=0.25) for signed in (True, False))
    options = ss.QuantiseOptions(**settings)  # type: ignore[arg-type]
    return ss.quantise(mixed(), weights, features, quanta="learned", options=options)


def trained(net: nn.Module, steps: int = 6) -> nn.Module:
    """A few large steps, so that all quanta move."""
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randint(256, (32, 1, 6, 6), generator=generator)
        y = torch.randint(5, (32,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net((x - 128) / 64.0), y).backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("settings", [{}, {"init": "keep", "fit": "channel"}])
def test_a_learned_network_is_exact_in_integers(settings):
    """Quanta moved apart; added features share one, and layers read the present one of others."""
    net = trained(learned(**settings))
    quanta = {name: ratio for name, ratio in net.named_parameters() if name.endswith("log_ratio")}
    assert len(quanta) == 4  # of three layers of weights, and one of both activations
    assert all(ratio.abs().min() > 0.01 for ratio in quanta.values())
    net.eval()
    assert net.conv.input_quantum == net.first.stair.quantum == net.second.stair.quantum
    assert net.last.input_quantum == net.first.stair.quantum / 9
    assert net.first.stair.quantum != 0.25
    x = torch.randint(256, (400, 1, 6, 6), dtype=torch.uint8)
    frozen = ss.freeze(net, (1, 6, 6), zero=128, scale=64.0, examples=x)
    assert frozen.report.differing == 0


def test_a_state_restores_the_learned_network():
    """In another learned network, and in one whose quanta are fixed."""
    net, x = trained(learned()), torch.randn(64, 1, 6, 6)
    scores = copy.deepcopy(net).eval()(x)
    other, fixed = learned(), ss.quantise(mixed(), *[ss.Stair.linear(4, s) for s in (True, False)])
    for loaded in (other, fixed):
        loaded.load_state_dict(net.state_dict())
        assert torch.equal(loaded.eval()(x), scores)
    assert torch.equal(fixed.first.quantum, net.eval().first.present_quantum().detach())
    fresh = learned()
    fresh.load_state_dict(fixed.state_dict())  # its quanta are where this one starts
    assert torch.equal(fresh.eval()(x), scores)
    for left, right in ((net, other), (copy.deepcopy(net), other)):
        assert all(map(torch.equal, left.state_dict().values(), right.state_dict().values()))


def test_quanta_that_are_equal_by_chance_are_not_followed_together():
    """A quarter of one quantum is another one until they are learned: then no integers are read."""

    def code(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.last(torch.cat([m.pool(m.a(m.up(x))), m.b(m.down(x))], dim=1))

    layers = {"up": nn.Conv2d(1, 2, 1), "down": nn.Conv2d(1, 2, 2, stride=2)}
    layers |= {"pool": nn.AvgPool2d(2), "last": nn.Conv2d(4, 2, 1)}
    model = networks.Code(code, **layers, a=nn.ReLU(), b=nn.ReLU())
    stairs = {"a": ss.Stair.linear(4, quantum=1.0), "b": ss.Stair.linear(4, quantum=0.25)}
    nets = [ss.quantise(model, ss.Stair.ternary(), stairs, quanta=q) for q in ("fixed", "learned")]
    assert [net.last.input_quantum for net in nets] == [0.25, None]


def test_the_truncated_backward_pass_changes_nothing():
    """Quanta of annealed layers move by momentum alone."""
    nets = []
    for truncate in (True, False):
        net = learned()
        schedule = ss.Schedule.for_network(net, period=2)
        annealer = ss.Annealer(net, schedule, truncate=truncate)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(3)
        for step in range(5):
            annealer.step()
            optimiser.zero_grad()
            net(torch.randn(8, 1, 6, 6, generator=generator)).square().mean().backward()
            optimiser.step()
            if step == 2:
                before = net.stem.weight_stair.log_ratio.clone()
        nets.append(net)
        assert annealer.annealed == (0, 1)
        assert not torch.equal(net.stem.weight_stair.log_ratio, before)
    assert all(map(torch.equal, nets[0].state_dict().values(), nets[1].state_dict().values()))


def test_latent_weights_are_clipped_to_the_learned_quantum():
    """Which moves after the bounds were computed."""
    for stair in (ss.Stair.ternary(), ss.Stair.ternary([0.5] * 6, axis=0)):
        net = ss.quantise(
            mixed(), {"stem": stair, "*": ss.Stair.ternary()}, ss.Stair.linear(4), quanta="learned"
        )
        bounds = latent_bounds(net, ss.Schedule.for_network(net, period=1))
        with torch.no_grad():
            net.stem.weight_stair.log_ratio.fill_(math.log(2))
            net.stem.weight.fill_(9.0)
        clip_latent(net, bounds)
        highest = 2 * net.stem.weight_stair.quantum.mean() * (1 - 5e-5)
        torch.testing.assert_close(net.stem.weight.detach(), highest.expand(6, 1, 3, 3))
        health = stair_health(net, torch.randn(4, 1, 6, 6), bounds)
        assert next(entry.edge for entry in health if entry.name == "stem weights") == 1.0


def test_quanta_have_the_plain_rate_and_no_decay():
    options = OptimiserOptions(learning_rate=0.1, norm_rate=3.0, weight_decay=0.3)
    net = learned()
    groups = {p: g for g in parameter_groups(net, options) for p in g["params"]}
    for name, parameter in net.named_parameters():
        is_quantum = name.endswith("log_ratio")
        assert not is_quantum or groups[parameter]["lr"] == 0.1
        assert groups[parameter]["weight_decay"] == (0.0 if is_quantum else 0.3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e4])
@pytest.mark.parametrize("fit", ["layer", "channel"])
def test_a_quantum_that_diverged_is_reported_as_such(value, fit):
    net = ss.quantise(
        networks.mlp(6, 8, 8, 3), "int4", options=ss.QuantiseOptions(fit=fit), quanta="learned"
    ).train()
    net[0].weight_stair.log_ratio.data.reshape(-1)[-1] = value
    for call in (net.eval, net.state_dict):
        with pytest.raises(SoftstairError, match=r"training diverged.* lower learning rate"):
            call()
