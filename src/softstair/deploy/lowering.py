"""The graph of a quantised network, converted to integers call by call."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from softstair.convert.graph import Graph, GraphStep
from softstair.convert.ops import (
    RESHAPES,
    SELECTIONS,
    Operator,
    operator_named,
    operator_of,
)
from softstair.deploy import arithmetic
from softstair.deploy.builder import NodeBuilder
from softstair.deploy.frozen import leaves, mapped
from softstair.deploy.modules import check_finite, linear_of, not_supported
from softstair.deploy.nodes import ExportError, Shape
from softstair.deploy.values import IntegerFeatures, PendingSum, Value
from softstair.nn import StairActivation, StairLayer

SELECTING = (*SELECTIONS, "channel_shuffle", "CopyingPad", "interpolate", "permute", "transpose")
ARITHMETIC = ("add", "sub", "neg", "mul", "div")
SIZES = frozenset({"size", "shape", "dim", "ndim", "ndimension", "numel", "nelement"})


@dataclass(frozen=True)
class StaticValue:
    """A value that is the same for every input, such as a size or a parameter."""

    value: Any


@dataclass(frozen=True)
class Reshaped:
    """Features in a shape or an order without an integer form, which can only be moved again.

    ``numbers`` are those of the elements of ``source``, (N, …); None if their order is the same.
    """

    source: Value
    shape: Shape
    numbers: Tensor | None = None


class Probe(fx.Interpreter):
    """Runs a graph, and notes the shape or the value of each result in ``meta`` of its node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception:  # whatever the model raises for another shape
            given = " and ".join(str(shape_of(source)[1:]) for source in n.all_input_nodes)
            reason = f"it cannot take features of shape {given}"
            raise ExportError.of(node_name(n), reason, "Correct the shape of the input") from None
        is_feature = isinstance(result, Tensor) and n.op != "get_attr"
        n.meta["shape" if is_feature else "value"] = tuple(result.shape) if is_feature else result
        return result


class GraphConversion:
    """The value of each node of a graph that a :class:`Probe` has run."""

    def __init__(self, net: nn.Module, graph: fx.Graph, steps: Graph, builder: NodeBuilder) -> None:
        self.net, self.builder = net, builder
        self.order, self.steps = list(graph.nodes), steps.steps
        self.batch = next(shape_of(node)[0] for node in self.order if node.op == "placeholder")
        self.values: dict[fx.Node, Any] = {}
        self.overwritten: dict[fx.Node, str] = {}
        """Nodes of which another view was changed in place, and the operation that did it."""
        self.live = _needed(self.order, self.steps)
        self.operators: dict[fx.Node, Operator] = {}
        for node, step in zip(self.order, self.steps, strict=True):
            module = self._module(node)
            operator = operator_named(step.function) if module is None else operator_of(module)
            self.operators[node] = operator
        ends = [end for end in leaves(self.order[-1].args[0]) if isinstance(end, fx.Node)]
        self.tails = {end: self._calls_at_end(end) for end in ends}
        """For each output the calls between its last layer and it that do not change the class."""
        self.tail = {node for calls in self.tails.values() for node in calls}

    def run(self) -> Any:
        """Convert the graph, and return the names of the nodes that give the scores."""
        for node, step in zip(self.order, self.steps, strict=True):
            if node.op == "placeholder":
                if self.values and node in self.live:
                    raise ExportError(f"net must have one input, but it also reads {node.name!r}.")
                self.values[node] = None if self.values else self.builder.input
            elif node in self.live:
                self._check_overwritten(node)
                if node.op == "output":
                    return self._scores(node.args[0])
                written = [self.order[number] for number in step.written]
                result = self._call(node, step.function)
                self._write(node, result, written)
                self.values[node] = result
        raise AssertionError("a graph has an output")

    def _module(self, node: fx.Node) -> Any:
        return self.net.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        return [reader for reader in node.users if reader in self.live]

    def _calls_at_end(self, node: Any) -> list[fx.Node]:
        """Return softmax, dropout and the like before an output, in order of execution."""
        calls: list[fx.Node] = []
        while isinstance(node, fx.Node) and len(self._readers(node)) == 1:
            operator = self.operators[node]
            passes = operator.passes and _is_off_in_evaluation(node)
            if not (operator.keeps_order or passes or operator.name in RESHAPES):
                break
            calls.insert(0, node)
            node = node.all_input_nodes[0]
        return calls

    def _scores(self, result: Any) -> Any:
        """Return the names of the nodes that give the scores, as the network returns these."""
        ends: dict[fx.Node, str] = {}

        def scores(end: Any) -> str:
            value = self.values.get(end) if isinstance(end, fx.Node) else None
            if isinstance(value, tuple):
                raise ExportError.of(node_name(end), "the network returns it", "Return its parts")
            if not isinstance(value, IntegerFeatures | PendingSum):
                raise ExportError("net must end in a linear or quantised layer, but it does not.")
            if end not in ends:
                ends[end] = self.builder.scores(value)
            return ends[end]

        if isinstance(result, dict) and not all(isinstance(key, str) for key in result):
            raise ExportError("net must return a dictionary with names, but it has other keys.")
        names = mapped(result, scores)
        if not ends:
            raise ExportError("net must return a tensor, but it returns none.")
        return names

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

    def _call(self, node: fx.Node, function: str | None) -> Any:
        """Return the value of a call of a module or of the function with that bare name."""
        name, operator, module = node_name(node), self.operators[node], self._module(node)
        inputs = [self.values[source] for source in node.all_input_nodes]
        features = [x for x in inputs if not isinstance(x, StaticValue)]
        if function in SIZES or not features:
            return self._constant(name, node)
        if node in self.tail and operator.keeps_order:
            if self.builder.choices.outputs == "classes":
                return self._left_out(name, node, module, inputs[0])
            if operator.name == "sigmoid":
                return self.builder.sigmoid(name, inputs[0])
            reason = f"{operator.name} changes the values that the network returns"
            raise ExportError.of(name, reason, "Return its input, or freeze with outputs='classes'")
        is_ordered = all(getattr(x, "numbers", None) is None for x in features)
        if operator.name in RESHAPES and len(features) == 1 and is_ordered:
            return self._reshape(name, node, features[0])
        is_padded = operator.name == "pad" and module is None
        if is_padded and len(features) == 1 and is_ordered:
            return self._padded(name, node, features[0])
        if isinstance(inputs[0], tuple) and function == "getitem":
            place: Any = node.args[1]
            return inputs[0][place]
        if operator.name in (*SELECTING, *RESHAPES) and len(features) == 1:
            return self._selected(name, node, features[0])
        for shape in (x.shape for x in features if isinstance(x, Reshaped) and operator.exports):
            advice = (
                "Only one vector per example, or the shape before, is exported: flatten it; for "
                "sequences, use Conv2d with kernels (1, k)"
            )
            raise ExportError.of(name, f"its input was reshaped to {shape}", advice)
        if any(isinstance(x, Reshaped) for x in features):
            raise self.refusal(node, function)
        if operator.name == "interpolate_linear" and len(features) == 1:
            return self._doubled(name, node, module, features[0])
        if operator.name == "cat" and features == inputs:
            return self._concatenate(name, node)
        module_of = linear_of if operator.name == "linear" else operator.module_of_call
        if module_of and module is None and len(features) == 1:
            args, kwargs = self._arguments(node)
            kwargs.pop("input", None)
            module = module_of(*args[1:], **kwargs)
        result: Value | Reshaped | None = None
        if operator.name in ARITHMETIC:
            result = self._arithmetic(name, operator.name, node)
        elif len(features) == 1:
            result = self._unary(name, operator, module, node, features[0])
        if result is not None:
            return result
        if not operator.why and any(x is self.builder.input for x in features):
            kind = function or type(module).__name__
            advice = "Do it before the network, and give `zero` and `scale`"
            raise ExportError.of(name, f"{kind} of the input is not supported", advice)
        raise self.refusal(node, function)

    def refusal(self, node: fx.Node, function: str | None) -> ExportError:
        """Return the error for a call that is not exported, whatever its input."""
        name, why = node_name(node), self.operators[node].why
        kind = function or type(self._module(node)).__name__
        return ExportError.of(name, f"{kind} is {why}") if why else not_supported(name, kind)

    def _left_out(self, name: str, node: fx.Node, module: Any, x: Any) -> Any:
        """Return the scores before a softmax or the like, which keeps their order."""
        args, kwargs = self._arguments(node)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 1)
        dim = getattr(module, "dim", 1) if module is not None else dim
        if dim not in (1, len(shape_of(node)) - 1, -1) or (dim == -1 and len(shape_of(node)) > 2):
            reason = "it is not a softmax of a module's scores along axis 1"
            raise ExportError.of(name, reason, "Set dim=1, or remove it")
        return x

    def _constant(self, name: str, node: fx.Node) -> StaticValue:
        """Return a parameter, or the value of a function of sizes."""
        package = getattr(node.target, "__module__", "") or ""
        is_python = package in ("_operator", "builtins", "math") or node.target is torch._assert
        if node.op == "get_attr":
            return StaticValue(attrgetter(str(node.target))(self.net))
        if "value" in node.meta and (node.op == "call_method" or is_python):
            return StaticValue(node.meta["value"])
        raise not_supported(name, str(getattr(node.target, "__name__", node.target)))

    def _arguments(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, with None for features."""

        def argument(source: Any) -> Any:
            x = self.values.get(source) if isinstance(source, fx.Node) else StaticValue(source)
            return x.value if isinstance(x, StaticValue) else None

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
        return list(args), dict(kwargs)

    def _arithmetic(self, name: str, function: str, node: fx.Node) -> Value | None:
        """Return the value of arithmetic on features, or on features and a constant.

        Of the network's input and a constant it is None: its stair is the device's.
        """
        named = dict(node.kwargs)
        terms = [*node.args, *(named.pop(key) for key in ("input", "other") if key in named)]
        if named or len(terms) != 1 + (function != "neg"):
            reason = f"its arguments are more than two terms: {', '.join(named) or len(terms)}"
            raise ExportError.of(name, reason, "Write it with +, -, * and /")
        x: list[Any] = [self.values[t] if isinstance(t, fx.Node) else t for t in terms]
        x = [term.value if isinstance(term, StaticValue) else term for term in x]
        is_feature = [isinstance(term, IntegerFeatures | PendingSum) for term in x]
        if len(x) == 2 and all(is_feature):
            return arithmetic.combined(self.builder, name, function, x[0], x[1])
        is_first = not is_feature[0]
        own, constant = (x[is_first], x[not is_first]) if len(x) == 2 else (x[0], None)
        if own is self.builder.input:
            return None
        if function == "neg":
            return arithmetic.negative(self.builder, name, own)
        if not isinstance(constant, int | float | Tensor):
            raise ExportError.of(name, f"its constant is a {type(constant).__name__}")
        return arithmetic.with_constant(self.builder, name, function, own, constant, is_first)

    def _unary(
        self, name: str, operator: Operator, module: Any, node: fx.Node, x: Value
    ) -> Value | Reshaped | None:
        """Return the value of an operation on features, or None if it has no integer form."""
        build = self.builder
        if module is not None:
            check_finite(name, module)
        if isinstance(module, StairActivation):
            return build.stair(name, module, x)
        if isinstance(module, StairLayer):
            return build.layer(name, module, build.integers(name, x))
        if operator.name == "mean":
            return self._mean(name, node, build.integers(name, x))
        match operator.name if module is not None else "":
            case "linear" | "conv1d" | "conv2d":
                return self._last_layer(name, node, module, build.integers(name, x))
            case "relu" | "relu6" | "hardtanh" | "batch_norm":
                return build.apply(name, x, module)
            case "max_pool1d" | "max_pool2d" | "adaptive_max_pool1d" | "adaptive_max_pool2d":
                return build.max_pool(name, module, operator.axes, x)
            case "avg_pool1d" | "avg_pool2d" | "adaptive_avg_pool1d" | "adaptive_avg_pool2d":
                return build.average(name, module, operator.axes, build.integers(name, x))
            case "pixel_shuffle":
                return build.pixel_shuffle(name, module, x)
            case "pad":
                return build.pad(name, module.padding, build.integers(name, x))
        return x if operator.passes and _is_off_in_evaluation(node) else None

    def _last_layer(self, name: str, node: fx.Node, module: Any, x: IntegerFeatures) -> PendingSum:
        """Return the sum of a layer in float, which must be the last one."""
        lasts = [calls[0].all_input_nodes[0] if calls else end for end, calls in self.tails.items()]
        for number, last in enumerate(lasts):
            while self.operators[last].name == "batch_norm":
                last = lasts[number] = last.all_input_nodes[0]
        if node not in lasts:
            reason = "it is in float, and not the last layer"
            raise ExportError.of(name, reason, "Quantise it")
        return self.builder.last_layer(name, module, x)

    def _mean(self, name: str, node: fx.Node, x: IntegerFeatures) -> Value | Reshaped:
        args, kwargs = self._arguments(node)
        axes = kwargs.get("dim", args[1] if len(args) > 1 else ())
        axes = [axes] if isinstance(axes, int) else list(axes or ())
        sums = self.builder.mean(name, x, axes)
        return self._reshape(name, node, sums)

    def _reshape(self, name: str, node: fx.Node, x: Value | Reshaped) -> Value | Reshaped:
        """Return a value in the shape that a call gives it."""
        batch, *rest = shape_of(node) or (0,)
        if batch != self.batch:
            raise not_supported(name, "a change of the batch")
        source, shape = x.source if isinstance(x, Reshaped) else x, tuple(rest)
        before = self.builder.pooled_shape(source)
        if shape == before:
            # The same tensor or a copy: as a new value, writes into it are not followed.
            return replace(source)
        if shape == (math.prod(before),):
            return self.builder.flatten(name, source)
        return Reshaped(source, shape)

    def _padded(self, name: str, node: fx.Node, x: Value) -> Any:
        """Return features between zeros, or between copies of them."""
        args, kwargs = self._arguments(node)
        padding = tuple(kwargs.get("pad", args[1] if len(args) > 1 else ()))
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        if mode != "constant":
            return self._selected(name, node, x)
        source = self.builder.integers(name, x)
        if len(padding) > 2 * len(self.builder.sizes[source.node]):
            raise not_supported(name, "a padding of the batch")
        return self.builder.pad(name, padding, source) if any(padding) else replace(source)

    def _doubled(self, name: str, node: fx.Node, module: Any, x: Value) -> IntegerFeatures:
        args, kwargs = self._arguments(node)
        names = ("input", "size", "scale_factor", "mode", "align_corners")
        given = dict(zip(names, args, strict=False)) | kwargs
        source, after = self.builder.integers(name, x), shape_of(node)[2:]
        before = self.builder.sizes[source.node][1:]
        facts = vars(module) if module is not None else given
        is_aligned = facts.get("align_corners") or given.get("antialias")
        if is_aligned or after != tuple(2 * n for n in before):
            reason = "it is an interpolation to other than twice the size, or with align_corners"
            raise ExportError.of(name, reason, "Use scale_factor=2 and align_corners=False")
        return self.builder.doubled(name, source)

    def _selected(self, name: str, node: fx.Node, x: Value | Reshaped) -> Any:
        """Return features from other places, which the call itself tells of their numbers."""
        reshaped = x if isinstance(x, Reshaped) else Reshaped(x, self.builder.pooled_shape(x))
        source = self.builder.integers(name, reshaped.source)
        shape, numbers = self.builder.sizes[source.node], reshaped.numbers
        if numbers is None:
            count = self.batch * math.prod(shape)
            numbers = torch.arange(count, dtype=torch.float64).reshape(-1, *reshaped.shape)

        def argument(part: Any) -> Any:
            own = self.values.get(part) if isinstance(part, fx.Node) else StaticValue(part)
            return own.value if isinstance(own, StaticValue) else numbers

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            called: Any = self._module(node) or node.target
            result = called(*args, **kwargs)
        one = lambda y: self._places(name, source, y, shape)
        return tuple(map(one, result)) if isinstance(result, tuple | list) else one(result)

    def _places(
        self, name: str, source: IntegerFeatures, numbers: Tensor, shape: Shape
    ) -> IntegerFeatures | Reshaped:
        """Return features in the order of their numbers."""
        if len(numbers) != self.batch:
            raise not_supported(name, "a change of the batch")
        first, size = numbers[0].long(), math.prod(shape)
        batch = torch.arange(self.batch).reshape(-1, *[1] * first.dim()) * size
        places, total, stride = [], torch.zeros_like(first), size
        for axis, length in enumerate(shape if first.dim() == len(shape) else ()):
            stride //= length
            line = first.movedim(axis, 0).reshape(first.shape[axis], -1)[:, 0]
            places.append(line // stride % length)
            total = total + (places[-1] * stride).reshape(-1, *[1] * (first.dim() - 1 - axis))
        if not torch.equal(numbers.long(), batch + first):
            raise not_supported(name, "a change of the batch")
        if first.dim() == 1 < len(shape):
            flat = self.builder.flatten(self.builder.unused(f"{name}.flat"), source)
            assert isinstance(flat, IntegerFeatures)
            return self.builder.select(self.builder.unused(name), flat, [first])
        if not places or not torch.equal(first, total):
            return Reshaped(source, tuple(first.shape), numbers)
        if all(torch.equal(y, torch.arange(n)) for y, n in zip(places, shape, strict=True)):
            return replace(source)
        return self.builder.select(self.builder.unused(name), source, places)

    def _concatenate(self, name: str, node: fx.Node) -> IntegerFeatures:
        arguments: dict[str, Any] = dict(zip(("tensors", "dim"), node.args, strict=False))
        arguments |= node.kwargs
        given = arguments["tensors"]  # a list, or the result of chunk or split
        is_one = isinstance(given, fx.Node)
        values = self.values[given] if is_one else [self.values[part] for part in given]
        parts = [self.builder.integers(name, value) for value in values]
        axis = arguments.get("axis", arguments.get("dim", 0))
        return self.builder.concatenate(name, parts, axis)


def _needed(order: Sequence[fx.Node], steps: Sequence[GraphStep]) -> set[fx.Node]:
    """Return the nodes that the output depends on, also those that write into what it reads."""
    needed: set[fx.Node] = set()
    for node, step in reversed([*zip(order, steps, strict=True)]):
        results = [node, *(order[number] for number in step.written)]
        if node.op == "output" or any(user in needed for x in results for user in x.users):
            needed.add(node)
    return needed


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's result, with the batch; () if it is no tensor."""
    return tuple(node.meta.get("shape", ()))


def node_name(node: fx.Node) -> str:
    """Return the name of the module that a node calls, or its own."""
    return str(node.target) if node.op == "call_module" else node.name


def _is_off_in_evaluation(node: fx.Node) -> bool:
    """Return whether an operation that passes its input on, such as a dropout, does so here."""
    return node.op == "call_module" or node.kwargs.get("training") is False
