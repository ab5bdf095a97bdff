"""Conversion of a trained stair network to integers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from softstair import _check
from softstair._errors import first_line
from softstair.anneal import Truncation
from softstair.convert.conversion import copy_of
from softstair.convert.graph import Graph, trace, why_untraceable
from softstair.convert.ops import RESHAPES, Operator, operator_named, operator_of
from softstair.deploy.builder import NodeBuilder, Value, not_supported
from softstair.deploy.nodes import ExportError, IntegerNetwork, Shape
from softstair.deploy.thresholds import IntegerFeatures, PendingSum
from softstair.nn import StairActivation, StairLayer, StairModule

BATCH = 1_000_003  # where a network reads its size; a large prime, so that it is not mistaken
SIZES = frozenset({"size", "shape", "dim", "ndim", "ndimension", "numel", "nelement"})
INPUT_TYPES = (torch.uint8, torch.int8, torch.int16)


def integerise(
    net: nn.Module,
    shape: Sequence[int],
    zero: int = 0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.uint8,
) -> IntegerNetwork:
    """Convert a trained stair network to an integer network with the same outputs.

    The integer network takes integers of type ``dtype``; the float network sees
    ``(integer - zero) / scale``.

    Args:
        net: A network of :func:`softstair.quantise`, trained; it is evaluated in float32.
        shape: Shape of one input, such as (C, H, W) or (C, L).
        zero: The integer that stands for 0, so that zero padding is exact.
        scale: A power of two, so that sums over the input are exact.
        dtype: ``torch.uint8``, ``torch.int8`` or ``torch.int16``.

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
    net, builder, traced, graph = prepare(net, shape, zero, scale, dtype)
    try:
        with torch.no_grad():
            return GraphConversion(net, builder).run(traced, graph)
    except ExportError as error:
        if any(isinstance(module, StairModule) for module in net.modules()):
            raise
        raise ExportError(
            f"net must be a network of softstair.quantise, but nothing in it is quantised ("
            f"{first_line(error)}): pass the network that softstair.quantise returned.",
            field="net",
        ) from None


def prepare(
    net: nn.Module, shape: Sequence[int], zero: int, scale: float, dtype: torch.dtype
) -> tuple[nn.Module, NodeBuilder, fx.Graph, Graph]:
    """Return a copy of a network to convert, a builder with its input, and its traced graph."""
    if dtype not in INPUT_TYPES:
        raise _check.wrong("dtype", dtype, "torch.uint8, torch.int8 or torch.int16")
    ends = torch.iinfo(dtype)
    if isinstance(zero, bool) or not isinstance(zero, int) or not ends.min <= zero <= ends.max:
        allowed = f"an integer from {ends.min} to {ends.max}, so that padding is exact"
        raise _bad_input("zero", zero, allowed)
    if not isinstance(scale, int | float) or scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise _bad_input("scale", scale, "a power of two, so that sums over the input are exact")
    if not isinstance(shape, Sequence) or not all(type(n) is int and n > 0 for n in shape):
        raise _check.wrong("shape", shape, "the shape of one input, such as (3, 32, 32)")
    net = copy_of(net).cpu().float().eval()
    try:
        graph, traced = trace(net, training=False)
    except Exception as error:
        problem = f"net must be traceable by torch.fx, but it is not: {why_untraceable(error, net)}"
        if hasattr(net, "module") or hasattr(net, "_orig_mod"):
            problem += "; pass the network inside DDP or torch.compile"
        raise ExportError(f"{problem}.", field="net") from None
    _check_hooks(net, traced)
    return net, NodeBuilder(tuple(shape), zero, float(scale), dtype), traced, graph


def _check_hooks(net: nn.Module, traced: fx.Graph) -> None:
    """Raise ExportError for a hook that the graph leaves out; an annealer's change no result."""
    called = [str(node.target) for node in traced.nodes if node.op == "call_module"]
    for name in ("", *called):
        module = net.get_submodule(name)
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", "") != Truncation.__module__:
                reason = "it has a forward hook, which would be left out"
                raise ExportError.of(name or "the network", reason, "Remove the hook first")


def _check_finite(name: str, module: nn.Module) -> None:
    """Raise ExportError for a parameter or a buffer that has NaN or infinity."""
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not bool(tensor.isfinite().all()):
            reason = f"its {key} has NaN or infinity, so training diverged"
            raise ExportError.of(name, reason, "Train again with a lower learning rate")


def _bad_input(name: str, value: object, allowed: str) -> ExportError:
    advice = "Train on (x - zero) / scale with such numbers (in a recipe: `integer_input`)."
    return ExportError(f"{name} must be {allowed}, but {value!r} was given. {advice}", field=name)


@dataclass(frozen=True)
class StaticValue:
    """A value that is the same for every input, such as a size or a parameter."""

    value: Any


@dataclass(frozen=True)
class Reshaped:
    """Features in a shape without an integer form, which can only be reshaped again."""

    source: Value
    shape: Shape


class GraphConversion:
    """The value of each node of a traced network, in terms of integer nodes."""

    def __init__(self, net: nn.Module, builder: NodeBuilder) -> None:
        self.net, self.builder = net, builder
        self.values: dict[fx.Node, Any] = {}
        """The name of a node where it is the network's scores."""
        self.overwritten: dict[fx.Node, str] = {}
        """Nodes of which another view was changed in place, and the operation that did it."""
        self.operators: dict[fx.Node, Operator] = {}
        self.tail: list[fx.Node] = []
        """The calls between the last layer and the output that do not change the class."""
        self.head = ""
        """The module that gives the scores, if a softmax follows."""

    def run(self, traced: fx.Graph, graph: Graph) -> IntegerNetwork:
        order = list(traced.nodes)
        for node, step in zip(order, graph.steps, strict=True):
            module = self.net.get_submodule(node_name(node)) if node.op == "call_module" else None
            operator = operator_named(step.function) if module is None else operator_of(module)
            self.operators[node] = operator
        self.tail = self._calls_at_end(order[-1].args[0])
        for node, step in zip(order, graph.steps, strict=True):
            self._check_overwritten(node)
            if node.op == "placeholder":
                if self.values and node.users:
                    raise ExportError(f"net must have one input, but it also reads {node.name!r}.")
                self.values[node] = None if self.values else self.builder.input
            elif node.op == "output":
                return self.builder.network(self._scores(node.args[0]), self.head)
            else:
                written = [order[number] for number in step.written]
                result = self._call(node, step.function, in_place=bool(written))
                self._write(node, result, written)
                self.values[node] = result
        raise AssertionError("a traced network has an output")

    def _calls_at_end(self, node: Any) -> list[fx.Node]:
        """Return softmax, flattening and the like before the output, in order of execution."""
        calls: list[fx.Node] = []
        while isinstance(node, fx.Node) and len(node.users) == 1:
            operator = self.operators[node]
            passes = operator.passes and _is_off_in_evaluation(node)
            if not (operator.keeps_order or passes or operator.name in RESHAPES):
                break
            calls.insert(0, node)
            node = node.all_input_nodes[0]
        return calls

    def _end(self, node: fx.Node, module: Any, x: Any) -> str | None:
        """Return the scores after a call of the tail, or None if its input gives none."""
        operator, source = self.operators[node], self.tail[0].all_input_nodes[0]
        if isinstance(x, IntegerFeatures) and operator.keeps_order:
            x = self.builder.feature_scores(x)
        if isinstance(x, Reshaped | IntegerFeatures) or (isinstance(x, PendingSum) and not x.layer):
            return None
        if operator.name in RESHAPES:
            batch, *shape = self._run(node).shape
            if batch != BATCH or shape[:1] != [math.prod(shape)]:
                return None
        if isinstance(x, PendingSum) and x.layer is not None:
            flat = any(self.operators[call].name in RESHAPES for call in self.tail)
            x = self.builder.rescaled_scores(x, x.layer, flat=flat)
        if operator.keeps_order:
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 1)
            dim = dim if module is None else getattr(module, "dim", 1)
            self.head = node_name(source)
            layer = self.net.get_submodule(self.head) if source.op == "call_module" else None
            is_vector = isinstance(layer, nn.Linear) and len(self.builder.pooled_shape(str(x))) == 1
            if layer is None or (dim != 1 and not (dim == -1 and is_vector)):
                reason = "it is not a softmax of a module's scores along axis 1"
                raise ExportError.of(node_name(node), reason, "Set dim=1, or remove it")
        return str(x)

    def _scores(self, result: Any) -> str:
        """Return the name of the node that gives the scores."""
        last = self.values.get(result) if isinstance(result, fx.Node) else None
        if isinstance(last, PendingSum) and last.layer is not None:
            last = self.builder.rescaled_scores(last, last.layer)
        if isinstance(last, IntegerFeatures):
            last = self.builder.feature_scores(last)
        if isinstance(last, str):
            return last
        if isinstance(result, tuple | list | dict):
            kind = type(result).__name__.removeprefix("immutable_")  # of torch.fx
            first = next(iter(result), 0) if isinstance(result, dict) else 0
            problem = f"net must return one tensor, but it returns a {kind} of {len(result)}"
            raise ExportError(f"{problem}: export a module that returns net(x)[{first!r}] alone.")
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
                self.overwritten[source] = node_name(node)

    def _check_overwritten(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.overwritten:
                writer = self.overwritten[source]
                reason = f"{writer!r} changed {node_name(source)!r} in place through another view"
                raise ExportError.of(node_name(node), reason, f"Read the result of {writer!r}")

    def _call(self, node: fx.Node, function: str | None, in_place: bool) -> Any:
        """Return the value of a call of a module or of the function with that bare name."""
        name, operator = node_name(node), self.operators[node]
        inputs = [self.values[source] for source in node.all_input_nodes]
        module = self.net.get_submodule(name) if node.op == "call_module" else None
        features = [x for x in inputs if not isinstance(x, StaticValue)]
        if function in SIZES or not features:
            return self._constant(name, node)
        if node in self.tail and (scores := self._end(node, module, inputs[0])) is not None:
            return scores
        if any(isinstance(x, str) for x in inputs):
            raise ExportError.of(name, "it follows the scores", "Remove it before exporting")
        if operator.name in RESHAPES and len(features) == 1:
            return self._reshape(name, node, features[0])
        for shape in (x.shape for x in features if isinstance(x, Reshaped) and operator.exports):
            advice = (
                "Only one vector per example, or the shape before, is exported: flatten it; for "
                "sequences, use Conv2d with kernels (1, k)"
            )
            raise ExportError.of(name, f"its input was reshaped to {shape}", advice)
        if any(isinstance(x, Reshaped) for x in features):
            raise self.refusal(node, function)
        if operator.name == "cat" and features == inputs:
            return self._concatenate(name, node)
        if operator.module_of_call and module is None and len(features) == 1:
            args, kwargs = self._arguments(node)
            kwargs.pop("input", None)
            module = operator.module_of_call(*args[1:], **kwargs)
        if len(features) == 1 and operator.name != "add":
            result = self._unary(name, operator, module, node, features[0])
            if result is not None:
                return result
        terms = len(node.args) == 2 and all(isinstance(term, fx.Node) for term in node.args)
        if operator.name == "add" and terms and not node.kwargs and features == inputs:
            return self._add(name, inputs[0], inputs[-1], in_place)
        if operator.name == "add":
            reason = "it adds something else than the results of two layers"
            raise ExportError.of(name, reason, "Write x + y; Python's sum begins with 0")
        if not operator.why and any(x is self.builder.input for x in features):
            kind = function or type(module).__name__
            advice = "Do it before the network, and give `zero` and `scale`"
            raise ExportError.of(name, f"{kind} of the input is not supported", advice)
        raise self.refusal(node, function)

    def refusal(self, node: fx.Node, function: str | None) -> ExportError:
        """Return the error for a call that is not exported, whatever its input."""
        name, why = node_name(node), self.operators[node].why
        kind = function or type(self.net.get_submodule(name)).__name__
        return ExportError.of(name, f"{kind} is {why}") if why else not_supported(name, kind)

    def _constant(self, name: str, node: fx.Node) -> StaticValue:
        """Return a parameter, or the value of a function of sizes."""
        package = getattr(node.target, "__module__", "") or ""
        is_python = package in ("_operator", "builtins", "math") or node.target is torch._assert
        if node.op == "get_attr":
            return StaticValue(attrgetter(str(node.target))(self.net))
        if node.op == "call_method" or is_python:
            return StaticValue(self._run(node))
        raise not_supported(name, str(getattr(node.target, "__name__", node.target)))

    def _arguments(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, with tensors without data for features."""

        def argument(source: fx.Node) -> Any:
            x = self.values[source]
            if isinstance(x, StaticValue):
                return x.value
            shape = x.shape if isinstance(x, Reshaped) else self.builder.pooled_shape(x)
            return torch.empty(BATCH, *shape, device="meta")

        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda x: argument(x) if isinstance(x, fx.Node) else x
        )
        return list(args), dict(kwargs)

    def _run(self, node: fx.Node) -> Any:
        """Return the result of a call for tensors without data."""
        args, kwargs = self._arguments(node)
        target: Any = node.target
        if node.op == "call_module":
            target = self.net.get_submodule(str(node.target))
        elif node.op == "call_method":
            target = getattr(args.pop(0), str(node.target))
        return target(*args, **kwargs)

    def _unary(
        self, name: str, operator: Operator, module: Any, node: fx.Node, x: Value
    ) -> Value | Reshaped | str | None:
        """Return the value of an operation on features, or None if it has no integer form."""
        build = self.builder
        if module is not None:
            _check_finite(name, module)
        if isinstance(module, StairActivation):
            return build.stair(name, module, x)
        if isinstance(module, StairLayer):
            return build.layer(name, module, _integers(name, x))
        if operator.name == "mean":
            return self._mean(name, node, _integers(name, x))
        match operator.name if module is not None else "":
            case "linear" | "conv1d" | "conv2d":
                return build.scores(name, module, _integers(name, x))
            case "relu" | "relu6" | "hardtanh" | "batch_norm":
                return build.apply(name, x, module)
            case "max_pool1d" | "max_pool2d" | "adaptive_max_pool1d" | "adaptive_max_pool2d":
                return build.max_pool(name, module, operator.axes, x)
            case "avg_pool1d" | "avg_pool2d" | "adaptive_avg_pool1d" | "adaptive_avg_pool2d":
                return build.average(name, module, operator.axes, _integers(name, x))
            case "ZeroPad":
                return build.pad(name, module.padding, _integers(name, x))
        return x if operator.passes and _is_off_in_evaluation(node) else None

    def _mean(self, name: str, node: fx.Node, x: IntegerFeatures) -> Value | Reshaped:
        args, kwargs = self._arguments(node)
        axes = kwargs.get("dim", args[1] if len(args) > 1 else ())
        axes = [axes] if isinstance(axes, int) else list(axes or ())
        sums = self.builder.mean(f"{name}.sums", x, axes)
        return self._reshape(name, node, sums)

    def _reshape(self, name: str, node: fx.Node, x: Value | Reshaped) -> Value | Reshaped:
        """Return a value in the shape that a call gives it."""
        batch, *rest = self._run(node).shape
        if batch != BATCH:
            raise not_supported(name, "a change of the batch")
        source, shape = x.source if isinstance(x, Reshaped) else x, tuple(rest)
        before = self.builder.pooled_shape(source)
        if shape == before:
            # The same tensor or a copy: as a new value, writes into it are not followed.
            return replace(source)
        if shape == (math.prod(before),):
            return self.builder.flatten(name, _integers(name, source))
        return Reshaped(source, shape)

    def _concatenate(self, name: str, node: fx.Node) -> IntegerFeatures:
        arguments: dict[str, Any] = dict(zip(("tensors", "dim"), node.args, strict=False))
        arguments |= node.kwargs
        parts = [_integers(name, self.values[part]) for part in arguments["tensors"]]
        axis = arguments.get("axis", arguments.get("dim", 0))
        return self.builder.concatenate(name, parts, axis)

    def _add(self, name: str, a: Value, b: Value, in_place: bool) -> Value:
        total = self.builder.add(name, a, b)
        shape, needed = self.builder.shape(a), self.builder.shape(total)
        if in_place and shape != needed:
            raise ExportError.of(name, f"{shape} cannot hold a sum of {needed}", "Write x = x + y")
        return total


def _integers(name: str, x: Value) -> IntegerFeatures:
    if isinstance(x, PendingSum):
        advice = "Add an activation before it, or quantise the model with `sums`"
        raise ExportError.of(name, f"its input, {x.source!r}, is not quantised", advice)
    return x


def _is_off_in_evaluation(node: fx.Node) -> bool:
    """Return whether an operation that passes its input on, such as a dropout, does so here."""
    return node.op == "call_module" or node.kwargs.get("training") is False


def node_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
