"""Networks as .tflite, run by LiteRT's three sets of kernels; all levels equal the network's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_networks import LEVELS, RandomBuilder
from torch import Tensor

from softstair.deploy import ExportError, comparison, tflite
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.runtimes import LITERT
from softstair.deploy.tflite_graph import facts_of

pytest.importorskip("ai_edge_litert.interpreter", reason="needs the extra tflite")
KINDS = ("ternary", "sign", "int4", "int8")
SMALL = ("ternary", "sign", "uint4")
NETWORKS = 100  # of each seed, at night


def differing(frozen: FrozenNetwork, folder: Path, x: Tensor) -> dict[str, dict[str, int]]:
    """Return the numbers that differ in each kernels that a file names."""
    path = tflite.write(frozen, folder / "network.tflite")
    found = {}
    for runtime, kernels in LITERT.items():
        if kernels not in facts_of(path.read_bytes())["kernels"]:
            continue
        compared = comparison.verify(frozen, path, x, runtime=runtime, timed=False)
        assert {*compared.compared} >= {*frozen.stairs, "scores"}
        found[kernels] = {name: count for name, count in compared.wrong.items() if count}
    return found


def small_network(seed: int) -> RandomBuilder:
    """Layers with weights to INT8 and features to 4 bits, of images or of sequences."""
    random = np.random.default_rng(2000 + seed)
    choose = lambda *choices: choices[random.integers(len(choices))]
    axes = int(choose(1, 2, 2, 2))
    shape = (int(random.integers(1, 4)), *(int(n) for n in random.integers(7, 12, axes)))
    net = RandomBuilder(seed, shape, int(choose(0, 121, 255)), dtype=choose("uint8", "int8"))
    if net.nodes["input"].dtype == "int8":
        net.change("input", low=-128, high=127, zero=0)
    elif choose(True, False, False):
        low, high = choose((-128, 127), (-40, 90))
        rows = torch.linspace(low, high, 256).round().to(torch.int8)
        net.change("input", low=low, high=high, zero=0, table=rows.expand(shape[0], -1).clone())
    levels = lambda: LEVELS[choose(*SMALL)]

    def layer(name: str, outputs: int, **options: Any) -> str:
        """Add a layer whose thresholds lie on a line, as those of trained ones do."""
        window = {key: (int(n),) * axes for key, n in options.items() if key != "groups"}
        net.sum(name, outputs, choose(*KINDS), groups=options.get("groups", 1), **window)
        return net.steps(f"{name}.stair", levels(), even=True)

    layer("first", 6, padding=choose(0, 1), stride=choose(1, 2))
    if random.integers(2):
        net.max_pool("pool", 2, int(choose(1, 2)), int(choose(0, 1)))
    if random.integers(3) == 0:
        net.pad("pad", *([1, 0] * axes))
    start = layer("second", 6, padding=1, groups=int(choose(1, 6, 6, 2)))
    if random.integers(2):
        layer("third", 6, padding=1)
        if net.nodes[net.last].high + net.nodes[start].high <= 127:
            net.add_features("add", net.last, start)
    if random.integers(2):
        net.concatenate("both", net.last, start)
    if random.integers(3) == 0:
        net.select("selected")
    layer("fourth", 9, dilation=choose(1, 1, 2), padding=1)
    if random.integers(2):
        net.sum_pool("average")
    net.flatten("flat")
    if random.integers(2):
        net.sum("linear", 8, choose(*KINDS))
        net.steps("linear.stair", levels(), even=True)
    net.scores("scores", 4)
    return net


def check_random(seeds: range, folder: Path) -> tuple[int, int]:
    """Compare random networks; return how many were written and how many were refused."""
    written, refused = 0, 0
    for seed in seeds:
        net = small_network(seed)
        frozen = net.network()
        try:
            wrong = differing(frozen, folder, net.bytes[:4])
        except ExportError as error:
            named = [node for node in frozen.nodes if repr(node.name) in f"{error}"]
            refused += len(named[:1]) or pytest.fail(f"{error}")
            continue
        assert wrong == {kernels: {} for kernels in tflite.KERNELS}, seed
        written += 1
    return written, refused


def test_random_networks_are_equal_in_all_kernels(tmp_path: Path) -> None:
    written, refused = check_random(range(6), tmp_path)
    assert written >= 3 * refused


@pytest.mark.nightly
@pytest.mark.parametrize("first", [100, 5000])
def test_many_random_networks_are_equal_in_all_kernels(first: int, tmp_path: Path) -> None:
    written, refused = check_random(range(first, first + 5 * NETWORKS // 4), tmp_path)
    assert written >= NETWORKS
    assert written >= 3 * refused
