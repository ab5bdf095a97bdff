"""What the paper claims, and what was measured: each claim in our words, and how it is judged.

A claim is judged once by every study of its data set that can tell: by trainings of full length and
by shorter ones, evaluated with running statistics, as the paper does, and with fresh ones. The
verdict is that of the longest study with running statistics; the others are given beside it.
Shorter trainings decide what is above what, not levels; and those with static noise on CIFAR-10
whose mean is below half of the paper's level have not learned enough to decide anything.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from softstair.experiments.claims import dynamic, static
from softstair.experiments.claims.verdict import Verdict, Word
from softstair.experiments.design import FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.statistics import final_of
from softstair.experiments.studies import STATIC, TITLES, Study, select, studies
from softstair.noise import names as noise_names

__all__ = ["CLAIMS", "Claim", "Finding", "Verdict", "decisive", "judged"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    name     such as static-mode-level
    data     the data set that it is about
    title    what it is about, in a few words
    says     what the paper says, in our words
    judge    the verdict of one study; not tested, where it lacks what the claim takes
    """

    name: str
    data: str
    title: str
    says: str
    judge: Callable[[Study], Verdict]

    def measured(self, trainings: Iterable[Training]) -> "Finding":
        """The claim with the verdicts of these trainings."""
        return self.of(studies(trainings))

    def of(self, parts: Iterable[Study]) -> "Finding":
        """The claim with the verdicts of these studies."""
        mine = [decisive(study) for study in parts if study.data == self.data]
        every = tuple(self.judge(study) for study in mine if study.trainings)
        return Finding(self.name, self.data, self.title, self.says, every)


@dataclass(frozen=True)
class Finding:
    """A claim and its verdicts, one for each study of its data set, in their order: those with
    running statistics first, and of those the longest."""

    name: str
    data: str
    claim: str
    says: str
    verdicts: tuple[Verdict, ...]

    @property
    def tested(self) -> list[Verdict]:
        """The verdicts of the studies that can tell."""
        return [one for one in self.verdicts if one.verdict != "not tested"]

    @property
    def verdict(self) -> Word:
        """That of the longest study with running statistics that can tell."""
        return next((one.verdict for one in self.tested if not one.study.is_fresh), "not tested")

    @property
    def measured(self) -> str:
        """What was measured, in a sentence for each study; in brackets, where it differs from
        :attr:`verdict`, what that study says."""
        sentences = [
            one.sentence + ("" if one.verdict == self.verdict else f" ({one.verdict})")
            for one in self.tested
        ]
        if sentences or not self.verdicts:
            return " ".join(sentences) or f"No training of {TITLES[self.data]} is there."
        return max(self.verdicts, key=lambda one: len(one.study.trainings)).sentence


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
    if study.data != "cifar10" or study.epochs >= static.FULL[study.data]:
        return study
    left_out: set[int] = set()
    for forward, level in static.STATIC_LEVELS.items():
        for noise in noise_names():
            group = select(study.trainings, {**STATIC, "forward": forward, "noise": noise})
            mean = final_of(group)
            if mean is not None and mean.value < level / 2:
                left_out.update(map(id, group))
    kept = tuple(one for one in study.trainings if id(one) not in left_out)
    return replace(study, trainings=kept)


def _elsewhere(data: str) -> tuple[Claim, ...]:
    """What the paper says of SVHN and of Speech Commands alike."""
    title = TITLES[data]
    return (
        Claim(
            f"{data}-static-noise",
            data,
            f"{title}: static noise types",
            "Networks trained with static noise of different types converge to about the same "
            "accuracy.",
            static.noise_matters_little,
        ),
        Claim(
            f"{data}-intervals",
            data,
            f"{title}: decay intervals",
            "Decay intervals that anneal the layers near the input first, partition and same "
            "start, are better than the others.",
            partial(dynamic.intervals_in_order, forwards=FORWARDS, noises=("uniform",)),
        ),
        Claim(
            f"{data}-same-end",
            data,
            f"{title}: same end",
            "Same end is the worst decay interval, whatever the forward pass.",
            dynamic.same_end_is_worst,
        ),
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "static-mode-level",
        "cifar10",
        "Static noise, mode",
        "Static noise with the mode comes to about 86 % on CIFAR-10.",
        partial(static.static_level, forward="mode"),
    ),
    Claim(
        "static-random-level",
        "cifar10",
        "Static noise, random",
        "Static noise with random sampling comes to about 82 %.",
        partial(static.static_level, forward="random"),
    ),
    Claim(
        "static-mode-above-random",
        "cifar10",
        "Mode above random",
        "Under static noise the mode has a small advantage over random sampling.",
        static.mode_above_random,
    ),
    Claim(
        "static-drop",
        "cifar10",
        "Mode and the learning rate",
        "Part of that advantage is the higher sensitivity of the mode to the lower learning rate.",
        static.mode_gains_more_at_the_drop,
    ),
    Claim(
        "static-noise",
        "cifar10",
        "Noise type under static noise",
        "The noise type hardly matters to accuracy.",
        static.noise_matters_little,
    ),
    Claim(
        "static-random-uniform",
        "cifar10",
        "Uniform noise with random sampling",
        "The exception: with random sampling, uniform noise is slightly worse than the others.",
        static.uniform_is_worse,
    ),
    Claim(
        "expectation-level",
        "cifar10",
        "Dynamic noise, expectation",
        "The best schedules of the expectation come to about 79 %.",
        partial(dynamic.expectation_level, level=0.79),
    ),
    Claim(
        "expectation-below-static",
        "cifar10",
        "Expectation below static noise",
        "That is a loss against static noise that is not negligible (7 points).",
        dynamic.expectation_below_static,
    ),
    Claim(
        "expectation-intervals",
        "cifar10",
        "Decay intervals, expectation",
        "With the expectation under uniform noise, partition and same start are best, and same "
        "end is worst.",
        partial(dynamic.intervals_in_order, forwards=("expectation",), noises=("uniform",)),
    ),
    Claim(
        "expectation-other-noises",
        "cifar10",
        "The same under other noise types",
        "Triangular, normal and logistic noise confirm it.",
        partial(
            dynamic.intervals_in_order,
            forwards=("expectation",),
            noises=("triangular", "normal", "logistic"),
        ),
    ),
    Claim(
        "homogeneous",
        "cifar10",
        "Power law",
        "With the expectation, homogeneous power laws are slightly better than progressive ones "
        "under partition and same start.",
        dynamic.homogeneous_is_better,
    ),
    Claim(
        "random-gains",
        "cifar10",
        "Random sampling with partition",
        "Under partition, random sampling improves accuracy by about 4 points over the "
        "expectation.",
        dynamic.random_gains,
    ),
    Claim(
        "random-same-end",
        "cifar10",
        "Random sampling with same end",
        "Random sampling mitigates the degradation that same end brings.",
        dynamic.random_mitigates_same_end,
    ),
    Claim(
        "mode-partition-static",
        "cifar10",
        "Mode with partition against static noise",
        "With the mode, partition yields the same accuracy as static noise until the learning "
        "rate drops; only then static noise is ahead.",
        dynamic.partition_until_the_drop,
    ),
    Claim(
        "same-end",
        "cifar10",
        "Same end",
        "Same end is the worst decay interval, whatever the forward pass.",
        dynamic.same_end_is_worst,
    ),
    Claim(
        "synchronisation",
        "cifar10",
        "Synchronisation over noise type",
        "What matters most is not the shape of the noise, but how the layers' schedules are "
        "synchronised.",
        dynamic.synchronisation_over_noise,
    ),
    *_elsewhere("svhn"),
    *_elsewhere("speech"),
    Claim(
        "speech-variability",
        "speech",
        "Speech Commands: variability",
        "Under static noise, accuracy varies least with triangular noise and most with uniform "
        "noise.",
        static.uniform_varies_most,
    ),
    Claim(
        "speech-partition-static",
        "speech",
        "Speech Commands: partition against static noise",
        "Partition can come to about the same accuracy as static noise.",
        dynamic.partition_equals_static,
    ),
)
"""In the paper's order."""
