"""The rivals of the language benchmark against their papers' formulas, and its queue."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as matrix
from torch import nn

from benchmarks import language, language_rivals
from benchmarks.language import Trial, plan


def rival(method: str, bits: str = "ternary") -> language_rivals.Rival:
    torch.manual_seed(0)
    return language_rivals.Rival(nn.Linear(128, 8, bias=False), method, bits, normed=False)


def test_values_are_those_of_the_papers() -> None:
    w = rival("bitnet").weight.detach().numpy().astype(np.float64)
    mean = np.abs(w).mean()
    np.testing.assert_allclose(
        rival("bitnet").value().detach(), mean * np.clip(np.round(w / mean), -1, 1), rtol=1e-5
    )
    layer = rival("paretoq")
    alpha = np.abs(w).max(1, keepdims=True)
    levels = np.where(np.abs(w) > alpha / 3, np.sign(w), 0) * 2 / 3 * alpha
    np.testing.assert_allclose(layer.value().detach(), levels, rtol=1e-5)
    layer.value().sum().backward()
    assert layer.log_scale.grad is not None
    layer = rival("parq")
    torch.testing.assert_close(layer.value(), layer.weight, rtol=1e-5, atol=1e-6)
    layer.share.fill_(1.0)
    rows = np.abs(w).mean(1, keepdims=True)
    ternary = rows * np.sign(w) * (np.abs(w) > rows / 2)
    np.testing.assert_allclose(layer.value().detach(), ternary, rtol=1e-4, atol=1e-6)
    layer = rival("quest")
    own = w @ (matrix(128) / np.sqrt(128))
    quantum = 1.224 * np.sqrt((own**2).mean(1, keepdims=True))
    expected = quantum * np.sign(own) * (np.abs(own) > quantum / 2)
    np.testing.assert_allclose(layer.value().detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["bitnet", "plain", "parq"])
def test_gradients_are_those_of_the_identity(method: str) -> None:
    layer = rival(method)
    (layer.value() * torch.arange(1024.0).reshape(8, 128)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.arange(1024.0).reshape(8, 128))


def test_a_rival_begins_in_float_under_the_same_decay() -> None:
    trial = replace(TINY, method="bitnet-start", steps=10, float_share=0.5)
    net, before = language.network(trial)
    twin, _ = language.network(replace(trial, method="float"))
    twin.load_state_dict(net.state_dict(), strict=False)
    tokens = torch.randint(256, (2, 8))
    before(0)
    assert torch.equal(net(tokens), twin(tokens))
    before(5)
    assert not torch.equal(net(tokens), twin(tokens))


TINY = Trial(width=32, inside=64, layers=1, heads=1, context=16, batch=4, steps=3)


def test_the_queue_goes_on_where_it_was_and_stops_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "text", tmp_path / "out.jsonl"
    folder.mkdir()
    (folder / "tinyshakespeare.txt").write_bytes(bytes(range(256)) * 20)
    assert language.trained(replace(TINY, steps=1000), folder, deadline=time.time()) is None
    row = language.trained(TINY, folder, deadline=time.time() + 100)
    assert row is not None
    assert 5 < row["test"] < 10
    assert Trial(**{key: row[key] for key in asdict(Trial())}) == TINY
    out.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(language, "plan", lambda name, rows: iter([TINY]))
    assert language.work("tiny", out, folder, time.time() + 100, jobs=1) == 0
    assert len(out.read_text().splitlines()) == 1


def test_later_plans_take_what_earlier_ones_found() -> None:
    def row(valid: float, **known: Any) -> dict[str, Any]:
        return {**asdict(Trial(**known)), "valid": valid}

    rows = [row(2.0, method="float", dropout=0.2, steps=10000), row(2.1, method="float")]
    rows += [row(v, method="bitnet", steps=2500, rate=r) for v, r in ((3, 1e-3), (2.5, 2e-3))]
    found = [t for t in plan("seeds", rows) if t.text == "shakespeare"]
    assert {t.seed for t in found} == {0, 1, 2}
    assert {(t.dropout, t.steps) for t in found} == {(0.2, 10000)}
    assert {t.rate for t in found if t.method == "bitnet"} == {2e-3}
    for name in ("tiny", "float", "rates", "others", "curves"):
        trials = list(plan(name, rows))
        assert len({*trials}) == len(trials) > 5
    with pytest.raises(ValueError, match="no plan"):
        list(plan("others2", rows))
