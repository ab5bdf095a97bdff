"""The paper's claims: each in our words, what is compared to judge it, and what was measured.

A claim is judged once by every study of its data set that can tell: by trainings of full length and
by shorter ones, evaluated with running statistics, as the paper does, and with fresh ones. The
verdict is that of the longest study with running statistics; the others are given beside it.
Shorter trainings decide what is above what, not levels.

Dynamic is noise whose std is annealed and whose mean stays, as in the paper's figures; uniform,
where nothing else is said. Decay intervals are means over the power laws that all of them have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from softstair.experiments.design import FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.studies import (
    DYNAMIC,
    FULL,
    STATIC,
    STATIC_LEVELS,
    TITLES,
    Study,
    decisive,
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
    at_most,
    judge,
    same,
)
from softstair.noise import names as noise_names
from softstair.schedule import POWERS

LEVEL = 0.015
"""How far below the paper's level is still at that level; and how near is the same accuracy."""
LITTLE = 0.01
"""What noise types may differ by if they are said not to matter."""
GAIN = 0.04
"""What random sampling gains over the expectation under partition, in the paper."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about a data set: what it says in our words, and how to judge it."""

    name: str
    data: str
    title: str
    says: str
    contrast: Contrast

    def measured(self, trainings: Iterable[Training]) -> "Finding":
        return self.of(studies(trainings))

    def of(self, parts: Iterable[Study]) -> "Finding":
        mine = [decisive(study) for study in parts if study.data == self.data]
        verdicts = (
            judge(self.contrast, study, FULL[self.data]) for study in mine if study.trainings
        )
        return Finding(self.name, self.data, self.title, self.says, tuple(verdicts))


@dataclass(frozen=True)
class Finding:
    """A claim and its verdicts, one for each study of its data set, in the order of studies."""

    name: str
    data: str
    claim: str
    says: str
    verdicts: tuple[Judgement, ...]

    @property
    def tested(self) -> list[Judgement]:
        return [judgement for judgement in self.verdicts if judgement.verdict != "not tested"]

    @property
    def verdict(self) -> Word:
        running = (judgement for judgement in self.tested if not judgement.study.is_fresh)
        return next((judgement.verdict for judgement in running), "not tested")

    @property
    def measured(self) -> str:
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


# What is compared. {} in the label of a gap stands for the name of its group.

UNIFORM = {"noise": "uniform", **DYNAMIC}
PARTITION = {**UNIFORM, "interval": "partition"}
BEST, WORST = ("partition", "same_start"), "same_end"
ORDER = (*BEST, "overlapped", WORST)
BEFORE = " / before the drop"
RANDOM, EXPECTATION = "partition / random", "partition / expectation"
HIGHEST, LOWEST = Pick("highest"), Pick("lowest")


def _cells(given: Mapping[str, Any], field: str, values: Iterable[str], label: str = "{}") -> Any:
    return {label.format(value): {**given, field: value} for value in values}


def _noises(
    *gaps: Gap, forwards: Iterable[str] = STATIC_LEVELS, label: str = "{}", **facts: Any
) -> tuple[Group, ...]:
    """Types of static noise, with each forward pass."""
    cells = {
        forward: _cells({**STATIC, "forward": forward}, "noise", noise_names(), label)
        for forward in forwards
    }
    return tuple(Group(cells[name], gaps, name, optional=True, **facts) for name in cells)


def _intervals(*gaps: Gap, field: str, values: Iterable[str], **facts: Any) -> tuple[Group, ...]:
    """Decay intervals of dynamic noise, with each of these values of another degree of freedom;
    the expectation, unless it is that."""
    given = {"forward": "expectation", **UNIFORM}
    cells = {value: _cells({**given, field: value}, "interval", ORDER) for value in values}
    return tuple(Group(cells[name], gaps, name, optional=True, **facts) for name in cells)


def _in_order(field: str, values: Iterable[str]) -> Contrast:
    """Partition and same start are above the other decay intervals, and same end is below."""
    pairs = [(interval, "overlapped") for interval in BEST]
    pairs += [(interval, WORST) for interval in ORDER[:-1]]
    gaps = [
        Gap(f"{interval} above {other}, {{}}".replace("_", " "), interval, other, above)
        for interval, other in pairs
    ]
    groups = _intervals(*gaps, field=field, values=values, one_of=((WORST,), BEST))
    return Contrast(groups, "same end, and partition or same start")


def _with_static(gap: Gap, forward: str, before_drop: bool = False) -> Group:
    """Partition, on the mean over power laws, beside static noise with mode."""
    tail = BEFORE if before_drop else ""
    cells = {
        f"partition / {forward}{tail}": {**PARTITION, "forward": forward},
        f"static / mode{tail}": {**STATIC, "noise": "uniform", "forward": "mode"},
    }
    return Group(cells, (gap,), over=("power",), before_drop=before_drop, family=tail)


def _level(level: float, cells: Mapping[str, Mapping[str, Any]]) -> Contrast:
    """The best of the cells reaches a level of the paper."""
    gaps = (
        Gap(
            f"below the paper's {100 * level:.0f} %", level, HIGHEST, partial(at_most, limit=LEVEL)
        ),
    )
    return Contrast(tuple(Group({label: cells[label]}, gaps) for label in cells), keep="best")


def _one_group(
    cells: Any, *gaps: Gap, needs: str, all_cells: bool = True, **facts: Any
) -> Contrast:
    return Contrast((Group(cells, gaps, **facts),), needs, all_cells=all_cells)


STATIC_FORWARDS = _cells(STATIC, "forward", STATIC_LEVELS)
MODE_ABOVE_RANDOM = _one_group(
    STATIC_FORWARDS,
    Gap("mode above random", "mode", "random", above),
    needs="static noise with mode and with random",
)
FORWARDS_BEFORE = _cells(STATIC, "forward", STATIC_LEVELS, f"{{}}{BEFORE}")
MODE_GAINS_MORE = Contrast(
    (Group(FORWARDS_BEFORE, before_drop=True, family=BEFORE), Group(STATIC_FORWARDS)),
    "static noise with mode and with random, and a drop of the rate",
    (
        Gap("gain of mode", "mode", f"mode{BEFORE}"),
        Gap("gain of random", "random", f"random{BEFORE}"),
        Gap("mode gains more by", "gain of mode", "gain of random", above),
    ),
)
NOISE_MATTERS_LITTLE = Contrast(
    _noises(Gap("largest difference, {}", HIGHEST, LOWEST, partial(same, tolerance=LITTLE))),
    "static noise of several types, with mode or random",
)
UNIFORM_IS_WORSE = Contrast(
    _noises(
        Gap("mean of the others above uniform", Pick("mean", but="uniform"), "uniform", above),
        forwards=["random"],
        one_of=(("uniform",),),
    ),
    "static noise of uniform and other types with random",
)
UNIFORM_VARIES_MOST = Contrast(
    _noises(
        Gap(None, "triangular", LOWEST, partial(at_most, limit=0)),
        Gap(None, HIGHEST, "uniform", partial(at_most, limit=0)),
        *(Gap(f"std over folds, {noise} / {{}}", noise, 0.0) for noise in noise_names()),
        one_of=(("triangular",), ("uniform",)),
        folds=2,
    ),
    "static noise of uniform, triangular and other types on two folds",
    variability=True,
)
EXPECTATION_LEVEL = _level(
    0.79,
    {
        f"best: {interval} / {power}": {
            **UNIFORM, "forward": "expectation", "interval": interval, "power": power
        }
        for interval in ORDER
        for power in POWERS
    },
)  # fmt: skip
STATIC_ABOVE = Gap("static noise above partition", "static / mode", EXPECTATION, above)
STATIC_ABOVE_EXPECTATION = Contrast(
    (_with_static(STATIC_ABOVE, "expectation"),),
    "partition with expectation, and static noise with mode",
)
HOMOGENEOUS_IS_BETTER = Contrast(
    tuple(
        Group(
            _cells({**UNIFORM, "forward": "expectation", "interval": interval}, "power", POWERS),
            (Gap("homogeneous above progressive, {}", "homogeneous", "progressive", above),),
            interval,
        )
        for interval in BEST
    ),
    "both power laws of partition or same start, with expectation",
)
RANDOM_GAINS = _one_group(
    _cells(PARTITION, "forward", ("random", "expectation"), "partition / {}"),
    Gap("random above expectation", RANDOM, EXPECTATION, above, GAIN - LEVEL),
    needs="partition with random and with expectation",
)
LOSS, RANDOM_LOSS = (f"partition above same end, {name}" for name in ("expectation", "random"))
RANDOM_MITIGATES_SAME_END = _one_group(
    {
        f"{interval} / {forward}": {**UNIFORM, "interval": interval, "forward": forward}
        for forward in ("expectation", "random")
        for interval in ("partition", WORST)
    },
    Gap(LOSS, EXPECTATION, "same_end / expectation"),
    Gap(RANDOM_LOSS, RANDOM, "same_end / random"),
    Gap("less with random by", LOSS, RANDOM_LOSS, above),
    needs="partition and same end, with expectation and with random",
)
EQUAL_UNTIL_THE_DROP = Gap(
    "partition above static noise, before the drop",
    f"partition / mode{BEFORE}",
    f"static / mode{BEFORE}",
    partial(same, tolerance=LEVEL),
)
STATIC_AHEAD = Gap(
    "static noise above partition, last epoch", "static / mode", "partition / mode", above
)
STATIC_AHEAD_AFTER_THE_DROP = Contrast(
    (
        _with_static(EQUAL_UNTIL_THE_DROP, "mode", before_drop=True),
        _with_static(STATIC_AHEAD, "mode"),
    ),
    "partition and static noise with mode, and a drop of the rate",
)
SAME_END_IS_WORST = Contrast(
    _intervals(
        *(Gap(None, interval, WORST, above) for interval in ORDER[:-1]),
        Gap("next above same end, {}", Pick("lowest", but=WORST), WORST),
        field="forward",
        values=FORWARDS,
        one_of=((WORST,),),
    ),
    "same end and other decay intervals",
)
BY_INTERVAL, BY_NOISE = "decay intervals differ by, {}", "static noise types differ by, {}"
SYNCHRONISATION = Contrast(
    (
        *_intervals(Gap(BY_INTERVAL, HIGHEST, LOWEST), field="forward", values=FORWARDS),
        *_noises(Gap(BY_NOISE, HIGHEST, LOWEST), label="{} / static", family="noises"),
    ),
    "several decay intervals and several types of static noise",
    (Gap("decay intervals by more", BY_INTERVAL, BY_NOISE, above),),
    keep="widest",
)
PARTITIONS = _cells(PARTITION, "forward", FORWARDS, "partition / {}")
STATICS = _cells({**STATIC, "noise": "uniform"}, "forward", STATIC_LEVELS, "static / {}")
PARTITION_EQUALS_STATIC = _one_group(
    {**PARTITIONS, **STATICS},
    Gap(
        "best of partition above best of static noise",
        Pick("highest", "partition"),
        Pick("highest", "static"),
        partial(same, tolerance=inf, below=LEVEL),
    ),
    needs="partition and static noise, on the same folds",
    all_cells=False,
    optional=True,
    over=("power",),
    one_of=(tuple(PARTITIONS), tuple(STATICS)),
)


# The claims


def _on_other_data(data: str) -> tuple[Claim, ...]:
    """What the paper says of SVHN and of Speech Commands alike."""
    title = TITLES[data]
    return (
        Claim(f"{data}-static-noise", data, f"{title}: static noise types",
              "Networks trained with static noise of different types converge to about the same "
              "accuracy.", NOISE_MATTERS_LITTLE),
        Claim(f"{data}-intervals", data, f"{title}: decay intervals",
              "Decay intervals that anneal the layers near the input first, partition and same "
              "start, are better than the others.", _in_order("forward", FORWARDS)),
        Claim(f"{data}-same-end", data, f"{title}: same end",
              "Same end is the worst decay interval, whatever the forward pass.",
              SAME_END_IS_WORST),
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    Claim("static-mode-level", "cifar10", "Static noise, mode",
          "Static noise with the mode comes to about 86 % on CIFAR-10.",
          _level(0.86, {"static / mode": {**STATIC, "forward": "mode"}})),
    Claim("static-random-level", "cifar10", "Static noise, random",
          "Static noise with random sampling comes to about 82 %.",
          _level(0.82, {"static / random": {**STATIC, "forward": "random"}})),
    Claim("static-mode-above-random", "cifar10", "Mode above random",
          "Under static noise the mode has a small advantage over random sampling.",
          MODE_ABOVE_RANDOM),
    Claim("static-drop", "cifar10", "Mode and the learning rate",
          "Part of that advantage is the higher sensitivity of the mode to the lower learning "
          "rate.", MODE_GAINS_MORE),
    Claim("static-noise", "cifar10", "Noise type under static noise",
          "The noise type hardly matters to accuracy.", NOISE_MATTERS_LITTLE),
    Claim("static-random-uniform", "cifar10", "Uniform noise with random sampling",
          "The exception: with random sampling, uniform noise is slightly worse than the others.",
          UNIFORM_IS_WORSE),
    Claim("expectation-level", "cifar10", "Dynamic noise, expectation",
          "The best schedules of the expectation come to about 79 %.", EXPECTATION_LEVEL),
    Claim("expectation-below-static", "cifar10", "Expectation below static noise",
          "That is a loss against static noise that is not negligible (7 points).",
          STATIC_ABOVE_EXPECTATION),
    Claim("expectation-intervals", "cifar10", "Decay intervals, expectation",
          "With the expectation under uniform noise, partition and same start are best, and same "
          "end is worst.", _in_order("noise", ["uniform"])),
    Claim("expectation-other-noises", "cifar10", "The same under other noise types",
          "Triangular, normal and logistic noise confirm it.",
          _in_order("noise", ["triangular", "normal", "logistic"])),
    Claim("homogeneous", "cifar10", "Power law",
          "With the expectation, homogeneous power laws are slightly better than progressive ones "
          "under partition and same start.", HOMOGENEOUS_IS_BETTER),
    Claim("random-gains", "cifar10", "Random sampling with partition",
          "Under partition, random sampling improves accuracy by about 4 points over the "
          "expectation.", RANDOM_GAINS),
    Claim("random-same-end", "cifar10", "Random sampling with same end",
          "Random sampling mitigates the degradation that same end brings.",
          RANDOM_MITIGATES_SAME_END),
    Claim("mode-partition-static", "cifar10", "Mode with partition against static noise",
          "With the mode, partition yields the same accuracy as static noise until the learning "
          "rate drops; only then static noise is ahead.", STATIC_AHEAD_AFTER_THE_DROP),
    Claim("same-end", "cifar10", "Same end",
          "Same end is the worst decay interval, whatever the forward pass.", SAME_END_IS_WORST),
    Claim("synchronisation", "cifar10", "Synchronisation over noise type",
          "What matters most is not the shape of the noise, but how the layers' schedules are "
          "synchronised.", SYNCHRONISATION),
    *_on_other_data("svhn"),
    *_on_other_data("speech"),
    Claim("speech-variability", "speech", "Speech Commands: variability",
          "Under static noise, accuracy varies least with triangular noise and most with uniform "
          "noise.", UNIFORM_VARIES_MOST),
    Claim("speech-partition-static", "speech", "Speech Commands: partition against static noise",
          "Partition can come to about the same accuracy as static noise.",
          PARTITION_EQUALS_STATIC),
)  # fmt: skip
"""In the paper's order."""
