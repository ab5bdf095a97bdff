"""Freezes a network, and compares all of it with numpy and with ``eval()``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from compiled import differing, program_of, run_in_program
from evaluator import evaluate
from torch import Tensor, nn

from softstair.deploy import ExportError
from softstair.deploy.freezing import freeze
from softstair.deploy.frozen import FrozenNetwork, leaves
from softstair.deploy.nodes import Lookup, Node, Requantise
from softstair.nn import StairActivation

MOVED = 2.0**-9
"""The largest relative error of a multiplier."""
ROUNDED = 2.0**-5
"""Levels by which the bias of a requantisation may be off."""


def frozen_of(
    net: nn.Module,
    shape: tuple[int, ...],
    x: Tensor,
    zero: int = 121,
    scale: float = 64.0,
    exact: bool = True,
    **options: Any,
) -> FrozenNetwork:
    """Return the frozen network, of which every number was compared with numpy, and the levels
    with those of ``eval()``. ``exact``: whether its sums are exact in float32."""
    options = {"examples": x, "dtype": x.dtype} | options
    frozen = freeze(net, shape, zero=zero, scale=scale, **options)
    assert_equals_numpy(frozen, x)
    assert_levels_of_eval(net, frozen, x, (x.float() - zero) / scale, exact)
    return frozen


def assert_equals_numpy(frozen: FrozenNetwork, x: Tensor) -> None:
    """Compare the results of all nodes, the classes and the values with those of its file."""
    with tempfile.TemporaryDirectory() as folder:
        expected = evaluate(frozen.save(Path(folder) / "frozen.safetensors"), x.numpy())
    actual: dict[str, Any] = dict(frozen.features(x))
    assert all(y.dtype == torch.int32 for y in actual.values())
    answers = zip(*map(leaves, (frozen(x), frozen.predict(x), frozen.values(x))), strict=True)
    for head, (scores, classes, values) in zip(frozen.heads.values(), answers, strict=True):
        assert torch.equal(scores, actual[head.name])
        actual |= {f"{head.name}:class": classes, f"{head.name}:values": values}
    for name, y in actual.items():
        np.testing.assert_array_equal(y.numpy(), expected[name], name)


def formats(frozen: FrozenNetwork, x: Tensor, folder: Path) -> list[bool]:
    """Return whether a network is written as ONNX, QONNX and C; every number of those that are is
    compared."""
    import test_onnx
    import test_qonnx

    def in_c() -> None:
        program = program_of({0: frozen}, folder)
        results = run_in_program(program, 0, frozen, x)
        assert differing(frozen.features(x), results) == {}

    def in_qonnx() -> None:
        with mock.patch.object(test_qonnx.onnx, "IR_VERSION", 8):
            test_qonnx.assert_right(frozen, x)

    def is_written(compare: Callable[[], object]) -> bool:
        try:
            compare()
        except ExportError:
            return False
        return True

    if shutil.which("cc") is None:
        pytest.skip("cc is not installed, so nothing can be compiled.")
    ways = (lambda: test_onnx.assert_right(frozen, x), in_qonnx, in_c)
    return [is_written(way) for way in ways]


def assert_levels_of_eval(
    net: nn.Module, frozen: FrozenNetwork, x: Tensor, floats: Tensor, exact: bool
) -> None:
    """Compare the levels of each stair, in examples in which those before it are equal.

    They differ only where a multiplication decides, and there the float network is about as far
    from the one level as from the other.
    """
    actual, clean = frozen.features(x), torch.ones(len(x), dtype=torch.bool)
    for name, (y, level) in stairs_of(net, floats).items():
        if name not in frozen.stairs:
            continue
        stair: Any = net.get_submodule(name)
        y, level, found = y[clean], level[clean], actual[name][clean]
        differs = found != level
        between = nodes_between(frozen, name)
        if tables := [node for node in between if isinstance(node, Lookup)]:
            jump = int(tables[-1].table.long().diff().abs().max())
            assert ((found - level).abs() <= jump + 1).all(), f"{name}: not beside in the table"
        elif differs.any() and not any(node.name.endswith(".bytes") for node in between):
            levels = torch.tensor(stair.stair.integers)
            places = torch.minimum(
                *(torch.searchsorted(levels, n[differs]) for n in (level, found))
            )
            apart = (levels[places + 1] == torch.maximum(level[differs], found[differs])).all()
            assert apart, f"{name}: levels differ by more than one"
            edges = torch.tensor(stair.stair.thresholds)[places].double()
            distance = (y[differs].double() - edges).abs() / stair.stair.quantum
            rounds = any(isinstance(node, Requantise) for node in between)
            size = (edges / stair.stair.quantum).abs() + sum_size(frozen, between, actual, stair)
            allowed = ROUNDED + MOVED * size if rounds else 1e-3 * torch.ones_like(size)
            assert rounds or not exact, f"{name}: {int(differs.sum())} levels differ"
            assert (distance <= allowed).all(), f"{name}: off by {float(distance.max()):.3f} levels"
        clean[clean.clone()] &= ~differs.flatten(1).any(1)


def sum_size(frozen: FrozenNetwork, between: list[Node], actual: Any, stair: Any) -> float:
    """Return the size, in levels, of what is rounded before a stair: shortcuts, and offsets."""
    sizes = [0.0]
    for node in between:
        if isinstance(node, Requantise):
            unit = node.multiplier.double() * 2.0 ** -node.shift.double()
            sizes.append(float((node.bias.double() * unit).abs().clamp(max=1e4).max()))
            if node.name.endswith(".total"):  # in 16 bits
                sizes.append(2 * (node.high - node.low) * 2.0**-6)
    return sum(sizes)


def stairs_of(net: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what each stair of a network is applied to, and its levels in quanta."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in net.named_modules():
        if isinstance(module, StairActivation):

            def note(stair: Any, inputs: Any, y: Tensor, name: str = name) -> None:
                z = inputs[0].clone()
                z = z if stair.function is None else stair.function(z)
                seen[name] = (z, (y.double() / stair.stair.quantum).round().int())

            handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return seen


def nodes_between(frozen: FrozenNetwork, name: str) -> list[Node]:
    """Return a stair's node and those before it, back to the stairs before."""
    found, queue = [], [frozen.node(name)]
    while queue:
        node = queue.pop()
        found.append(node)
        queue += [frozen.node(n) for n in node.inputs if n not in frozen.stairs]
    return found
