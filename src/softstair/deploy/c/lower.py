"""Lowering: the nodes of a frozen network become operations of the generated program."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.affine import AffineSteps, Integers, affine_steps
from softstair.deploy.c.layout import (
    Constant,
    Features,
    MemoryLayout,
    Operation,
    first_places,
    is_over_places,
    structure,
    turned,
    window_fields,
)
from softstair.deploy.c.panels import PANEL
from softstair.deploy.c.sums import Stored, weighted_sum
from softstair.deploy.combining import Multiply, Scale, Subtract
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import INT32_LIMIT, ExportError, Node, Stair, narrowest

FEW_COUNTED, MAX_COUNTED = 3, 31
"""For x86: thresholds that are faster than affine steps, and than a bisection."""


def lower(network: FrozenNetwork, layout: MemoryLayout, scratch: int) -> list[Operation]:
    """Return the operations of a network; a layer uses up to ``scratch`` bytes to be faster."""
    lowering, operations = _Lowering(network, layout, scratch), list[Operation]()
    for number in range(len(network.nodes)):
        operations += lowering.turns(number)
        operation = lowering.operation(number)
        operations += [] if operation is None else [operation]
    return operations


@dataclass(frozen=True)
class _Sink:
    """A function that stores sums, with its constants by channel and its other fields."""

    store: str
    arrays: dict[str, npt.NDArray[Any]]
    fields: dict[str, object]


class _Lowering:
    def __init__(self, network: FrozenNetwork, layout: MemoryLayout, scratch: int) -> None:
        self.network, self.layout, self.scratch = network, layout, scratch
        self.number = {node.name: number for number, node in enumerate(network.nodes)}
        self.copies: dict[tuple[str, str], int] = {}
        """The numbers of turned copies, by the names of the reader and of what it reads."""

    def operation(self, number: int) -> Operation | None:
        """Return the operation of a node, or None if it needs none of its own."""
        node = self.network.nodes[number]
        if self.layout.home[node.name] != node.name:
            return None
        match node:
            case nodes.Input():
                return self._input(number, node)
            case nodes.Sum() | Multiply() if self._is_fused(node):
                return None
            case nodes.Sum() | Multiply():
                return self._stored(number, node)
            case nodes.Steps() | nodes.Requantise():
                return self._stair(number, node)
            case nodes.Lookup():
                return self._lookup(number, node)
            case nodes.MaxPool() | nodes.SumPool():
                return self._pool(number, node)
            case nodes.Pad():
                return self._pad(number, node)
            case nodes.Concat():
                return self._concatenate(number, node)
            case nodes.Select():
                return self._select(number, node)
            case nodes.PixelShuffle():
                return self._pixel_shuffle(number, node)
            case Scale():
                return self._scale(number, node)
            case nodes.Add() | Subtract() | nodes.Flatten():
                return self._elementwise(number, node)
            case nodes.Scores():
                return self._scores(number, node)
        raise ExportError.of(node.name, f"{type(node).__name__} has no form in C")

    def turns(self, number: int) -> list[Operation]:
        """Return the operations that give a node its inputs with channels first or last."""
        node, operations = self.network.nodes[number], list[Operation]()
        wanted = self._wanted(node) if self.layout.home[node.name] == node.name else None
        for name in node.inputs if wanted is not None else ():
            x = self.layout.features[name]
            if len(self.network.sizes[name]) < 2 or x.is_turned == wanted:
                continue
            copy = len(self.network.nodes) + len(self.layout.turned)
            self.layout.turned[copy] = turned(x, self.network.sizes[name], bool(wanted))
            self.copies[node.name, name] = copy
            home = self.number[self.layout.home[name]]
            call = f"ss_turn(&layer_{home}, &layer_{copy}, {int(bool(wanted))});"
            calls = (*_clear(copy, x), call)
            operations.append(Operation(copy, (), (home,), calls, "channels in another order"))
        return operations

    def _wanted(self, node: Node) -> bool | None:
        """Return whether a node reads features with their channels last; None if it does not
        matter."""
        if isinstance(node, nodes.Sum) and node.weight.dim() == 2:
            return True if is_over_places(self.network, node) else None
        if isinstance(node, Stair | nodes.Add | Multiply | Subtract | nodes.Lookup):
            return self.layout.features[node.name].is_turned
        return None if isinstance(node, nodes.Flatten) else False

    def _home(self, node: Node, place: int = 0) -> int:
        """Return the number of the features that a node reads."""
        name = node.inputs[place]
        return self.copies.get((node.name, name), self.number[self.layout.home[name]])

    def _homes(self, node: Node) -> tuple[int, ...]:
        return tuple(self._home(node, place) for place in range(len(node.inputs)))

    def _read(self, node: Node, place: int = 0) -> Features:
        """Return the features that a node reads."""
        name = node.inputs[place]
        copy = self.copies.get((node.name, name))
        return self.layout.features[name] if copy is None else self.layout.turned[copy]

    def _is_fused(self, node: Node) -> bool:
        """Whether a single stair reads sums or products, so that they need not be stored."""
        if not isinstance(node, nodes.Sum | Multiply):
            return False
        users = self.network.users(node.name)
        if len(users) != 1 or not isinstance(users[0], Stair) or users[0].inputs[0] != node.name:
            return False
        features = self.layout.features
        return features[node.name].is_turned == features[users[0].name].is_turned

    def _input(self, number: int, node: nodes.Input) -> Operation:
        how, out = "bytes with their channels together", f"&layer_{number}"
        constants: tuple[Constant, ...] = ()
        call = f"ss_input_{node.dtype}(input, {node.zero}, {out});"
        if node.table is not None:
            table = node.table.cpu().numpy()
            constants, how = (Constant(f"layer_{number}_table", table, "thresholds"),), "by a table"
            call = f"ss_input_table(input, layer_{number}_table, {table.itemsize}, {out});"
        return Operation(number, (number,), (), (call,), how, constants)

    def _weighted_sum(self, node: nodes.Sum, sink: int, stored: Stored) -> Operation:
        source = self.network.node(node.inputs[0])
        span = (min(source.low, 0), max(source.high, 0))
        number, home, features = self.number[node.name], self._home(node), self.layout.features
        ends = {"in": f"&layer_{home}", "sink": f"&layer_{sink}_sink"}
        output = features[node.name]
        more = (ends, stored, self.scratch, self.layout.cpu)
        operation = weighted_sum(number, node, self._read(node), output, span, *more)
        return replace(operation, reads=(home,))

    def _source(self, node: Node, sink: int, stored: Stored) -> Operation:
        """The operation that passes sums or products to a sink."""
        if isinstance(node, nodes.Sum):
            return self._weighted_sum(node, sink, stored)
        number, homes = self.number[node.name], self._homes(node)
        call = f"ss_product(&layer_{homes[0]}, &layer_{homes[1]}, &layer_{sink}_sink);"
        return Operation(number, (number,), homes, (call,), "multiplied")

    def _stored(self, number: int, node: Node) -> Operation:
        """Sums or products that are stored as they are."""
        operation = self._source(node, number, "sums")
        name = f"layer_{number}"
        sink = structure("ss_sink", f"{name}_sink", store="ss_store_sums", out=f"&{name}")
        return replace(operation, structures=(sink, *operation.structures))

    def _stair(self, number: int, node: Stair) -> Operation:
        """A stair, with the sum before it where nothing else reads that."""
        source, output = self.network.node(node.inputs[0]), self.layout.features[node.name]
        if node.axis != 1 and not output.is_turned:
            raise ExportError.of(node.name, "C has channels on the first axis, or on the last")
        beside = self._homes(node)[1:]
        is_fused = self._is_fused(source)
        sink, inner = self._sink(node, source, output), self.number[source.name]
        name, clear = f"layer_{number}", _clear(number, output)
        constants = tuple(
            Constant(f"{name}_{key}", array, "thresholds") for key, array in sink.arrays.items()
        )
        ends = {"store": sink.store, "out": f"&{name}"}
        ends |= {"beside": f"&layer_{beside[0]}"} if beside else {}
        ends |= {"sums": f"SS_TRACED(&layer_{inner})"} if is_fused else {}
        arrays = {key: f"{name}_{key}" for key in sink.arrays}
        text = structure("ss_sink", f"{name}_sink", **ends, **arrays, **sink.fields)
        if not is_fused:
            home = self._home(node)
            calls = (*clear, f"ss_steps(&layer_{home}, &{name}_sink);")
            how = "thresholds" if isinstance(node, nodes.Steps) else "in another unit"
            return Operation(number, (number,), (home, *beside), calls, how, constants, (text,))
        stored: Stored = "affine" if sink.store == "ss_store_affine" else "levels"
        operation = self._source(source, number, stored)
        return replace(
            operation,
            number=number,
            nodes=(inner, number),
            reads=(*operation.reads, *beside),
            calls=(*clear, *operation.calls),
            constants=(*operation.constants, *constants),
            structures=(text, *operation.structures),
        )

    def _sink(self, node: Stair, source: nodes.Node, output: Features) -> _Sink:
        """Return how sums become levels: by affine steps, or else by thresholds or in 64 bits."""
        channels = output.channels
        ends = (np.full(channels, end, dtype=np.int64) for end in (source.low, source.high))
        if isinstance(source, nodes.Sum):
            before = self.network.node(source.inputs[0])
            bounds = source.bounds(before.low, before.high)
            ends = (end.cpu().numpy() for end in bounds)
        least, greatest = ends
        if isinstance(node, nodes.Requantise):
            return _rescaled(node)
        table = node.thresholds.cpu().numpy().astype(np.int64)
        is_even = node.levels == tuple(range(node.low, node.high + 1))
        is_x86 = self.layout.cpu == "x86" and output.kind == "SS_BYTES"
        if is_even and not output.planes and not (is_x86 and table.shape[1] <= FEW_COUNTED):
            steps = affine_steps(table, least, greatest, node.low - output.bias)
            if steps is not None:
                return _affine(steps, node, output)
        # Fewer bytes hold thresholds that only just are below or above all sums.
        beyond = np.minimum(greatest + 1, INT32_LIMIT - 1)
        table = np.clip(table, least[:, None], beyond[:, None])
        if is_x86 and table.shape[1] <= MAX_COUNTED:
            return _counted(table, node.levels, output)
        return _thresholds(table, node.levels, output)

    def _pool(self, number: int, node: nodes.MaxPool | nodes.SumPool) -> Operation:
        home = self._home(node)
        x, output = self._read(node), self.layout.features[node.name]
        if len(self.network.sizes[node.name]) != len(node.kernel) + 1:
            reason = "C cannot pool without channels"
            raise ExportError.of(node.name, reason, "Give it (C, H, W)")
        function, how, clear = "ss_sum_pool", "the sum of each window", _clear(number, output)
        if isinstance(node, nodes.MaxPool):
            how, clear = "the largest of each window", ()
            function = "ss_max_pool_planes" if x.planes else "ss_max_pool"
        name = f"layer_{number}_window"
        call = f"{function}(&{name}, &layer_{home}, &layer_{number});"
        windows = (node.kernel, node.stride, node.padding)
        text = structure("ss_window", name, **window_fields(x, output, *windows))
        return Operation(number, (number,), (home,), (*clear, call), how, structures=(text,))

    def _lookup(self, number: int, node: nodes.Lookup) -> Operation:
        home, name = self._home(node), f"layer_{number}"
        table = narrowest(node.table.cpu().numpy())
        call = f"ss_lookup(&layer_{home}, {name}_table, {table.itemsize}, &{name});"
        constant = Constant(f"{name}_table", table, "thresholds")
        return Operation(number, (number,), (home,), (call,), "by a table", (constant,))

    def _pad(self, number: int, node: nodes.Pad) -> Operation:
        home, output = self._home(node), self.layout.features[node.name]
        x = self._read(node)
        before = [*node.padding[::2], 0, 0, 0][: len(self.network.sizes[node.name])]
        rows, columns = [0, 0, *before[-2::-1]][-2:]
        numbers = f"{x.width}, {output.width}, {rows}, {columns}, {before[-1]}"
        call = f"ss_place(&layer_{home}, &layer_{number}, {numbers});"
        calls = (f"ss_clear(&layer_{number});", call)
        return Operation(number, (number,), (home,), calls, "between zeros")

    def _concatenate(self, number: int, node: nodes.Concat) -> Operation:
        homes, output = self._homes(node), self.layout.features[node.name]
        # Channels, rows and columns, as in Features.
        axis = (
            node.axis - 1 if node.axis == 1 else node.axis - len(self.network.sizes[node.name]) - 1
        )
        calls, first = list(_clear(number, output)), [0, 0, 0]
        for part, home in enumerate(homes):
            x = self._read(node, part)
            place = f"{x.width}, {output.width}, {first[1]}, {first[2]}, {first[0]}"
            calls.append(f"ss_place(&layer_{home}, &layer_{number}, {place});")
            first[axis] += (x.channels, x.height, x.width)[axis]
        return Operation(number, (number,), homes, tuple(calls), "side by side")

    def _select(self, number: int, node: nodes.Select) -> Operation:
        home, output = self._home(node), self.layout.features[node.name]
        x, name = self._read(node), f"layer_{number}"
        # Places of one row are those of its only column axis.
        rows, columns = (None, node.rows) if node.columns is None else (node.rows, node.columns)
        axes = {"rows": (rows, x.height), "columns": (columns, x.width)}
        axes["channels"] = (node.channels, x.channels)
        constants = {
            key: Constant(f"{name}_{key}", places.cpu().numpy(), "thresholds")
            for key, (places, size) in axes.items()
            if places is not None and not np.array_equal(places.cpu().numpy(), np.arange(size))
        }
        tables = ", ".join(constants[key].name if key in constants else "0" for key in axes)
        call = f"ss_take(&layer_{home}, &{name}, {x.width}, {output.width}, {tables});"
        calls = (*_clear(number, output), call)
        return Operation(
            number, (number,), (home,), calls, "from other places", tuple(constants.values())
        )

    def _pixel_shuffle(self, number: int, node: nodes.PixelShuffle) -> Operation:
        home, output = self._home(node), self.layout.features[node.name]
        width = self._read(node).width
        rows, columns = (1, *node.factor)[-2:]
        steps = (1, rows * columns) if node.channels_first else (output.channels, 1)
        numbers = ", ".join(map(str, (width, rows, columns, *steps)))
        calls = (
            *_clear(number, output),
            f"ss_pixel_shuffle(&layer_{home}, &layer_{number}, {numbers});",
        )
        return Operation(number, (number,), (home,), calls, "channels as pixels")

    def _elementwise(self, number: int, node: nodes.Add | Subtract | nodes.Flatten) -> Operation:
        homes = self._homes(node)
        if isinstance(node, nodes.Flatten) and self._read(node).is_turned:
            call = f"ss_turn(&layer_{homes[0]}, &layer_{number}, 0);"
            return Operation(number, (number,), homes, (call,), "put into another order")
        arguments = [f"&layer_{n}" for n in (*homes, number)]
        if isinstance(node, Subtract) and len(homes) == 1:
            arguments.insert(0, "0")
        call = f"ss_{type(node).__name__.lower()}({', '.join(arguments)});"
        how = "put into another order" if isinstance(node, nodes.Flatten) else "added"
        return Operation(number, (number,), homes, (call,), how)

    def _scale(self, number: int, node: Scale) -> Operation:
        home, name = self._home(node), f"layer_{number}"
        constant = Constant(f"{name}_factors", node.factor.cpu().numpy(), "thresholds")
        call = f"ss_scale(&layer_{home}, {constant.name}, &{name});"
        return Operation(number, (number,), (home,), (call,), "times a number", (constant,))

    def _scores(self, number: int, node: nodes.Scores) -> Operation:
        home, name = self._home(node), f"layer_{number}"
        if node.axis != 1:
            raise ExportError.of(node.name, "C has no scores along another axis than the first")
        constants = [Constant(f"{name}_bias", node.bias.cpu().numpy(), "thresholds")]
        if self.network.outputs == "classes":
            constants.append(Constant(f"{name}_order", node.order.cpu().numpy(), "thresholds"))
        first, size = first_places(self.network)[node.name], self.network.sizes[node.name]
        results = f"results + {first}" if first else "results"
        calls = (
            f"ss_scores(&layer_{home}, {node.shift}, {name}_bias, {results});",
            f"ss_trace_scores({number}, {results}, {math.prod(size)});",
        )
        return Operation(number, (number,), (home,), calls, "scores", tuple(constants))


def _clear(number: int, output: Features) -> tuple[str, ...]:
    """Return the call that clears bit planes before bits are set."""
    return (f"ss_clear(&layer_{number});",) if output.planes else ()


def _affine(steps: AffineSteps, node: nodes.Steps, output: Features) -> _Sink:
    """Return affine steps, in 32 bits where they are enough."""
    is_narrow = output.kind == "SS_BYTES" and not steps.is_wide
    bias = output.bias if is_narrow else 0  # in 64 bits it is subtracted later
    offset = steps.offset + ((output.bias - bias) << steps.shift)
    arrays: dict[str, npt.NDArray[Any]] = {
        "multipliers": steps.multiplier.astype(np.int32),
        "shifts": steps.shift.astype(np.int8),
    }
    arrays |= {"offsets": offset.astype(np.int32)} if is_narrow else {"addends": offset}
    store = "ss_store_affine" if is_narrow else "ss_store_rescaled"
    return _Sink(store, arrays, {"low": node.low - bias, "high": node.high - bias})


def _counted(table: Integers, levels: tuple[int, ...], output: Features) -> _Sink:
    """Return thresholds of a step together, and what each takes from the highest level."""
    thresholds = np.pad(table.T, ((0, 0), (0, PANEL - 1))).astype(np.int32)
    stored = np.array([levels[-1] - output.bias, *np.diff(levels)], dtype=np.int32)
    fields: dict[str, object] = {"width": thresholds.shape[1], "steps": len(thresholds)}
    return _Sink("ss_store_counted", {"thresholds": thresholds, "levels": stored}, fields)


def _thresholds(table: Integers, levels: tuple[int, ...], output: Features) -> _Sink:
    """Return thresholds in as few bytes as hold them."""
    if output.planes:
        # The first threshold of all channels, then the second.
        thresholds = narrowest(table.T)
        fields = {"width": thresholds.itemsize, "steps": len(levels) - 1}
        return _Sink("ss_store_planes", {"thresholds": thresholds}, dict(fields))
    # The last threshold and level are repeated, so that there are 2ᵏ levels, for a bisection.
    more = 2 ** (len(levels) - 1).bit_length() - len(levels)
    thresholds = narrowest(np.pad(table, ((0, 0), (0, more)), "edge"))
    padded = np.pad(np.array(levels, dtype=np.int32), (0, more), "edge")
    fields = {"width": thresholds.itemsize, "steps": len(padded) - 1}
    return _Sink("ss_store_levels", {"thresholds": thresholds, "levels": padded}, dict(fields))


def _rescaled(node: nodes.Requantise) -> _Sink:
    """Return the numbers of a requantisation; a factor is part of its multiplier where it fits."""
    names = ("factor", "bias", "multiplier", "shift")
    factor, bias, multiplier, shift = (
        getattr(node, name).cpu().numpy().astype(np.int64) for name in names
    )
    arrays: dict[str, npt.NDArray[Any]] = {"shifts": shift.astype(np.int8)}
    limits: dict[str, object] = {"low": node.low, "high": node.high}
    product = factor * multiplier
    is_double = node.rounding == "double"
    if is_double or bool((np.abs(product) >= INT32_LIMIT).any()):
        product = multiplier
        arrays |= {"factors": factor.astype(np.int32)} if (factor != 1).any() else {}
    arrays["multipliers"] = product.astype(np.int32)
    arrays["addends"] = bias if is_double else bias * multiplier + ((1 << shift) >> 1)
    if node.beside is not None and node.rest is not None:
        arrays["others"] = node.beside.cpu().numpy()
        arrays["addends"] = arrays["addends"] + node.rest.cpu().numpy()
    return _Sink("ss_store_doubly" if is_double else "ss_store_rescaled", arrays, limits)
