"""Frozen networks that use every way to compute a layer in C, and reach every edge of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from random_networks import RandomBuilder, random_network

from softstair.deploy import nodes

BT = np.array(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
     [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]
)  # fmt: skip


def bit_features(seed: int = 0) -> RandomBuilder:
    """Ternary and binary features in bit planes whose last words are not full."""
    net = RandomBuilder(seed, (2, 9, 8), zero=121, batch=3)
    net.layer("first", 45, "ternary", (-1, 0, 1), padding=(1, 1))
    net.max_pool("pool", 3, 2, 1)
    net.layer("signs", 70, "sign", (-1, 1), padding=(1, 1))
    net.layer("dilated", 130, "ternary", (0, 1), padding=(2, 2), dilation=(2, 2), stride=(1, 2))
    net.max_pool("largest", 2, 1, 0)
    net.flatten("flat")
    net.layer("linear", 22, "ternary", (-1, 0))
    net.layer("binary", 100, "sign", (-1, 0, 1))
    net.scores("last", 5)
    return net


def byte_features(seed: int = 0) -> RandomBuilder:
    """Features in bytes: with a bias, depthwise, grouped and pointwise convolutions."""
    net = RandomBuilder(seed, (3, 8, 7), zero=0, batch=3)
    net.layer("first", 36, "int8", tuple(range(200)), padding=(2, 1), stride=(2, 1))
    net.layer("depthwise", 36, "int4", (-5, -1, 0, 4, 100), padding=(1, 1), groups=36)
    net.layer("groups", 48, "sign", tuple(range(-8, 8)), padding=(1, 1), groups=4)
    net.layer("pointwise", 34, "int4", (-1, 0, 1), kernel=1)
    net.layer("many", 68, "int4", (3, 4, 9), padding=(1, 1), groups=34)
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 3)
    return net


def affine_features(seed: int = 0) -> RandomBuilder:
    """Levels as bytes, with and without a bias, and as words, from thresholds on a line."""
    net = RandomBuilder(seed, (2, 6, 6), zero=121, batch=3)
    start = net.layer("first", 10, "int4", tuple(range(16)), even=True, padding=(1, 1))
    net.layer("each", 10, "int4", tuple(range(-8, 8)), even=True, padding=(1, 1), groups=10)
    net.add_features("added", start, net.last)
    net.steps("added.stair", tuple(range(-3, 9)), even=True)
    net.layer("deep", 10, "int4", tuple(range(-8, 8)), shortcut=start, even=True, padding=(1, 1))
    net.layer("bits", 10, "int4", (-1, 0, 1), shortcut=start, even=True, padding=(1, 1))
    net.layer("biased", 35, "int4", tuple(range(40, 170)), even=True)
    net.layer("wide", 9, "ternary", tuple(range(-150, 151)), even=True, kernel=1)
    net.layer("uneven", 7, "int4", (-5, -1, 0, 4, 100), even=True, kernel=1)
    net.flatten("flat")
    net.scores("last", 3)
    return net


def packed_features(seed: int = 0) -> RandomBuilder:
    """INT4 layers with several products in one multiplication; sums reach the bounds."""
    net = RandomBuilder(seed, (3, 11, 6), zero=121, batch=3)
    net.layer("first", 24, "int4", tuple(range(16)), even=True, padding=(2, 1))
    net.layer("each", 24, "int4", tuple(range(-8, 8)), even=True, padding=(1, 1), groups=24)
    net.layer("unpadded", 24, "int4", tuple(range(16)), even=True, groups=24)
    net.layer("point", 48, "int4", (3, 4, 9), kernel=1)
    net.layer("groups", 26, "int4", tuple(range(40, 170)), even=True, padding=(1, 1), groups=2)
    net.sum("bytes", 64, "int8", kernel=1)
    table = torch.full((64, 15), -(2**30), dtype=torch.int32)
    net.add(nodes.Steps("full", ("bytes",), 0, 15, table, tuple(range(16))))
    weight = torch.full((7, 64, 1, 1), 4)
    weight[:, :17] = 5  # 15 times the sum of each row is 4,095
    weight[1] *= -1
    weight[2, 0] = -3
    weight[3:, :32] = -8
    net.weighted("most", weight)
    net.steps("most.stair", tuple(range(16)), even=True)
    net.flatten("flat")
    net.scores("last", 3)
    return net


def shared_features(seed: int = 0) -> RandomBuilder:
    """Features that several nodes read, in memory that is used again."""
    net = RandomBuilder(seed, (1, 6, 6), zero=255, batch=3)
    start = net.layer("first", 48, "ternary", (-1, 0, 1), padding=(1, 1))
    deep = net.layer("deep", 48, "ternary", (-1, 0, 1), shortcut=start, padding=(1, 1))
    net.last = "deep"
    net.steps("deep.other", (-1, 1))
    net.layer("third", 48, "ternary", tuple(range(16)), shortcut=deep, padding=(1, 1))
    net.add_features("added", net.last, start)
    net.max_pool("pool", 3, 3, 0)
    flat = net.flatten("flat")
    net.sum("linear", net.results[flat].shape[1], "ternary")
    net.steps("linear.stair", (-900, 0, 900))
    net.add_features("summed", net.last, flat)
    net.scores("last", 4, "int12")
    return net


def expanded_features(seed: int = 0) -> RandomBuilder:
    """Bit planes, bytes and sums that are repeated along axes of length 1."""
    net = RandomBuilder(seed, (1, 6, 6), zero=100, batch=3)
    start = net.layer("first", 48, "ternary", (-1, 0, 1), padding=(1, 1))
    small = net.layer("all positions", 48, "ternary", (-1, 0, 1), kernel=6)
    wide = net.expand("wide", (48, 6, 6))
    net.last = start
    net.layer("deep", 48, "ternary", tuple(range(16)), shortcut=wide, padding=(1, 1))
    deep = net.add_features("deep.added", net.last, wide)
    net.last = small  # counted as bits, too
    net.sum("again", 48, "ternary", kernel=1)
    net.expand("again.sums", (48, 6, 6))
    again = net.requantise("again.stair", -1, 1, start)
    net.layer("single", 1, "int4", tuple(range(200)), kernel=1)
    single = net.expand("single.channel", (48, 6, 6))
    net.last = start
    net.sum("row", 1, "int4", kernel=1)
    net.expand("row.sums", (48, 6, 6))
    net.steps("row.stair", (-5, -1, 0, 4, 100))
    net.add_features(
        "summed", net.add_features("sum", net.add_features("more", net.last, single), deep), again
    )
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 4)
    return net


def int8_last_layer(seed: int = 0) -> RandomBuilder:
    """An INT8 last layer over features with a bias; their number is no multiple of 16."""
    net = RandomBuilder(seed, (2, 5, 6), zero=7, batch=3)
    net.layer("first", 9, "ternary", tuple(range(200)), padding=(1, 1), stride=(2, 2))
    net.flatten("flat")
    net.scores("last", 11)
    return net


def channels_by_sixteen(seed: int = 1) -> RandomBuilder:
    """49 positions: a round of 32, four groups of four, and one; 37 channels: twice 16, and 5."""
    net = RandomBuilder(seed, (3, 7, 7), zero=121, batch=3)
    net.layer("first", 37, "ternary", (-1, 0, 1), padding=(1, 1))
    net.layer("pointwise", 32, "int4", tuple(range(16)), kernel=1)
    net.layer("strided", 34, "int4", tuple(range(16)), padding=(1, 1), stride=(2, 2), groups=2)
    net.flatten("flat")
    net.scores("last", 4)
    return net


def depthwise_features(seed: int = 1) -> RandomBuilder:
    """Depthwise sums of 16 and of 32 bits.

    35 places: a round of 32, and three; 69 channels: twice 32, and 5.
    """
    net = RandomBuilder(seed, (3, 7, 5), zero=121, batch=3)
    net.layer("first", 69, "int8", (0, 7, 60, 199), padding=(1, 1))
    net.layer("int4", 69, "int4", tuple(range(200)), even=True, padding=(1, 1), groups=69)
    net.layer("int8", 69, "int8", (0, 7, 60, 127), padding=(1, 1), groups=69)
    net.sum("sums", 69, "int8", padding=(1, 1), groups=69)
    assert float(net.results["sums"].abs().max()) >= 2**15
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 4, "ternary")
    return net


def other_units(seed: int = 0) -> RandomBuilder:
    """Every requantisation: with features beside it, unfused, doubly rounded, of 8 to 16 bits."""
    net = RandomBuilder(seed, (3, 6, 7), zero=0, batch=3)
    net.table(-128, 127)
    net.sum("first", 20, "int8", padding=(1, 1))
    start = net.requantise("first.stair", 0, 255)
    net.sum("deep", 20, "int8", padding=(1, 1))
    deep = net.requantise("deep.stair", -128, 127, start)
    net.sum("doubly", 20, "int8", kernel=1)
    doubly = net.requantise("doubly.stair", -128, 127, rounding="double")
    net.sum("halves", 20, "int4", groups=20, padding=(1, 1))
    halves = net.requantise("halves.stair", -32768, 32767, deep)
    net.add_features("added", doubly, halves)
    net.requantise("added.stair", 0, 15)
    net.requantise("both", -200, 55, halves)
    net.pad("channels", 1, 0, 0, 2, 3, 4)
    net.concatenate("together", "channels", "channels")
    net.sum_pool("average")
    net.requantise("average.stair", -128, 127, rounding="double")
    net.flatten("flat")
    net.scores("last", 4)
    return net


def large_numbers(seed: int = 0) -> RandomBuilder:
    """Sums of halves and words near 2**31, whose partial sums are beyond it."""
    net = RandomBuilder(seed, (2, 3, 3), zero=0, batch=4, dtype="int16")
    net.bytes[0, :, :2], net.bytes[1] = -32768, 32767
    net.change("input")
    net.weighted("most", torch.tensor([[32767, 32767], [-32768, 32767], [1, -1]])[:, :, None, None])
    assert int(net.results["most"].abs().max()) > 2**31 - 2**17
    net.requantise("most.stair", -32768, 32767)
    net.last = "most"
    net.steps("steps", tuple(range(16)), even=True)
    net.last = "most"
    net.steps("bits", (-1, 0, 1))
    net.add_features("added", "most.stair", "steps")
    net.requantise("small", -128, 127, "bits")
    net.sum("deep", 70, "int12", kernel=2)
    net.requantise("deep.stair", 0, 255, rounding="double")
    net.weighted("grouped", torch.full((140, 1, 1, 1), 2**13), groups=70)
    net.flatten("flat")
    net.weighted("last.sum", torch.tensor([[1, -1] * 280, [1] * 560]))
    net.scored("last", shift=0)
    return net


def lines_and_values(seed: int = 0) -> RandomBuilder:
    """Features of one axis, a 16-bit table, and outputs that are values."""
    net = RandomBuilder(seed, (3, 12), zero=0, batch=5)
    net.table(-32768, 32767)
    net.sum("first", 40, "int4", padding=(1,))
    net.requantise("first.stair", -100, 127)
    net.pad("longer", 2, 1)
    net.max_pool("pool", 2, 2, 0)
    net.layer("deep", 33, "ternary", tuple(range(16)), stride=(2,))
    net.flatten("flat")
    net.pad("more", 1, 2)
    net.concatenate("both", "more", "flat")
    net.scores("last", 3, "int12")
    return net


HOSTILE = 'a */ int x; /* b\n#error "c" \\\n??/\n" %s é 💥'


def hostile_names() -> RandomBuilder:
    """A random network whose layers have names that would break out of a comment."""
    net = random_network(0)
    names = {name: f"{HOSTILE} {number}" for number, name in enumerate(net.nodes)}
    net.nodes = {
        names[node.name]: replace(
            node, name=names[node.name], inputs=tuple(names[source] for source in node.inputs)
        )
        for node in net.nodes.values()
    }
    net.results = {names[name]: x for name, x in net.results.items()}
    return net


def edges(seed: int = 0) -> RandomBuilder:
    """Sizes that are no multiple of a tile, paddings of 0 to 2, words that are not full."""
    net = RandomBuilder(seed, (2, 9, 7), zero=121, batch=3)
    net.layer("first", 45, "ternary", (-1, 0, 1), padding=(1, 1))
    start = net.layer("ternary", 43, "ternary", (-1, 0, 1), padding=(1, 1))
    net.layer("signs", 70, "sign", (-1, 1), padding=(1, 1))
    net.layer("narrow", 24, "ternary", (0, 1), padding=(1, 0))
    net.layer("wide", 48, "sign", (-1, 0), padding=(2, 2))
    net.max_pool("pool", 2, 2, 0)
    net.layer("small", 46, "ternary", (-1, 0, 1), padding=(0, 1))
    net.max_pool("single", 2, 2, 0)
    net.layer("one", 33, "ternary", (-1, 0, 1), padding=(1, 1))
    net.flatten("flat")
    net.layer("linear", 9, "ternary", tuple(range(16)))
    other = net.last
    net.last = start
    net.sum("stored", 43, "ternary", padding=(1, 1))
    stored = net.last
    net.steps("stored.stair", (-1, 0, 1))
    net.last = stored
    net.requantise("levels", 0, 15, start)
    net.sum_pool("sums")
    net.flatten("flat sums")
    net.layer("last sums", 9, "int4", tuple(range(16)))
    net.add_features("added", net.last, other)
    net.scores("last", 4)
    return net


def byte_edges(seed: int = 0) -> RandomBuilder:
    """Bytes with weights of 4, 2 and 1 bits; the largest of them, and of all sums, occur."""
    net = RandomBuilder(seed, (2, 9, 7), zero=121, batch=3)
    start = net.layer("first", 32, "int4", tuple(range(16)), even=True, padding=(1, 1))
    net.layer("int4", 48, "int4", tuple(range(-8, 8)), padding=(1, 1))
    net.layer("ternary", 16, "ternary", tuple(range(16)), even=True, padding=(2, 0))
    net.layer("signs", 21, "sign", tuple(range(16)), padding=(0, 1))
    net.sum("ragged", 16, "int4", padding=(1, 1))  # 21 channels are not read 16 at a time
    net.steps("ragged.stair", tuple(range(32)))
    net.sum("wide", 16, "int4", padding=(1, 1))  # 4 times 31 is a byte
    net.steps("wide.stair", tuple(range(33)))
    net.layer("too wide", 5, "int4", (0, 1, 2), padding=(1, 1))
    net.flatten("flat")
    other = net.sum("linear", 9, "int4")
    net.last = start
    net.sum("full", 32, "int4", kernel=1)
    net.change("full", weight=torch.zeros(32, 32, 1, 1, dtype=torch.int8))
    net.steps("full.stair", tuple(range(16)))
    net.change("full.stair", thresholds=torch.zeros(32, 15, dtype=torch.int32))
    net.sum("large", 16, "int4", padding=(1, 1))
    net.nodes["large"].weight[0] = -8  # type: ignore[attr-defined]
    net.change("large", low=-8 * 15 * 9 * 32)
    assert int(net.results["large"].min()) == -8 * 15 * 9 * 32
    net.sum_pool("sums")
    net.flatten("flat sums")
    net.sum("last sums", 9, "ternary")
    net.add_features("added", net.last, other)
    net.scores("last", 4, "ternary")
    return net


def largest_tiles() -> RandomBuilder:
    """Images and weights with the largest intermediate results."""
    net = RandomBuilder(0, (1, 6, 6), zero=128, batch=36)
    signs = np.where(BT >= 0, 1, -1)
    images = np.einsum("iy,jx->ijyx", signs, signs).reshape(36, 1, 6, 6)
    net.bytes = torch.from_numpy(128 + 100 * images).to(torch.uint8)
    net.results["input"] = net.nodes["input"].run(net.bytes)
    net.sum("same", 96, "sign", kernel=1)
    net.change("same", weight=torch.ones(96, 1, 1, 1, dtype=torch.int8))
    net.steps("same.stair", (-1, 1))
    net.change("same.stair", thresholds=torch.zeros(96, 1, dtype=torch.int32))
    assert set(net.results["same.stair"].unique().tolist()) == {-1, 1}
    net.sum("large", 64, "sign")
    first = net.nodes["large"].weight[:, :1]  # type: ignore[attr-defined]
    net.change("large", weight=first.repeat(1, 96, 1, 1))
    net.steps("large.stair", (-1, 0, 1))
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 3)
    assert int(net.results["large"].abs().max()) == 9 * 96
    return net


NETWORKS: dict[str, Callable[[], RandomBuilder]] = {
    "bits": bit_features,
    "bytes": byte_features,
    "affine": affine_features,
    "packed": packed_features,
    "shared": shared_features,
    "expanded": expanded_features,
    "scores": int8_last_layer,
    "channels": channels_by_sixteen,
    "depthwise": depthwise_features,
    "units": other_units,
    "large": large_numbers,
    "lines": lines_and_values,
    "hostile": hostile_names,
    "tiles": edges,
    "tiles of bytes": byte_edges,
    "largest tiles": largest_tiles,
}
TILED = {
    "tiles": ("ternary", "signs", "narrow", "wide", "small", "one", "stored"),
    "tiles of bytes": ("int4", "ternary", "signs", "wide", "large"),
    "largest tiles": ("large",),
}
"""The layers that are computed in tiles where that is exact."""
