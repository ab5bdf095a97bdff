"""What the paper claims, beside what was measured: each claim in our words, and how it is judged.

The paper's accuracies are those of 500 epochs (120 of Speech Commands): of shorter trainings, what
is above what is judged, and levels are not. Every comparison is made fold by fold, between
configurations that are alike in all else; a difference is there if its 95 % interval is above 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from softstair.experiments.claims import dynamic, static
from softstair.experiments.claims.verdict import Verdict, Word
from softstair.experiments.design import FORWARDS
from softstair.experiments.results import Training
from softstair.experiments.studies import TITLES, Study, studies

__all__ = ["CLAIMS", "Claim", "Finding", "Verdict", "judged"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    name     such as static-mode-level
    data     the data set that it is about
    title    what it is about, in a few words
    says     what the paper says, in our words
    judge    the verdict of one study; not tested, where it has not all that it takes
    """

    name: str
    data: str
    title: str
    says: str
    judge: Callable[[Study], Verdict]

    def measured(self, trainings: Iterable[Training]) -> Verdict:
        """The verdict of the longest study of its data set that can tell; where that holds as far
        as it goes, of the longest that has all that the claim is about, and both are told."""
        return self.of(studies(trainings))

    def of(self, parts: Iterable[Study]) -> Verdict:
        """The same of studies, the longest first; if none can tell, what the one of most
        trainings is in want of."""
        mine = [one for one in parts if one.data == self.data]
        if not mine:
            return Verdict("not tested", f"No training of {TITLES[self.data]} is there.")
        found = [self.judge(one) for one in mine]
        tested = [one for one in found if one.verdict != "not tested"]
        most = max(range(len(mine)), key=lambda number: len(mine[number].trainings))
        if not tested:
            return found[most]
        complete = [one for one in tested if one.complete]
        if not (tested[0].so_far and complete):
            return tested[0]
        longer = tested[0].sentence[:1].lower() + tested[0].sentence[1:]
        both = f"{complete[0].sentence} Longer ones hold it as far as they go: {longer}"
        return replace(complete[0], sentence=both)


@dataclass(frozen=True)
class Finding:
    """A claim and its verdict, as a report shows them: what it is about, what the paper says,
    a word, and what was measured in a sentence."""

    name: str
    claim: str
    says: str
    verdict: Word
    measured: str


def judged(trainings: Iterable[Training]) -> list[Finding]:
    """Every claim with its verdict, in the paper's order.

    >>> {one.verdict for one in judged([])}
    {'not tested'}
    """
    parts = studies(trainings)
    found = []
    for claim in CLAIMS:
        said = claim.of(parts)
        found.append(Finding(claim.name, claim.title, claim.says, said.verdict, said.sentence))
    return found


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
            partial(static.noise_matters_little, less_than_forwards=False),
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
        partial(static.static_level, forward="mode", level=0.86),
    ),
    Claim(
        "static-random-level",
        "cifar10",
        "Static noise, random",
        "Static noise with random sampling comes to about 82 %.",
        partial(static.static_level, forward="random", level=0.82),
    ),
    Claim(
        "static-mode-above-random",
        "cifar10",
        "Mode above random",
        "Under static noise the mode has a small advantage over random sampling.",
        static.mode_above_random,
    ),
    Claim(
        "static-noise",
        "cifar10",
        "Noise type under static noise",
        "The noise type hardly matters to accuracy.",
        partial(static.noise_matters_little, less_than_forwards=True),
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
        "speech-partition-static",
        "speech",
        "Speech Commands: partition against static noise",
        "Partition can come to about the same accuracy as static noise.",
        dynamic.partition_equals_static,
    ),
)
"""In the paper's order."""
