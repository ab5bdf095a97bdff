"""Random PyTorch networks: either ExportError, or equal numbers in every format."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from compiled import BUILDS, differing, needs_compiler, program_of, run_in_program
from freezes import frozen_of
from random_modules import (
    ACTIVATIONS,
    BLOCKS,
    GATES,
    HEADS,
    SCALE,
    ZERO,
    Generated,
    as_floats,
    generate,
    inputs,
)
from test_rows import calls_of
from torch import Tensor, nn

import softstair as ss
from softstair.convert.ops import OPERATORS
from softstair.deploy import ExportError, FrozenNetwork
from softstair.deploy.c.program import sources
from softstair.nn import StairActivation

FIRST, NETWORKS, SLICE = 100, 1120, 70
"""About half of the networks have an integer form: more than 500."""
PER_PROGRAM = 25
NOT_EXPORTED = {"slice", "view", "written view"}
"""Constructs without an integer form."""
NOT_IN_C = {"integer linear on (N, L, C)"}
MOST_ERROR = 0.08
"""Of features of eight bits, relative; some share a quantum with wider ones."""


@dataclass
class Result:
    """The outcome for one network; ``wrong`` lists what differs."""

    seed: int
    constructs: frozenset[str]
    x: Tensor
    """Of two seeds; thresholds are inputs that the first gives."""
    frozen: FrozenNetwork | None = None
    written: bool = False
    """Whether it can be written as C."""
    wrong: list[str] = field(default_factory=list)


def examine(seed: int) -> Result:
    """Compare ``eval()``, numpy, the frozen network and ONNX Runtime on one network."""
    generated = generate(seed)
    result = Result(seed, generated.constructs, torch.cat([inputs(generated, i) for i in (0, 1)]))
    try:
        _compare(generated, result)
    except (Exception, pytest.fail.Exception) as error:
        result.wrong.append(f"{type(error).__name__}: {error}")
    return result


def _compare(generated: Generated, result: Result) -> None:
    from test_onnx import assert_right

    x = result.x
    with torch.no_grad():
        net = generated.quantised(inputs(generated))
    said = ss.report(net, generated.shape, ZERO, SCALE)
    if not said.freezes:
        with pytest.raises(ExportError) as caught:
            ss.freeze(net, generated.shape, zero=ZERO, scale=SCALE)
        assert str(caught.value) in said.conclusion
        return
    result.frozen = frozen = frozen_of(
        net, generated.shape, x, ZERO, SCALE, exact=generated.exact_sums
    )
    assert_right(frozen, x)
    with contextlib.suppress(ExportError):
        sources(frozen, "network")
        result.written = True
    assert result.written or said.plan is None, said.conclusion


def _examine_in_c(results: list[Result], folder: Path, kind: str) -> None:
    """Compare networks in one C program with the frozen ones."""
    networks = {r.seed: r.frozen for r in results if r.frozen is not None}
    program = program_of(networks, folder, BUILDS[kind])
    for result in results:
        frozen = networks[result.seed]
        try:
            counts = differing(
                frozen.features(result.x), run_in_program(program, result.seed, frozen, result.x)
            )
            result.wrong += [f"C: {counts}"] if counts else []
        except ValueError as error:
            result.wrong.append(f"C: {error}")


# The kinds of C take turns; the slice of the default lane has one network of each block.
@needs_compiler
@pytest.mark.filterwarnings("ignore:all weights of")
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("first", [len(BLOCKS), *range(FIRST, FIRST + NETWORKS, SLICE)])
def test_random_networks_raise_or_are_equal_everywhere(first: int, tmp_path: Path) -> None:
    count = len(BLOCKS) if first == len(BLOCKS) else SLICE
    results = [examine(seed) for seed in range(first, first + count)]
    written = [result for result in results if result.written]
    for start in range(0, len(written), PER_PROGRAM):
        kind = ("plain", "packed")[start // PER_PROGRAM % 2]
        _examine_in_c(written[start : start + PER_PROGRAM], tmp_path / str(start), kind)
    wrong = [f"seed {r.seed} ({', '.join(r.constructs)}): {r.wrong}" for r in results if r.wrong]
    assert not wrong, "\n".join(wrong)
    assert sum(r.frozen is not None for r in results) > 0.4 * count
    assert len(written) > 0.25 * count
    generated = Counter(name for r in results for name in r.constructs)
    frozen = Counter(name for r in results if r.frozen is not None for name in r.constructs)
    in_c = Counter(name for r in written for name in r.constructs)
    for name in {*BLOCKS, *HEADS} - NOT_EXPORTED:
        assert frozen[name] > 0 or generated[name] < 9, name
        assert in_c[name] > 0 or generated[name] < 18 or name in NOT_IN_C, name


@pytest.mark.nightly
def test_random_networks_have_every_row_that_exports() -> None:
    rows = {row.name for row in OPERATORS if row.exports}
    for seed in range(FIRST, FIRST + NETWORKS):
        rows -= {name for name, _ in calls_of(generate(seed).model)}
    assert not rows


def first_call(net: nn.Module, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the result of the first call of a module in a network."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = module.register_forward_hook(lambda _, x, y: seen.append((x[0].clone(), y.clone())))
    with torch.no_grad():
        net(x)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("count", [20, pytest.param(250, marks=pytest.mark.nightly)])
def test_eight_bits_compute_the_activations_of_the_float_network(count: int) -> None:
    """Given the same sums; every kind of activation occurs."""
    kinds: set[type[nn.Module]] = set()
    for seed in range(count):
        generated = generate(seed)
        x = as_floats(inputs(generated))
        try:
            net = ss.quantise(generated.model.eval(), "int8", skip=generated.settings["skip"])
        except ss.SoftstairError:  # nothing to quantise, or an activation in place on a view
            continue
        ss.calibrate(net.eval(), [x])
        activations = {f"layers.{name}": m for name, m in generated.model.layers.items()}
        for name, stair in net.named_modules():
            activation = activations.get(name)
            if not isinstance(stair, StairActivation) or activation is None:
                continue
            sums, features = first_call(net, stair, x)
            with torch.no_grad():
                expected = activation(sums)
            if expected.norm() > 0:
                kinds.add(type(activation))
                error = float((features - expected).norm() / expected.norm())
                assert error <= MOST_ERROR, f"seed {seed}: {name} ({activation}), {error:.3f}"
    assert len(kinds) >= 10
    assert count < 100 or kinds == set(ACTIVATIONS) | set(GATES)
