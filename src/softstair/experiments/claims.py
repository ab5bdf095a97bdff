"""The paper's claims: each in our words, what is compared to judge it, and what was measured.

A claim is judged once by every study of its data set that can tell: by trainings of full length and
by shorter ones, evaluated with running statistics, as the paper does, and with fresh ones. The
verdict is that of the longest study with running statistics; the others are given beside it.
Shorter trainings decide what is above what, not levels; and those with static noise on CIFAR-10
whose mean is below half of the paper's level have not learned enough to decide anything.

Dynamic is noise whose std is annealed and whose mean stays, as in the paper's figures; uniform,
where nothing else is said. Decay intervals are means over the power laws that all of them have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from softstair.experiments.design import DESIGNS, FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.studies import (
    DYNAMIC,
    STATIC,
    TITLES,
    Mean,
    Study,
    final_of,
    select,
    studies,
)
from softstair.experiments.verdicts import (
    Contrast,
    Gap,
    Group,
    Judgement,
    Pick,
    Word,
    above,
    judge,
    same,
)
from softstair.noise import names as noise_names
from softstair.schedule import POWERS

__all__ = ["CLAIMS", "FULL", "Claim", "Finding", "decisive", "judged"]

FULL = {
    design.configurations[0].recipe.data: design.configurations[0].recipe.epochs
    for design in DESIGNS.values()
}
"""The paper's epochs of each data set: levels are judged of no fewer."""
STATIC_LEVELS = {"mode": 0.86, "random": 0.82}
"""The paper's levels of static noise on CIFAR-10."""
LEVEL = 0.015
"""How far below the paper's level is still at that level; and how near is the same accuracy."""
LITTLE = 0.01
"""What noise types may differ by if they are said not to matter."""
GAIN = 0.04
"""What random sampling gains over the expectation under partition, in the paper."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    name      such as static-mode-level
    data      the data set that it is about
    title     what it is about, in a few words
    says      what the paper says, in our words
    contrast  what is compared to judge it
    """

    name: str
    data: str
    title: str
    says: str
    contrast: Contrast

    def measured(self, trainings: Iterable[Training]) -> "Finding":
        """The claim with the verdicts of these trainings."""
        return self.of(studies(trainings))

    def of(self, parts: Iterable[Study]) -> "Finding":
        """The claim with the verdicts of these studies."""
        mine = [decisive(study) for study in parts if study.data == self.data]
        verdicts = (
            judge(self.contrast, study, FULL[self.data]) for study in mine if study.trainings
        )
        return Finding(self.name, self.data, self.title, self.says, tuple(verdicts))


@dataclass(frozen=True)
class Finding:
    """A claim and its verdicts, one for each study of its data set, in their order: those with
    running statistics first, and of those the longest."""

    name: str
    data: str
    claim: str
    says: str
    verdicts: tuple[Judgement, ...]

    @property
    def tested(self) -> list[Judgement]:
        """The verdicts of the studies that can tell."""
        return [judgement for judgement in self.verdicts if judgement.verdict != "not tested"]

    @property
    def verdict(self) -> Word:
        """That of the longest study with running statistics that can tell."""
        running = (judgement for judgement in self.tested if not judgement.study.is_fresh)
        return next((judgement.verdict for judgement in running), "not tested")

    @property
    def measured(self) -> str:
        """What was measured, in a sentence for each study; in brackets, where it differs from
        :attr:`verdict`, what that study says."""
        sentences = [
            judgement.sentence
            + ("" if judgement.verdict == self.verdict else f" ({judgement.verdict})")
            for judgement in self.tested
        ]
        if sentences or not self.verdicts:
            return " ".join(sentences) or f"No training of {TITLES[self.data]} is there."
        return max(self.verdicts, key=lambda judgement: len(judgement.study.trainings)).sentence


def judged(trainings: Iterable[Training]) -> list[Finding]:
    """Every claim with its verdicts, in the paper's order.

    >>> {finding.verdict for finding in judged([])}
    {'not tested'}
    """
    parts = studies(trainings)
    return [claim.of(parts) for claim in CLAIMS]


def decisive(study: Study) -> Study:
    """A study without the configurations that have not learned enough to decide: static noise on
    CIFAR-10 in shortened trainings, with a mean below half of the paper's level."""
    if study.data != "cifar10" or study.epochs >= FULL[study.data]:
        return study
    left_out: set[int] = set()
    for forward, level in STATIC_LEVELS.items():
        for noise in noise_names():
            group = select(study.trainings, {**STATIC, "forward": forward, "noise": noise})
            mean = final_of(group)
            if mean is not None and mean.value < level / 2:
                left_out.update(map(id, group))
    kept = tuple(training for training in study.trainings if id(training) not in left_out)
    return replace(study, trainings=kept)


# What is compared

UNIFORM = {"noise": "uniform", **DYNAMIC}
BEST, WORST = ("partition", "same_start"), "same_end"
ORDER = (*BEST, "overlapped", WORST)
PARTITION = {**UNIFORM, "interval": "partition"}
BEFORE = " / before the drop"
HIGHEST, LOWEST = Pick("highest"), Pick("lowest")


def _cells(given: Mapping[str, Any], field: str, values: Iterable[str], label: str = "{}") -> Any:
    """A cell for each value of a degree of freedom."""
    return {label.format(value): {**given, field: value} for value in values}


def _noises(
    gaps: tuple[Gap, ...], forwards: Iterable[str] = STATIC_LEVELS, label: str = "{}", **facts: Any
) -> tuple[Group, ...]:
    """Types of static noise, with each forward pass."""
    cells = {
        forward: _cells({**STATIC, "forward": forward}, "noise", noise_names(), label)
        for forward in forwards
    }
    return tuple(Group(cells[name], gaps, name, optional=True, **facts) for name in cells)


def _intervals(gaps: tuple[Gap, ...], field: str, values: Iterable[str], **facts: Any) -> Any:
    """Decay intervals of dynamic noise, with each of these values of another degree of freedom;
    the expectation, unless it is that."""
    given = {"forward": "expectation", **UNIFORM}
    cells = {value: _cells({**given, field: value}, "interval", ORDER) for value in values}
    return tuple(Group(cells[name], gaps, name, optional=True, **facts) for name in cells)


def _in_order(field: str, values: Iterable[str]) -> Contrast:
    """Partition and same start are above the other decay intervals, and same end is below."""
    pairs = [(interval, "overlapped") for interval in BEST] + [
        (interval, WORST) for interval in ORDER[:-1]
    ]
    gaps = (Gap(f"{interval} above {other}, {{}}".replace("_", " "), interval, other, above)
            for interval, other in pairs)  # fmt: skip
    groups = _intervals(tuple(gaps), field, values, needs=((WORST,), BEST))
    return Contrast((groups,), "same end, and partition or same start")


def _with_static(gaps: tuple[Gap, ...], forward: str, tail: str = "") -> tuple[Group, ...]:
    """Partition, on the mean over power laws, beside static noise with mode."""
    cells = {
        f"partition / {forward}{tail}": {**PARTITION, "forward": forward},
        f"static / mode{tail}": {**STATIC, "noise": "uniform", "forward": "mode"},
    }
    return (Group(cells, gaps, over=("power",), before_drop=bool(tail)),)


def _level(level: float, cells: Mapping[str, Mapping[str, Any]]) -> Contrast:
    """The best of the cells reaches a level of the paper."""
    gaps = (Gap(f"below the paper's {100 * level:.0f} %", level, HIGHEST, _is_reached),)
    return Contrast((tuple(Group({label: cells[label]}, gaps) for label in cells),), keep="best")


def _is_reached(gap: Mean) -> Word:
    return "holds" if gap.value <= LEVEL else "does not hold"


def _is_extreme(gap: Mean) -> Word:
    return "holds" if gap.value == 0 else "does not hold"


SCHEDULES = {
    f"best: {interval} / {power}": {
        **UNIFORM, "forward": "expectation", "interval": interval, "power": power,
    }
    for interval in ORDER
    for power in POWERS
}  # fmt: skip
NOISE_MATTERS_LITTLE = Contrast(
    (_noises((Gap("largest difference, {}", HIGHEST, LOWEST, partial(same, tolerance=LITTLE)),)),),
    "static noise of several types, with mode or random",
)  # fmt: skip
SAME_END_IS_WORST = Contrast(
    (_intervals((*(Gap(None, interval, WORST, above) for interval in ORDER[:-1]),
                 Gap("next above same end, {}", Pick("lowest", but=WORST), WORST)),
                "forward", FORWARDS, needs=((WORST,),)),),
    "same end and other decay intervals",
)  # fmt: skip
UNIFORM_VARIES_MOST = Contrast(
    (_noises((Gap(None, "triangular", LOWEST, _is_extreme),
              Gap(None, "uniform", HIGHEST, _is_extreme),
              *(Gap(f"std over folds, {noise} / {{}}", noise, 0.0) for noise in noise_names())),
             needs=(("triangular",), ("uniform",)), folds=2),),
    "static noise of uniform, triangular and other types on two folds",
    variability=True,
)  # fmt: skip


def _on_other_data(data: str) -> tuple[Claim, ...]:
    """What the paper says of SVHN and of Speech Commands alike."""
    title = TITLES[data]
    return (
        Claim(
            f"{data}-static-noise", data, f"{title}: static noise types",
            "Networks trained with static noise of different types converge to about the same "
            "accuracy.",
            NOISE_MATTERS_LITTLE,
        ),
        Claim(
            f"{data}-intervals", data, f"{title}: decay intervals",
            "Decay intervals that anneal the layers near the input first, partition and same "
            "start, are better than the others.",
            _in_order("forward", FORWARDS),
        ),
        Claim(
            f"{data}-same-end", data, f"{title}: same end",
            "Same end is the worst decay interval, whatever the forward pass.",
            SAME_END_IS_WORST,
        ),
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "static-mode-level", "cifar10", "Static noise, mode",
        "Static noise with the mode comes to about 86 % on CIFAR-10.",
        _level(0.86, {"static / mode": {**STATIC, "forward": "mode"}}),
    ),
    Claim(
        "static-random-level", "cifar10", "Static noise, random",
        "Static noise with random sampling comes to about 82 %.",
        _level(0.82, {"static / random": {**STATIC, "forward": "random"}}),
    ),
    Claim(
        "static-mode-above-random", "cifar10", "Mode above random",
        "Under static noise the mode has a small advantage over random sampling.",
        Contrast(
            ((Group(_cells(STATIC, "forward", STATIC_LEVELS),
                    (Gap("mode above random", "mode", "random", above),)),),),
            "static noise with mode and with random",
        ),
    ),
    Claim(
        "static-drop", "cifar10", "Mode and the learning rate",
        "Part of that advantage is the higher sensitivity of the mode to the lower learning rate.",
        Contrast(
            ((Group(_cells(STATIC, "forward", STATIC_LEVELS, f"{{}}{BEFORE}"), before_drop=True),),
             (Group(_cells(STATIC, "forward", STATIC_LEVELS)),)),
            "static noise with mode and with random, and a drop of the rate",
            (Gap("gain of mode", "mode", f"mode{BEFORE}"),
             Gap("gain of random", "random", f"random{BEFORE}"),
             Gap("mode gains more by", "gain of mode", "gain of random", above)),
        ),
    ),
    Claim(
        "static-noise", "cifar10", "Noise type under static noise",
        "The noise type hardly matters to accuracy.",
        NOISE_MATTERS_LITTLE,
    ),
    Claim(
        "static-random-uniform", "cifar10", "Uniform noise with random sampling",
        "The exception: with random sampling, uniform noise is slightly worse than the others.",
        Contrast(
            (_noises((Gap("mean of the others above uniform", Pick("mean", but="uniform"),
                          "uniform", above),),
                     ["random"], needs=(("uniform",),)),),
            "static noise of uniform and other types with random",
        ),
    ),
    Claim(
        "expectation-level", "cifar10", "Dynamic noise, expectation",
        "The best schedules of the expectation come to about 79 %.",
        _level(0.79, SCHEDULES),
    ),
    Claim(
        "expectation-below-static", "cifar10", "Expectation below static noise",
        "That is a loss against static noise that is not negligible (7 points).",
        Contrast(
            (_with_static((Gap("static noise above partition", "static / mode",
                               "partition / expectation", above),), "expectation"),),
            "partition with expectation, and static noise with mode",
        ),
    ),
    Claim(
        "expectation-intervals", "cifar10", "Decay intervals, expectation",
        "With the expectation under uniform noise, partition and same start are best, and same "
        "end is worst.",
        _in_order("noise", ["uniform"]),
    ),
    Claim(
        "expectation-other-noises", "cifar10", "The same under other noise types",
        "Triangular, normal and logistic noise confirm it.",
        _in_order("noise", ["triangular", "normal", "logistic"]),
    ),
    Claim(
        "homogeneous", "cifar10", "Power law",
        "With the expectation, homogeneous power laws are slightly better than progressive ones "
        "under partition and same start.",
        Contrast(
            (tuple(Group(_cells({**UNIFORM, "forward": "expectation", "interval": interval},
                                "power", POWERS),
                         (Gap("homogeneous above progressive, {}", "homogeneous",
                              "progressive", above),), interval)
                   for interval in BEST),),
            "both power laws of partition or same start, with expectation",
        ),
    ),
    Claim(
        "random-gains", "cifar10", "Random sampling with partition",
        "Under partition, random sampling improves accuracy by about 4 points over the "
        "expectation.",
        Contrast(
            ((Group(_cells(PARTITION, "forward", ("random", "expectation"), "partition / {}"),
                    (Gap("random above expectation", "partition / random",
                         "partition / expectation", above, GAIN - LEVEL),)),),),
            "partition with random and with expectation",
        ),
    ),
    Claim(
        "random-same-end", "cifar10", "Random sampling with same end",
        "Random sampling mitigates the degradation that same end brings.",
        Contrast(
            ((Group({f"{interval} / {forward}":
                     {**UNIFORM, "interval": interval, "forward": forward}
                     for forward in ("expectation", "random") for interval in ("partition", WORST)},
                    (Gap("partition above same end, expectation",
                         "partition / expectation", "same_end / expectation"),
                     Gap("partition above same end, random",
                         "partition / random", "same_end / random"),
                     Gap("less with random by", "partition above same end, expectation",
                         "partition above same end, random", above))),),),
            "partition and same end, with expectation and with random",
        ),
    ),
    Claim(
        "mode-partition-static", "cifar10", "Mode with partition against static noise",
        "With the mode, partition yields the same accuracy as static noise until the learning "
        "rate drops; only then static noise is ahead.",
        Contrast(
            (_with_static((Gap("partition above static noise, before the drop",
                               f"partition / mode{BEFORE}", f"static / mode{BEFORE}",
                               partial(same, tolerance=LEVEL)),), "mode", BEFORE),
             _with_static((Gap("static noise above partition, last epoch",
                               "static / mode", "partition / mode", above),), "mode")),
            "partition and static noise with mode, and a drop of the rate",
        ),
    ),
    Claim(
        "same-end", "cifar10", "Same end",
        "Same end is the worst decay interval, whatever the forward pass.",
        SAME_END_IS_WORST,
    ),
    Claim(
        "synchronisation", "cifar10", "Synchronisation over noise type",
        "What matters most is not the shape of the noise, but how the layers' schedules are "
        "synchronised.",
        Contrast(
            (_intervals((Gap("decay intervals differ by, {}", HIGHEST, LOWEST),),
                        "forward", FORWARDS),
             _noises((Gap("static noise types differ by, {}", HIGHEST, LOWEST),),
                     label="{} / static")),
            "several decay intervals and several types of static noise",
            (Gap("decay intervals by more", "decay intervals differ by, {}",
                 "static noise types differ by, {}", above),),
            keep="widest",
        ),
    ),
    *_on_other_data("svhn"),
    *_on_other_data("speech"),
    Claim(
        "speech-variability", "speech", "Speech Commands: variability",
        "Under static noise, accuracy varies least with triangular noise and most with uniform "
        "noise.",
        UNIFORM_VARIES_MOST,
    ),
    Claim(
        "speech-partition-static", "speech", "Speech Commands: partition against static noise",
        "Partition can come to about the same accuracy as static noise.",
        Contrast(
            ((Group({**_cells(PARTITION, "forward", FORWARDS, "partition / {}"),
                     **_cells({**STATIC, "noise": "uniform"}, "forward", STATIC_LEVELS,
                              "static / {}")},
                    (Gap("best of partition above best of static noise",
                         Pick("highest", "partition"), Pick("highest", "static"),
                         partial(same, tolerance=inf, below=LEVEL)),),
                    optional=True, over=("power",),
                    needs=(tuple(f"partition / {forward}" for forward in FORWARDS),
                           ("static / mode", "static / random"))),),),
            "partition and static noise, on the same folds",
            all_cells=False,
        ),
    ),
)  # fmt: skip
"""In the paper's order."""
