"""The annealer: its clock, its checkpoints, the first shift, compiled networks."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import networks
import softstair as ss

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint")


def network(*widths: int, seed: int = 0, **settings) -> nn.Module:
    torch.manual_seed(seed)
    stairs = {"weights": TERNARY, "features": TERNARY, **settings}
    return ss.quantise(networks.mlp(*(widths or (6, 8, 8, 3))), **stairs)


def flags(net: nn.Module) -> list[bool]:
    return [stair.annealed for _, stair in ss.nn.stair_modules(net)]


@pytest.mark.parametrize(
    ("interval", "update"), [("partition", "iteration"), ("same_end", "epoch")]
)
def test_the_noise_follows_the_schedule(interval, update):
    """The buffers hold the schedule's float32 at every step, in quanta."""
    net = network(weights=INT4)
    schedule = ss.Schedule(3, 2, interval=interval, static_mean=False, std0=0.4, mean0=-0.5)
    annealer = ss.Annealer(net, schedule, steps_per_unit=5, update=update)
    for step in range(35):
        t = step // 5 if update == "epoch" else step / 5
        assert annealer.t == t
        annealer.step()
        for _, stair in ss.nn.stair_modules(net):
            noise = schedule(stair.layer, t)
            assert annealer.noise[stair.layer] == noise
            assert (float(stair.mean), float(stair.std)) == pytest.approx(noise, rel=1e-6)
            assert (stair.layer in annealer.annealed) == (noise[1] == 0)
    assert annealer.annealed == (0, 1, 2)


def test_noise_may_come_back():
    """A function that heats a layer up again gives it its gradient again."""
    net = network()
    annealer = ss.Annealer(net, lambda layer, t: (0.1 * layer, 0.3 if t != 1 else 0.0))
    x = torch.randn(16, 6)
    for step in range(3):
        annealer.step()
        net.zero_grad()
        net(x).square().sum().backward()
        assert (net[0].weight.grad.abs().sum() > 0) == (step != 1)
        assert annealer.annealed == ((0, 1, 2) if step == 1 else ())
        assert float(net[5].mean) == pytest.approx(0.1)


# Checkpoints


def train(net, optimiser, annealer, steps, x, y):
    losses = []
    for _ in range(steps):
        annealer.step()
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, generator=generator)
    return x, torch.randint(3, (32,), generator=generator)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("stop", [0, 1, 7, 12, 19])
@pytest.mark.parametrize("forward", ["mode", "random", "expectation"])
def test_an_interrupted_run_is_the_same_run(stop, forward):
    """Bit for bit, whatever had been annealed when it stopped."""
    x, y = data()

    def start(seed) -> tuple[Any, Any, Any]:
        net = network(forward=forward, seed=seed)
        schedule = ss.Schedule.for_network(net, period=2, static_mean=False)
        return (
            net,
            torch.optim.Adam(net.parameters(), 0.02),
            ss.Annealer(net, schedule, steps_per_unit=3),
        )

    whole = start(0)
    torch.manual_seed(11)
    losses = train(*whole, 22, x, y)
    first = start(0)
    torch.manual_seed(11)
    before = train(*first, stop, x, y)
    buffer = io.BytesIO()
    torch.save([*(part.state_dict() for part in first), torch.get_rng_state()], buffer)
    buffer.seek(0)
    *states, rng = torch.load(buffer)
    second = start(99)
    for part, state in zip(second, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(rng)
    after = train(*second, 22 - stop, x, y)
    assert before + after == losses
    for key, value in whole[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[key])


def test_the_state_is_plain_data():
    net = network()
    annealer = ss.Annealer(net, ss.Schedule.for_network(net, period=2), steps_per_unit=3)
    for _ in range(4):
        annealer.step()
    state = json.loads(json.dumps(annealer.state_dict()))
    other = ss.Annealer(network(seed=1), ss.Schedule(3, 2), steps_per_unit=3)
    other.load_state_dict(state)
    assert other.t == annealer.t
    assert other.noise == annealer.noise


@pytest.mark.parametrize("truncate", [True, False])
def test_a_second_annealer_starts_afresh(truncate):
    """A network annealed once may be annealed again: fine-tuning, another schedule."""
    net = network()
    schedule = ss.Schedule.for_network(net, period=2)
    first = ss.Annealer(net, schedule)
    for _ in range(8):
        first.step()
    second = ss.Annealer(net, schedule, truncate=truncate)
    second.step()
    assert not any(flags(net))
    net(data()[0]).square().sum().backward()
    assert net[0].weight.grad.abs().sum() > 0


# The first shift


@pytest.mark.parametrize("stair", [TERNARY, INT4, INT4.with_quantum([0.1] * 8, axis=0)])
def test_weights_are_shifted_by_the_first_mean_once(stair):
    """α(0)·ε, once ever: not by a second annealer, not after loading, not after copying."""
    net = network(6, 8, 8, weights=stair)
    quantum = stair.quantum[0] if isinstance(stair.quantum, tuple) else stair.quantum
    before = [net[i].weight.detach().clone() for i in (0, 3)]
    schedule = ss.Schedule.for_network(net, period=2, static_mean=False, mean0=-0.25)
    for _ in range(3):
        ss.Annealer(net, schedule).step()
        for i, weight in zip((0, 3), before, strict=True):
            torch.testing.assert_close(net[i].weight.detach(), weight - 0.25 * quantum)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        ss.Annealer(twin, schedule)
        assert torch.equal(twin[0].weight, net[0].weight)
    loaded = network(6, 8, 8, weights=stair, seed=5)
    loaded.load_state_dict(net.state_dict())
    ss.Annealer(loaded, schedule)
    assert torch.equal(loaded[0].weight, net[0].weight)
    late = network(6, 8, 8, weights=stair, seed=6)
    ss.Annealer(late, schedule)
    late.load_state_dict(net.state_dict())
    assert torch.equal(late[0].weight, net[0].weight)


def test_no_shift_under_a_static_mean_unless_asked():
    net = network()
    before = net[0].weight.detach().clone()
    schedule = ss.Schedule.for_network(net, period=2, mean0=-0.5)
    ss.Annealer(net, schedule)
    assert torch.equal(net[0].weight, before)
    ss.Annealer(net, schedule, shift=True)
    torch.testing.assert_close(net[0].weight.detach(), before - 0.5)
    other = network()
    ss.Annealer(other, ss.Schedule.for_network(other, period=2, static_mean=False), shift=False)
    assert torch.equal(other[0].weight, before)


def test_a_tied_parameter_is_shifted_once():
    layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
    model = networks.Code(lambda m, x: m.b(m.r(m.a(x))), **layers)
    model.b.weight = model.a.weight
    net = ss.quantise(model, TERNARY, TERNARY)
    assert net.a.weight is net.b.weight
    before = net.a.weight.detach().clone()
    ss.Annealer(net, ss.Schedule.for_network(net, period=2, static_mean=False))
    torch.testing.assert_close(net.a.weight.detach(), before - 0.5)


# Wrapped, compiled, in other dtypes


class Counter:
    """A backend that counts compilations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [2, 12])
def test_only_a_newly_annealed_layer_recompiles(layers):
    """Moving noise does not, evaluation never; twelve layers do not reach the limit of dynamo."""
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    try:
        net, counter, x = (
            network(*[6] * (layers + 1), 3, skip=f"{3 * layers}"),
            Counter(),
            data()[0],
        )
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        annealer = ss.Annealer(compiled, ss.Schedule.for_network(net, period=2))
        for step in range(2 * layers + 1):
            annealer.step()
            assert len(annealer.annealed) == step // 2
            for mode in (False, True):
                torch.testing.assert_close(net.train(mode)(x), compiled(x), rtol=0, atol=1e-5)
            slopes = [torch.autograd.grad(f(x).sum(), net[0].weight)[0] for f in (net, compiled)]
            torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-4)
        assert counter.count <= 2 + layers + 1
    finally:
        torch._dynamo.config.recompile_limit = limit


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"schedule": ss.Schedule(2, 2)}, "schedule"),
        ({"schedule": None}, "schedule"),
        ({"net": nn.Linear(2, 2)}, "net"),
        ({"net": "resnet"}, "net"),
        ({"steps_per_unit": 0}, "steps_per_unit"),
        ({"update": "step"}, "update"),
        ({"truncate": "no"}, "truncate"),
    ],
)
def test_a_wrong_argument_is_named_and_the_network_stays_as_it_was(settings, field):
    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ss._errors.SoftstairError) as caught:
        ss.Annealer(**{"net": net, "schedule": ss.Schedule(3, 2), **settings})
    assert caught.value.field == field
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not net._forward_hooks


@pytest.mark.parametrize(
    "noise", [(0.0, -0.1), (0.0, math.nan), (math.inf, 0.1), (0.0, 2e38), None, "ab", (1,)]
)
def test_a_schedule_that_gives_nonsense(noise):
    """Found out before anything is moved: no layer follows it, none is shifted."""
    net = network()
    annealer = ss.Annealer(net, lambda layer, t: (0.0, 0.2) if layer < 2 else noise)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match="schedule must give") as caught:
        annealer.step()
    assert "layer 2" in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    with pytest.raises(ValueError, match="schedule must give"):
        ss.Annealer(net, lambda layer, t: (0.5, 0.2) if layer < 2 else noise, shift=True)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"more": 1}, "state"),
        ({"steps": -1}, "steps"),
        ({"steps_per_unit": 3}, "steps_per_unit"),
        ({"update": "epoch"}, "update"),
        ({"schedule": ss.Schedule(5, 2).to_json()}, "schedule must have layers=5, .* has layers=3"),
        ({"schedule": None}, "schedule must be None"),
    ],
)
def test_a_state_that_does_not_fit(change, field):
    annealer = ss.Annealer(network(), ss.Schedule(3, 2), steps_per_unit=2)
    annealer.step()
    with pytest.raises(ValueError, match=field):
        annealer.load_state_dict({**annealer.state_dict(), **change})
    assert annealer.steps == 1


def test_noise_is_set_again_after_a_checkpoint_was_loaded():
    """Loading writes to the noise behind the annealer's back; the next step puts it right."""
    net = ss.quantise(networks.mlp(6, 8, 3), TERNARY, TERNARY)
    early = {name: value.clone() for name, value in net.state_dict().items()}
    annealer = ss.Annealer(net, lambda layer, t: (0.0, 0.0), truncate=False)
    annealer.step()
    net.load_state_dict(early)
    annealer.step()
    assert all(stair.std == 0 for _, stair in ss.nn.stair_modules(net))


def test_an_estimator_keeps_its_own_noise():
    net = ss.quantise(networks.mlp(6, 8, 3), TERNARY, TERNARY, noise=ss.ste.clipped_relu())
    ss.Annealer(net, lambda layer, t: (0.0, 0.1)).step()
    assert all(stair.mean == 0.5 for _, stair in ss.nn.stair_modules(net))


def test_gathered_noise_is_the_same_noise():
    """One tensor for all layers: the stairs hold what they would hold without it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    nets = [ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary()) for _ in range(2)]
    annealers = [
        ss.Annealer(net, ss.Schedule.for_network(net, period=3, static_mean=False)) for net in nets
    ]
    annealers[1].gather()
    for _ in range(7):
        for annealer in annealers:
            annealer.step()
        for (_, one), (_, other) in zip(*map(ss.nn.stair_modules, nets), strict=True):
            assert torch.equal(one.mean, other.mean)
            assert torch.equal(one.std, other.std)
    nets[1].load_state_dict(nets[0].state_dict())
    assert nets[1].state_dict().keys() == nets[0].state_dict().keys()
