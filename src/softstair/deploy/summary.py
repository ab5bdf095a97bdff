"""The report of a network: what was quantised, what freezes, and what it costs."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from softstair import _check
from softstair._errors import SoftstairError
from softstair.convert import quantise
from softstair.convert.conversion import (
    Conversion,
    Row,
    conversion_of,
    owners,
    traces_of,
)
from softstair.convert.ops import operator_of
from softstair.deploy.builder import Choices, NodeBuilder
from softstair.deploy.c.program import MemoryPlan, memory_plan
from softstair.deploy.freezing import Source, input_scale
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.lowering import GraphConversion, StaticValue, shape_of
from softstair.deploy.modules import has_table
from softstair.deploy.nodes import ExportError
from softstair.nn import StairActivation, StairLayer, StairModule
from softstair.stair import Stair

YES = "yes"
UNKNOWN = object()
"""The value of a call that has no exact integer form, or that follows one."""


@dataclass(frozen=True)
class ReportRow(Row):
    """A module or function call: what became of it, whether it exports, and what it costs."""

    exports: str = ""  # "yes", or why not and what to change
    weights: int = 0
    macs: int | None = None  # multiply-accumulate operations per input
    bytes: int = 0  # of the packed weights, and four for each other parameter
    parameters: int = 0  # those that no earlier row has
    floats: int = 0  # those of them that are in float


@dataclass(frozen=True)
class Report:
    """What :func:`softstair.report` returns; ``print`` shows it as a table.

    Attributes:
        rows: In order of execution; layers are numbered in the order of their activations.
        conclusion: One sentence: the network freezes, or what does not and what to change.
        freezes: Whether it does; None if that depends on the ``shape`` of the input.
        plan: The memory that the C program will need; None if there will be no such program. The
            widths of its constants are estimated, and its RAM is exact.
    """

    rows: tuple[ReportRow, ...]
    conclusion: str
    freezes: bool | None = None
    plan: MemoryPlan | None = None

    @property
    def headline(self) -> str:
        """What share of the parameters is quantised, and whether the network trains and exports."""
        floats = sum((Counter({row.kind: row.floats}) for row in self.rows), Counter[str]())
        refused = Counter(row.kind for row in self.rows if row.exports.startswith("cannot"))
        total = sum(row.parameters for row in self.rows)
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in floats.most_common())
        share = f"quantised {1 - floats.total() / max(1, total):.1%} of the {total:,} parameters"
        exports = {True: YES, False: "no", None: "depends on `shape`"}[self.freezes]
        if refused and not self.freezes:
            exports += f" ({', '.join(f'{count} {kind}' for kind, count in refused.items())})"
        return f"{share} (in float: {kinds or 'none'}); trains: yes; exports: {exports}"

    @property
    def layers(self) -> int:
        """The number of quantised layers."""
        return 1 + max(row.layer for row in self.rows if row.layer is not None)

    def __str__(self) -> str:
        lines = ["layer name was became stair noise forward exports parameters MACs bytes".split()]
        notes: list[str] = []
        for row in self.rows:
            exports = row.exports
            if exports not in ("", YES):
                notes += [exports] if exports not in notes else []
                exports = f"no ({notes.index(exports) + 1})"
            about = [row.name, row.kind, row.became, row.stair, row.noise, row.forward, exports]
            figures = [row.parameters or "", "" if row.macs is None else row.macs, row.bytes or ""]
            layer = "" if row.layer is None else str(row.layer)
            lines.append([layer, *about, *(f"{figure:,}" if figure else "" for figure in figures)])
        names = ("parameters", "macs", "bytes")
        sums = (sum(getattr(row, name) or 0 for row in self.rows) for name in names)
        lines.append(["", "in all", *[""] * 6, *(f"{total:,}" if total else "" for total in sums)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["─" * width for width in widths])
        table = (
            "  ".join(
                cell.rjust(width) if number > 7 else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        notes = [f"({number}) {note}" for number, note in enumerate(notes, 1)]
        if self.plan is not None and self.plan.warning:
            notes.append(f"warning: in C, {self.plan.warning}.")
        return "\n".join([self.headline, *table, *notes, self.conclusion])


def report(
    model: nn.Module,
    shape: Sequence[int] | None = None,
    zero: int = 128,
    scale: float = 64.0,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    dtype: torch.dtype = torch.uint8,
) -> Report:
    """Return what became of each layer, what freezes, and what it costs, before training.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="3")
    >>> summary = ss.report(net, shape=(1, 2, 2))
    >>> summary.freezes, [row.exports for row in summary.rows]
    (True, ['yes', 'yes', 'yes', 'yes'])
    >>> print(summary.conclusion)
    freezes; C needs about 112 bytes of constants and 176 bytes of RAM

    The answer comes from the conversion of :func:`softstair.freeze` itself. After a call that has
    no integer form, the conversion goes on behind the next stair.

    Args:
        model: A network of :func:`softstair.quantise`. A float network is quantised first, in a
            copy: in ternary, all but its last layer.
        shape: Shape of one input, (C, H, W); without it, nothing is said about export.
        zero: The byte that stands for 0, as in :func:`softstair.freeze`.
        scale: The scale of the input.
        mean: Instead of both, the mean of each channel.
        std: The standard deviation of each channel.
        dtype: The type of the input: ``torch.uint8``, ``torch.int8`` or ``torch.int16``.

    Returns:
        The rows, the conclusion and the memory plan of C.

    Raises:
        ValueError: If a float network cannot be quantised, or ``shape`` does not fit. DDP and
            ``torch.compile`` wrap the network.
    """
    if not isinstance(model, nn.Module):
        raise _check.wrong("model", model, "a torch.nn.Module")
    preface, net = "", model
    if not any(isinstance(module, StairModule) for module in model.modules()):
        net, skip = _quantised(model, shape)
        preface = f"in ternary, with {skip!r} in float: " if skip else "in ternary: "
    conversion = conversion_of(net)
    modules = dict(net.named_modules())
    plain = tuple(_row(modules.get(row.name), row) for row in conversion.rows)

    def made(rows: Iterable[ReportRow], conclusion: str, *rest: Any) -> Report:
        return Report(tuple(_counted(net, rows)), preface + conclusion, *rest)

    try:
        if shape is None:
            traces_of(net)  # raises an error if it has none
            first = next((row.exports for row in plain if row.exports), None)
            advice = "give `shape`, that of one input, to see what exports"
            conclusion = f"does not freeze: {first}" if first else advice
            return made(plain, conclusion, False if first else None)
        own = (0, 1.0) if len(mean) else (zero, scale)
        entry = (shape, input_scale(shape, *own, mean, std, dtype), dtype)
        trial = _Trial(net, *entry)
    except SoftstairError as error:  # the input, or a network that cannot be traced
        if error.field == "shape":
            raise
        return made(plain, f"does not freeze: {error}", False)
    rows = tuple(trial.rows(conversion))
    rows += tuple(row for row in plain if row.name not in {known.name for known in rows})
    if trial.network is None:
        return made(rows, f"does not freeze: {trial.first_error}", False)
    if doubts := [*trial.builder.doubts.values()]:
        conclusion = f"freezes as it is, but training may change that: {doubts[0]}"
        return made(rows, conclusion, True)
    try:
        plan = memory_plan(trial.network)
    except ExportError as error:
        return made(rows, f"freezes, but has no C: {error}", True)
    sizes = f"{plan.flash:,} bytes of constants and {plan.ram:,} bytes of RAM"
    return made(rows, f"freezes; C needs about {sizes}", True, plan)


def _counted(net: nn.Module, rows: Iterable[ReportRow]) -> Iterator[ReportRow]:
    """Yield rows with their parameters, and one for each other module that holds some."""
    counts, known = Counter[tuple[str, str]](), list(rows)
    for parameter, owner in owners(net, known).items():
        counts[owner] += parameter.numel()
    names = {row.name for row in known}
    known += [ReportRow(*owner, None, "float") for owner in counts if owner[0] not in names]
    for row in known:
        count = counts.pop((row.name, row.kind), 0)
        floats = count - min(count, row.weights if row.became == "stair weights" else 0)
        yield replace(row, parameters=count, floats=floats, bytes=row.bytes + 4 * floats)


def _quantised(model: nn.Module, shape: Sequence[int] | None) -> tuple[nn.Module, str]:
    """Return a float network in ternary, and the name of its last layer, which stays in float."""
    stair = Stair.ternary()
    example = None if shape is None else torch.zeros(2, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report shows what stays in float
        net = quantise(model, stair, stair, example_inputs=example)
        names = [row.name for row in conversion_of(net).rows if row.became == "stair weights"]
        if len(names) < 2:
            return net, ""
        return quantise(model, stair, stair, skip=names[-1], example_inputs=example), names[-1]


def _row(layer: Any, row: Row, exports: str = "", size: Sequence[int] = ()) -> ReportRow:
    """Return the row of a module with its costs; ``size`` is the shape of its result."""
    is_kept = row.layer is None and isinstance(layer, nn.Module)
    if is_kept and not exports and not operator_of(layer).exports:
        exports = f"cannot export {row.kind}"
    plain = ReportRow(**asdict(row), exports=exports)
    if not isinstance(layer, StairLayer | nn.Linear | nn.Conv1d | nn.Conv2d):
        return plain
    count, width = layer.weight.numel(), 0
    if isinstance(layer, StairLayer):
        width = max(1, (len(layer.weight_stair.stair) - 1).bit_length())
    macs = count * math.prod(size[1:]) // len(layer.weight) if size else None
    return replace(plain, weights=count, macs=macs, bytes=-(-count * width // 8))


class _Trial(GraphConversion):
    """A conversion that goes on after a call that has no integer form."""

    network: FrozenNetwork | None = None

    def __init__(self, net: nn.Module, *entry: Any) -> None:
        source, choices = Source(net, *entry), Choices(searched=False)
        first = source.entry(choices)
        try:
            source.probe(first.random(1))
        except ExportError as error:
            raise SoftstairError(str(error), field="shape") from None
        builder = NodeBuilder(first, choices)
        super().__init__(source.net, source.graph, source.steps, builder)
        self.errors: dict[fx.Node | None, ExportError] = {}
        with torch.no_grad():
            try:
                network = builder.network(self.run(), (), "classes")
                self.network = None if self.errors else network
            except ExportError as error:
                self.errors.setdefault(None, error)

    @property
    def first_error(self) -> ExportError:
        return next(iter(self.errors.values()))

    def _call(self, node: fx.Node, function: str | None) -> Any:
        if any(self.values[source] is UNKNOWN for source in node.all_input_nodes):
            module = self._module(node)
            if not isinstance(module, StairActivation) or module.stair.integers is None:
                return UNKNOWN
            try:
                if module.function is not None:
                    has_table(str(node.target), module.function)
            except ExportError as error:
                self.errors[node] = error
            return self.builder.unknown_stair(str(node.target), module.stair, shape_of(node)[1:])
        try:
            return super()._call(node, function)
        except ExportError as error:
            self.errors[node] = error
            return UNKNOWN

    def rows(self, conversion: Conversion) -> Iterator[ReportRow]:
        """Yield a row for each call, in order of execution."""
        known = {row.name: row for row in conversion.rows}
        modules, doubts = dict(self.net.named_modules()), self.builder.doubts
        for node, step in zip(self.order, self.steps, strict=True):
            value = self.values.get(node)
            if not node.op.startswith("call_") or isinstance(value, StaticValue):
                continue
            name = step.module or node.name
            kind = step.function or type(self.net.get_submodule(name)).__name__
            row = known.get(name) or Row(name, kind, None, "kept")
            exports = YES if value is not UNKNOWN else "its input is not exported"
            if node not in self.live:
                exports = "the output does not need it"
            elif value is UNKNOWN and not self.operators[node].exports:
                exports = str(self.refusal(node, step.function))
            if node in self.errors:
                exports = str(self.errors[node])
            elif name in doubts:
                exports = f"after training perhaps: {doubts[name]}"
            yield _row(modules.get(row.name), row, exports, shape_of(node))
