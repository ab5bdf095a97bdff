"""Frozen networks in other runtimes, which run as processes of environments of their own."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import needs_compiler
from frozen_networks import Builder, random_network
from random_modules import SCALE, ZERO, generate, inputs
from random_networks import LEVELS

import softstair as ss
from softstair.deploy import RUNTIMES, FrozenNetwork, processes, pte


def needs(name: str) -> None:
    """Skip a test of a runtime that is not installed."""
    if reason := processes.absent(name):
        pytest.skip(reason)


def small(seed: int = 0) -> tuple[FrozenNetwork, torch.Tensor]:
    net = Builder(seed, (3, 6, 6), zero=121)
    net.layer("first", 6, "int4", LEVELS["uint4"], even=True, padding=(1, 1))
    net.max_pool("pool", 2, 2, 0)
    net.flatten("flat")
    return net.head(4), net.bytes


@needs_compiler
@pytest.mark.parametrize("runtime", ["c", "onnxruntime"])
def test_a_network_is_written_compared_and_timed(runtime: str) -> None:
    needs(runtime)
    frozen, x = small()
    found = ss.deploy.verify(frozen, None, x, runtime=runtime)
    assert found.mismatches == 0
    assert found.compared["first.stair"] == len(x) * 6 * 36
    assert found.milliseconds is not None
    assert 0 < found.milliseconds < 100


def test_a_process_that_ends_is_an_error_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, x = small()
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    monkeypatch.setenv("SOFTSTAIR_RUNTIMES", str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="openvino is not installed"):
        ss.deploy.verify(frozen, None, x, runtime="openvino")
    python = tmp_path / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no such instruction >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ss.SoftstairError, match="openvino ended and said: … no such instruction"):
        ss.deploy.verify(frozen, None, x, runtime="openvino")
    with pytest.raises(ValueError, match="runtime must be"):
        ss.deploy.verify(frozen, None, x, runtime="tensorrt")
    assert "openvino" in RUNTIMES


def differing(runtime: str, seeds: range) -> tuple[Counter[str], dict[int, str]]:
    """Return how many random networks were compared or refused, and those that differ."""
    done, wrong = Counter[str](), dict[int, str]()
    for seed in seeds:
        net = random_network(seed)
        try:
            found = ss.deploy.verify(net.network(), None, net.bytes, runtime=runtime, timed=False)
        except ss.deploy.ExportError:
            done["refused"] += 1
            continue
        done["compared"] += 1
        if found.mismatches:
            wrong[seed] = str(found)
    return done, wrong


@pytest.mark.nightly
@pytest.mark.parametrize(("runtime", "count"), [("openvino", 12)])
def test_random_networks_are_equal_or_refused(runtime: str, count: int) -> None:
    needs(runtime)
    done, wrong = differing(runtime, range(count))
    assert not wrong
    assert done["compared"] > 3


def test_the_graph_of_executorch_has_the_levels_of_the_network() -> None:
    """In plain torch, without ExecuTorch: quantised, computed and quantised again."""
    compared = 0
    for seed in range(8):
        net = Builder(seed, (3, 6, 6), zero=121)
        net.layer("first", 6, "int4", LEVELS["uint4"], even=True, padding=(1, 1))
        net.max_pool("pool", 2, 2, 0)
        net.layer("second", 4, "ternary", (-1, 0, 1), even=True, groups=2)
        if seed % 2:
            net.sum_pool("average")
        net.flatten("flat")
        frozen, x = net.head(4), net.bytes
        try:
            graph, decode = pte._Graph(frozen, True), pte.decoder(frozen, None)
        except ss.deploy.ExportError:
            continue
        given = torch.from_numpy(pte.encode(frozen, x))
        outputs = graph(given)
        found = decode({str(n): y.numpy() for n, y in enumerate(outputs)})
        expected, clean = frozen.features(x), torch.ones(len(x), dtype=torch.bool)
        assert {*frozen.stairs} <= {*found}
        for name in {*found} & {*expected}:
            # Floats of torch move a sum that lies near a half; XNNPACK's are integers until then.
            differ = (found[name] != expected[name]).flatten(1)
            assert differ[clean].sum() <= 2
            clean &= ~differ.any(1)
        assert clean.sum() > len(x) / 3
        assert torch.equal(found["scores"][clean], frozen(x)[clean])
        assert torch.equal(found["class"][clean], frozen.predict(x)[clean])
        compared += 1
    assert compared > 3


COUNT = 30
"""Networks that are lowered, a few seconds each."""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:all weights of")
@pytest.mark.parametrize("first", [100, 5000])
def test_random_networks_are_equal_in_one_delegate(first: int, tmp_path: Path) -> None:
    needs("executorch")
    count = 0
    for seed in range(first, first + 1000):
        generated = generate(seed)
        try:
            with torch.no_grad():
                net = generated.quantised(inputs(generated))
            frozen = ss.freeze(net, generated.shape, zero=ZERO, scale=SCALE)
            pte._Graph(frozen, True)
        except ss.deploy.ExportError:
            continue
        frozen.save(tmp_path / f"{seed}.safetensors")
        np.save(tmp_path / f"{seed}.npy", inputs(generated)[:3].numpy())
        count += 1
        if count == COUNT:
            break
    paths = [Path(ss.__file__).parents[1], Path(np.__file__).parents[1]]
    script = Path(__file__).with_name("pte_by_hand.py")
    command = [processes.python_with("executorch"), "-P", script, tmp_path, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(rows) == COUNT, done.stderr[-2000:]
    wrong = [row for row in rows if row[1] and row[2]]
    assert not wrong
    assert sum(row[1] > 0 for row in rows) > COUNT / 2, rows
