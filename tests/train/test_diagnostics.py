"""Whether the diagnostics count rightly, against counting one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from short import recipe
from torch import Tensor, nn

import softstair as ss
from softstair.nn import StairLayer, stair_modules
from softstair.train import train
from softstair.train.metrics import Health, stair_health

WIDTHS = {"uniform": 3**0.5, "triangular": 6**0.5}


def network(noise: str = "uniform", quantum: float = 1.0, std: float = 0.2) -> nn.Module:
    torch.manual_seed(3)
    hidden = [nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(20, 4))
    weights, features = (
        ss.Stair.linear(3, True, quantum, "midpoint"),
        ss.Stair.ternary(quantum=quantum),
    )
    net = ss.quantise(model, weights, features, noise=noise, skip="5")  # type: ignore[arg-type]
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


@pytest.mark.parametrize("noise", WIDTHS)
@pytest.mark.parametrize(("quantum", "std"), [(1.0, 0.2), (0.25, 0.05), (0.5, 0.01)])
def test_occupancy_and_dead_shares(noise: str, quantum: float, std: float) -> None:
    net = network(noise, quantum, std)
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


def test_it_leaves_the_network_as_it_was() -> None:
    net = network().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    stair_health(net, torch.randn(5, 12, generator=torch.Generator().manual_seed(1)))
    assert net.training
    assert all(module.training for module in net.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_it_takes_its_hooks_away_when_it_fails() -> None:
    net = network().train()
    with pytest.raises(RuntimeError):
        stair_health(net, torch.zeros(5, 11))
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert all(module.training for module in net.modules())


def test_once_the_noise_is_gone_nothing_is_called_dead() -> None:
    assert {health.dead for health in stair_health(network(std=0.0), torch.zeros(2, 12))} == {None}


def test_complaints() -> None:
    def told(occupancy: tuple[float, ...], dead: float | None, std: float = 0.25) -> list[str]:
        one = Health(name="features.3", layer=0, std=std, occupancy=occupancy, dead=dead)
        return [str(one.warning(fading=fading)) for fading in (False, True)]

    assert told((0.5, 0.5), 0.9) == ["None", "None"]
    assert told((0.99, 0.01), None) == ["None", "None"]
    dead = "99.5% of the inputs of features.3 pass no gradient"
    assert told((0.5, 0.5), 0.995) == [dead, dead]
    # Noise that is about to go passes next to nothing; noise that stays as narrow is a mistake.
    assert told((0.5, 0.5), 0.995, std=0.01) == [dead, "None"]
    constant = "100.0% of the inputs of features.3 lie at one level"
    assert told((0, 1.0), 0.1) == told((0, 1.0), None) == [constant, constant]
    line = Health("features.3", 0, 0.25, (1 / 3, 2 / 3), 0.123456).to_json()
    assert line == {"name": "features.3", "layer": 0, "levels": [0.3333, 0.6667], "dead": 0.1235}


def warnings_of(out: Path) -> list[list[str]]:
    text = (out / "metrics.jsonl").read_text()
    return [json.loads(line)["warnings"] for line in text.splitlines()]


def test_a_dead_network_is_told_of(tmp_path: Path) -> None:
    train(recipe(feature_quantum=1e-5, epochs=1, period=5.0), tmp_path / "dead")
    assert any("pass no gradient" in warning for warning in warnings_of(tmp_path / "dead")[0])
    train(recipe(static_std=True, std0=1e-6, epochs=1), tmp_path / "narrow")
    assert any("pass no gradient" in warning for warning in warnings_of(tmp_path / "narrow")[0])
    train(recipe(feature_quantum=1e4, epochs=1, period=5.0), tmp_path / "constant")
    assert any("lie at one level" in warning for warning in warnings_of(tmp_path / "constant")[0])


@pytest.mark.nightly
def test_a_network_that_is_well_is_not_complained_of(tmp_path: Path) -> None:
    train(recipe(limit=600, epochs=4, period=9.0, batch=16), tmp_path / "x")
    assert warnings_of(tmp_path / "x")[-1] == []
    stairs = json.loads((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()[-1])["stairs"]
    assert [stair["layer"] for stair in stairs] == [i // 2 for i in range(len(stairs))]
