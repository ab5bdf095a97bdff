"""Conversion of a trained stair network to integers, which from then on are the network."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from softstair import _check
from softstair.anneal import Truncation
from softstair.convert.conversion import constant_layers, copy_of, traces_of
from softstair.deploy.builder import Choices, NodeBuilder
from softstair.deploy.frozen import FrozenNetwork, leaves
from softstair.deploy.lowering import GraphConversion, Probe
from softstair.deploy.measuring import (
    CHUNK,
    FreezeReport,
    LayerReport,
    after,
    difference,
    levels_of,
)
from softstair.deploy.nodes import Arithmetic, ExportError, Input, Rounding

INPUT_TYPES = (torch.uint8, torch.int8, torch.int16)
PROBED = 7
"""Random examples that show the shapes."""
CHANGED = 1 / 1000
"""The share of classes that 8 bits may change."""
VALUE_ERROR = 0.005


@dataclass(frozen=True)
class InputScale:
    """What the float network sees for the integers that a device reads.

    (x − zero) / scale, or with a mean and a standard deviation of each channel
    (x / 255 − mean) / std.
    """

    zero: int = 0
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def to_float(self, x: Tensor) -> Tensor:
        """Return the input of the float network."""
        if not self.mean:
            return (x.float() - self.zero) / self.scale
        shape = (-1, *[1] * (x.dim() - 2))
        mean, std = (torch.tensor(values).reshape(shape) for values in (self.mean, self.std))
        return (x.float() / 255 - mean) / std

    def entry(self, shape: Sequence[int], dtype: torch.dtype, bits: int) -> Input:
        """Return the first node; a table has integers of so many bits."""
        size, name = tuple(shape), str(dtype).removeprefix("torch.")
        if not self.mean:
            ends = (torch.iinfo(dtype).min - self.zero, torch.iinfo(dtype).max - self.zero)
            return Input("input", (), *ends, size, 1 / self.scale, self.zero, name)
        values = self.to_float(torch.arange(256).expand(1, shape[0], 256))[0].double()
        unit = float(values.abs().max()) / (2 ** (bits - 1) - 1)
        table = (values / unit).round().to(torch.int8 if bits == 8 else torch.int16)
        ends = (int(table.min()), int(table.max()))
        return Input("input", (), *ends, size, unit, 0, name, table)


def freeze(
    net: nn.Module,
    shape: Sequence[int],
    *,
    zero: int = 0,
    scale: float = 1.0,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    dtype: torch.dtype = torch.uint8,
    examples: Tensor | None = None,
    outputs: Literal["classes", "values"] = "classes",
    classes: Sequence[str] = (),
    rounding: Rounding = "once",
    arithmetic: Arithmetic = "fine",
) -> FrozenNetwork:
    """Convert a trained stair network to integers, which from then on define the network.

    The frozen network takes integers of type ``dtype``; the float network sees
    ``(integer - zero) / scale``, or ``(integer / 255 - mean) / std`` of each channel.

    A stair after a sum becomes thresholds, found by asking the float network: the same levels on
    the machine that freezes. Eight-bit stairs, shortcuts and features with different quanta become
    a multiplication and a shift, rounded half up. GELU and the like, which decrease somewhere,
    become a table of 256. A last layer in float gets INT8 weights, or INT16
    where ``examples`` show that INT8 changes more than 1 class in 1,000, or values by more than
    0.5 %. ``frozen.report`` says how many levels and classes differ from ``eval()``.

    Args:
        net: A network of :func:`softstair.quantise`, trained; it is left as it is.
        shape: Shape of one input, such as (C, H, W) or (C, L).
        zero: The integer that stands for 0, so that zero padding is exact.
        scale: The number of integers that stand for 1.
        mean: Instead of ``zero`` and ``scale``: the mean of each channel, of values from 0 to 1.
        std: The standard deviation of each channel.
        dtype: ``torch.uint8``, ``torch.int8`` or ``torch.int16``.
        examples: Integers as the device receives them, such as part of the validation set.
        outputs: ``"classes"``, or ``"values"`` of a network that is no classifier.
        classes: Names of the classes or outputs.
        rounding: Of the multiplications: ``"once"``, or ``"double"`` as TensorFlow Lite Micro and
            CMSIS-NN do; additions of a shortcut are rounded once.
        arithmetic: ``"fine"``, or ``"int8"`` as INT8 runtimes compute, which a .tflite needs of
            networks with features of 8 bits: biases in units of INT8 sums, weights from -127,
            sums and averages as bytes before a shortcut is added or weights read them.

    Raises:
        ExportError: If the network has no integer form; the message names the layer.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3),
    ...                       nn.ReLU(), nn.Linear(3, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> x = torch.randint(256, (50, 1, 2, 2), dtype=torch.uint8)
    >>> frozen = freeze(net, (1, 2, 2), zero=128, scale=64.0, examples=x)
    >>> frozen(x).dtype, frozen(x).shape, frozen.report.differing
    (torch.int32, torch.Size([50, 2]), 0)
    """
    _check.choice("outputs", outputs, ("classes", "values"))
    _check.choice("rounding", rounding, ("once", "double"))
    _check.choice("arithmetic", arithmetic, ("fine", "int8"))
    source = Source(net, shape, input_scale(shape, zero, scale, mean, std, dtype), dtype)
    names = (tuple(map(str, classes)), outputs)
    source.check_graph(examples)
    if constant := constant_layers(net):
        warnings.warn(f"all weights of {constant} have the same level", stacklevel=2)
    choices = Choices(rounding, arithmetic, outputs=outputs)
    if examples is None:
        frozen = source.frozen(choices, *names)
        frozen.report = source.report(frozen, None)
    else:
        frozen = _best(source, choices, names, examples)
    count = frozen.sizes[frozen.last.name][frozen.last.axis - 1]
    if len(classes) not in (0, count):
        raise _check.wrong("classes", classes, f"the names of all {count}, or none")
    if len(classes) and len(frozen.heads) > 1:
        raise _check.wrong("classes", classes, "left out for a network of several outputs")
    return frozen


def _best(
    source: "Source", choices: Choices, names: tuple[Any, ...], examples: Tensor
) -> FrozenNetwork:
    """Return the network with as few bits in the last layer and the table as the examples allow."""
    frozen = source.frozen(choices, *names)
    allowed = CHANGED if names[1] == "classes" else VALUE_ERROR
    if source.float_layers:
        finer = source.frozen(replace(choices, last_bits=16), *names)
        frozen.report = source.report(frozen, examples, finer)
        if (frozen.report.changed_by_last or 0) > allowed:
            frozen, choices = finer, replace(choices, last_bits=16)
    if source.scale.mean:
        finer = source.frozen(replace(choices, input_bits=16), *names)
        if source.distance(frozen, examples) > source.distance(finer, examples) + allowed:
            frozen = finer
    if frozen.report is None:
        frozen.report = source.report(frozen, examples)
    return frozen


class Source:
    """A trained network, its graph in evaluation, and what its input stands for."""

    def __init__(
        self, net: nn.Module, shape: Sequence[int], scale: InputScale, dtype: torch.dtype
    ) -> None:
        traces = traces_of(net)
        self.net = copy_of(net).cpu().float().eval()
        self.shape, self.scale, self.dtype = tuple(shape), scale, dtype
        self.module = fx.GraphModule(self.net, traces.evaluation)
        self.graph, self.steps = traces.evaluation, traces.eval_steps
        self.float_layers: list[str] = []
        self.clamped = 0
        _check_own_code(self.net, self.graph)

    def check_graph(self, examples: Tensor | None) -> None:
        """Run the graph, and raise ExportError if it is not what the network computes."""
        entry = self.entry(Choices())
        given = [entry.random(PROBED)]
        if examples is not None:
            entry.check(examples, "examples")
            if not len(examples):
                raise _check.invalid("examples", "must hold at least one example")
            given.insert(0, examples[:CHUNK])
        for x in given:
            actual = tree_leaves(self.probe(x))
            with torch.no_grad():
                expected = tree_leaves(self.net(self.scale.to_float(x)))
            if not all(_same(a, b) for a, b in zip(actual, expected, strict=True)):
                raise ExportError(
                    "net must compute what softstair.quantise traced, but its outputs are others: "
                    "remove hooks and changed modules, or quantise it again.",
                    field="net",
                )

    @torch.no_grad()
    def probe(self, x: Tensor) -> Any:
        """Run the graph, note the shapes of its results, and return its output."""
        return Probe(self.module).run(self.scale.to_float(x))

    def entry(self, choices: Choices) -> Input:
        """Return the first node."""
        return self.scale.entry(self.shape, self.dtype, choices.input_bits)

    def frozen(
        self, choices: Choices, classes: Sequence[str] = (), outputs: str = "classes"
    ) -> FrozenNetwork:
        """Return the frozen network with these choices."""
        builder = NodeBuilder(self.entry(choices), choices)
        with torch.no_grad():
            returns = GraphConversion(self.net, self.graph, self.steps, builder).run()
        self.float_layers, self.clamped = builder.float_layers, builder.clamped
        return builder.network(returns, classes, outputs)

    def report(
        self, frozen: FrozenNetwork, examples: Tensor | None, finer: FrozenNetwork | None = None
    ) -> FreezeReport:
        """Return what differs between ``eval()`` and a frozen network on examples."""
        facts: dict[str, Any] = {"clamped": self.clamped}
        if self.float_layers:
            weights = [frozen.node(name).tensors["weight"] for name in self.float_layers]
            facts["last_bits"] = 8 * max(weight.element_size() for weight in weights)
        if frozen.input.table is not None:
            facts["input_bits"] = 8 * frozen.input.table.element_size()
        if examples is None:
            return FreezeReport(**facts)
        rows = {name: LayerReport(name) for name in frozen.stairs}
        is_class, heads = frozen.outputs == "classes", frozen.heads.values()
        trained, actual, exact = ([list[Tensor]() for _ in heads] for _ in range(3))
        for x in examples.split(CHUNK):
            expected = levels_of(self.module, frozen.stairs, self.scale.to_float(x))
            results = frozen.features(x)
            for name, row in rows.items():
                rows[name] = row.with_levels(expected[name], results[name])
            exacts = results if finer is None else after(finer, self.float_layers, results)
            for number, (head, y) in enumerate(zip(heads, leaves(expected[""]), strict=True)):
                y = y.reshape(len(x), *frozen.sizes[head.name])
                trained[number].append(y.argmax(head.axis) if is_class else y.double())
                actual[number].append(frozen.answers(results[head.name], head))
                exact[number].append(frozen.answers(exacts[head.name], head))
        distance = difference(actual, trained, is_class)
        if is_class:
            facts["classes"] = sum(part.numel() for parts in actual for part in parts)
            facts["changed"] = round(distance * facts["classes"])
        else:
            facts["error"] = distance
        if finer is not None:
            facts["changed_by_last"] = difference(actual, exact, is_class)
        return FreezeReport(tuple(rows.values()), len(examples), **facts)

    def distance(self, frozen: FrozenNetwork, examples: Tensor) -> float:
        """Return how far a frozen network is from ``eval()``."""
        found = self.report(frozen, examples)
        is_class = found.changed is not None
        return (found.changed or 0) / found.classes if is_class else found.error or 0.0


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _check_own_code(net: nn.Module, graph: fx.Graph) -> None:
    """Raise ExportError for a hook or a method that the integers would leave out."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for name in ("", *called):
        module = net.get_submodule(name)
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        kinds = {getattr(hook, "__module__", "") for hook in hooks} - {Truncation.__module__}
        if kinds or (name and "forward" in vars(module)):
            what = "a forward hook" if kinds else "a forward method of its own"
            reason = f"it has {what}, which would be left out"
            raise ExportError.of(name or "the network", reason, "Remove it first")


def _numbers(name: str, values: Any, count: int) -> tuple[float, ...]:
    """Return so many finite numbers, or raise SoftstairError."""
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise _check.wrong(name, values, f"a number for each of {count} channels")
    return numbers


def input_scale(
    shape: Sequence[int],
    zero: int,
    scale: float,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> InputScale:
    """Return what an input stands for, or raise SoftstairError."""
    if dtype not in INPUT_TYPES:
        raise _check.wrong("dtype", dtype, "torch.uint8, torch.int8 or torch.int16")
    if not isinstance(shape, Sequence) or not all(type(n) is int and n > 0 for n in shape):
        raise _check.wrong("shape", shape, "the shape of one input, such as (3, 32, 32)")
    if any(not isinstance(values, Sequence) or values for values in (mean, std)):
        mean, std = _numbers("mean", mean, shape[0]), _numbers("std", std, shape[0])
        if min(std) <= 0:
            raise _check.wrong("std", std, "positive numbers")
        if dtype != torch.uint8 or zero or scale != 1.0:
            raise _check.invalid("mean", "is for bytes, without `zero` and `scale`")
        return InputScale(mean=mean, std=std)
    ends = torch.iinfo(dtype)
    if isinstance(zero, bool) or not isinstance(zero, int) or not ends.min <= zero <= ends.max:
        allowed = f"an integer from {ends.min} to {ends.max}, so that padding is exact; or give"
        raise _check.wrong("zero", zero, f"{allowed} `mean` and `std`")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise _check.wrong("scale", scale, "a positive number")
    return InputScale(zero, float(scale))
