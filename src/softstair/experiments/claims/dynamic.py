"""Claims about dynamic noise: decay intervals, power laws, forward passes, and static noise beside.

Dynamic is noise whose std is annealed and whose mean stays, as in the paper's figures; uniform,
where nothing else is said. Decay intervals are means over the power laws that all of them have.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from softstair.experiments.claims.contrasts import (
    Side,
    before_the_drop,
    difference,
    extremes,
    final,
    minus,
    side_by_side,
    split,
)
from softstair.experiments.claims.static import FULL, LEVEL, at_level
from softstair.experiments.claims.verdict import (
    Verdict,
    Word,
    above,
    judged_by,
    lacking,
    read,
    same,
    untested,
)
from softstair.experiments.design import FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean, mean_of
from softstair.experiments.studies import DYNAMIC, STATIC, Study
from softstair.noise import names as noise_names
from softstair.schedule import POWERS

__all__ = [
    "expectation_below_static",
    "expectation_level",
    "homogeneous_is_better",
    "intervals_in_order",
    "partition_equals_static",
    "partition_until_the_drop",
    "random_gains",
    "random_mitigates_same_end",
    "same_end_is_worst",
    "synchronisation_over_noise",
]

GAIN = 0.04
"""What random sampling gains over the expectation under partition, in the paper."""
BEST, WORST = ("partition", "same_start"), "same_end"
ORDER = (*BEST, "overlapped", WORST)
UNIFORM = {"noise": "uniform", **DYNAMIC}


def expectation_level(study: Study, level: float) -> Verdict:
    """The best schedule of the expectation reaches the level."""
    every: dict[str, Side] = {}
    for interval in ORDER:
        for power in POWERS:
            wanted = {**UNIFORM, "forward": "expectation", "interval": interval, "power": power}
            every |= side_by_side(study, {f"best: {read(interval)} / {power}": wanted})
    best = max(every, key=lambda label: every[label].mean.value, default=None)
    return at_level(study, {} if best is None else {best: every[best]}, level)


def expectation_below_static(study: Study) -> Verdict:
    """Static noise with mode is above the expectation with partition."""
    sides = _with_static(study, "expectation")
    if not sides:
        return untested(study, "partition with expectation, and static noise with mode")
    gap = difference(sides["static / mode"], sides["partition / expectation"])
    return judged_by(study, [above(gap)], sides, {"static noise above partition": gap})


def intervals_in_order(study: Study, forwards: Sequence[str], noises: Sequence[str]) -> Verdict:
    """Partition and same start are above the other decay intervals, and same end is below; with
    each of these forward passes and noise types."""
    every: dict[str, dict[str, Side]] = {}
    words: list[Word] = []
    gaps: dict[str, Mean] = {}
    for forward, noise in ((forward, noise) for forward in forwards for noise in noises):
        sides = _intervals(study, forward, noise)
        if WORST not in sides or not set(BEST) & set(sides):
            continue
        name = noise if len(forwards) == 1 else forward
        every[name] = sides
        pairs = [(one, "overlapped") for one in BEST if {one, "overlapped"} <= set(sides)]
        for one, other in pairs + [(one, WORST) for one in sides if one != WORST]:
            gap = difference(sides[one], sides[other])
            words.append(above(gap))
            gaps[f"{read(one)} above {read(other)}, {name}"] = gap
    if not every:
        return untested(study, "same end, and partition or same start")
    missing = lacking(every, noises if len(forwards) == 1 else forwards) + _intervals_lack(every)
    return judged_by(study, words, _labelled(every), gaps, missing)


def same_end_is_worst(study: Study) -> Verdict:
    """Same end is below the other decay intervals, with each forward pass."""
    every = {forward: _intervals(study, forward, "uniform") for forward in FORWARDS}
    every = {forward: sides for forward, sides in every.items() if WORST in sides}
    if not every:
        return untested(study, "same end and other decay intervals")
    words: list[Word] = []
    gaps: dict[str, Mean] = {}
    for forward, sides in every.items():
        others = [difference(sides[one], sides[WORST]) for one in sides if one != WORST]
        words += map(above, others)
        gaps[f"next above same end, {forward}"] = min(others, key=lambda gap: gap.value)
    missing = lacking(every, FORWARDS) + _intervals_lack(every)
    return judged_by(study, words, _labelled(every), gaps, missing)


def random_mitigates_same_end(study: Study) -> Verdict:
    """From partition to same end, less is lost with random than with the expectation."""
    labels = {
        f"{read(interval)} / {forward}": {**UNIFORM, "interval": interval, "forward": forward}
        for forward in ("expectation", "random")
        for interval in ("partition", WORST)
    }
    sides = side_by_side(study, labels)
    if not sides:
        return untested(study, "partition and same end, with expectation and with random")
    losses = {
        forward: minus(sides[f"partition / {forward}"].folds, sides[f"same end / {forward}"].folds)
        for forward in ("expectation", "random")
    }
    less = mean_of(minus(losses["expectation"], losses["random"]).values())
    gaps = {f"partition above same end, {name}": mean_of(x.values()) for name, x in losses.items()}
    return judged_by(study, [above(less)], sides, {**gaps, "less with random by": less})


def homogeneous_is_better(study: Study) -> Verdict:
    """With the expectation under partition and same start, homogeneous is above progressive."""
    every: dict[str, dict[str, Side]] = {}
    for interval in BEST:
        wanted = {**UNIFORM, "forward": "expectation", "interval": interval}
        if sides := split(study, wanted, "power", POWERS):
            every[interval] = sides
    if not every:
        return untested(study, "both power laws of partition or same start, with expectation")
    gaps = {
        f"homogeneous above progressive, {read(name)}": difference(
            sides["homogeneous"], sides["progressive"]
        )
        for name, sides in every.items()
    }
    return judged_by(study, map(above, gaps.values()), _labelled(every), gaps, lacking(every, BEST))


def random_gains(study: Study) -> Verdict:
    """Under partition, random is above the expectation; by about 4 points at full length."""
    wanted = {**UNIFORM, "interval": "partition"}
    sides = split(study, wanted, "forward", ("random", "expectation"), "partition / {}")
    if not sides:
        return untested(study, "partition with random and with expectation")
    gap = difference(sides["partition / random"], sides["partition / expectation"])
    words = [above(gap)]
    if study.epochs >= FULL[study.data] and gap.value < GAIN - LEVEL:
        words.append("does not hold")
    return judged_by(study, words, sides, {"random above expectation": gap})


def partition_until_the_drop(study: Study) -> Verdict:
    """With mode, partition is the same as static noise before the learning rate drops, and below
    it in the end."""
    before, last = _with_static(study, "mode", before_the_drop), _with_static(study, "mode")
    if not before or not last:
        return untested(study, "partition and static noise with mode, and a drop of the rate")
    early = difference(before["partition / mode"], before["static / mode"])
    late = difference(last["static / mode"], last["partition / mode"])
    sides = {f"{label} / before the drop": side for label, side in before.items()} | last
    gaps = {
        "partition above static noise, before the drop": early,
        "static noise above partition, last epoch": late,
    }
    return judged_by(study, [same(early, LEVEL), above(late)], sides, gaps)


def partition_equals_static(study: Study) -> Verdict:
    """The best of partition is the same as the best of static noise, or above."""
    partition = {**UNIFORM, "interval": "partition"}
    static = {**STATIC, "noise": "uniform"}
    wanted = {f"partition / {one}": {**partition, "forward": one} for one in FORWARDS}
    wanted |= {f"static / {one}": {**static, "forward": one} for one in ("mode", "random")}
    there = {name: one for name, one in wanted.items() if side_by_side(study, {name: one})}
    sides = side_by_side(study, there, over=["power"]) if there else {}
    best: dict[str, Side] = {}
    for label, side in sides.items():
        kind = label.partition(" /")[0]
        if kind not in best or side.mean.value > best[kind].mean.value:
            best[kind] = side
    if len(best) < 2:
        return untested(study, "partition and static noise, on the same folds")
    gap = difference(best["partition"], best["static"])
    name = "best of partition above best of static noise"
    return judged_by(study, [same(gap, inf, below=LEVEL)], sides, {name: gap})


def synchronisation_over_noise(study: Study) -> Verdict:
    """Decay intervals, where they lie furthest apart, differ by more than static noise types do."""
    intervals = {forward: _intervals(study, forward, "uniform") for forward in FORWARDS}
    noises = {
        forward: split(study, {**STATIC, "forward": forward}, "noise", noise_names())
        for forward in ("mode", "random")
    }
    if not any(intervals.values()) or not any(noises.values()):
        return untested(study, "several decay intervals and several types of static noise")
    widest, wide = max(intervals.items(), key=_width)
    narrowest, narrow = max(noises.items(), key=_width)
    spreads = [minus(*(side.folds for side in extremes(sides))) for sides in (wide, narrow)]
    more = mean_of(minus(*spreads).values())
    gaps = {
        f"decay intervals differ by, {widest}": mean_of(spreads[0].values()),
        f"static noise types differ by, {narrowest}": mean_of(spreads[1].values()),
        "decay intervals by more": more,
    }
    sides = _labelled({widest: wide}) | _labelled({f"static / {narrowest}": narrow})
    missing = lacking(wide, ORDER) + lacking(narrow, noise_names())
    return judged_by(study, [above(more)], sides, gaps, missing)


def _width(group: tuple[str, Mapping[str, Side]]) -> float:
    return difference(*extremes(group[1])).value if group[1] else -1.0


def _intervals(study: Study, forward: str, noise: str) -> dict[str, Side]:
    return split(study, {**DYNAMIC, "forward": forward, "noise": noise}, "interval", ORDER)


def _intervals_lack(every: Mapping[str, Mapping[str, Side]]) -> list[str]:
    """Decay intervals that not all of them have."""
    return lacking(set.intersection(*(set(sides) for sides in every.values())), ORDER)


def _labelled(every: Mapping[str, Mapping[str, Side]]) -> dict[str, Side]:
    return {
        f"{read(label)} / {read(name)}": side
        for name, sides in every.items()
        for label, side in sides.items()
    }


def _with_static(
    study: Study, forward: str, of: Callable[[Training], float | None] = final
) -> dict[str, Side]:
    """Partition, on the mean over power laws, beside static noise with mode."""
    sides = {
        f"partition / {forward}": {**UNIFORM, "forward": forward, "interval": "partition"},
        "static / mode": {**STATIC, "noise": "uniform", "forward": "mode"},
    }
    return side_by_side(study, sides, of, over=["power"])
