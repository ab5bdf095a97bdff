"""Conversion of a trained stair network to one that computes with integers."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from softstair._errors import first_line
from softstair.convert.graph import Graph, trace
from softstair.convert.ops import Effect, Operator, operator_named, operator_of
from softstair.deploy.builder import NodeBuilder, Value, no_integer_form
from softstair.deploy.nodes import ExportError, IntegerNetwork
from softstair.deploy.thresholds import IntegerFeatures, PendingSum
from softstair.nn import StairActivation, StairLayer

__all__ = ["integerise"]


def integerise(
    net: nn.Module, shape: Sequence[int], zero: int = 0, scale: float = 1.0
) -> IntegerNetwork:
    """Convert a trained stair network to an integer network with the same outputs.

    The integer network takes bytes; the float network sees ``(byte - zero) / scale``.

    Args:
        net: A network of :func:`softstair.quantise`, trained; it is evaluated in float32.
        shape: Shape of one input, (C, H, W).
        zero: The byte that stands for 0, so that zero padding is exact.
        scale: A power of two, so that sums over the input are exact.

    Raises:
        ExportError: If the network has no exact integer form; the message names the layer.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3),
    ...                       nn.ReLU(), nn.Linear(3, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> integer = integerise(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> torch.equal(integer(x), net((x.float() - 128) / 64))
    True
    """
    if isinstance(zero, bool) or not isinstance(zero, int) or not 0 <= zero <= 255:
        raise _bad_input("zero", zero, "an integer from 0 to 255, so that padding is exact")
    if not isinstance(scale, int | float) or scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise _bad_input("scale", scale, "a power of two, so that sums over the input are exact")
    net = copy.deepcopy(net).cpu().float().eval()
    try:
        graph, traced = trace(net, training=False)
    except Exception as error:
        raise ExportError(
            f"net must be traceable by torch.fx, but it is not ({first_line(error)}).", field="net"
        ) from None
    with torch.no_grad():
        return _Conversion(net, NodeBuilder(tuple(shape), zero, float(scale))).run(traced, graph)


def _bad_input(name: str, value: object, allowed: str) -> ExportError:
    message = f"{name} must be {allowed}, but {value!r} was given: train with `integer_input`."
    return ExportError(message, field=name)


class _Conversion:
    """The value of each node of a traced network, in terms of integer nodes."""

    def __init__(self, net: nn.Module, builder: NodeBuilder) -> None:
        self.net, self.builder = net, builder
        self.values: dict[fx.Node, Any] = {}
        """The name of a node where it is the network's scores."""
        self.overwritten: dict[fx.Node, str] = {}
        """Nodes of which another view was changed in place, and the operation that did it."""

    def run(self, traced: fx.Graph, graph: Graph) -> IntegerNetwork:
        order = list(traced.nodes)
        for node, step in zip(order, graph.steps, strict=True):
            self._check_overwritten(node)
            if node.op == "placeholder":
                if self.values and node.users:
                    raise ExportError(f"net must have one input, but it also reads {node.name!r}.")
                self.values[node] = None if self.values else self.builder.input
            elif node.op == "output":
                return self.builder.network(self._scores(node.args[0]))
            else:
                written = [order[number] for number in step.written]
                result = self._call(node, step.function, in_place=bool(written))
                self._write(node, result, written)
                self.values[node] = result
        raise AssertionError("a traced network has an output")

    def _scores(self, result: Any) -> str:
        """Return the name of the node that gives the scores."""
        last = self.values.get(result) if isinstance(result, fx.Node) else None
        if isinstance(last, PendingSum) and last.layer is not None:
            last = self.builder.rescaled_scores(last, last.layer)
        if isinstance(last, str):
            return last
        raise ExportError("net must end in a linear or quantised layer, but it does not.")

    def _write(self, node: fx.Node, result: Any, written: list[fx.Node]) -> None:
        """Give all names of the tensor that a node writes into the new value."""
        target = self.values[node.all_input_nodes[0]] if written else None
        if result is target:  # a dropout writes nothing in evaluation
            return
        for source in written:
            if self.values[source] is target:
                self.values[source] = result
            else:
                self.overwritten[source] = _name(node)

    def _check_overwritten(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.overwritten:
                writer = self.overwritten[source]
                reason = f"{writer!r} changed {_name(source)!r} in place through another view"
                raise ExportError.of(_name(node), reason, f"Read the result of {writer!r}")

    def _call(self, node: fx.Node, function: str | None, in_place: bool) -> Any:
        """Return the value of a call of a module or of the function with that bare name."""
        name = _name(node)
        inputs = [self.values[source] for source in node.all_input_nodes]
        if any(isinstance(x, str) for x in inputs):
            raise ExportError.of(name, "it follows the scores", "Remove it before exporting")
        module = self.net.get_submodule(name) if node.op == "call_module" else None
        operator = operator_named(function) if module is None else operator_of(module)
        if len(inputs) == 1 and operator.name != "add":
            result = self._unary(name, operator, module, node, inputs[0])
            if result is not None:
                return result
        terms = len(node.args) == 2 and all(isinstance(term, fx.Node) for term in node.args)
        if operator.name == "add" and terms and not node.kwargs:
            return self._add(name, inputs[0], inputs[-1], in_place)
        raise no_integer_form(name, function or (type(module).__name__ if module else node.op))

    def _unary(
        self, name: str, operator: Operator, module: Any, node: fx.Node, x: Value
    ) -> Value | str | None:
        """Return the value of an operation with one input, or None if it has no integer form."""
        build, is_module = self.builder, module is not None
        if isinstance(module, StairActivation):
            return build.stair(name, module, x)
        if isinstance(module, StairLayer):
            return build.layer(name, module, _integers(name, x))
        match operator.name:
            case "linear" if is_module:
                return build.scores(name, module, _integers(name, x))
            case "relu":
                return build.apply(name, x, module if is_module else F.relu)
            case "BatchNorm":
                return build.apply(name, x, module)
            case "flatten" if is_module:
                return build.flatten(name, _integers(name, x), module.start_dim, module.end_dim)
            case "flatten":
                start, end = (*node.args[1:], *([0, -1][len(node.args) - 1 :]))[:2]
                start, end = node.kwargs.get("start_dim", start), node.kwargs.get("end_dim", end)
                return build.flatten(name, _integers(name, x), start, end)
            case "max_pool2d" if is_module:
                return build.max_pool(name, module, x)
            case "avg_pool2d" | "adaptive_avg_pool2d" if is_module:
                return build.average(name, module, _integers(name, x))
            case "contiguous":
                # The same tensor or a copy: as a new value, writes into it are not followed.
                return replace(x)
        passes = operator.effect in (Effect.PASS, Effect.DROPOUT)
        return x if passes and (is_module or node.kwargs.get("training") is False) else None

    def _add(self, name: str, a: Value, b: Value, in_place: bool) -> Value:
        total = self.builder.add(name, a, b)
        shape, needed = self.builder.shape(a), self.builder.shape(total)
        if in_place and shape != needed:
            raise ExportError.of(name, f"{shape} cannot hold a sum of {needed}", "Write x = x + y")
        return total


def _integers(name: str, x: Value) -> IntegerFeatures:
    if isinstance(x, PendingSum):
        raise ExportError.of(name, f"its input, {x.source!r}, is not quantised", "Add a stair")
    return x


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
