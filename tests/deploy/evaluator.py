"""A frozen network in plain numpy, from nothing but its file and the docstrings of its nodes.

Every number is an integer of 64 bits, and every bound that the file states is asserted.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load

Array = np.ndarray[Any, Any]
INT32 = (-(2**31), 2**31 - 1)


def evaluate(file: Path, x: Array) -> dict[str, Array]:
    """Return the result of every node of a saved network, and the ``:class`` and ``:values`` of
    the nodes that give scores."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["softstair"])
    tensors = load(data)
    results: dict[str, Array] = {}
    for row in about["nodes"]:
        own = {key.rpartition(":")[2]: value for key, value in tensors.items()
               if key.rpartition(":")[0] == row["name"]}  # fmt: skip
        inputs = [results[name] for name in row["inputs"]] or [x.astype(np.int64)]
        y = NODES[row["kind"]](row | own, *inputs)
        assert y.dtype == np.int64, row
        assert y.shape == (len(x), *about["sizes"][row["name"]]), row
        if y.size:
            assert row["low"] <= y.min(), row["name"]
            assert y.max() <= row["high"], row["name"]
            assert INT32[0] <= y.min() <= y.max() <= INT32[1], row["name"]
        results[row["name"]] = y
    for head in [row for row in about["nodes"] if row["kind"] == "Scores"]:
        name, axis, y = head["name"], head["axis"], results[head["name"]]
        weighted = y * _channels(tensors[f"{name}:order"], y, axis)
        results[f"{name}:class"] = weighted.argmax(axis)
        results[f"{name}:values"] = y * _channels(tensors[f"{name}:scale"], y, axis, float)
    return results


def _channels(values: Array, x: Array, axis: int, kind: type = np.int64) -> Array:
    return values.astype(kind).reshape(-1, *[1] * (x.ndim - 1 - axis))


def _input(row: Any, x: Array) -> Array:
    if row.get("table") is None:
        return x - row["zero"]
    channels = [row["table"][c].astype(np.int64)[x[:, c]] for c in range(x.shape[1])]
    return np.stack(channels, 1)


def _windows(row: Any, x: Array, fill: int) -> Array:
    """The windows of a pooling, on axes behind those of the result."""
    kernel, stride, padding = (row[key] for key in ("kernel", "stride", "padding"))
    ends = zip(padding, row["beyond"] or [0] * len(padding), strict=True)
    x = np.pad(x, [(0, 0), (0, 0), *((p, p + b) for p, b in ends)], constant_values=fill)
    axes = tuple(range(2, 2 + len(kernel)))
    strided = (slice(None), slice(None), *(slice(None, None, s) for s in stride))
    return sliding_window_view(x, kernel, axes)[strided]


def _pool(row: Any, x: Array, fill: int, name: str) -> Array:
    axes = tuple(range(-len(row["kernel"]), 0))
    if x.ndim < 2 + len(row["kernel"]):  # (N, C) are windows of one axis for a single channel
        return _pool(row, x[:, None], fill, name)[:, 0]
    return getattr(_windows(row, x, fill), name)(axis=axes)


def _sum(row: Any, x: Array) -> Array:
    weight = row["weight"].astype(np.int64)
    if weight.ndim == 2:
        return x @ weight.T
    kernel, groups = weight.shape[2:], row["groups"]
    padding = [(0, 0), (0, 0), *((p, p) for p in row["padding"])]
    x = np.pad(x, padding)
    extent = [d * (k - 1) + 1 for d, k in zip(row["dilation"], kernel, strict=True)]
    axes = tuple(range(2, x.ndim))
    windows = sliding_window_view(x, extent, axes)
    steps = [slice(None, None, s) for s in (*row["stride"], *row["dilation"])]
    windows = windows[(slice(None), slice(None), *steps)]
    flat = windows.reshape(*windows.shape[: x.ndim], math.prod(kernel))  # (N, C, …, window)
    parts = []
    for group, rows in zip(np.split(flat, groups, 1), np.split(weight, groups), strict=True):
        y = np.tensordot(rows.reshape(len(rows), rows.shape[1], -1), group, ([1, 2], [1, -1]))
        parts.append(np.moveaxis(y, 0, 1))
    return np.concatenate(parts, 1)


def _steps(row: Any, x: Array) -> Array:
    levels, thresholds = np.array(row["levels"]), row["thresholds"].astype(np.int64)
    assert (np.diff(levels) > 0).all()
    assert (np.diff(thresholds, axis=1) >= 0).all()
    channels = np.moveaxis(x, row["axis"], -1)
    assert channels.shape[-1] == len(thresholds)
    reached = sum(channels >= column for column in thresholds.T)
    return np.moveaxis(levels[reached], -1, row["axis"])


def _requantise(row: Any, x: Array, y: Array | None = None) -> Array:
    numbers = {key: _channels(row[key], x, row["axis"])
               for key in ("factor", "bias", "multiplier", "shift")}  # fmt: skip
    v, shift = x * numbers["factor"] + numbers["bias"], numbers["shift"]
    _assert_below(v, 2**31)
    if row["rounding"] == "double":
        assert y is None
        return gemmlowp(v, numbers["multiplier"], shift - 31).clip(row["low"], row["high"])
    total = v * numbers["multiplier"]
    _assert_below(total, 2**53)
    if y is not None:
        second = y * _channels(row["beside"], x, row["axis"])
        _assert_below(second, 2**53)
        total = total + second + _channels(row["rest"], x, row["axis"])
        _assert_below(total, 2**53)
    # ⌊total / 2^shift + ½⌋
    rounded = np.floor_divide(2 * total + 2**shift, 2 ** (shift + 1))
    return rounded.clip(row["low"], row["high"])


def _assert_below(values: Array, limit: int) -> None:
    assert not values.size or max(int(values.max()), -int(values.min())) < limit


def gemmlowp(v: Array, multiplier: Array, exponent: Array) -> Array:
    """SaturatingRoundingDoublingHighMul, then RoundingDivideByPOT, written as in gemmlowp."""
    assert (exponent >= 0).all()
    assert (np.abs(multiplier) >= 2**30).all()
    product = v * multiplier
    total = product + np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    # In C, a division drops the fraction.
    high = np.where(total >= 0, total // 2**31, -(-total // 2**31))
    mask = (1 << exponent) - 1
    remainder = high & mask
    threshold = (mask >> 1) + (high < 0)
    return (high >> exponent) + (remainder > threshold)


def _select(row: Any, x: Array) -> Array:
    places = [row[key] for key in ("channels", "rows", "columns") if row.get(key) is not None]
    return x[np.ix_(np.arange(len(x)), *places)]


def _pixel_shuffle(row: Any, x: Array) -> Array:
    factor = (1, *row["factor"])[-2:]
    one_row = x.ndim == 3
    x = x[:, :, None] if one_row else x
    count, (f, g) = x.shape[1] // math.prod(factor), factor
    y = np.zeros((len(x), count, x.shape[2] * f, x.shape[3] * g), np.int64)
    for c, p, q in np.ndindex(count, f, g):
        at = (c * f + p) * g + q if row["channels_first"] else (p * g + q) * count + c
        y[:, c, p::f, q::g] = x[:, at]
    return y[:, :, 0] if one_row else y


def _pad(row: Any, x: Array) -> Array:
    pairs = list(zip(row["padding"][::2], row["padding"][1::2], strict=True))[::-1]
    return np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs)


def _scores(row: Any, x: Array) -> Array:
    return x * 2 ** row["shift"] + _channels(row["bias"], x, row["axis"])


NODES: dict[str, Any] = {
    "Input": _input,
    "Sum": _sum,
    "Steps": _steps,
    "Requantise": _requantise,
    "Lookup": lambda row, x: row["table"].astype(np.int64)[x],
    "MaxPool": lambda row, x: _pool(row, x, INT32[0], "max"),
    "SumPool": lambda row, x: _pool(row, x, 0, "sum"),
    "Select": _select,
    "PixelShuffle": _pixel_shuffle,
    "Add": lambda _, x, y: x + y,
    "Subtract": lambda _, *x: x[0] - x[1] if len(x) == 2 else -x[0],
    "Multiply": lambda _, x, y: x * y,
    "Scale": lambda row, x: x * row["factor"].astype(np.int64),
    "Concat": lambda row, *x: np.concatenate(x, row["axis"]),
    "Pad": _pad,
    "Flatten": lambda _, x: x.reshape(len(x), math.prod(x.shape[1:])),
    "Scores": _scores,
}
