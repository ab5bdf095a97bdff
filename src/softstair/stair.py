"""Stairs: K-quantisers σ(x) = q₀ + Σₖ (qₖ − qₖ₋₁)·[x ≥ θₖ], right-continuous.

A stair is plain, frozen data: levels q₀ < … < q_{K−1}, thresholds θ₁ < … < θ_{K−1} and a quantum ε,
the unit in which noise is measured and of which the levels of a linear stair are whole multiples.

>>> import torch
>>> Stair.ternary()(torch.tensor([-0.7, -0.5, 0.2, 0.5]))
tensor([-1.,  0.,  0.,  1.])
>>> Stair.linear(bits=2, signed=True, quantum=0.5).levels
(-1.0, -0.5, 0.0, 0.5)
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from softstair import _check

__all__ = ["Quantum", "Stair", "fit_quantum"]

Quantum = float | tuple[float, ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FIT_CANDIDATES = 96


@dataclass(frozen=True)
class Line:
    """fl(fl(n + first)·unit) for n = 0, 1, …: values on a line, each rounded once.

    ``native``: the product may be taken in the tensor's own (or the accumulating) dtype;
    otherwise only float64 rounds it right.
    """

    first: float
    unit: float
    native: bool


@dataclass(frozen=True)
class Rounded:
    """A stair in one dtype: its levels and thresholds after rounding, and as lines if they are."""

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    level_line: Line | None
    threshold_line: Line | None


@dataclass(frozen=True, repr=False)
class Stair:
    """Any stair of K ≥ 2 levels.

    With one quantum, ``levels`` and ``thresholds`` are absolute. With a quantum per channel (a
    tuple, ``axis`` naming the channel dimension) they are in quanta: channel c has the levels
    quantum[c]·levels and the thresholds quantum[c]·thresholds.

    A stair meets a tensor in the tensor's own dtype: levels and thresholds are rounded to it once,
    x equal to a rounded threshold lies in the upper bin, and no value outside the rounded levels is
    ever returned. NaN stays NaN.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    quantum: Quantum = 1.0
    axis: int | None = None
    integers: tuple[int, ...] | None = field(init=False, compare=False)
    """The levels in quanta where they are whole numbers, as integer hardware holds them."""
    spacing: tuple[float, float] | None = field(init=False, compare=False)
    """(distance of thresholds, of levels) where each is one number, as in a linear stair."""
    _rounded: dict[torch.dtype, Rounded] = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # A frozen dataclass sets its own fields this way; lists and integers become plain floats.
        object.__setattr__(self, "levels", _increasing("levels", self.levels, at_least=2))
        object.__setattr__(self, "thresholds", _increasing("thresholds", self.thresholds))
        if len(self.thresholds) != len(self.levels) - 1:
            raise ValueError(
                f"thresholds must be one fewer than the {len(self.levels)} levels, "
                f"but {len(self.thresholds)} were given."
            )
        object.__setattr__(self, "quantum", _quantum(self.quantum))
        if isinstance(self.quantum, tuple) and self.axis is None:
            object.__setattr__(self, "axis", 0)
        if isinstance(self.quantum, float) and self.axis is not None:
            raise ValueError(
                f"axis goes with a quantum per channel, but axis={self.axis!r} was given "
                f"with the one quantum {self.quantum!r}."
            )
        if self.axis is not None:
            _check.integer("axis", self.axis)
        # None hashes by address, which would make a pickled stair unequal to itself elsewhere.
        axis = -1 if self.axis is None else self.axis
        object.__setattr__(self, "_hash", hash((self.levels, self.thresholds, self.quantum, axis)))
        # Worked out now and not when asked for: compilers trace what is asked for.
        object.__setattr__(self, "integers", _integers(self.levels, self.quantum))
        object.__setattr__(self, "spacing", _spacing(self.levels, self.thresholds))
        object.__setattr__(self, "_rounded", {d: self._round(d) for d in DTYPES})

    @classmethod
    def heaviside(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """H⁺₀: levels {0, 1}·ε, threshold 0."""
        return cls._in_quanta((0, 1), (0.0,), quantum, axis)

    @classmethod
    def sign(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """Levels {−1, 1}·ε, threshold 0."""
        return cls._in_quanta((-1, 1), (0.0,), quantum, axis)

    @classmethod
    def ternary(cls, quantum: float | Sequence[float] = 1.0, axis: int | None = None) -> "Stair":
        """Levels {−1, 0, 1}·ε, thresholds ±ε/2."""
        return cls._in_quanta((-1, 0, 1), (-0.5, 0.5), quantum, axis)

    @classmethod
    def linear(
        cls,
        bits: int,
        signed: bool = False,
        quantum: float | Sequence[float] = 1.0,
        thresholds: Literal["floor", "midpoint"] = "floor",
        axis: int | None = None,
    ) -> "Stair":
        """Levels (z + k)·ε, k = 0 … 2^bits − 1, with z = 0 or −2^(bits−1).

        ``"floor"`` puts each threshold at the level above it: ε·clip(⌊x/ε⌋, z, z + K − 1), the
        paper's text. ``"midpoint"`` puts it half-way between neighbours, its experiments.
        """
        _check.integer("bits", bits, 1, 16)
        _check.choice("thresholds", thresholds, ("floor", "midpoint"))
        lowest = -(2 ** (bits - 1)) if signed else 0
        integers = range(lowest, lowest + 2**bits)
        back = 0.0 if thresholds == "floor" else 0.5
        return cls._in_quanta(integers, [n - back for n in integers[1:]], quantum, axis)

    @classmethod
    def _in_quanta(
        cls,
        levels: Iterable[float],
        thresholds: Iterable[float],
        quantum: float | Sequence[float],
        axis: int | None,
    ) -> "Stair":
        unit = cls(tuple(levels), tuple(thresholds))
        return unit.with_quantum(quantum, axis)

    def with_quantum(self, quantum: float | Sequence[float], axis: int | None = None) -> "Stair":
        """The same shape scaled to another quantum, or to one quantum per channel."""
        new = _quantum(quantum)
        scale = 1.0 if isinstance(self.quantum, tuple) else self.quantum
        levels = _rescaled(self.levels, scale, new)
        thresholds = _rescaled(self.thresholds, scale, new)
        if isinstance(new, tuple) and axis is None:
            axis = self.axis
        return Stair(levels, thresholds, new, axis)

    def __call__(self, x: Tensor) -> Tensor:
        """σ(x), in x's dtype and shape; without gradient (:func:`softstair.regularise` has one)."""
        from softstair.kernels import hard

        return hard(x, self)

    def index(self, x: Tensor) -> Tensor:
        """The index k of the level σ(x) = qₖ, as int64; that of NaN is 0."""
        from softstair.kernels import index

        return index(x, self)

    def rounded(self, dtype: torch.dtype) -> Rounded:
        """The stair as a tensor of that dtype sees it."""
        return self._rounded[dtype]

    def _round(self, dtype: torch.dtype) -> Rounded:
        levels = torch.tensor(self.levels, dtype=torch.float64).to(dtype)
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64).to(dtype)
        return Rounded(
            tuple(levels.double().tolist()),
            tuple(thresholds.double().tolist()),
            _line(self.levels, self.quantum, levels),
            _line(self.thresholds, self.quantum, thresholds),
        )

    def __len__(self) -> int:
        return len(self.levels)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        def short(values: tuple[float, ...]) -> str:
            shown = [f"{v:g}" for v in values]
            return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])

        unit = f"{len(self.quantum)} channels" if isinstance(self.quantum, tuple) else self.quantum
        parts = f"levels=({short(self.levels)}), thresholds=({short(self.thresholds)})"
        return f"Stair({parts}, quantum={unit}{'' if self.axis is None else f', axis={self.axis}'})"

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for :func:`json.dumps`."""
        quantum = list(self.quantum) if isinstance(self.quantum, tuple) else self.quantum
        return {
            "levels": list(self.levels),
            "thresholds": list(self.thresholds),
            "quantum": quantum,
            "axis": self.axis,
        }

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> "Stair":
        """The stair that :meth:`to_json` wrote, from its text or its data."""
        values = _parsed(data)
        required, known = {"levels", "thresholds"}, {"levels", "thresholds", "quantum", "axis"}
        if not isinstance(values, Mapping) or not required <= set(values) <= known:
            raise ValueError(
                "a stair in JSON must hold levels and thresholds and nothing but "
                f"{', '.join(sorted(known))}, but {values!r} was given."
            )
        return cls(**values)


def _parsed(data: object) -> Any:
    try:
        return json.loads(data) if isinstance(data, str) else data
    except json.JSONDecodeError as error:
        raise ValueError(f"a stair in JSON must be JSON, but the text is not: {error}.") from None


def _number(name: str, value: object) -> float:
    # numpy's and torch's scalars are numbers too; booleans and text are not.
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers, but {value!r} was given.") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite numbers, but {value!r} was given.")
    return number


def _increasing(name: str, values: object, at_least: int = 1) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of numbers, but {values!r} was given.")
    numbers = tuple(_number(name, value) for value in values)
    if len(numbers) < at_least:
        raise ValueError(f"{name} must be at least {at_least}, but {len(numbers)} were given.")
    for before, after in pairwise(numbers):
        if not before < after:
            raise ValueError(
                f"{name} must increase strictly, but {after!r} was given after {before!r}."
            )
    return numbers


def _quantum(value: object) -> Quantum:
    if (
        isinstance(value, Iterable)
        and not isinstance(value, str)
        and getattr(value, "ndim", 1) != 0
    ):
        numbers = tuple(_number("quantum", one) for one in value)
        if not numbers:
            raise ValueError("quantum must be one number or one a channel, but none was given.")
        given: Quantum = numbers
    else:
        numbers = (_number("quantum", value),)
        given = numbers[0]
    for number in numbers:
        if not number > 0:
            raise ValueError(f"quantum must be above 0, but {number!r} was given.")
    return given


def _integers(levels: tuple[float, ...], quantum: Quantum) -> tuple[int, ...] | None:
    unit = 1.0 if isinstance(quantum, tuple) else quantum
    ratios = [level / unit for level in levels]
    close = (math.isclose(r, round(r), rel_tol=1e-9, abs_tol=1e-9) for r in ratios)
    return tuple(round(r) for r in ratios) if all(close) else None


def _spacing(
    levels: tuple[float, ...], thresholds: tuple[float, ...]
) -> tuple[float, float] | None:
    rises = [b - a for a, b in pairwise(levels)]
    # Two levels have one threshold; any distance will do, and their own is the natural one.
    gaps = [b - a for a, b in pairwise(thresholds)] or rises
    even = all(math.isclose(g, gaps[0], rel_tol=1e-9) for g in gaps)
    if even and all(math.isclose(r, rises[0], rel_tol=1e-9) for r in rises):
        return gaps[len(gaps) // 2], rises[len(rises) // 2]
    return None


def _line(values: tuple[float, ...], quantum: Quantum, rounded: Tensor) -> Line | None:
    """The line through the values, if arithmetic along it gives every rounded value to the bit."""
    unit = 1.0 if isinstance(quantum, tuple) else quantum
    steps = [_in_units(b, unit) - _in_units(a, unit) for a, b in pairwise(values)]
    step = steps[0] if steps else 1.0
    if any(s != step for s in steps):
        return None
    first, unit = _in_units(values[0], unit) / step, unit * step
    number = torch.arange(len(values), dtype=torch.float64) + first
    if not torch.equal((number * unit).to(rounded.dtype), rounded):
        return None
    # Along a line, dividing must find each threshold to within one (kernels.rungs); in a dtype too
    # coarse for its neighbours to differ evenly it does not.
    offset = (rounded.double() - rounded[0].double()) / unit - torch.arange(len(values))
    if offset.abs().max() > 0.9:
        return None
    working = torch.promote_types(rounded.dtype, torch.float32)
    # As the kernels do it: n and the first are added in the working dtype, too.
    product = (torch.arange(len(values), dtype=working) + first) * unit
    return Line(first, unit, torch.equal(product.to(rounded.dtype), rounded))


def _rescaled(values: tuple[float, ...], old: float, new: Quantum) -> tuple[float, ...]:
    factor = 1.0 if isinstance(new, tuple) else new
    return values if old == factor else tuple(_in_units(v, old) * factor for v in values)


def _in_units(value: float, unit: float) -> float:
    """value/unit; the whole and half numbers of a linear stair come out exact."""
    ratio = value / unit
    halves = round(2 * ratio) / 2
    return halves if math.isclose(ratio, halves, rel_tol=1e-12) else ratio


@torch.no_grad()
def fit_quantum(weight: Tensor, stair: Stair, per_channel: bool = False) -> Stair:
    """Return ``stair`` with the quantum ε that minimises ‖w − σ_ε(w)‖².

    The search runs from a hundredth of the quantum that reaches the largest weight to a quarter
    above it, so that the fit may clip outliers.

    >>> weight = torch.tensor([[-0.3, 0.3, 0.0, 0.3], [0.6, -0.6, 0.0, 0.0]])
    >>> [round(q, 2) for q in fit_quantum(weight, Stair.ternary(), per_channel=True).quantum]
    [0.3, 0.6]

    Args:
        weight: The weights w; dimension 0 is the output channels.
        stair: The stair σ, whose own quantum does not matter.
        per_channel: Fit a quantum to each output channel instead of one to all weights.
    """
    unit = stair.with_quantum(1.0)
    rows = weight.detach().double().reshape(weight.shape[0] if per_channel else 1, -1)
    reach = max(abs(unit.levels[0]), abs(unit.levels[-1]))
    largest = rows.abs().amax(dim=1, keepdim=True) / reach
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    best = torch.full_like(largest, torch.inf)
    quantum = largest.clone()
    for ratio in torch.linspace(0.01, 1.25, FIT_CANDIDATES, dtype=torch.float64).tolist():
        candidate = largest * ratio
        error = (unit(rows / candidate) * candidate - rows).square().sum(dim=1, keepdim=True)
        quantum = torch.where(error < best, candidate, quantum)
        best = torch.minimum(best, error)
    # Rounded to float32, in which it is saved, so that a loaded network is the trained one.
    quanta = quantum.float().double().flatten().tolist()
    return stair.with_quantum(quanta, axis=0) if per_channel else stair.with_quantum(quanta[0])
