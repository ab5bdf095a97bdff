"""Frozen networks whose sums are as large as 32 bits allow, one for each path of products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import Flatten, Input, Node, Scores, Sum, SumPool

SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "linear": ((4096,), 0, {}),
    "conv1d": ((455, 9), 1, {"padding": (1,)}),
    "conv2d": ((113, 6, 6), 2, {"padding": (1, 1), "stride": (2, 2)}),
    "grouped": ((226, 6, 6), 2, {"groups": 2, "padding": (1, 1)}),
    "depthwise": ((8, 6, 6), 2, {"groups": 8, "padding": (2, 2), "dilation": (2, 2)}),
}
INPUTS = {"uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1)}
LARGEST = [f"{kind}, {dtype}" for kind in SHAPES for dtype in INPUTS] + ["averages"]


def largest(kind: str) -> tuple[FrozenNetwork, Tensor]:
    """A network with sums just below 2³¹ in magnitude, and inputs that reach them."""
    if kind == "averages":
        return _averages()
    name, dtype = kind.split(", ")
    shape, axes, options = SHAPES[name]
    low, high = INPUTS[dtype]
    x = _inputs(shape, dtype)
    entry = Input("input", (), low, high, shape, 1.0, 0, dtype)
    groups = options.get("groups", 1)
    inputs, kernel = shape[0] // groups, (3,) * axes
    outputs = 4 * groups if groups < 8 else groups
    count = inputs * 3**axes
    most = (2**31 - 1) // (count * max(-low, high))
    weight = _weights((outputs, inputs, *kernel), most)
    windows = {"stride": (1,) * axes, "padding": (0,) * axes, "dilation": (1,) * axes}
    return _network([entry], weight, {**(windows if axes else {}), **options}, x), x


def _averages() -> tuple[FrozenNetwork, Tensor]:
    """Sums over windows, then a layer over these sums."""
    shape = (16, 12, 12)
    x = _inputs(shape, "int16")
    low, high = INPUTS["int16"]
    entry = Input("input", (), low, high, shape, 1.0, 0, "int16")
    pool = SumPool("pool", ("input",), 36 * low, 36 * high, (6, 6), (6, 6))
    weight = _weights((4, 16, 2, 2), (2**31 - 1) // (64 * 36 * 2**15))
    windows = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    return _network([entry, pool], weight, windows, x), x


def _inputs(shape: tuple[int, ...], dtype: str) -> Tensor:
    """The least and the greatest everywhere, in checks, and at random."""
    low, high = INPUTS[dtype]
    draw = torch.Generator().manual_seed(0)
    random = torch.randint(low, high + 1, (3, *shape), generator=draw)
    ends = torch.where(torch.rand((3, *shape), generator=draw) < 0.5, low, high)
    same = torch.full((2, *shape), low)
    same[1] = high
    return torch.cat([same, ends, random]).to(getattr(torch, dtype))


def _weights(shape: tuple[int, ...], most: int) -> Tensor:
    """Rows of the largest weights of one sign, of the other, of both, and at random."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randint(-most, most + 1, shape, generator=draw)
    weight[0::4], weight[1::4] = most, -most
    weight[2::4] = most * (1 - 2 * (torch.arange(weight[0].numel()) % 2).reshape(shape[1:]))
    weight[2, 0] -= 1
    return weight.to(torch.int8 if most < 128 else torch.int16 if most < 2**15 else torch.int32)


def _network(
    before: list[Node], weight: Tensor, options: dict[str, Any], x: Tensor
) -> FrozenNetwork:
    source = before[-1]
    layer = Sum("sum", (source.name,), 0, 0, weight, **options)
    least, greatest = layer.bounds(source.low, source.high)
    layer = replace(layer, low=int(least.min()), high=int(greatest.max()))
    assert max(-layer.low, layer.high) < 2**31
    nodes = [*before, layer]
    sizes = _sizes(nodes, x)
    if len(sizes["sum"]) > 1:
        nodes.append(Flatten("flat", ("sum",), layer.low, layer.high))
        sizes = _sizes(nodes, x)
    count = sizes[nodes[-1].name][0]
    ones = torch.ones(count, dtype=torch.int32)
    ends = (layer.low, layer.high)
    last = Scores("scores", (nodes[-1].name,), *ends, ones * 0, ones.double(), ones)
    return FrozenNetwork([*nodes, last], {**sizes, "scores": (count,)})


def _sizes(nodes: list[Node], x: Tensor) -> dict[str, tuple[int, ...]]:
    results: dict[str, Tensor] = {}
    for node in nodes:
        results[node.name] = node.run(*[results[name] for name in node.inputs] or [x[:1]])
    return {name: tuple(y.shape[1:]) for name, y in results.items()}
