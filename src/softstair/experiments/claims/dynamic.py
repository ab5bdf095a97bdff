"""Claims about dynamic noise: decay intervals, power laws, forward passes, and static noise beside.

Dynamic is noise whose std is annealed and whose mean stays, as in the paper's figures; uniform,
where nothing else is said.
"""

from collections.abc import Callable, Sequence

from softstair.experiments.claims.contrasts import (
    Folds,
    before_the_drop,
    difference,
    final,
    mean,
    side_by_side,
)
from softstair.experiments.claims.static import FULL, LEVEL, at_level, shared, split
from softstair.experiments.claims.verdict import (
    ALONE,
    Verdict,
    Word,
    capital,
    greater,
    in_part,
    points,
    read,
    scale,
    so,
    spread,
    together,
    told,
    untested,
    whole,
)
from softstair.experiments.design import FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.studies import DYNAMIC, STATIC, Study
from softstair.experiments.variance import BLOCKS, explained
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
    "same_end_is_worst",
    "synchronisation_over_noise",
]

GAIN = 0.04
"""What random sampling gains over the expectation under partition, in the paper."""
BEST, WORST = ("partition", "same_start"), "same_end"
ORDER = (*BEST, "overlapped", WORST)
UNIFORM = {"noise": "uniform", **DYNAMIC}


def expectation_level(study: Study, level: float) -> Verdict:
    """The best schedule of the expectation comes to that level."""
    found: dict[str, Folds] = {}
    for interval in ORDER:
        for power in POWERS:
            one = {**UNIFORM, "forward": "expectation", "interval": interval, "power": power}
            found |= side_by_side(study, {f"{read(interval)}, {power}": one})
    best = max(found, key=lambda name: mean(found[name]).value, default=None)
    return at_level(study, {} if best is None else {f"best is {best}:": found[best]}, level)


def expectation_below_static(study: Study) -> Verdict:
    """Static noise with mode is above the expectation with partition."""
    sides = _with_static(study, "expectation", "mode")
    if not sides:
        return untested(study, "partition with expectation, and static noise with mode")
    gap = difference(sides["static mode"], sides["partition"])
    said = f"{told(sides)}: static noise is {points(gap)} points above"
    return Verdict(greater(gap), capital(f"{said}{scale(study, sides)}."))


def intervals_in_order(study: Study, forwards: Sequence[str], noises: Sequence[str]) -> Verdict:
    """Partition and same start are above the other decay intervals, and same end is below; with
    each of these forward passes and noise types."""
    wanted = [(forward, noise) for forward in forwards for noise in noises]
    there: dict[str, dict[str, Folds]] = {}
    found: list[Word] = []
    for forward, noise in wanted:
        sides = _intervals(study, forward, noise)
        if WORST not in sides or not set(BEST) & set(sides):
            continue
        pairs = [(one, "overlapped") for one in BEST if {one, "overlapped"} <= set(sides)]
        pairs += [(one, WORST) for one in sides if one != WORST]
        found += [greater(difference(sides[one], sides[other])) for one, other in pairs]
        there[noise if len(forwards) == 1 else forward] = sides
    if not there:
        return untested(study, "same end and better decay intervals")
    head = {name: f"{name}: " if len(wanted) > 1 else "" for name in there}
    said = "; ".join(f"{head[name]}{told(sides)}" for name, sides in there.items())
    verdict = Verdict(together(found), capital(f"{said}{scale(study, *there.values())}."))
    verdict = whole(verdict, there, noises if len(forwards) == 1 else forwards)
    return whole(verdict, shared(there), ORDER)


def same_end_is_worst(study: Study) -> Verdict:
    """Same end is below the other decay intervals, with each forward pass."""
    each = {forward: _intervals(study, forward, "uniform") for forward in FORWARDS}
    there = {forward: sides for forward, sides in each.items() if WORST in sides}
    if not there:
        return untested(study, "same end and other decay intervals")
    found: list[Word] = []
    said = []
    for forward, sides in there.items():
        gaps = [difference(sides[one], sides[WORST]) for one in sides if one != WORST]
        found += map(greater, gaps)
        least = min(gaps, key=lambda gap: gap.value)
        said.append(f"{forward} {mean(sides[WORST])}, {points(least)} points below the next")
    text = f"Same end with {'; with '.join(said)}{scale(study, *there.values())}."
    return whole(whole(Verdict(together(found), text), there, FORWARDS), shared(there), ORDER)


def homogeneous_is_better(study: Study) -> Verdict:
    """With the expectation under partition and same start, homogeneous is above progressive."""
    there: dict[str, dict[str, Folds]] = {}
    for interval in BEST:
        wanted = {**UNIFORM, "forward": "expectation", "interval": interval}
        if sides := split(study, wanted, "power", POWERS):
            there[interval] = sides
    if not there:
        return untested(study, "both power laws of partition or same start, with expectation")
    gaps = {
        name: difference(sides["homogeneous"], sides["progressive"])
        for name, sides in there.items()
    }
    said = " and ".join(f"{points(gap)} points under {read(one)}" for one, gap in gaps.items())
    text = f"Homogeneous is above progressive by {said}{scale(study, *there.values())}."
    return whole(Verdict(together(map(greater, gaps.values())), text), there, BEST)


def random_gains(study: Study) -> Verdict:
    """Under partition, random is above the expectation; by about 4 points at full length."""
    wanted = {**UNIFORM, "interval": "partition"}
    sides = split(study, wanted, "forward", ("random", "expectation"))
    if not sides:
        return untested(study, "partition with random and with expectation")
    gap = difference(sides["random"], sides["expectation"])
    word = greater(gap)
    if study.epochs >= FULL[study.data] and gap.value < GAIN - LEVEL:
        word = in_part(word)
    said = f"partition with {told(sides)}: random gains {points(gap)} points"
    return Verdict(word, capital(f"{said}{scale(study, sides)}."))


def partition_until_the_drop(study: Study) -> Verdict:
    """With mode, partition is level with static noise before the learning rate drops, and below
    it in the end."""
    first = _with_static(study, "mode", "mode", before_the_drop)
    last = _with_static(study, "mode", "mode")
    if not first or not last:
        return untested(study, "partition and static noise with mode, and a drop of learning rate")
    early = difference(first["partition"], first["static mode"])
    late = difference(last["static mode"], last["partition"])
    found = [so(abs(early.value) <= LEVEL), greater(late)]
    said = f"before the drop {told(first)}; in the end {told(last)}{scale(study, first, last)}"
    return Verdict(together(found), capital(f"{said}."))


def partition_equals_static(study: Study) -> Verdict:
    """The best of partition is level with the best of static noise, or above."""
    partition = {**UNIFORM, "interval": "partition"}
    static = {**STATIC, "noise": "uniform"}
    sides = {f"partition with {one}": {**partition, "forward": one} for one in FORWARDS}
    sides |= {f"static {one}": {**static, "forward": one} for one in ("mode", "random")}
    there = {name: one for name, one in sides.items() if side_by_side(study, {name: one})}
    found = side_by_side(study, there, over=["power"]) if there else {}
    best = {
        kind: max(
            (name for name in found if name.startswith(kind)),
            key=lambda name: mean(found[name]).value,
            default=None,
        )
        for kind in ("partition", "static")
    }
    if best["partition"] is None or best["static"] is None:
        return untested(study, "partition and static noise")
    gap = difference(found[best["partition"]], found[best["static"]])
    less = f"at best, partition less static noise is {points(gap, sign=True)} points"
    word = so(gap.value >= -LEVEL)
    if gap.low is not None and gap.low < -LEVEL:  # that may be by chance
        word = in_part(word)
    return Verdict(word, capital(f"{told(found)}: {less}{scale(study, found)}."))


def synchronisation_over_noise(study: Study) -> Verdict:
    """The decay interval explains more of the variance than the noise type does; where not every
    combination is there, its means lie further apart than those of static noise types do."""
    found, _ = explained(BLOCKS["dynamic-expectation"], study.trainings)
    if found is not None and "interval" in found.table.factors:
        interval, noise = found["interval"], found["noise"]
        word = so(interval.eta > noise.eta)
        if interval.low is None or noise.high is None or interval.low <= noise.high:
            word = in_part(word)
        said = f"Decay intervals explain {interval} of the variance, noise types {noise}"
        folds = {"": dict.fromkeys(found.table.folds, 0.0)}
        verdict = Verdict(word, f"{said}, with the expectation{scale(study, folds)}.")
        verdict = whole(verdict, found.table.factors["noise"], noise_names())
        return whole(verdict, found.table.factors["interval"], ORDER)
    intervals = [_intervals(study, forward, "uniform") for forward in FORWARDS]
    noises = [
        split(study, {**STATIC, "forward": forward}, "noise", noise_names())
        for forward in ("mode", "random")
    ]
    if not any(intervals) or not any(noises):
        return untested(study, "several decay intervals and several noise types")
    wide, narrow = max(intervals, key=_width), max(noises, key=_width)
    gap = spread(wide) - spread(narrow)
    said = f"decay intervals lie up to {100 * spread(wide):.1f} points apart ({told(wide)}), static"
    said += f" noise types up to {100 * spread(narrow):.1f} ({told(narrow)})"
    word = so(gap > 0) if gap > ALONE else in_part(so(gap > 0))
    return Verdict(word, capital(f"{said}{scale(study, wide, narrow)}."))


def _width(sides: dict[str, Folds]) -> float:
    return spread(sides) if sides else -1.0


def _intervals(study: Study, forward: str, noise: str) -> dict[str, Folds]:
    return split(study, {**DYNAMIC, "forward": forward, "noise": noise}, "interval", ORDER)


def _with_static(
    study: Study,
    forward: str,
    static: str,
    of: Callable[[Training], float | None] = final,
) -> dict[str, Folds]:
    """Partition, on the mean over power laws, beside static noise."""
    sides = {
        "partition": {**UNIFORM, "forward": forward, "interval": "partition"},
        f"static {static}": {**STATIC, "noise": "uniform", "forward": static},
    }
    return side_by_side(study, sides, of, over=["power"])
