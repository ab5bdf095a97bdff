"""Lowering: the nodes of an integer network become operations of the generated program."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.affine import Integers, affine_steps, small_wide_steps, sum_bounds
from softstair.deploy.c.layout import (
    Constant,
    Features,
    MemoryLayout,
    Operation,
    structure,
    window_fields,
)
from softstair.deploy.c.sums import Stored, weighted_sum
from softstair.deploy.nodes import ExportError, IntegerNetwork, narrowest


def lower(network: IntegerNetwork, layout: MemoryLayout, scratch: int) -> list[Operation]:
    """Return the operations of a network; a layer uses up to ``scratch`` bytes to be faster."""
    if not isinstance(network.last, nodes.Scores | nodes.Rescaled):
        raise ExportError.of(network.last.name, "the network must end in scores to be written as C")
    lowering = _Lowering(network, layout, scratch)
    operations = map(lowering.operation, range(len(network.nodes)))
    return [operation for operation in operations if operation is not None]


class _Lowering:
    def __init__(self, network: IntegerNetwork, layout: MemoryLayout, scratch: int) -> None:
        self.network, self.layout, self.scratch = network, layout, scratch
        self.number = {node.name: number for number, node in enumerate(network.nodes)}

    def operation(self, number: int) -> Operation | None:
        """Return the operation of a node, or None if it needs none of its own."""
        node = self.network.nodes[number]
        if self.layout.home[node.name] != node.name:
            return None
        match node:
            case nodes.Input():
                call = f"ss_input_{node.type_name}(input, {node.zero}, &layer_{number});"
                how = "bytes with their channels together"
                return Operation(number, (number,), (), (call,), how)
            case nodes.Sum():
                return None if self._is_fused(node) else self._sum(number, node)
            case nodes.Steps():
                return self._steps(number, node)
            case nodes.MaxPool() | nodes.SumPool() | nodes.Pad():
                return self._pool(number, node)
            case nodes.Concat():
                return self._concatenate(number, node)
            case nodes.Expand():
                return self._expand(number, node)
            case nodes.Add() | nodes.Flatten():
                return self._elementwise(number, node)
            case nodes.Scores():
                return self._scores(number, node)
            case nodes.Rescaled():
                return self._rescaled(number, node)
        raise ExportError.of(node.name, f"{type(node).__name__} has no form in C")

    def _home(self, name: str) -> int:
        return self.number[self.layout.home[name]]

    def _is_fused(self, node: nodes.Sum) -> bool:
        """Whether a single stair reads the sums, so that they need not be stored."""
        users = self.network.users(node.name)
        return len(users) == 1 and isinstance(users[0], nodes.Steps)

    def _weighted_sum(self, node: nodes.Sum, sink: int, stored: Stored) -> Operation:
        x = node.inputs[0]
        if node.weight.dim() == 2 and len(self.network.sizes[x]) != 1:
            raise ExportError.of(node.name, "C has no linear layer over positions")
        source = self.network.node(x)
        span = (min(source.low, 0), max(source.high, 0))
        number, home, features = self.number[node.name], self._home(x), self.layout.features
        ends = {"in": f"&layer_{home}", "sink": f"&layer_{sink}_sink"}
        output = features[node.name]
        more = (ends, stored, self.scratch)
        operation = weighted_sum(number, node, features[x], output, span, *more)
        return replace(operation, reads=(home,))

    def _sum(self, number: int, node: nodes.Sum) -> Operation:
        """Sums that are stored as they are."""
        operation = self._weighted_sum(node, number, "sums")
        name = f"layer_{number}"
        sink = structure("ss_sink", f"{name}_sink", store="ss_store_sums", out=f"&{name}")
        return replace(operation, structures=(sink, *operation.structures))

    def _steps(self, number: int, node: nodes.Steps) -> Operation:
        """A stair, with the sum before it where nothing else reads that."""
        source = self.network.node(node.inputs[0])
        output = self.layout.features[node.name]
        shortcut = self._home(node.inputs[1]) if len(node.inputs) == 2 else None
        reads = () if shortcut is None else (shortcut,)
        clear = _clear(number, output)
        if isinstance(source, nodes.Sum) and self._is_fused(source):
            inner = self.number[source.name]
            constants, text, store = _sink(number, node, source, output, shortcut, inner)
            is_affine = output.kind == "SS_BYTES" and store == "ss_store_affine"
            operation = self._weighted_sum(source, number, "affine" if is_affine else "levels")
            return replace(
                operation,
                number=number,
                nodes=(inner, number),
                reads=(*operation.reads, *reads),
                calls=(*clear, *operation.calls),
                constants=(*operation.constants, *constants),
                structures=(text, *operation.structures),
            )
        home = self._home(source.name)
        constants, text, _ = _sink(number, node, source, output, shortcut, None)
        calls = (*clear, f"ss_steps(&layer_{home}, &layer_{number}_sink);")
        given = (calls, "thresholds", constants, (text,))
        return Operation(number, (number,), (home, *reads), *given)

    def _pool(self, number: int, node: nodes.MaxPool | nodes.SumPool | nodes.Pad) -> Operation:
        home = self._home(node.inputs[0])
        x, output = self.layout.features[node.inputs[0]], self.layout.features[node.name]
        function, how, clear = "ss_sum_pool", "the sum of each window", _clear(number, output)
        if not isinstance(node, nodes.Pad):
            windows = (node.kernel, node.stride, node.padding)
            if len(self.network.sizes[node.name]) != len(node.kernel) + 1:
                reason = "C cannot pool without channels"
                raise ExportError.of(node.name, reason, "Give it (C, H, W)")
        else:  # sums of one place, which may lie in the padding
            how, windows = "between zeros", ((1, 1), (1, 1), node.padding[::2][::-1])
        if isinstance(node, nodes.MaxPool):
            how, clear = "the largest of each window", ()
            function = "ss_max_pool_planes" if x.planes else "ss_max_pool"
        name = f"layer_{number}_window"
        call = f"{function}(&{name}, &layer_{home}, &layer_{number});"
        text = structure("ss_window", name, **window_fields(x, output, *windows))
        return Operation(number, (number,), (home,), (*clear, call), how, structures=(text,))

    def _concatenate(self, number: int, node: nodes.Concat) -> Operation:
        if node.axis != 1:
            raise ExportError.of(node.name, f"C cannot concatenate along axis {node.axis}")
        homes = tuple(self._home(name) for name in node.inputs)
        channels = [self.layout.features[name].channels for name in node.inputs]
        firsts = [sum(channels[:place]) for place in range(len(channels))]
        calls = (
            f"ss_concatenate(&layer_{home}, {first}, &layer_{number});"
            for home, first in zip(homes, firsts, strict=True)
        )
        clear = _clear(number, self.layout.features[node.name])
        return Operation(number, (number,), homes, (*clear, *calls), "side by side")

    def _expand(self, number: int, node: nodes.Expand) -> Operation:
        home, output = self._home(node.inputs[0]), self.layout.features[node.name]
        x = self.layout.features[node.inputs[0]]
        # Distances between rows, columns and channels of the input; 0 along axes of length 1.
        strides = (x.width if x.height > 1 else 0, int(x.width > 1), int(x.channels > 1))
        numbers = ", ".join(map(str, (output.width, *strides)))
        call = f"ss_expand(&layer_{home}, &layer_{number}, {numbers});"
        calls = (*_clear(number, output), call)
        return Operation(number, (number,), (home,), calls, "repeated")

    def _elementwise(self, number: int, node: nodes.Add | nodes.Flatten) -> Operation:
        homes = tuple(self._home(name) for name in node.inputs)
        arguments = ", ".join(f"&layer_{n}" for n in (*homes, number))
        call = f"ss_{type(node).__name__.lower()}({arguments});"
        how = "added" if isinstance(node, nodes.Add) else "put into another order"
        return Operation(number, (number,), homes, (call,), how)

    def _scores(self, number: int, node: nodes.Scores) -> Operation:
        """A last layer in float."""
        home, x = self._home(node.inputs[0]), self.layout.features[node.inputs[0]]
        name, shape = f"layer_{number}", (len(node.weight), x.channels, x.positions)
        weight = node.weight.float().reshape(shape).permute(2, 1, 0).contiguous()
        constants = [Constant(f"{name}_weights", weight.numpy(), "weights")]
        if node.bias is not None:
            constants.append(Constant(f"{name}_bias", node.bias.float().numpy(), "thresholds"))
        text = structure(
            "ss_last",
            f"{name}_last",
            classes=shape[0],
            unit=f"{float(np.float32(node.unit)).hex()}F",
            weights=f"{name}_weights",
            bias=None if node.bias is None else f"{name}_bias",
            totals="totals",
            **{"in": f"&layer_{home}"},
        )
        call, weights = f"ss_scores(&{name}_last, scores);", node.weight.numel()
        more = (tuple(constants), (text,), 0, weights)
        return Operation(number, (number,), (home,), (call,), "floats", *more)

    def _rescaled(self, number: int, node: nodes.Rescaled) -> Operation:
        """The scores of a last layer with integer weights."""
        home = self._home(node.inputs[0])
        if self.layout.features[node.inputs[0]].positions != 1:
            raise ExportError.of(node.name, "C has no scores for each position")
        name = f"layer_{number}"
        constants = tuple(
            Constant(f"{name}_{part}", values.float().contiguous().numpy(), "thresholds")
            for part, values in (("scale", node.scale), ("bias", node.bias))
        )
        call = f"ss_rescale(&layer_{home}, {name}_scale, {name}_bias, scores);"
        return Operation(number, (number,), (home,), (call,), "floats", constants)


def _clear(number: int, output: Features) -> tuple[str, ...]:
    """Return the call that clears bit planes before bits are set."""
    return (f"ss_clear(&layer_{number});",) if output.planes else ()


def _sink(
    number: int,
    node: nodes.Steps,
    source: nodes.Node,
    output: Features,
    shortcut: int | None,
    traced: int | None,
) -> tuple[tuple[Constant, ...], str, str]:
    """Return the constants of a stair, the structure that sums are passed to, and its function.

    The steps are affine, or thresholds if there are none. Node ``shortcut`` is added to the sums; a
    traced build stores the sums of ``traced``.
    """
    name, table = f"layer_{number}", node.thresholds.numpy().astype(np.int64)
    in_planes, low = bool(output.planes) and shortcut is None, node.low - output.bias
    arrays = {} if in_planes else _affine_arrays(node, source, table, low)
    if arrays:
        fields: dict[str, object] = {"low": low, "high": node.high - output.bias}
        fields |= {key: f"{name}_{key}" for key in arrays}
        fields |= {key: int(array) for key, array in arrays.items() if array.ndim == 0}
        arrays = {key: array for key, array in arrays.items() if array.ndim}
        store = "ss_store_wide" if "unit" in fields else "ss_store_affine"
    else:
        store, levels = "ss_store_planes", np.array(node.levels)
        if in_planes:
            table = table.T  # the first threshold of all channels, then the second
        else:
            store = "ss_store_levels" if shortcut is None else "ss_store_with_shortcut"
            table, levels = _padded(table, levels)
        arrays["thresholds"] = narrowest(table)
        width = arrays["thresholds"].itemsize
        if width > 4:
            raise ExportError.of(node.name, "its thresholds do not fit into 32 bits")
        fields = {"thresholds": f"{name}_thresholds", "width": width, "steps": len(levels) - 1}
        if not in_planes:
            arrays["levels"] = (levels - output.bias).astype(np.int32)
            fields["levels"] = f"{name}_levels"
    if shortcut is not None:
        fields |= {"shortcut": f"&layer_{shortcut}", "first": int(node.first)}
        fields |= {"values": table.shape[1]} if store == "ss_store_with_shortcut" else {}
    sums = None if traced is None else f"SS_TRACED(&layer_{traced})"
    ends = {"store": store, "out": f"&{name}", "sums": sums}
    constants = (Constant(f"{name}_{key}", values, "thresholds") for key, values in arrays.items())
    return tuple(constants), structure("ss_sink", f"{name}_sink", **ends, **fields), store


def _affine_arrays(
    node: nodes.Steps, source: nodes.Node, table: Integers, low: int
) -> dict[str, npt.NDArray[Any]]:
    """Return the constants of affine steps; none if there are none, or if they are larger."""
    is_even = table.ndim == 2 and node.levels == tuple(range(node.low, node.high + 1))
    steps = affine_steps(table, *sum_bounds(source, len(table)), low) if is_even else None
    if steps is not None:
        return {
            "multipliers": steps.multiplier.astype(np.int32),
            "offsets": steps.offset.astype(np.int32),
            "shifts": steps.shift.astype(np.int8),
        }
    wide = small_wide_steps(node, source, low)
    if wide is None:
        return {}
    first: dict[str, npt.NDArray[Any]] = {"scales": wide.factors[:-1].astype(np.int32)}
    optional: dict[str, npt.NDArray[Any]] = {
        "biases": wide.addends[:-1],
        "rows": wide.rows.astype(np.int32),
        "columns": wide.columns.astype(np.int32),
    }
    return {
        **(first if len(wide.factors) > 1 else {}),  # scales of 0 as well
        **{name: numbers for name, numbers in optional.items() if numbers.any()},
        "factors": wide.factors[-1].astype(np.int32),
        "shifts": wide.shifts[-1].astype(np.int8),
        "addends": wide.addends[-1],
        **{name: np.array(number) for name, number in wide.scalars.items()},
    }


def _padded(thresholds: Integers, levels: Integers) -> tuple[Integers, Integers]:
    """Repeat the last threshold and level, so that there are 2ᵏ levels, for a bisection."""
    more = 2 ** (len(levels) - 1).bit_length() - len(levels)
    columns = [(0, 0)] * (thresholds.ndim - 1) + [(0, more)]
    return np.pad(thresholds, columns, "edge"), np.pad(levels, (0, more), "edge")
