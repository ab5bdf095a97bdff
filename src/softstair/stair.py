"""Stairs: K-quantisers σ(x) = q₀ + Σₖ (qₖ − qₖ₋₁)·[x ≥ θₖ], right-continuous.

A stair is plain, frozen data: levels q₀ < … < q_{K−1}, thresholds θ₁ < … < θ_{K−1} and a quantum ε,
the unit in which noise is measured and of which the levels of a linear stair are integer multiples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from softstair import _check

Quantum = float | tuple[float, ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Line:
    """Rounded values on a line: of (n + first)·unit for n = 0, 1, ….

    ``unit_parts`` serve to evaluate the line in the dtype of the stair, where m = n + first. One
    part is the unit: fl(m·unit) is each value. Two parts, high + low = unit: fl(m·high + fl(m·low))
    is each value, with and without fused multiply-add, since m·high is exact. No part: float64
    alone gives every value.
    """

    first: float
    unit: float
    unit_parts: tuple[float, ...]

    @property
    def native(self) -> bool:
        """Whether one product in the dtype gives every value."""
        return len(self.unit_parts) == 1

    def evaluate(self, index: Tensor, out: Tensor) -> Tensor:
        """Write the value of each n in ``index`` to ``out``, another tensor of the dtype.

        The line must have unit parts. ``index`` has the same values afterwards.
        """
        if self.native:
            return torch.add(index, self.first, out=out).mul_(self.unit)
        high, low = self.unit_parts
        index.add_(self.first)  # exact, as is the way back: integers or halves
        torch.mul(index, low, out=out).add_(index, alpha=high)
        index.sub_(self.first)
        return out


@dataclass(frozen=True)
class Rounded:
    """A stair in float32 or float64: levels and thresholds rounded to it, and as lines if they
    are."""

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    level_line: Line | None
    threshold_line: Line | None
    index_error: float = field(init=False)

    def __post_init__(self) -> None:
        # Not on demand: compilers would trace it, and compile again once it is there.
        object.__setattr__(self, "index_error", self._index_error())

    def _index_error(self) -> float:
        """By how much (x − θ₁)/unit, in the dtype, may be wrong as a number of thresholds;
        infinite if that dtype does not evaluate the line."""
        line, thresholds = self.threshold_line, self.thresholds
        if line is None or not line.unit_parts or not 1e-30 < line.unit < 1e30:
            return math.inf
        offsets = [(threshold - thresholds[0]) / line.unit for threshold in thresholds]
        error = max(abs(offset - number) for number, offset in enumerate(offsets))
        return error + 2.0**-22 * (abs(thresholds[0] / line.unit) + len(thresholds))

    @property
    def is_regular(self) -> bool:
        """Whether the dtype evaluates the thresholds so precisely that x needs to be compared with
        one of them only: the nearest, which a division finds."""
        return self.index_error < 0.5


@dataclass(frozen=True, repr=False)
class Stair:
    """A quantiser with K ≥ 2 levels q₀ < … < q_{K−1} and thresholds θ₁ < … < θ_{K−1}.

    >>> import softstair as ss
    >>> x = torch.tensor([-0.7, -0.5, 0.2, 0.5])
    >>> ss.Stair.ternary()(x)
    tensor([-1.,  0.,  0.,  1.])
    >>> ss.Stair.linear(bits=2, signed=True, quantum=0.5).levels
    (-1.0, -0.5, 0.0, 0.5)
    >>> ss.Stair(levels=(0.0, 1.0, 4.0), thresholds=(0.5, 2.5))(torch.tensor([0.5, 3.0]))
    tensor([1., 4.])
    >>> ss.Stair.sign(quantum=[0.1, 0.2], axis=0)(torch.tensor([3.0, -3.0]))
    tensor([ 0.1000, -0.2000])

    A stair evaluates in float32, or in float64 if its input has it: an x equal to a threshold of
    that dtype is in the upper bin. The result is the level, rounded to the dtype of the input. NaN
    stays NaN.

    Args:
        levels: The levels, strictly increasing.
        thresholds: The thresholds, strictly increasing, one fewer than the levels.
        quantum: The unit ε of the noise, of which the levels of a linear stair are integer
            multiples. With a sequence there is one quantum per channel, and levels and thresholds
            are in quanta: channel c has the levels quantum[c]·levels.
        axis: The dimension of the channels, with a quantum per channel.

    Attributes:
        integers: The levels in quanta, or None if they are no integers.
        spacing: The distances of thresholds and of levels, or None if they are not constant.

    Raises:
        ValueError: If levels or thresholds do not increase, or if their numbers do not match.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    quantum: Quantum = 1.0
    axis: int | None = None
    integers: tuple[int, ...] | None = field(init=False, compare=False)
    spacing: tuple[float, float] | None = field(init=False, compare=False)
    _rounded: dict[torch.dtype, Rounded] = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # A frozen dataclass sets its own fields this way.
        object.__setattr__(self, "levels", _increasing("levels", self.levels, at_least=2))
        object.__setattr__(self, "thresholds", _increasing("thresholds", self.thresholds))
        if len(self.thresholds) != len(self.levels) - 1:
            counts = f"{len(self.levels)} levels, but {len(self.thresholds)} were given"
            raise _check.invalid("thresholds", f"must be one fewer than the {counts}")
        object.__setattr__(self, "quantum", _quantum(self.quantum))
        if isinstance(self.quantum, tuple) and self.axis is None:
            object.__setattr__(self, "axis", 0)
        if isinstance(self.quantum, float) and self.axis is not None:
            raise _check.invalid(
                "axis", f"needs a quantum per channel, but the quantum is {self.quantum!r}"
            )
        if self.axis is not None:
            _check.integer("axis", self.axis)
        # None hashes by address, which would make a pickled stair unequal to itself elsewhere.
        axis = -1 if self.axis is None else self.axis
        object.__setattr__(self, "_hash", hash((self.levels, self.thresholds, self.quantum, axis)))
        # Computed here and not on demand: compilers would trace it.
        object.__setattr__(self, "integers", _integers(self.levels, self.quantum))
        object.__setattr__(self, "spacing", _spacing(self.levels, self.thresholds))
        grids = [_grid(values, self.quantum) for values in (self.levels, self.thresholds)]
        object.__setattr__(self, "_rounded", {d: self._round(d, *grids) for d in DTYPES[:2]})

    @classmethod
    def heaviside(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """Return the stair with the levels {0, 1}·ε and the threshold 0."""
        return cls((0, 1), (0,)).with_quantum(quantum, axis)

    @classmethod
    def sign(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """Return the stair with the levels {−1, 1}·ε and the threshold 0."""
        return cls((-1, 1), (0,)).with_quantum(quantum, axis)

    @classmethod
    def ternary(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """Return the stair with the levels {−1, 0, 1}·ε and the thresholds ±ε/2."""
        return cls((-1, 0, 1), (-0.5, 0.5)).with_quantum(quantum, axis)

    @classmethod
    def linear(
        cls,
        bits: int,
        signed: bool = False,
        quantum: float | Sequence[float] = 1.0,
        thresholds: Literal["floor", "midpoint"] = "midpoint",
        axis: int | None = None,
    ) -> "Stair":
        """Return the stair with the levels (z + k)·ε, k = 0 … 2^bits − 1.

        Args:
            bits: The number of bits, from 1 to 16.
            signed: z = −2^(bits−1) instead of z = 0.
            quantum: The quantum ε, or one per channel.
            thresholds: ``"midpoint"`` puts each threshold half-way between two levels, as in the
                paper's experiments. ``"floor"`` puts it at the level above it, as in the paper's
                text: ε·clip(⌊x/ε⌋, z, z + K − 1).
            axis: The dimension of the channels, with a quantum per channel.
        """
        _check.integer("bits", bits, 1, 16)
        _check.boolean("signed", signed)
        _check.choice("thresholds", thresholds, ("floor", "midpoint"))
        lowest = -(2 ** (bits - 1)) if signed else 0
        levels = tuple(range(lowest, lowest + 2**bits))
        back = 0.0 if thresholds == "floor" else 0.5
        unit = cls(levels, tuple(level - back for level in levels[1:]))
        return unit.with_quantum(quantum, axis)

    def with_quantum(self, quantum: float | Sequence[float], axis: int | None = None) -> "Stair":
        """Return the stair scaled to another quantum, or to one quantum per channel."""
        new = _quantum(quantum)
        old = 1.0 if isinstance(self.quantum, tuple) else self.quantum
        levels = _rescaled(self.levels, old, new)
        thresholds = _rescaled(self.thresholds, old, new)
        if isinstance(new, tuple) and axis is None:
            axis = self.axis
        return Stair(levels, thresholds, new, axis)

    def __call__(self, x: Tensor) -> Tensor:
        """Return σ(x) in x's dtype, without a gradient (:func:`softstair.regularise` has one)."""
        index, x = self.index(x), x.detach()
        levels = self._rounded_table(self.levels, x)
        if self.axis is not None:
            rows = torch.arange(len(levels), device=x.device) * len(self)
            index = (index.movedim(self.axis, -1) + rows).movedim(-1, self.axis)
        return torch.where(x.isnan(), x, levels.flatten()[index].to(x.dtype))

    def index(self, x: Tensor) -> Tensor:
        """Return the index k of each level σ(x) = qₖ, as int64; that of NaN is 0."""
        check_tensor(x)
        x = x.detach()
        thresholds = self._rounded_table(self.thresholds, x)
        values = x.to(thresholds.dtype)
        if self.axis is None:
            index = torch.bucketize(values.contiguous(), thresholds, right=True)
        else:
            check_channels(x, len(thresholds), self.axis)
            channels = values.movedim(self.axis, 0)
            rows = channels.reshape(len(thresholds), -1).contiguous()
            index = torch.searchsorted(thresholds, rows, right=True).reshape(channels.shape)
            index = index.movedim(0, self.axis)
        return index.masked_fill(x.isnan(), 0)

    def _rounded_table(self, values: tuple[float, ...], x: Tensor) -> Tensor:
        """Return values in float32 or x's float64, with a row per channel if there are channels."""
        table = torch.tensor(values, dtype=torch.float64)
        if isinstance(self.quantum, tuple):
            table = torch.tensor(self.quantum, dtype=torch.float64)[:, None] * table
        return table.to(torch.promote_types(x.dtype, torch.float32)).to(x.device)

    def rounded(self, dtype: torch.dtype) -> Rounded:
        """Return the stair rounded to float32 or float64."""
        return self._rounded[dtype]

    def _round(self, dtype: torch.dtype, *grids: tuple[float, float] | None) -> Rounded:
        levels = torch.tensor(self.levels, dtype=torch.float64).to(dtype)
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64).to(dtype)
        return Rounded(
            tuple(levels.double().tolist()),
            tuple(thresholds.double().tolist()),
            *map(_line, grids, (levels, thresholds)),
        )

    def __len__(self) -> int:
        return len(self.levels)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Stair, (self.levels, self.thresholds, self.quantum, self.axis)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stair":
        return self  # nothing in it changes

    def __repr__(self) -> str:
        def shortened(values: tuple[float, ...]) -> str:
            shown = [f"{v:g}" for v in values]
            return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])

        shape = f"levels=({shortened(self.levels)}), thresholds=({shortened(self.thresholds)})"
        if isinstance(self.quantum, tuple):
            return f"Stair({shape}, quantum={len(self.quantum)} channels, axis={self.axis})"
        return f"Stair({shape}, quantum={self.quantum})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        quantum = list(self.quantum) if isinstance(self.quantum, tuple) else self.quantum
        lists = {"levels": list(self.levels), "thresholds": list(self.thresholds)}
        return {**lists, "quantum": quantum, "axis": self.axis}

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> "Stair":
        """Return the stair of :meth:`to_json`, from its data or its text."""
        required = {"levels", "thresholds"}
        return cls(**_check.json_fields(data, required, required | {"quantum", "axis"}))

    def to_tensor(self) -> Tensor:
        """Return the number of levels, the levels, the thresholds and the quanta, in float64."""
        quanta = self.quantum if isinstance(self.quantum, tuple) else (self.quantum,)
        values = (len(self), *self.levels, *self.thresholds, *quanta)
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def from_tensor(cls, tensor: Tensor, axis: int | None = None) -> "Stair":
        """Return the stair of :meth:`to_tensor`; ``axis`` is that of its quanta, if it has some."""
        try:
            count, *values = tensor.tolist()
            levels, values = tuple(values[: int(count)]), values[int(count) :]
            thresholds, quanta = tuple(values[: len(levels) - 1]), values[len(levels) - 1 :]
            return cls(levels, thresholds, float(*quanta) if axis is None else tuple(quanta), axis)
        except (AttributeError, ArithmeticError, TypeError, ValueError):
            raise _check.wrong("stair", tensor, "a tensor of Stair.to_tensor") from None


def check_tensor(x: object) -> None:
    """Raise ValueError if x is not a tensor of a dtype that stairs take."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise _check.invalid("x", f"must be a floating-point tensor, but {given} was given")


def check_channels(x: Tensor, channels: int, axis: int) -> None:
    """Raise ValueError if x does not have that many channels along dimension ``axis``."""
    if not -x.dim() <= axis < x.dim() or x.shape[axis] != channels:
        raise _check.invalid(
            "x",
            f"must have {channels} channels along dimension {axis}, as many as the stair has "
            f"quanta, but its shape is {tuple(x.shape)}",
        )


def _number(name: str, value: object) -> float:
    # Scalars of NumPy and torch are numbers too; booleans and strings are not.
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise _check.wrong(name, value, "finite numbers")
    return number


def _increasing(name: str, values: object, at_least: int = 1) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise _check.wrong(name, values, "a sequence of numbers")
    numbers = tuple(_number(name, value) for value in values)
    if len(numbers) < at_least:
        raise _check.invalid(name, f"must be at least {at_least}, but {len(numbers)} were given")
    for before, after in pairwise(numbers):
        if not before < after:
            raise _check.invalid(
                name, f"must increase strictly, but {after!r} was given after {before!r}"
            )
    return numbers


def _quantum(value: object) -> Quantum:
    quantum: Quantum
    if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0:
        quantum = tuple(_number("quantum", quantum) for quantum in value)
        lowest = min(quantum, default=0.0)
    else:
        quantum = lowest = _number("quantum", value)
    if lowest <= 0:
        raise _check.wrong("quantum", value, "above 0")
    return quantum


def _integers(levels: tuple[float, ...], quantum: Quantum) -> tuple[int, ...] | None:
    unit = 1.0 if isinstance(quantum, tuple) else quantum
    ratios = [level / unit for level in levels]
    close = (math.isclose(r, round(r), rel_tol=1e-9, abs_tol=1e-9) for r in ratios)
    return tuple(round(r) for r in ratios) if all(close) else None


def _spacing(
    levels: tuple[float, ...], thresholds: tuple[float, ...]
) -> tuple[float, float] | None:
    rises = [b - a for a, b in pairwise(levels)]
    # Two levels have one threshold; its spacing is that of the levels.
    gaps = [b - a for a, b in pairwise(thresholds)] or rises
    even = all(math.isclose(g, gaps[0], rel_tol=1e-9) for g in gaps)
    if even and all(math.isclose(r, rises[0], rel_tol=1e-9) for r in rises):
        return gaps[len(gaps) // 2], rises[len(rises) // 2]
    return None


def _grid(values: tuple[float, ...], quantum: Quantum) -> tuple[float, float] | None:
    """Return the first value in steps, and the step, if all steps are equal."""
    unit = 1.0 if isinstance(quantum, tuple) else quantum
    steps = [_in_units(b, unit) - _in_units(a, unit) for a, b in pairwise(values)]
    step = steps[0] if steps else 1.0
    if any(s != step for s in steps):
        return None
    return _in_units(values[0], unit) / step, unit * step


def _line(grid: tuple[float, float] | None, rounded: Tensor) -> Line | None:
    """Return the line through the values if arithmetic along it gives every rounded value."""
    if grid is None:
        return None
    first, unit = grid
    number = torch.arange(len(rounded), dtype=torch.float64) + first
    if not torch.equal((number * unit).to(rounded.dtype), rounded):
        return None
    # Division must find each threshold to within one (kernels); in a fine stair it may not.
    offset = (rounded.double() - rounded[0].double()) / unit - torch.arange(len(rounded))
    if offset.abs().max() > 0.9:
        return None
    # n and the first are added in this dtype, as in the kernels.
    index = torch.arange(len(rounded), dtype=rounded.dtype)
    for parts in ((unit,), _split_unit(unit, index + first)):
        line = Line(first, unit, parts)
        if parts and torch.equal(line.evaluate(index, index.clone()), rounded):
            return line
    return Line(first, unit, ())


def _split_unit(unit: float, number: Tensor) -> tuple[float, ...]:
    """Split the unit into high + low, with high so short that m·high is exact in float32 for every
    number m; return () if that is impossible, or if a number is not an integer or a half."""
    doubled = 2 * number.abs()
    bits = 24 - int(doubled.max()).bit_length()
    if not 1e-30 < unit < 1e30 or bits < 1 or not torch.equal(doubled, doubled.round()):
        return ()
    mantissa, exponent = math.frexp(unit)
    high = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
    return high, unit - high


def _rescaled(values: tuple[float, ...], old: float, new: Quantum) -> tuple[float, ...]:
    factor = 1.0 if isinstance(new, tuple) else new
    return values if old == factor else tuple(_in_units(v, old) * factor for v in values)


def _in_units(value: float, unit: float) -> float:
    """Return value/unit; integers and halves, as in linear stairs, are exact."""
    ratio = value / unit
    halves = round(2 * ratio) / 2
    return halves if math.isclose(ratio, halves, rel_tol=1e-12) else ratio
