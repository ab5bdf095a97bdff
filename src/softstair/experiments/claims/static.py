"""Claims about static noise: its levels, its noise types, mode and random."""

from collections.abc import Iterable, Mapping

from softstair.experiments.claims.contrasts import Folds, difference, mean, side_by_side
from softstair.experiments.claims.verdict import (
    Verdict,
    capital,
    greater,
    points,
    scale,
    so,
    spread,
    together,
    told,
    untested,
    whole,
)
from softstair.experiments.studies import STATIC, Study, select
from softstair.noise import names as noise_names

__all__ = [
    "FULL",
    "LEVEL",
    "at_level",
    "mode_above_random",
    "noise_matters_little",
    "shared",
    "split",
    "static_level",
    "uniform_is_worse",
]

FULL = {"cifar10": 500, "svhn": 500, "speech": 120}
"""The paper's epochs: levels are judged of no fewer."""
LEVEL = 0.015
"""How far below the paper's level is still at that level; and how near is the same accuracy."""
LITTLE = 0.01
"""What noise types may differ by if they are said not to matter."""


def static_level(study: Study, forward: str, level: float) -> Verdict:
    """Static noise comes to that level, on the mean over noise types."""
    what = f"static {forward}"
    sides = side_by_side(study, {what: {**STATIC, "forward": forward}}, over=["noise"])
    return at_level(study, sides, level)


def mode_above_random(study: Study) -> Verdict:
    """Under static noise, mode is above random."""
    sides = split(study, STATIC, "forward", ("mode", "random"))
    if not sides:
        return untested(study, "static noise with mode and with random")
    gap = difference(sides["mode"], sides["random"])
    apart = f"mode is {points(gap)} points above"
    return Verdict(greater(gap), capital(f"{told(sides)}: {apart}{scale(study, sides)}."))


def noise_matters_little(study: Study, less_than_forwards: bool) -> Verdict:
    """Under static noise, the means of noise types differ by a point at most; and, if that is
    asked, by less than those of mode and random do."""
    each = {
        forward: split(study, {**STATIC, "forward": forward}, "noise", noise_names())
        for forward in ("mode", "random")
    }
    each = {forward: sides for forward, sides in each.items() if sides}
    forwards = split(study, STATIC, "forward", ("mode", "random"))
    if not each or (less_than_forwards and not forwards):
        return untested(study, "static noise of several types, with mode and with random")
    spreads = {forward: spread(sides) for forward, sides in each.items()}
    found = [so(one <= LITTLE) for one in spreads.values()]
    said = " and ".join(f"{100 * one:.1f} points with {name}" for name, one in spreads.items())
    said = f"the means of noise types differ by up to {said}"
    if forwards:
        gap = difference(forwards["mode"], forwards["random"])
        said += f"; those of mode and random by {points(gap)}"
        found += [so(max(spreads.values()) < abs(gap.value))] if less_than_forwards else []
    verdict = Verdict(together(found), capital(f"{said}{scale(study, *each.values())}."))
    verdict = whole(verdict, each, ("mode", "random"))
    return whole(verdict, shared(each), noise_names())


def uniform_is_worse(study: Study) -> Verdict:
    """Under static noise with random, uniform noise is below the mean of the others."""
    sides = split(study, {**STATIC, "forward": "random"}, "noise", noise_names())
    if "uniform" not in sides:
        return untested(study, "static noise of uniform and other types with random")
    uniform = sides["uniform"]
    others = [one for name, one in sides.items() if name != "uniform"]
    rest = {fold: sum(one[fold] for one in others) / len(others) for fold in uniform}
    gap = difference(rest, uniform)
    said = f"{told(sides)}: uniform is {points(gap)} points below the mean of the others"
    verdict = Verdict(greater(gap), capital(f"{said}{scale(study, sides)}."))
    return whole(verdict, sides, noise_names())


def at_level(study: Study, sides: Mapping[str, Folds], level: float) -> Verdict:
    """Whether the one side that there is comes to the paper's level, or above."""
    if not sides:
        return untested(study, "the trainings whose level it is")
    ((_, folds),) = sides.items()
    said = f"{told(sides)}{scale(study, sides)}"
    if study.epochs < FULL[study.data]:
        full = f"the paper's level is that of {FULL[study.data]} epochs"
        return Verdict("not tested", capital(f"{said}; {full}."))
    return Verdict(so(mean(folds).value >= level - LEVEL), capital(f"{said}."))


def split(
    study: Study, wanted: Mapping[str, str], name: str, values: Iterable[str]
) -> dict[str, Folds]:
    """The values of a degree of freedom that are there, side by side, if they are two at least."""
    there = {one.settings[name] for one in select(study.trainings, wanted) if one.is_done}
    sides = {value: {**wanted, name: value} for value in values if value in there}
    return side_by_side(study, sides) if len(sides) > 1 else {}


def shared(each: Mapping[str, Mapping[str, Folds]]) -> set[str]:
    """The sides that all of them have."""
    return set.intersection(*(set(sides) for sides in each.values()))
