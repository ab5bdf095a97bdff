"""From a trained stair network to one that computes with whole numbers alone.

The network is walked through in the order in which it runs. A value is *whole* (a node gives it, in
units of some quantum) or *pending*: a whole sum that has still to pass what the float network does
before the next stair. When it comes to that stair, both become thresholds
(:mod:`softstair.deploy.folding`); a pooling in between changes places with the stair, which is
monotone. What cannot be exact is refused, by the name of its layer.
"""

import copy
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from softstair.convert.graph import Graph, trace
from softstair.deploy import nodes
from softstair.deploy.folding import fold
from softstair.deploy.network import IntegerNetwork
from softstair.deploy.sums import pair, total
from softstair.deploy.values import ExportError, Pending, Value, Whole
from softstair.nn import StairActivation, StairLayer

__all__ = ["ExportError", "integerise"]

SUMS = 2**31
EXACT = 2**24
"""Whole numbers below it are exact in float32, in which the network sums."""
MOST_BESIDE = 256
"""Values of a shortcut, each of which has thresholds of its own."""
SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
Shape = tuple[int, ...]


def integerise(
    net: nn.Module, shape: Sequence[int], zero: int = 0, scale: float = 1.0
) -> IntegerNetwork:
    """The integer network of a trained one, which takes bytes of that (C, H, W).

    The float network sees (byte − zero)/scale: ``scale`` must be a power of two, so that sums over
    the input are exact too, and ``zero`` a whole number, so that padding is one.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3),
    ...                       nn.ReLU(), nn.Linear(3, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> integer = integerise(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> torch.equal(integer(x), net((x.float() - 128) / 64))
    True
    """
    _check_input(zero, scale)
    net = copy.deepcopy(net).cpu().float().eval()
    try:
        graph, traced = trace(net, training=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ExportError(
            f"net must be traceable by torch.fx to be exported, but it is not ({reason})."
        ) from None
    with torch.no_grad():
        return _Walk(net, tuple(shape), zero, float(scale)).through(traced, graph)


def _check_input(zero: Any, scale: Any) -> None:
    if isinstance(zero, bool) or not isinstance(zero, int) or not 0 <= zero <= 255:
        raise ExportError(
            f"zero must be a whole number from 0 to 255, so that padding is one, but {zero!r} was "
            "given: train with --integer-input."
        )
    if not isinstance(scale, int | float) or scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise ExportError(
            f"scale must be a power of two, so that sums over the input are exact, but {scale!r} "
            "was given: train with --integer-input."
        )


class _Walk:
    """One pass through a traced network."""

    def __init__(self, net: nn.Module, shape: Shape, zero: int, scale: float) -> None:
        self.net = net
        self.made: dict[str, nodes.Node] = {}
        self.taken: set[str] = set()
        self.written: dict[fx.Node, str] = {}
        """The values of which an in-place operation has changed a view, and its name."""
        self.stairs: list[str] = []
        self.sizes: dict[str, Shape] = {}
        low, high = -zero, 255 - zero
        self._add(nodes.Input("input", (), low, high, shape=shape, zero=zero, scale=scale))
        values = tuple(number / scale for number in range(low, high + 1))
        self.input = Whole("input", 1 / scale, low, high, values)

    def through(self, traced: fx.Graph, graph: Graph) -> IntegerNetwork:
        values: dict[fx.Node, Any] = {}
        order = list(traced.nodes)
        for node, step in zip(order, graph.steps, strict=True):
            self._refuse_written(node)
            if node.op == "placeholder":
                if values and node.users:
                    raise ExportError(
                        f"the network takes {node.name} besides its input, which is not exported: "
                        "give it one input."
                    )
                values[node] = None if values else self.input
            elif node.op == "output":
                (result,) = node.args
                last = values.get(result) if isinstance(result, fx.Node) else None
                if isinstance(last, Pending):
                    last = self._rescaled(last)
                if not isinstance(last, str):
                    raise _no_scores()
                return self._network(last)
            else:
                result = self._step(node, values)
                self._write(node, result, [order[number] for number in step.written], values)
                values[node] = result
        raise AssertionError("a traced network has an output")

    def _write(
        self, node: fx.Node, result: Any, written: list[fx.Node], values: dict[fx.Node, Any]
    ) -> None:
        """Gives the tensor that a node writes into, under all its names, the new value."""
        target = values[node.all_input_nodes[0]] if written else None
        if result is target:  # a dropout writes nothing in evaluation
            return
        for source in written:
            if values[source] is target:
                values[source] = result
            else:
                self.written[source] = _name(node)

    def _refuse_written(self, node: fx.Node) -> None:
        """Raises ExportError if a node reads what was changed in place through another view."""
        for source in node.all_input_nodes:
            if source in self.written:
                raise ExportError(
                    f"{_name(node)} reads {_name(source)}, whose memory {self.written[source]} has "
                    f"changed in place through another view: read the result of "
                    f"{self.written[source]} instead, or do not work in place."
                )

    def _step(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        name = _name(node)
        taken = [values[one] for one in node.all_input_nodes]
        if any(isinstance(one, str) for one in taken):
            raise ExportError(
                f"{name} comes after the scores of the network, which integers do not follow: "
                "leave it out of the network that is exported."
            )
        if node.op == "call_module":
            module = self.net.get_submodule(name)
            if len(taken) != 1:
                raise self._refusal(name, type(module).__name__)
            return self._module(name, module, taken[0])
        if node.op in ("call_function", "call_method"):
            return self._function(node, name, taken)
        raise self._refusal(name, node.op)

    def _module(self, name: str, module: nn.Module, x: Value) -> Any:
        if isinstance(module, SILENT):
            return x
        if isinstance(module, StairLayer):
            return self._layer(name, module, self._whole(name, x))
        if isinstance(module, nn.Linear):
            return self._scores(name, module, self._whole(name, x))
        if isinstance(module, StairActivation):
            return self._stair(name, module, x)
        if isinstance(module, NORMS):
            return self._chained(name, x, module)
        if isinstance(module, nn.ReLU):
            return self._chained(name, x, module)
        if isinstance(module, nn.Flatten):
            return self._flat(name, self._whole(name, x), module.start_dim, module.end_dim)
        pools = isinstance(module, nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d)
        if pools and len(self._shape(x)) < 2:
            raise ExportError(
                f"{name} pools features of shape {self._shape(x)}, without the batch: give it "
                "channels, height and width."
            )
        if isinstance(module, nn.MaxPool2d):
            return self._max_pool(name, module, x)
        if isinstance(module, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            return self._average(name, module, self._whole(name, x))
        if isinstance(module, nn.ZeroPad2d):
            raise ExportError(
                f"{name} pads by itself, which is not exported: give the convolution after it that "
                "padding."
            )
        raise self._refusal(name, type(module).__name__)

    def _function(self, node: fx.Node, name: str, taken: list[Value]) -> Any:
        function = node.target
        word = str(function) if node.op == "call_method" else getattr(function, "__name__", "")
        plain = len(node.args) == 2 and all(isinstance(one, fx.Node) for one in node.args)
        if function in (operator.add, operator.iadd, torch.add) and plain and not node.kwargs:
            added = self._sum_of(name, taken[0], taken[-1])
            if function is operator.iadd and self._shape(added) != self._shape(taken[0]):
                raise ExportError(
                    f"{name} adds features of shape {self._shape(taken[-1])} in place to those of "
                    f"shape {self._shape(taken[0])}, which do not hold the sum: write x = x + y."
                )
            return added
        if word == "flatten" and len(taken) == 1:
            start, end = (*node.args[1:], *([0, -1][len(node.args) - 1 :]))[:2]
            start, end = node.kwargs.get("start_dim", start), node.kwargs.get("end_dim", end)
            return self._flat(name, self._whole(name, taken[0]), start, end)
        if word in ("relu", "relu_") and len(taken) == 1:
            return self._chained(name, taken[0], F.relu)
        if word == "contiguous":
            return replace(taken[0])  # the same tensor or a copy: a write into it is not followed
        if word == "dropout" and node.kwargs.get("training") is False:
            return taken[0]
        raise self._refusal(name, word or str(function))

    def _layer(self, name: str, layer: StairLayer, x: Whole) -> Pending:
        weight = layer.weight_stair.integers(layer.weight)
        if weight is None:
            raise ExportError(
                f"the weights of {name} have levels that are no whole multiples of a quantum: "
                "choose a stair whose levels are."
            )
        factor = self._factor(name, layer, x)
        if isinstance(layer, nn.Conv2d) and len(self.sizes[x.node]) != 3:
            raise ExportError(
                f"{name} is a convolution over features of shape {self.sizes[x.node]}: give it "
                "channels, height and width."
            )
        node = self._add(total(name, layer, weight.long(), x))
        if layer.input_quantum is None and max(-node.low, node.high) >= EXACT:
            raise ExportError(
                f"the sums of {name} reach 2²⁴, beyond which float32 rounds them: take a coarser "
                "input, or fewer of them."
            )
        chain = (lambda sums: layer.rescale(sums.float() * factor),)
        return Pending(node.name, chain, layer, factor)

    def _factor(self, name: str, layer: StairLayer, x: Whole) -> float:
        """What a whole sum is multiplied by before the layer's own scale."""
        if layer.input_quantum is not None:
            if layer.input_quantum != x.unit:
                raise ExportError(
                    f"the features that {name} takes are multiples of {x.unit}, but it sums them "
                    f"as multiples of {layer.input_quantum}: quantise the model anew."
                )
            return 1.0
        if math.frexp(x.unit)[0] == 0.5:
            return x.unit  # a power of two: the float sum is exact as well
        raise ExportError(
            f"the features that {name} takes are not known to be whole multiples of one quantum: "
            "give every activation before it a stair with the same quantum."
        )

    def _stair(self, name: str, activation: StairActivation, x: Value) -> Whole:
        """The thresholds of a stair, and the poolings that waited for it."""
        stair = activation.stair
        if stair.integers is None or isinstance(stair.quantum, tuple):
            raise ExportError(
                f"the levels of {name} are no whole multiples of one quantum: choose a stair whose "
                "levels are."
            )
        if isinstance(x, Whole):
            raise ExportError(
                f"{name} is a stair on features that are quantised already, with no weights in "
                "between: leave one of the two stairs out."
            )
        levels = stair.integers
        ends = {"low": levels[0], "high": levels[-1]}
        source = self.made[x.source]
        assert isinstance(source, nodes.Sum)
        if x.source in self.taken:
            raise ExportError(
                f"{name} takes the sum of {x.source}, which another stair takes too: give each "
                "stair weights of its own."
            )
        self.taken.add(x.source)
        axis = self._axis(source)
        steps, source = fold(name, activation, x, source, axis)
        self.made[x.source] = source
        shape = self._shape(x)
        if shape != self.sizes[x.source]:  # the shortcut is larger than the sum
            expand = nodes.Expand(f"{name}.expanded", (x.source,), source.low, source.high, shape)
            inputs = (self._add(expand).name, *steps.inputs[1:])
            table = steps.thresholds.expand(shape[axis - 1], *steps.thresholds.shape[1:])
            steps = replace(steps, inputs=inputs, thresholds=table.contiguous())
        # A pooling that waited comes after the stair, and gives what the stair gave.
        chain = [steps, *x.pools]
        before = ""
        for number, node in enumerate(chain):
            own = name if node is chain[-1] else f"{name}.{number}"
            inputs = (before,) if before else node.inputs
            node = replace(node, name=own, inputs=inputs, **ends)
            before = self._add(node).name
        self.stairs.append(name)
        floats = stair.rounded(torch.float32).levels
        return Whole(name, stair.quantum, levels[0], levels[-1], _spread(levels, floats))

    def _chained(self, name: str, x: Value, module: Any) -> Pending:
        if isinstance(x, Whole):
            raise ExportError(
                f"{name} works on quantised features before any weights do, which integers do not "
                "follow: put it behind the weights."
            )
        if isinstance(module, NORMS) and module.running_mean is None:
            raise ExportError(
                f"{name} has no running statistics, so that what it gives depends on the batch: "
                "train it with track_running_stats."
            )
        source = self.made[x.source]
        axis = self._axis(source)
        if isinstance(module, NORMS) and axis != 1:
            raise ExportError(
                f"{name} normalises axis 1, but the weights of {x.source}, applied to features of "
                f"shape {self.sizes[source.inputs[0]]}, give channels along axis {axis}: flatten "
                f"before {x.source}, or leave {name} out."
            )
        if isinstance(module, NORMS) and self._shape(x)[0] != self.sizes[x.source][0]:
            raise ExportError(
                f"{name} normalises several channels that have the one channel of {x.source} in "
                f"common: put {name} before the shortcut is added."
            )
        turns = isinstance(module, NORMS) and module.weight is not None
        if x.pools and turns and bool((module.weight < 0).any()):
            raise ExportError(
                f"{name} normalises after a pooling, and turns the order of some channels round: "
                "put the pooling behind the stair."
            )
        if x.beside is None:
            return replace(x, chain=(*x.chain, module), layer=None)
        return replace(x, after=(*x.after, module))

    def _sum_of(self, name: str, a: Value, b: Value) -> Value:
        if isinstance(a, Whole) and isinstance(b, Whole):
            if a.unit != b.unit:
                raise ExportError(
                    f"{name} adds features of the quanta {a.unit} and {b.unit}: give both stairs "
                    "one quantum."
                )
            shape = self._broadcast(name, a, b)
            inputs = (
                self._expanded(f"{name}.left", a, shape).node,
                self._expanded(f"{name}.right", b, shape).node,
            )
            node = nodes.Add(name, inputs, a.low + b.low, a.high + b.high)
            return Whole(self._add(node).name, a.unit, node.low, node.high)
        if isinstance(a, Pending) and isinstance(b, Pending):
            raise ExportError(
                f"{name} adds two sums that no stair has quantised: put a stair behind one of them."
            )
        pending, whole = (a, b) if isinstance(a, Pending) else (b, a)
        assert isinstance(pending, Pending)
        assert isinstance(whole, Whole)
        if pending.beside is not None or pending.pools:
            raise ExportError(f"{name} adds a second shortcut before a stair: put a stair between.")
        if whole.values is None or len(whole.values) > MOST_BESIDE:
            raise ExportError(
                f"the shortcut that {name} adds has more than {MOST_BESIDE} values, or values that "
                "were added up: put a stair before it."
            )
        shape = self._broadcast(name, pending, whole)
        whole = self._expanded(f"{name}.shortcut", whole, shape)
        return replace(pending, beside=whole, layer=None)

    def _broadcast(self, name: str, a: Value, b: Value) -> Shape:
        """The shape of a sum of two terms, without the batch; an axis of length 1 is repeated.

        Raises ExportError if the shapes do not fit, or if the terms have different ranks.
        """
        shapes = (self._shape(a), self._shape(b))
        pairs = list(zip(*shapes, strict=False))
        fit = all(m == n or 1 in (m, n) for m, n in pairs)
        if not fit or len(shapes[0]) != len(shapes[1]):
            raise ExportError(
                f"{name} adds features of the shapes {shapes[0]} and {shapes[1]}, without the "
                "batch: give both one shape, or an axis of length 1 where they differ."
            )
        return tuple(max(pair) for pair in pairs)

    def _expanded(self, name: str, x: Whole, shape: Shape) -> Whole:
        """Features of that shape: x itself, or x repeated along axes of length 1."""
        if self.sizes[x.node] == shape:
            return x
        node = self._add(nodes.Expand(name, (x.node,), x.low, x.high, shape))
        return replace(x, node=node.name)

    def _shape(self, x: Value) -> Shape:
        """The shape of a value, without the batch and before its pending poolings."""
        if isinstance(x, Whole):
            return self.sizes[x.node]
        return self.sizes[x.source if x.beside is None else x.beside.node]

    def _axis(self, source: nodes.Node) -> int:
        """The axis of a sum's channels; the batch is axis 0."""
        assert isinstance(source, nodes.Sum)
        return 1 if source.weight.dim() == 4 else len(self.sizes[source.name])

    def _max_pool(self, name: str, module: nn.MaxPool2d, x: Value) -> Value:
        if module.return_indices or module.ceil_mode or pair(module.dilation) != (1, 1):
            raise ExportError(
                f"{name} pools with indices, dilation or ceil_mode, which is not exported: pool "
                "without."
            )
        kernel, stride = pair(module.kernel_size), pair(module.stride)
        pool = nodes.MaxPool(name, (), 0, 0, kernel, stride, pair(module.padding))
        if isinstance(x, Pending):
            if self._axis(self.made[x.source]) != 1:
                raise ExportError(
                    f"{name} pools over the channels of {x.source}, each of which has thresholds "
                    "of its own: put the pooling behind the stair."
                )
            return replace(x, pools=(*x.pools, pool), layer=None)
        made = self._add(replace(pool, inputs=(x.node,), low=x.low, high=x.high))
        return replace(x, node=made.name)

    def _average(self, name: str, module: nn.Module, x: Whole) -> Whole:
        if isinstance(module, nn.AvgPool2d):
            kernel, stride = pair(module.kernel_size), pair(module.stride)
            plain = not module.ceil_mode and module.divisor_override is None
            good = plain and pair(module.padding) == (0, 0)
        else:
            size = getattr(module, "output_size", None)
            kernel = stride = pair(self.sizes[x.node][-2:])
            good = size in (1, (1, 1))
        if not good:
            raise ExportError(
                f"{name} averages with padding or to several places, which is not exported: use "
                "AvgPool2d without padding, or AdaptiveAvgPool2d(1)."
            )
        area = kernel[0] * kernel[1]
        low, high = area * x.low, area * x.high
        node = self._add(nodes.SumPool(name, (x.node,), low, high, kernel, stride))
        return Whole(node.name, x.unit / area, low, high)

    def _flat(self, name: str, x: Whole, start: Any, end: Any) -> Whole:
        if (start, end) != (1, -1):
            raise self._refusal(name, f"flatten from {start} to {end}")
        node = self._add(nodes.Flatten(name, (x.node,), x.low, x.high))
        return replace(x, node=node.name)

    def _scores(self, name: str, module: nn.Linear, x: Whole) -> str:
        if len(self.sizes[x.node]) != 1:
            raise self._refusal(name, "a linear layer over places")
        bias = None if module.bias is None else module.bias.detach().clone()
        weight = module.weight.detach().clone()
        return self._add(nodes.Scores(name, (x.node,), 0, 0, weight, bias, x.unit)).name

    def _rescaled(self, x: Pending) -> str:
        """The scores of a last layer whose weights are whole too."""
        layer = x.layer
        if layer is None:
            raise _no_scores()
        if x.source in self.taken:
            raise ExportError(
                f"the network ends in the sum of {x.source}, which a stair takes too: give the "
                "stair weights of its own."
            )
        count = layer.weight.shape[0]
        scale = layer.weight_stair.scale(layer.weight, 0)
        scale = torch.as_tensor(scale * (layer.input_quantum or 1.0), dtype=torch.float32)
        # A power of two at most: multiplied before or after, it is the same.
        scale = (scale * x.factor).expand(count).clone()
        bias = torch.zeros(count) if layer.bias is None else layer.bias.detach().clone()
        axis = self._axis(self.made[x.source])
        node = nodes.Rescaled(f"{x.source}.scores", (x.source,), 0, 0, scale, bias, axis)
        return self._add(node).name

    def _whole(self, name: str, x: Value) -> Whole:
        if isinstance(x, Pending):
            raise ExportError(
                f"{name} takes sums that no stair has quantised: put a stair before it, or leave "
                "fewer layers in float."
            )
        return x

    def _network(self, last: str) -> IntegerNetwork:
        """The network of the nodes that the scores of node ``last`` depend on."""
        needed = {last}
        for node in reversed(self.made.values()):
            if node.name in needed:
                needed.update(node.inputs)
        needed.add("input")
        kept = {name: node for name, node in self.made.items() if name in needed and name != last}
        kept[last] = self.made[last]
        sizes = {name: self.sizes[name] for name in kept}
        stairs = tuple(name for name in self.stairs if name in kept)
        return IntegerNetwork(tuple(kept.values()), sizes, stairs)

    def _add(self, node: Any) -> Any:
        """Takes a node in, and notes the shape of what it gives."""
        if node.name in self.made:
            raise ExportError(
                f"{node.name} runs more than once, which is not exported: give each use a module "
                "of its own."
            )
        if max(abs(node.low), abs(node.high)) >= SUMS:
            raise ExportError(f"the sums of {node.name} do not fit into 32 bits.")
        self.made[node.name] = node
        if isinstance(node, nodes.Input):
            self.sizes[node.name] = node.shape
        else:
            examples = [torch.zeros(1, *self.sizes[one], dtype=torch.int64) for one in node.inputs]
            if isinstance(node, nodes.Steps) and len(examples) == 2:
                examples[1] += node.first
            self.sizes[node.name] = tuple(node.run(*examples).shape[1:])
        return node

    def _refusal(self, name: str, what: str) -> ExportError:
        return ExportError(
            f"{name} ({what}) has no exact form in whole numbers: leave it out of the network that "
            "is exported, or replace it."
        )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _spread(levels: tuple[int, ...], floats: Sequence[float]) -> tuple[float, ...]:
    """The float of every whole number from the lowest level on; what is no level is never asked."""
    known = dict(zip(levels, floats, strict=True))
    return tuple(known.get(one, math.nan) for one in range(levels[0], levels[-1] + 1))


def _no_scores() -> ExportError:
    return ExportError(
        "the network must end in a linear layer that gives scores, but it ends in something else: "
        "keep its last layer in float, or as a stair."
    )
