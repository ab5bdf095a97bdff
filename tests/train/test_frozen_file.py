"""``frozen.safetensors`` of a run: what is frozen, what is not, and runs that were killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short import RECIPE
from torch import nn

import softstair as ss
from softstair import zoo
from softstair.data import load, split
from softstair.train import fit, records


def hidden() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()]


def test_a_run_writes_its_integers(tmp_path: Path) -> None:
    summary = fit(RECIPE, tmp_path / "run", device="cpu")
    assert summary["frozen"].startswith("frozen: 0 of ")
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())
    frozen = ss.load_frozen(tmp_path / "run" / records.FROZEN)
    dataset = load("digits").sample(200)
    part = split(dataset, 0, 5)[1]
    right = (frozen.predict(dataset.x[part]) == dataset.y[part]).double().mean()
    assert float(right) == pytest.approx(summary["valid_accuracy"])
    assert frozen.classes == dataset.classes
    assert frozen.input.table is None


def test_an_input_with_another_zero_has_a_table(tmp_path: Path) -> None:
    dataset = replace(load("digits"), mean=8.3, std=4.4)
    summary = fit(RECIPE, tmp_path, dataset=dataset, device="cpu")
    assert "the input's table has INT" in summary["frozen"]
    frozen, sampled = ss.load_frozen(tmp_path / records.FROZEN), dataset.sample(200)
    assert frozen.input.table is not None
    x = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    expected = (x.double() - 8.3) / 4.4
    error = (frozen.features(x)["input"] * frozen.input.unit - expected).abs().max()
    assert float(error) <= frozen.input.unit / 2 + 1e-5
    net, part = zoo.load(tmp_path / records.NETWORK), split(sampled, 0, 5)[1]
    with torch.no_grad():
        classes = net((sampled.x[part].float() - 8.3) / 4.4).argmax(1)
    assert int((frozen.predict(sampled.x[part]) != classes).sum()) <= 1


@pytest.mark.parametrize(
    ("changes", "model", "reason"),
    [
        ({"weights": "float", "features": "float"}, None, "the network is float"),
        ({}, nn.Sequential(*hidden(), nn.Linear(16, 10), nn.Softsign()), "not the last layer"),
    ],
)
def test_a_run_says_why_it_is_not_frozen(
    changes: dict[str, Any], model: nn.Module | None, reason: str, tmp_path: Path
) -> None:
    summary = fit(RECIPE.replace(**changes), tmp_path, model=model, device="cpu")
    assert summary["frozen"].startswith("not frozen: ")
    assert reason in summary["frozen"]
    assert (tmp_path / records.NETWORK).is_file()
    assert not (tmp_path / records.FROZEN).exists()


def test_an_unexpected_error_of_freezing_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("softstair.train.network.freeze", fail)
    summary = fit(RECIPE, tmp_path, device="cpu")
    assert summary["frozen"] == "not frozen: it raised RuntimeError (unexpected)"


def test_a_run_that_was_killed_before_it_was_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    fit(RECIPE, tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("softstair.train.network.freeze", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(RECIPE, tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / records.NETWORK).is_file()
    assert not [*(tmp_path / "run").glob("*frozen*"), *(tmp_path / "run").glob("summary.json")]
    fit(RECIPE, tmp_path / "run", resume=True, device="cpu")
    whole, resumed = (ss.load_frozen(tmp_path / n / records.FROZEN) for n in ("whole", "run"))
    assert whole.digest == resumed.digest
