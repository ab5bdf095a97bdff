"""Networks as .tflite, run by LiteRT's three sets of kernels; all levels equal the network's."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import needs_compiler
from evaluator import gemmlowp
from random_networks import LEVELS, RandomBuilder
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import ExportError, comparison, nodes, tflite
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.int8_roundings import ALL, ROUNDINGS, Labels, Stairs, fit
from softstair.deploy.requantise import added, unit_of_bytes
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
    layer("fourth", 9, **choose({"padding": 1}, {"padding": 2, "dilation": 2}))
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
    written, refused = check_random(range(4), tmp_path)
    assert written >= 3 * refused


@pytest.mark.nightly
@pytest.mark.parametrize("first", [100, 5000])
def test_many_random_networks_are_equal_in_all_kernels(first: int, tmp_path: Path) -> None:
    written, refused = check_random(range(first, first + 5 * NETWORKS // 4), tmp_path)
    assert written >= NETWORKS
    assert written >= 3 * refused


class Residual(nn.Module):
    """A residual block of two widths between a first layer and an average."""

    def __init__(self) -> None:
        super().__init__()
        norm = lambda n: nn.BatchNorm2d(n)
        self.first = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), norm(6), nn.ReLU())
        self.same = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), norm(6))
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), norm(8))
        self.short = nn.Sequential(nn.Conv2d(6, 8, 1, 2), norm(8))
        self.relu, self.pool, self.last = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)
        self.after = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.relu(self.same(x) + x)
        x = self.after(self.down(x) + self.short(x))
        return self.last(self.pool(x).flatten(1))


@pytest.fixture(scope="module")
def int8() -> tuple[nn.Module, Tensor]:
    """A network of 8 bits, whose quanta were fitted to its examples, and integers for it."""
    torch.manual_seed(3)
    x = torch.randint(256, (40, 2, 9, 9), dtype=torch.uint8)
    model = Residual().train()
    for _ in range(5):
        model((x.float() - 121) / 64)
    net = ss.quantise(model.eval(), "int8", skip="last", example_inputs=torch.zeros(1, 2, 9, 9))
    ss.calibrate(net, [(x.float() - 121) / 64])
    return net, x


def frozen_int8(net: nn.Module, **options: Any) -> FrozenNetwork:
    return ss.freeze(net, (2, 9, 9), zero=121, scale=64.0, **options)


def test_eight_bits_are_exact_in_the_kernels_of_one_rounding(
    int8: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    net, x = int8
    with pytest.raises(nodes.NeedsInt8, match="arithmetic='int8'"):
        tflite.write(frozen_int8(net), tmp_path / "network.tflite")
    once = frozen_int8(net, arithmetic="int8", examples=x)
    assert differing(once, tmp_path, x) == {"xnnpack": {}}
    double = frozen_int8(net, arithmetic="int8", rounding="double")
    assert differing(double, tmp_path, x) == {"builtin": {}, "reference": {}}
    assert ss.deploy.export(double, tmp_path / "own.tflite", to="tflite").mismatches == 0
    with pytest.raises(ExportError, match=r"not in xnnpack. Freeze it with rounding='once'"):
        ss.deploy.verify(double, None, x, runtime="litert")
    # As near to the float network as the finer arithmetic is, but for a level or two.
    levels = [row for row in once.report.layers if row.name.startswith("first")]
    assert all(row.largest <= 1 for row in levels)
    assert once.report.differing < sum(row.compared for row in once.report.layers) / 2


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("runtime", ["onnxruntime", "c"])
@pytest.mark.parametrize("rounding", ["once", "double"])
def test_int8_arithmetic_is_the_same_in_other_formats(
    int8: tuple[nn.Module, Tensor], runtime: str, rounding: nodes.Rounding
) -> None:
    frozen = frozen_int8(int8[0], arithmetic="int8", rounding=rounding)
    assert ss.deploy.verify(frozen, None, int8[1], runtime=runtime, timed=False).mismatches == 0


@pytest.mark.parametrize("levels", [(0, 15), (0, 255), (-128, 127)])
def test_all_pairs_of_bytes_are_added_alike_in_all_kernels(
    levels: tuple[int, int], tmp_path: Path
) -> None:
    x = torch.stack(
        [torch.arange(256).expand(256, 256), torch.arange(256)[:, None].expand(256, 256)]
    )
    net = RandomBuilder(0, (2, 256, 256), 0)
    net.bytes = x[None].to(torch.uint8)
    net.change("input")
    for channel, name in enumerate("ab"):
        places = [torch.tensor([channel]), torch.arange(256), torch.arange(256)]
        node = nodes.Select(name, ("input",), 0, 255, *(part.int() for part in places))
        net.add(node)
    zero = torch.zeros(1, dtype=torch.int32)
    empty = (zero + 1, zero, zero, zero, zero, zero.long())
    share = 0.4748 * (levels[1] - levels[0]) / 255
    unit, _ = unit_of_bytes(-share * 255, float(levels[1]), levels[0] < 0)
    node = added(nodes.Requantise("y", ("a", "b"), *levels, *empty), unit, share, *[(0, 255)] * 2)
    net.add(node)
    net.flatten("flat")
    net.weighted("sum", torch.eye(1, 2**16, dtype=torch.int64))
    net.scored("scores", 0)
    frozen = net.network()
    assert frozen.features(net.bytes)["y"].unique().numel() > 10
    assert differing(frozen, tmp_path, net.bytes) == {name: {} for name in tflite.KERNELS}


def test_roundings_are_those_of_fractions_and_of_gemmlowp() -> None:
    random = np.random.default_rng(0)
    v = random.integers(-(2**20), 2**20, 4000)
    scale = np.ldexp(random.integers(2**23, 2**24, 4000), random.integers(-44, -24, 4000))
    product = [Fraction(int(a)) * Fraction(float(b)) for a, b in zip(v, scale, strict=True)]
    assert ROUNDINGS["single"](v, scale).tolist() == [
        math.floor(p + Fraction(1, 2)) for p in product
    ]
    mantissa, exponent = np.frexp(scale)
    multiplier = np.rint(mantissa * 2**31).astype(np.int64)
    doubly = gemmlowp(v, multiplier, -exponent)
    np.testing.assert_array_equal(ROUNDINGS["reference"](v, scale), doubly)
    near = ROUNDINGS["builtin"](v, scale) - doubly
    assert set(near[doubly >= 0]) == {0}
    assert {0, 1} >= set(near)
    single = np.rint(np.float32(v) * np.float32(scale))
    np.testing.assert_array_equal(ROUNDINGS["xnnpack"](v, scale), single)


@pytest.mark.parametrize("labels", [Labels(), Labels(1 / 7, 0.3)])
def test_numbers_that_are_found_give_the_levels_at_every_sum(labels: Labels) -> None:
    random = np.random.default_rng(1)
    count, reach = 30, 900
    steps = random.uniform(20, 90, (count, 1)) * np.arange(1, 16)
    table = np.rint(steps + random.uniform(-900, 200, (count, 1))).astype(np.int64)
    ends = np.full((2, count), [[-reach], [reach]])
    largest = np.full(count, 15)
    found = fit(Stairs(np.arange(16), table, *ends), largest, (0, 15), ALL, labels)
    assert found.found.all()
    sums = np.arange(-reach, reach + 1)
    expected = (sums[None, :, None] >= table[:, None]).sum(2)
    v = found.factor[:, None] * sums + found.bias[:, None]
    single, scale = (part[:, None] for part in labels.seen(found.scale))
    for name, rounding in ROUNDINGS.items():
        levels = rounding(v, single if name == "xnnpack" else scale).clip(0, 15)
        np.testing.assert_array_equal(levels, expected, name)


def test_what_has_no_numbers_is_refused_by_name(tmp_path: Path) -> None:
    net = RandomBuilder(0, (2, 6, 6), 121)
    net.layer("crooked", 4, "int8", LEVELS["uint4"])
    net.flatten("flat")
    net.sum("last", 3, "int8")
    net.scored("scores")
    with pytest.raises(ExportError, match=r"'crooked.stair': no scale gives its levels"):
        tflite.write(net.network(), tmp_path / "network.tflite")
    assert not [*tmp_path.iterdir()]
