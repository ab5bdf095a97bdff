"""Random PyTorch networks: either ExportError, or equal bits in every format."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from compiled import BUILDS, needs_compiler, program_of, run_in_program
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
from test_rows import rows_of
from torch import Tensor, nn

import softstair as ss
from networks import without_exact_sums
from softstair.convert.ops import OPERATORS
from softstair.deploy import ExportError, IntegerNetwork, integerise, onnx as onnx_export, verify
from softstair.deploy.c.program import sources
from softstair.deploy.nodes import Sum
from softstair.deploy.summary import report
from softstair.nn import StairActivation

NETWORKS, PER_PROGRAM = 180, 25
MOST_ERROR = 0.08
"""Of features of eight bits, relative; some share a quantum with wider ones."""


@dataclass
class Result:
    """The outcome for one network; ``wrong`` lists what differs."""

    seed: int
    constructs: frozenset[str]
    x: Tensor
    network: IntegerNetwork | None = None
    written: bool = False
    """Whether it can be written as C."""
    wrong: list[str] = field(default_factory=list)
    rows: set[str] = field(default_factory=set)
    """The rows of the operator table that it has."""


def examine(seed: int) -> Result:
    """Compare ``eval()``, integers and ONNX Runtime on one network."""
    generated = generate(seed)
    result = Result(seed, generated.constructs, inputs(generated))
    result.rows = rows_of(generated.model)
    try:
        _compare(generated, result)
    except Exception as error:
        result.wrong.append(f"{type(error).__name__}: {error}")
    return result


def _compare(generated: Generated, result: Result) -> None:
    x = result.x
    with torch.no_grad():
        net = generated.quantised(x)
        scores = net(as_floats(x))
        if generated.exact_sums:
            plain = without_exact_sums(net)(as_floats(x))
            result.wrong += [] if torch.equal(scores, plain) else ["eval()"]
    reported = report(net, generated.shape, ZERO, SCALE)
    try:
        network = integerise(net, generated.shape, ZERO, SCALE)
    except ExportError as error:
        is_said = reported.exports_exactly is False and str(error) in reported.conclusion
        result.wrong += [] if is_said else [f"report: {reported.conclusion}"]
        return
    result.network = network
    result.wrong += [] if reported.exports_exactly else [f"report: {reported.conclusion}"]
    same = verify(net, network, x)["integer network"].mismatches == 0
    # A softmax is left out, and a float convolution gives scores without positions.
    is_equal = bool(network.head) or torch.equal(network(x), scores.reshape(network(x).shape))
    if not same or not is_equal:
        result.wrong.append("integers")
    with contextlib.suppress(ExportError):
        differing = _differ(network.features(x), by_onnx(network, x))
        result.wrong += [f"ONNX: {differing}"] if differing else []
    with contextlib.suppress(ExportError):
        sources(network, "network")
        result.written = True
    if reported.plan is not None and not result.written:
        result.wrong.append("report: C")


def _differ(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Return the nodes whose results differ."""
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


def by_onnx(network: IntegerNetwork, x: Tensor) -> dict[str, Tensor]:
    """Return the result of every node under ONNX Runtime.

    Sums that a QLinearConv computes with their stair are not in the file: those of the network.
    """
    runtime = pytest.importorskip("onnxruntime")
    model = onnx_export.model(network, features=True).SerializeToString()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1  # others would spin beside the other tests
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    outputs = onnx_export.feature_outputs(network)
    values = session.run([*outputs.values()], {"bytes": x.numpy()})
    tensors = map(torch.from_numpy, values)
    sums = {node.name for node in network.nodes if isinstance(node, Sum)} - {*outputs}
    features = network.features(x)
    return {name: features[name] for name in sums} | {
        name: value if value.is_floating_point() else value.long()
        for name, value in zip(outputs, tensors, strict=True)
    }


@needs_compiler
@pytest.mark.parametrize("count", [14, pytest.param(NETWORKS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("packed", marks=pytest.mark.nightly)])
def test_random_networks_raise_or_are_equal_everywhere(
    kind: str, count: int, tmp_path: Path
) -> None:
    results = [examine(seed) for seed in range(count)]
    written = [result for result in results if result.written]
    for first in range(0, len(written), PER_PROGRAM):
        _examine_in_c(written[first : first + PER_PROGRAM], tmp_path / str(first), kind)
    wrong = [f"seed {r.seed} ({', '.join(r.constructs)}): {r.wrong}" for r in results if r.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(written) > count / 4
    if count == NETWORKS:
        _assert_accepted(results)


def first_call(net: nn.Module, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the result of the first call of a module in a network."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = module.register_forward_hook(lambda _, x, y: seen.append((x[0].clone(), y.clone())))
    with torch.no_grad():
        net(x)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.nightly)])
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
    assert len(kinds) >= 15
    assert count < 100 or kinds == set(ACTIVATIONS) | set(GATES)


def _examine_in_c(results: list[Result], folder: Path, kind: str) -> None:
    """Compare networks in one C program with their integer networks."""
    networks = {r.seed: r.network for r in results if r.network is not None}
    program = program_of(networks, folder, BUILDS[kind])
    for result in results:
        network = networks[result.seed]
        try:
            actual = run_in_program(program, result.seed, network, result.x)
            differing = _differ(network.features(result.x), actual)
            result.wrong += [f"C: {differing}"] if differing else []
        except ValueError as error:
            result.wrong.append(f"C: {error}")


NOT_EXPORTED = {"slice", "view", "written view"}
"""Constructs without an integer form; these networks are compared in ``eval()`` only."""
NOT_IN_C = {"Linear on (N, L, C)", "integer linear on (N, L, C)"}


def _assert_accepted(results: list[Result]) -> None:
    """Networks of every construct are exported: if all raised, none would be wrong."""
    generated = Counter(name for r in results for name in r.constructs)
    accepted = Counter(name for r in results if r.network is not None for name in r.constructs)
    written = Counter(name for r in results if r.written for name in r.constructs)
    for name in (*BLOCKS, *HEADS):
        assert generated[name] >= 12, name
        if name not in NOT_EXPORTED:
            assert accepted[name] >= generated[name] / 4, name
            assert written[name] >= generated[name] / 8 or name in NOT_IN_C, name
    rows = set().union(*(result.rows for result in results if result.network is not None))
    assert {row.name for row in OPERATORS if row.exports} <= rows
