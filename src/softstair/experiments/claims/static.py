"""Claims about static noise: its levels, its noise types, mode and random."""

from collections.abc import Mapping

import numpy as np

from softstair.experiments.claims.contrasts import (
    Side,
    before_the_drop,
    difference,
    extremes,
    minus,
    side_by_side,
    split,
)
from softstair.experiments.claims.verdict import (
    Verdict,
    Word,
    above,
    judged_by,
    lacking,
    same,
    so,
    untested,
)
from softstair.experiments.statistics import FEWEST, Mean, mean_of
from softstair.experiments.studies import STATIC, Study
from softstair.noise import names as noise_names

__all__ = [
    "FULL",
    "LEVEL",
    "STATIC_LEVELS",
    "at_level",
    "mode_above_random",
    "mode_gains_more_at_the_drop",
    "noise_matters_little",
    "static_level",
    "uniform_is_worse",
    "uniform_varies_most",
]

FULL = {"cifar10": 500, "svhn": 500, "speech": 120}
"""The paper's epochs: levels are judged of no fewer."""
STATIC_LEVELS = {"mode": 0.86, "random": 0.82}
"""The paper's levels of static noise on CIFAR-10."""
LEVEL = 0.015
"""How far below the paper's level is still at that level; and how near is the same accuracy."""
LITTLE = 0.01
"""What noise types may differ by if they are said not to matter."""
TAIL = 6
"""Variability is that of the last sixth of the epochs: the last 20 of 120."""


def static_level(study: Study, forward: str) -> Verdict:
    """Static noise reaches the paper's level, on the mean over noise types."""
    sides = {f"static / {forward}": {**STATIC, "forward": forward}}
    return at_level(study, side_by_side(study, sides, over=["noise"]), STATIC_LEVELS[forward])


def at_level(study: Study, sides: Mapping[str, Side], level: float) -> Verdict:
    """The one side that there is reaches the paper's level."""
    if not sides or study.epochs < FULL[study.data]:
        return untested(study, f"trainings over {FULL[study.data]} epochs")
    (side,) = sides.values()
    gap = mean_of(level - value for value in side.folds.values())
    word = so(gap.value <= LEVEL)
    return judged_by(study, [word], sides, {f"below the paper's {100 * level:.0f} %": gap})


def mode_above_random(study: Study) -> Verdict:
    """Mode is above random."""
    sides = split(study, STATIC, "forward", STATIC_LEVELS)
    if not sides:
        return untested(study, "static noise with mode and with random")
    gap = difference(sides["mode"], sides["random"])
    return judged_by(study, [above(gap)], sides, {"mode above random": gap})


def mode_gains_more_at_the_drop(study: Study) -> Verdict:
    """From before the drop of the learning rate to the last epoch, mode gains more than random."""
    wanted = {forward: {**STATIC, "forward": forward} for forward in STATIC_LEVELS}
    before, last = side_by_side(study, wanted, before_the_drop), side_by_side(study, wanted)
    if not before or not last:
        return untested(study, "static noise with mode and with random, and a drop of the rate")
    gains = {name: minus(last[name].folds, before[name].folds) for name in wanted}
    more = mean_of(minus(gains["mode"], gains["random"]).values())
    gaps = {f"gain of {name}": mean_of(gain.values()) for name, gain in gains.items()}
    sides = {f"{name} / before the drop": side for name, side in before.items()} | last
    return judged_by(study, [above(more)], sides, {**gaps, "mode gains more by": more})


def noise_matters_little(study: Study) -> Verdict:
    """The means of noise types differ by a point at most, with mode and with random."""
    words: list[Word] = []
    gaps: dict[str, Mean] = {}
    every = _by_noise(study)
    for forward, sides in every.items():
        gap = difference(*extremes(sides))
        words.append(same(gap, LITTLE))
        gaps[f"largest difference, {forward}"] = gap
    if not words:
        return untested(study, "static noise of several types, with mode or random")
    return judged_by(study, words, _together(every), gaps, _missing(every))


def uniform_is_worse(study: Study) -> Verdict:
    """With random, uniform noise is below the mean of the others."""
    sides = _by_noise(study).get("random", {})
    if "uniform / random" not in sides:
        return untested(study, "static noise of uniform and other types with random")
    uniform = sides["uniform / random"].folds
    others = [side.folds for label, side in sides.items() if label != "uniform / random"]
    rest = {fold: sum(side[fold] for side in others) / len(others) for fold in uniform}
    gap = mean_of(minus(rest, uniform).values())
    missing = lacking((label.partition(" /")[0] for label in sides), noise_names())
    return judged_by(study, [above(gap)], sides, {"mean of the others above uniform": gap}, missing)


def uniform_varies_most(study: Study) -> Verdict:
    """The accuracy of triangular noise varies least over folds, that of uniform noise most.

    Variability is the standard deviation over folds, averaged over the last sixth of the epochs.
    """
    words: list[Word] = []
    gaps: dict[str, Mean] = {}
    every = {
        forward: sides
        for forward, sides in _by_noise(study).items()
        if {f"uniform / {forward}", f"triangular / {forward}"} <= set(sides)
        and all(len(side.folds) > 1 for side in sides.values())
    }
    for forward, sides in every.items():
        stds = {label: _variability(study, side) for label, side in sides.items()}
        low, high = min(stds.values()), max(stds.values())
        words += [
            so(stds[f"triangular / {forward}"] == low),
            so(stds[f"uniform / {forward}"] == high),
        ]
        gaps |= {f"std over folds, {label}": mean_of([std]) for label, std in stds.items()}
    if not words:
        return untested(study, "static noise of uniform, triangular and other types on two folds")
    few = any(len(side.folds) < FEWEST for sides in every.values() for side in sides.values())
    missing = [*_missing(every), *(["a third fold"] if few else [])]
    return judged_by(study, words, _together(every), gaps, missing)


def _variability(study: Study, side: Side) -> float:
    curves = [
        [epoch.valid_accuracy for epoch in one.curve[-max(1, study.epochs // TAIL) :]]
        for one in study.trainings
        if (one.configuration, one.fold) in side.trainings
    ]
    return float(np.std(curves, axis=0, ddof=1).mean())


def _by_noise(study: Study) -> dict[str, dict[str, Side]]:
    """Noise types side by side, for each forward that has several."""
    every = {
        forward: split(
            study, {**STATIC, "forward": forward}, "noise", noise_names(), f"{{}} / {forward}"
        )
        for forward in STATIC_LEVELS
    }
    return {forward: sides for forward, sides in every.items() if sides}


def _together(every: Mapping[str, Mapping[str, Side]]) -> dict[str, Side]:
    return {label: side for sides in every.values() for label, side in sides.items()}


def _missing(every: Mapping[str, Mapping[str, Side]]) -> list[str]:
    """Forwards that none has, and noise types that not all have."""
    names = [{label.partition(" /")[0] for label in sides} for sides in every.values()]
    shared = set.intersection(*names) if names else set()
    return lacking(every, STATIC_LEVELS) + lacking(shared, noise_names())
