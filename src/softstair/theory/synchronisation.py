"""The theorem's practical reading: is each layer, at every t, as annealed as those after it?

How annealed a layer is, is measured by what is left of its noise: ρ_ℓ(t) = β_ℓ(t)/β_ℓ(0), or
|α_ℓ(t)|/|α_ℓ(0)| where the std never moves. Synchronised means ρ_ℓ(t) ≤ ρ_{ℓ+1}(t) for all ℓ and t;
neighbours are enough, because a pair that breaks the order has neighbours between it that do.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from softstair.schedule import NoisePath, Schedule
from softstair.theory.spans import Span, logs_of_function, moves, spans_of_grid, spans_of_schedule

__all__ = ["Break", "Synchronisation", "synchronisation"]

STILL = "nothing moves: every layer keeps its noise throughout"


@dataclass(frozen=True)
class Break:
    """For start < t < end layer ``later`` is ahead of layer ``earlier``, which feeds it.

    ``end`` is where the order first returns (it may break again later), or the end of the schedule.
    """

    earlier: int
    later: int
    start: float
    end: float


@dataclass(frozen=True)
class Synchronisation:
    """``"strictly"``: every layer is somewhere ahead of the next and nowhere behind it;
    ``"weakly"``: some pair always goes together; ``"broken"``: ``first`` says who, and when."""

    order: Literal["strictly", "weakly", "broken"]
    reason: str
    breaks: tuple[Break, ...] = ()
    resolution: float = 0.0
    """The step of the grid that was looked at; 0 where the answer is exact."""

    @property
    def holds(self) -> bool:
        return self.order != "broken"

    @property
    def first(self) -> Break | None:
        """The earliest break, that of the foremost pair among those of one time."""
        return min(self.breaks, key=lambda one: (one.start, one.earlier), default=None)


def synchronisation(
    path: NoisePath, layers: int | None = None, end: float | None = None, points: int = 1001
) -> Synchronisation:
    """Whether a schedule keeps its layers in order; for each pair of neighbours, its first break.

    ``layers``, ``end`` (the last time to look at) and ``points`` are for functions of your own.

    >>> synchronisation(Schedule(layers=7, period=50, interval="partition")).order
    'strictly'
    >>> synchronisation(Schedule(layers=7, period=50, interval="overlapped")).order
    'weakly'
    >>> synchronisation(Schedule(layers=7, period=50, interval="same_end")).first
    Break(earlier=5, later=6, start=0.0, end=350.0)
    >>> synchronisation(lambda layer, t: (0.0, 1 / (1 + t * (3 - layer))), layers=3, end=9.0).order
    'strictly'
    """
    if isinstance(path, Schedule):
        if not moves(path):
            return Synchronisation("weakly", STILL)
        pairs = [spans_of_schedule(path, layer) for layer in range(path.layers - 1)]
        return _judge(pairs, resolution=0.0)
    if layers is None or end is None or points < 2 or layers < 1 or not end > 0:
        raise ValueError(
            "a function (layer, t) -> (mean, std) is judged for layers of at least 1, over times "
            f"from 0 to an end above 0, at 2 or more points, but layers={layers!r}, end={end!r} "
            f"and points={points!r} were given."
        )
    times = [end * index / (points - 1) for index in range(points)]
    left = [logs_of_function(path, layer, times) for layer in range(layers)]
    if all(log == 0 for one in left for log in one):
        return Synchronisation("weakly", STILL)
    grids = [spans_of_grid(times, before, after) for before, after in pairwise(left)]
    return _judge(grids, resolution=times[1])


def _judge(pairs: list[list[Span]], resolution: float) -> Synchronisation:
    breaks = []
    for layer, spans in enumerate(pairs):
        wrong = [index for index, span in enumerate(spans) if span[2] > 0]
        if wrong:
            last = wrong[0]
            while last + 1 in wrong:
                last += 1
            breaks.append(Break(layer, layer + 1, spans[wrong[0]][0], spans[last][1]))
    if breaks:
        result = Synchronisation("broken", "", tuple(breaks), resolution)
        return Synchronisation("broken", _sentence(result.first), tuple(breaks), resolution)
    together = [layer for layer, spans in enumerate(pairs) if all(sign == 0 for *_, sign in spans)]
    if not pairs:
        return Synchronisation("weakly", "there is one layer, and nothing to be in order with")
    if together:
        reason = f"no layer is ever behind, but {_pairs(together)} always go together"
        return Synchronisation("weakly", reason, (), resolution)
    reason = "every layer is at some time ahead of the next, and never behind it"
    return Synchronisation("strictly", reason, (), resolution)


def _sentence(first: Break | None) -> str:
    assert first is not None
    return (
        f"layer {first.later} is ahead of layer {first.earlier}, which feeds it, "
        f"from t = {first.start:g} to t = {first.end:g}"
    )


def _pairs(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"layers {layers[0]} and {layers[0] + 1}"
    return f"{len(layers)} pairs of neighbours"
