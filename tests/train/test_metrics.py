"""Metrics: fresh statistics against a network written by hand, stairs against counting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from short import lines_of, metrics_of, recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import softstair as ss
from softstair.data import load, split
from softstair.data.augment import Augmentation, crop, flip
from softstair.data.batches import Examples
from softstair.nn import StairLayer, stair_modules
from softstair.train import fit, trained_network
from softstair.train.metrics import Health, evaluate, refresh_statistics, stair_health
from softstair.train.network import make_network
from softstair.train.state import State

WIDTHS = {"uniform": 3**0.5, "triangular": 6**0.5}


def stair_net(noise: str = "uniform", quantum: float = 1.0, std: float = 0.2) -> nn.Module:
    torch.manual_seed(3)
    hidden = [nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(20, 4))
    weights = ss.Stair.linear(3, True, quantum, "midpoint")
    net = ss.quantise(model, weights, ss.Stair.ternary(quantum=quantum), noise=noise, skip="5")
    schedule = ss.Schedule(layers=2, period=9.0, std0=std, mean0=0.1, static_std=True)
    ss.Annealer(net, schedule).step()
    return net.eval()


def counted(x: Tensor, stair: Any, reach: float, mean: float) -> tuple[list[float], float]:
    """Shares at each level and share out of reach of every threshold, one value after the other."""
    at = [0] * len(stair.levels)
    dead = 0
    values = x.flatten().tolist()
    for value in values:
        at[sum(value >= threshold for threshold in stair.thresholds)] += 1
        dead += all(abs(value - mean - threshold) > reach for threshold in stair.thresholds)
    return [count / len(values) for count in at], dead / len(values)


@pytest.mark.parametrize(
    ("noise", "quantum", "std"), [("uniform", 1.0, 0.2), ("triangular", 0.25, 0.05)]
)
def test_occupancy_and_dead_shares(noise: str, quantum: float, std: float) -> None:
    net = stair_net(noise, quantum, std)
    x = torch.randn(30, 12, generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Tensor] = {}
    hidden = x
    with torch.no_grad():
        for name, module in net.named_children():
            if isinstance(module, StairLayer):
                inputs[f"{name} weights"] = module.weight
            elif type(module).__name__ == "StairActivation":
                inputs[name] = hidden
            hidden = module(hidden)
    found = {health.name: health for health in stair_health(net, x)}
    assert list(found) == ["0 weights", "2", "3 weights", "4"]
    stairs = {name: module.stair for name, module in stair_modules(net)}
    for name, health in found.items():
        stair = stairs[name.replace(" weights", ".weight_stair")]
        reach = WIDTHS[noise] * std * quantum
        levels, dead = counted(inputs[name], stair, reach, 0.1 * quantum)
        assert health.occupancy == pytest.approx(levels, abs=1e-6)
        assert sum(health.occupancy) == pytest.approx(1)
        assert health.dead == pytest.approx(dead, abs=1e-6)
        assert health.layer == (0 if name in ("0 weights", "2") else 1)
    assert any(0.1 < (health.dead or 0) < 0.99 for health in found.values())


def test_ternary_features_by_name_are_dead_from_two_quanta_on() -> None:
    net = ss.quantise(
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)),
        "ternary",
        options=ss.QuantiseOptions(gradient_margin=1),
    )
    net[1].set_quantum(0.25)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = net[0](x)
    dead = {health.name: health.dead for health in stair_health(net, x)}
    assert dead["1"] == pytest.approx((features.abs() > 0.5).double().mean().item(), abs=1e-6)
    assert dead["1"] < (features.abs() > 0.25).double().mean()


def test_it_leaves_the_network_unchanged() -> None:
    net = stair_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    stair_health(net, torch.randn(5, 12, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError):
        stair_health(net, torch.zeros(5, 11))
    assert all(module.training for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_without_noise_no_input_is_called_dead() -> None:
    health = stair_health(stair_net(std=0.0), torch.zeros(2, 12))
    assert {stair.dead for stair in health} == {None}


def test_warnings() -> None:
    def warnings(occupancy: tuple[float, ...], dead: float | None, std: float = 0.25) -> list[str]:
        health = Health(name="features.3", layer=0, std=std, occupancy=occupancy, dead=dead)
        return [str(health.warning(fading=fading)) for fading in (False, True)]

    assert warnings((0.5, 0.5), 0.9) == ["None", "None"]
    assert warnings((0.99, 0.01), None) == ["None", "None"]
    dead = "99.5% of the inputs of features.3 pass no gradient"
    assert warnings((0.5, 0.5), 0.995) == [dead, dead]
    # Noise that is about to go passes next to nothing; noise that stays as narrow is a mistake.
    assert warnings((0.5, 0.5), 0.995, std=0.01) == [dead, "None"]
    constant = "100.0% of the inputs of features.3 lie at one level"
    assert warnings((0, 1.0), 0.1) == warnings((0, 1.0), None) == [constant, constant]
    line = Health("features.3", 0, 0.25, (1 / 3, 2 / 3), 0.123456).to_json()
    assert line == {"name": "features.3", "layer": 0, "levels": [0.3333, 0.6667], "dead": 0.1235}


def test_narrow_noise_that_stays_gives_a_warning(tmp_path: Path) -> None:
    fit(recipe(epochs=1, static_std=True, std0=1e-6), tmp_path / "run")
    warnings = lines_of(tmp_path / "run")[-1]["warnings"]
    assert any("pass no gradient" in warning for warning in warnings)


@pytest.mark.nightly
def test_a_healthy_network_gives_no_warnings(tmp_path: Path) -> None:
    fit(recipe(limit=600, epochs=4, period=9.0, batch=16), tmp_path / "x")
    line = lines_of(tmp_path / "x")[-1]
    assert line["warnings"] == []
    layers = [stair["layer"] for stair in line["stairs"]]
    assert layers == [i // 2 for i in range(len(layers))]


def some(count: int = 70) -> Examples:
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
    return Examples(x, torch.zeros(count, dtype=torch.int64), 100.0, 50.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(),
        nn.Linear(6, 3),
    )  # fmt: skip
    return ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), forward="random", skip="8")


@pytest.mark.parametrize("mixed", [False, True])
def test_they_are_the_means_over_batches_of_the_network_without_noise(mixed: bool) -> None:
    net, examples = network(), some()
    net.train()
    net(examples.batch(torch.arange(32))[0] * 9)  # other statistics, to begin with
    before = torch.get_rng_state()
    augmentation = Augmentation("crop-flip", mixup=0.5) if mixed else Augmentation()
    refresh_statistics(net, examples, 16, 5, augmentation)
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training
    assert (net[2].momentum, net[6].momentum) == (0.3, 0.1)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5))
    draw, batches = torch.Generator().manual_seed(5), []
    for part in order[:64].split(16):
        x = examples.x[part]
        if mixed:
            x = flip(crop(x, generator=draw), draw)
        x = (x.double() - 100) / 50
        if mixed:
            x = x.lerp(x.flip(0), 0.5 * torch.rand((), generator=draw).double())
        batches.append(x)
    steps = lambda x: (x >= 0.5).double() - (x < -0.5).double()
    first = [x.flatten(1) @ steps(net[1].weight).t() for x in batches]
    norm = net[2]
    normalised = [
        (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        for x in first
    ]
    second = [steps(z) @ steps(net[5].weight).t() for z in normalised]
    for place, sums in ((2, first), (6, second)):
        mean = torch.stack([x.mean(0) for x in sums]).mean(0)
        variance = torch.stack([x.var(0) for x in sums]).mean(0)
        torch.testing.assert_close(net[place].running_mean.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net[place].running_var.double(), variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("examples", "batches"), [(10, 1), (70, 2)])
def test_number_of_batches(examples: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softstair.train.metrics.ENOUGH_EXAMPLES", 40)
    net, calls = network().train(), []
    refresh_statistics(net, some(examples), batch=16, seed=0, callback=lambda: calls.append(1))
    assert len(calls) == batches
    assert float(net[2].running_var.mean()) != 1.0


def test_normalisations_that_training_does_not_change_stay_as_they_are() -> None:
    """Frozen ones, whose statistics training uses; and what an average of all batches counts."""
    net = network()
    net[6].eval()
    net[2].momentum = None
    net[2].num_batches_tracked.fill_(1000)
    net[6].running_mean.fill_(7.0)
    refresh_statistics(net, some(), batch=16, seed=0)
    assert not net[6].training
    assert net[2].training
    assert net[6].running_mean.tolist() == [7.0] * 6
    assert int(net[2].num_batches_tracked) == 1000
    frozen = network().eval()
    kept = [value.clone() for value in frozen.state_dict().values()]
    refresh_statistics(frozen, some(), batch=16, seed=0)
    assert all(map(torch.equal, kept, frozen.state_dict().values()))


def test_statistics_of_a_loader_are_the_same() -> None:
    """Of a network in eval() all, and of one in train() those that are not frozen."""
    examples = some()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5))[:64]
    loader = [(examples.batch(part)[0], None) for part in order.split(16)]
    expected = network().train()
    refresh_statistics(expected, examples, 16, 5)
    for net in (network().eval(), network().train()):
        is_training = net.training
        ss.refresh_statistics(net, loader)
        assert net.training is net[2].training is is_training
        assert all(map(torch.equal, expected.state_dict().values(), net.state_dict().values()))
    net = network().train()
    net[6].eval().running_mean.fill_(7.0)
    ss.refresh_statistics(net, [x for x, _ in loader])
    assert net[6].running_mean.tolist() == [7.0] * 6
    before = net[2].running_mean.clone()
    for wrong, batches, message in (
        (net, [], "at least one batch"),
        (net[0], loader, "batch norm"),
    ):
        with pytest.raises(ValueError, match=message):
            ss.refresh_statistics(wrong, batches)
    assert torch.equal(net[2].running_mean, before)


def test_a_stop_in_the_middle_leaves_everything_in_its_mode() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    net = network()
    with pytest.raises(KeyboardInterrupt):
        refresh_statistics(net, some(), batch=16, seed=0, callback=stop)
    assert all(module.training for module in net.modules())
    assert (net[2].momentum, net[6].momentum) == (0.3, 0.1)


def test_a_run_is_measured_with_them_and_keeps_them(tmp_path: Path) -> None:
    fresh = recipe(statistics="fresh", seed=3, augment="crop", epochs=1)
    summary = fit(fresh, tmp_path / "fresh")
    fit(fresh.replace(statistics="running"), tmp_path / "running")
    assert metrics_of(tmp_path / "fresh") != metrics_of(tmp_path / "running")
    data = load("digits").sample(200)
    net = trained_network(tmp_path / "fresh", data)
    training, valid = (
        Examples(data.x[part], data.y[part], data.mean, data.std) for part in split(data, 0, 5)
    )
    assert evaluate(net, valid)[1] == summary["valid_accuracy"]
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    settings = (fresh.run.batch, fresh.run.seed, fresh.data.augmentation)
    refresh_statistics(net.train(), training, *settings)
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())


class Operations(TorchDispatchMode):
    """Counts operations, each of which launches a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, *given: Any) -> Any:
        self.count += 1
        return function(*given[1], **(given[2] if len(given) > 2 else {}))


def test_diagnostics_of_an_epoch_take_few_operations() -> None:
    """On a GPU, an epoch of a small network takes as long as a few thousand launches."""
    chosen = recipe(weights="int4", features="uint4", model="digits")
    data = load("digits").sample(100)
    state = State(chosen, make_network(chosen, data), 100, torch.device("cpu"))
    with Operations() as counted:
        assert state.is_finite()
    assert counted.count < 60
    inputs = torch.zeros(8, 1, 8, 8)
    with torch.no_grad(), Operations() as forward:
        state.network.eval()(inputs)
    with Operations() as counted:
        stair_health(state.network, inputs)
    assert counted.count - forward.count < 70 * len(list(stair_modules(state.network)))
