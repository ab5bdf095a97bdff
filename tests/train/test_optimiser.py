"""Each option of the optimiser, against the update written out by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import short
import torch
from short import recipe
from torch import Tensor, nn

import softstair as ss
from networks import HeadFirst
from softstair.data import load
from softstair.train.checkpoint import load_state_dict, state_dict
from softstair.train.fit import Step
from softstair.train.metrics import stair_health
from softstair.train.network import make_network
from softstair.train.optimiser import (
    OptimiserOptions,
    clip_latent,
    latent_bounds,
    parameter_groups,
)
from softstair.train.state import State
from softstair.train.updates import Rates


def begun(**changes: Any) -> tuple[State, Step]:
    return short.begun(recipe(**{"drop": None, **changes}), 64)


def steps(state: State, step: Step, count: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    """Take steps; return (parameter before, gradient) of every parameter in each of them."""
    seen = []
    for _ in range(count):
        before = [parameter.detach().clone() for parameter in state.network.parameters()]
        step()
        grads = [parameter.grad.clone() for parameter in state.network.parameters()]
        seen.append(list(zip(before, grads, strict=True)))
    return seen


def adam(p: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Adam with decoupled weight decay."""
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        p *= 1 - rate * decay
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p -= rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return p


def sgd(p: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """SGD with Nesterov's momentum of 0.9."""
    p, m = p.clone(), torch.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        g = g + decay * p
        m = 0.9 * m + g
        p -= rate * (g + 0.9 * m)
    return p


@pytest.mark.parametrize(("name", "update"), [("adamw", adam), ("nesterov", sgd)])
def test_groups_have_their_own_rates_and_decay(name: str, update: Any) -> None:
    """Latent weights, normalisations and last layer: three updates with a cosine and warm-up."""
    state, step = begun(
        optimiser=name, learning_rate=0.01, latent_rate=0.02, norm_rate=0.3,
        weight_quantum=0.5, weight_decay=0.1, norm_decay=0.0, rate_shape="cosine", warm_up=1.0,
    )  # fmt: skip
    assert state.steps == 2
    seen = steps(state, step, 2)
    state.end_epoch({})
    state.begin_epoch()
    seen += steps(state, step, 1)
    factors = [0.0, 0.5 * 0.5 * (1 + math.cos(math.pi / 6)), 0.5 * (1 + math.cos(math.pi / 3))]
    quantum = 0.5 if name == "adamw" else 0.25
    for number, (key, parameter) in enumerate(state.network.named_parameters()):
        rate, decay = (0.02 * quantum, 0.1) if parameter.dim() > 1 else (0.003, 0.0)
        if key.startswith("classifier"):
            rate = 0.01
        gradients = [gradient[number][1] for gradient in seen]
        expected = update(seen[0][number][0], gradients, [rate * f for f in factors], decay)
        torch.testing.assert_close(parameter.detach(), expected, msg=key)


@pytest.mark.parametrize("name", ["adam", "nesterov"])
def test_rates_in_tensors_are_those_in_numbers(name: str) -> None:
    """As on a GPU, whose graphs read them; also after a checkpoint was loaded."""
    options = {"optimiser": name, "latent_rate": 0.02, "rate_shape": "linear"}
    (plain, step), (state, other) = (begun(**options) for _ in range(2))
    state.updates.rates = Rates(state.optimiser, torch.device("cpu"))
    steps(plain, step, 1)
    steps(state, other, 1)
    for number, tensor in zip(*(s.network.parameters() for s in (plain, state)), strict=True):
        torch.testing.assert_close(number, tensor)
    address = state.optimiser.param_groups[0]["lr"].data_ptr()
    load_state_dict(state, state_dict(state))
    steps(plain, step, 1)
    steps(state, other, 1)
    first, second = (s.optimiser.param_groups for s in (plain, state))
    assert second[0]["lr"].data_ptr() == address
    for group, tensors in zip(first, second, strict=True):
        assert group["lr"] == pytest.approx(float(tensors["lr"]))


def test_without_new_options_there_is_one_group() -> None:
    state, _ = begun(weight_decay=0.1)
    (group,) = state.optimiser.param_groups
    assert list(map(id, group["params"])) == list(map(id, state.network.parameters()))


@pytest.mark.parametrize("weights", [None, ss.Stair.linear(8, signed=True, quantum=2**-7)])
def test_the_first_and_the_last_layer_have_the_plain_rate_unless_they_are_latent(
    weights: ss.Stair | None,
) -> None:
    stair = ss.Stair.ternary(quantum=0.5)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    options = OptimiserOptions(learning_rate=1.0, latent_rate=0.2, norm_rate=3.0)

    def rates(first: ss.Stair | None) -> dict[str, float]:
        kinds = {"0": first, "2": stair}
        network = ss.quantise(model, weights=kinds, features=stair, skip="4")
        groups = parameter_groups(network, options)
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        return {name: rates[id(p)] for name, p in network.named_parameters()}

    others = {"0.bias": 3.0, "2.weight": 0.1, "2.bias": 3.0, "4.weight": 1.0, "4.bias": 1.0}
    assert rates(weights) == {"0.weight": 1.0, **others}
    assert rates(stair) == {"0.weight": 0.1, **others}
    float_rates = [group["lr"] for group in parameter_groups(model, options)]
    assert sorted(float_rates) == [1.0, 3.0]


def test_clipped_gradients_have_the_largest_norm_that_is_allowed() -> None:
    plain, clipped = (begun(optimiser="sgd", clip_gradient=norm) for norm in (None, 0.01))
    (before,), (after,) = (steps(state, step, 1) for state, step in (plain, clipped))
    norm = torch.cat([gradient.flatten() for _, gradient in before]).norm()
    assert norm > 0.01
    for (_, gradient), (_, scaled) in zip(before, after, strict=True):
        torch.testing.assert_close(scaled, gradient * (0.01 / (norm + 1e-6)))


def test_labels_are_smoothed() -> None:
    state, step = begun(label_smoothing=0.1)
    x, y, _ = step.examples.batch(state.order[:32])
    scores = state.network(x)
    state.annealer.steps = 0
    log = scores.log_softmax(1)
    loss = -0.9 * log[torch.arange(32), y].mean() - 0.1 * log.mean()
    step()
    assert state.mean_loss() == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, -1.0, 1.0),
        ({"noise": "normal"}, -1.0, 1.0),  # 95 % of the noise within half a quantum
        ({"std0": 0.1}, -0.5 - 0.1 * math.sqrt(3), 0.5 + 0.1 * math.sqrt(3)),
        ({"static_mean": False}, -1.5, 1.0),  # the mean goes from -0.5 to 0
        ({"weight_quantum": 0.5}, -0.5, 0.5),
        ({"weights": "int4", "weight_quantum": 0.07}, -8 * 0.07, 7 * 0.07),
    ],
)
def test_latent_weights_are_clipped_to_where_the_first_noise_is(
    changes: dict[str, Any], low: float, high: float
) -> None:
    chosen = recipe(clip_latent=True, latent_rate=5.0, **changes)
    state, step = begun(**{name: chosen[name] for name in (*changes, "clip_latent")})
    for _ in range(2):
        step()
    weight = state.network.get_parameter("features.1.weight")
    with torch.no_grad():
        weight[0], weight[1], weight[2] = low - 9, high + 9, 0.0
    clip_latent(state.network, state.latent_bounds)
    quantum = chosen.network.weight_quantum
    assert float(weight.detach().min()) == pytest.approx(low, abs=1e-4 * quantum)
    assert float(weight.detach().max()) == pytest.approx(high, abs=1e-4 * quantum)
    assert float(weight.detach().min()) > low
    assert float(weight.detach().max()) < high
    assert not weight[2].any()


@pytest.mark.parametrize(
    ("estimator", "low", "high"),
    [(ss.ste.hard_sigmoid(), -1.0, 1.0), (ss.ste.clipped_relu(), -0.5, 1.5)],
)
def test_clipping_has_the_width_of_an_estimator(estimator: Any, low: float, high: float) -> None:
    net = ss.quantise(nn.Sequential(nn.Linear(3, 4)), ss.Stair.ternary(), noise=estimator)
    schedule = ss.Schedule.for_network(net, period=1.0, std0=0.1)
    assert latent_bounds(net, schedule)["0"] == pytest.approx((low, high), abs=1e-4)


def test_a_slope_without_end_is_not_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import softstair as ss\n\ndef plain():\n    return ss.ste.identity()\n"
    (tmp_path / "endless_estimator.py").write_text(source)
    with pytest.raises(ValueError, match=r"clip_latent must be False with the identity estimator"):
        begun(noise="endless_estimator:plain", static_std=True, std0=1.0, clip_latent=True)
    net = ss.quantise(nn.Sequential(nn.Linear(3, 4)), ss.Stair.ternary(), noise=ss.ste.identity())
    assert latent_bounds(net, ss.Schedule.for_network(net, period=1.0)) == {}


def test_clipping_leaves_a_gradient_and_the_edge_is_measured() -> None:
    state, step = begun(clip_latent=True, latent_rate=3.0, optimiser="adamw")
    step()
    weight = state.network.get_parameter("features.1.weight").detach()
    low, high = state.latent_bounds["features.1"]
    edge = ((weight == low) | (weight == high)).double().mean()
    assert edge > 0.1
    x, _, _ = step.examples.batch(state.order[:32])
    health = {entry.name: entry for entry in stair_health(state.network, x, state.latent_bounds)}
    entry = health["features.1 weights"]
    assert entry.edge == pytest.approx(float(edge))
    assert entry.dead == 0.0  # where they are clipped, the noise has a density
    assert entry.to_json()["edge"] == round(float(edge), 4)
    assert health["features.3"].edge is None
    assert replace(entry, edge=1.0).warning(fading=False) is not None
    assert all("edge" not in each.to_json() for each in stair_health(state.network, x))


def test_channels_are_clipped_to_their_own_quanta() -> None:
    stair = ss.Stair.ternary().with_quantum([0.5, 2.0], 0)
    network = ss.quantise(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), stair, stair)
    weight = network.get_parameter("0.weight")
    with torch.no_grad():
        weight.fill_(9.0)
    clip_latent(network, latent_bounds(network, ss.Schedule(layers=2, period=1)))
    torch.testing.assert_close(weight.detach().mean(1), torch.tensor([0.5, 2.0]) * (1 - 5e-5))


SHAPES = {
    "cosine": [
        1.0,
        0.5 * (1 + math.cos(math.pi * 0.3)),
        0.5,
        0.5 * (1 - math.cos(math.pi * 0.2)),
        0,
    ],
    "linear": [1.0, 0.7, 0.5, 0.2, 0.0],
    "flat-then-linear": [1.0, 1.0, 1.0, 0.5, 0.0],
    "drop": [1.0, 1.0, 0.2, 0.2, 0.2],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rates_follow_their_shape(shape: Any) -> None:
    options = OptimiserOptions(rate_shape=shape, drop=5.0, drop_factor=0.2)
    assert [options.rate_factor(t, 10) for t in (0, 3, 5, 8, 10)] == pytest.approx(SHAPES[shape])
    warm = replace(options, warm_up=4.0)
    assert [warm.rate_factor(t, 10) for t in (0, 3)] == pytest.approx([0, 0.75 * SHAPES[shape][1]])
    assert [warm.rate_factor(t, 10) for t in (5, 8, 10)] == pytest.approx(SHAPES[shape][2:])


def test_the_last_layer_is_the_last_that_is_called() -> None:
    chosen = recipe(norm_rate=5.0, latent_rate=0.5, learning_rate=1.0)
    network = make_network(chosen, load("digits"), HeadFirst())
    names = {parameter: name for name, parameter in network.named_parameters()}
    groups = parameter_groups(network, chosen.optimiser)
    rates = {names[key]: group["lr"] for group in groups for key in group["params"]}
    assert rates == {
        "head.weight": 1.0, "head.bias": 1.0, "body.weight": 0.5,
        "norm.weight": 5.0, "norm.bias": 5.0,
    }  # fmt: skip
