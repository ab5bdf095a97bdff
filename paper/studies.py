"""Studies: trainings that may be compared, and means over repetitions with 95 % intervals.

The trainings of a study differ in degrees of freedom, folds and seeds alone. A folder may hold more
than one: two data sets, or the same grid over 100 and over 500 epochs. What is compared, drawn or
tested is always of one study. Trainings that differ in fold and seed alone are repetitions.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paper.design import DESIGNS, FREEDOMS
from paper.mean import Mean, Numbers, interval, mean_of
from paper.tables import DATA_VERSION, NAMES, Fold, Training
from softstair.noise import names as noise_names
from softstair.train import RunError
from softstair.train.recipe import fields_with

STATIC: Mapping[str, str] = {"static_mean": "true", "static_std": "true"}
"""Noise that stays as it is: a straight-through estimator."""
DYNAMIC: Mapping[str, str] = {"static_mean": "true", "static_std": "false"}
"""Noise whose std is annealed and whose mean stays: the paper's dynamic noise."""
TITLES = {"cifar10": "CIFAR-10", "svhn": "SVHN", "speech": "Speech Commands", "digits": "Digits"}
SHARED = tuple(
    name
    for name in (*fields_with("changes_result"), DATA_VERSION)
    if name not in (*FREEDOMS, "fold", "seed")
)
"""The settings that all trainings of a study share."""
FULL = {
    design.configurations[0].recipe.data.name: design.configurations[0].recipe.run.epochs
    for design in DESIGNS.values()
}
"""The paper's epochs of each data set: levels are judged of no fewer."""
STATIC_LEVELS = {"mode": 0.86, "random": 0.82}
"""The paper's levels of static noise on CIFAR-10."""


@dataclass(frozen=True)
class Study:
    """Trainings on one data set that differ in degrees of freedom, folds and seeds alone.

    ``version`` is that of the data set where there is a study of another one; else empty.
    """

    name: str
    trainings: tuple[Training, ...]
    version: str = ""

    @property
    def data(self) -> str:
        return self.trainings[0].recipe.data.name

    @property
    def epochs(self) -> int:
        return self.trainings[0].recipe.run.epochs

    @property
    def statistics(self) -> str:
        return self.trainings[0].recipe.run.statistics

    @property
    def is_validated(self) -> bool:
        """Whether it was validated; a study is otherwise of trainings on all examples."""
        return self.trainings[0].fold != "all"

    @property
    def is_fresh(self) -> bool:
        return self.statistics == "fresh"

    @property
    def scale(self) -> str:
        """Such as 500 epochs; and what is not as the paper has it: 500 epochs, fresh statistics."""
        words = [f"{self.epochs} epochs"]
        words += ["fresh statistics"] if self.is_fresh else []
        words += [] if self.is_validated else ["all examples"]
        words += [f"data version {self.version}"] if self.version else []
        return ", ".join(words)

    @property
    def title(self) -> str:
        """Such as CIFAR-10, 500 epochs."""
        return f"{TITLES.get(self.data, self.data)}, {self.scale}"


def studies(trainings: Iterable[Training]) -> list[Study]:
    """Return the studies among trainings: the paper's data sets first, of each those with running
    statistics first, as the paper evaluates, and of those the longest first.

    Float twins are left out, since no degree of freedom touches them. Of two units that are the
    same training under two names, the one that is done stays, or else the first.
    """
    groups: dict[tuple[str, ...], dict[tuple[str, ...], Training]] = {}
    for training in trainings:
        if training.recipe.network.is_float:
            continue
        settings = training.settings
        part = "all" if training.fold == "all" else ""
        units = groups.setdefault((*(settings[name] for name in SHARED), part), {})
        unit = tuple(settings[name] for name in (*FREEDOMS, "fold", "seed"))
        if unit not in units or (training.is_done and not units[unit].is_done):
            units[unit] = training
    shared = [dict(zip((*SHARED, "fold"), values, strict=True)) for values in groups]
    results = []
    for settings, units in zip(shared, groups.values(), strict=True):
        rivals = [other for other in shared if other["data"] == settings["data"]]
        # Epochs first: periods and drops follow them.
        names = distinguishing(rivals, ["epochs", *sorted(SHARED), "fold"])
        words = [settings["data"], *(f"{name}-{settings[name]}" for name in names)]
        name = re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-.")
        version = settings[DATA_VERSION]
        is_only = all(other[DATA_VERSION] == version for other in rivals)
        results.append(Study(name, tuple(units.values()), "" if is_only else version))
    order = list(TITLES)
    place = lambda data: order.index(data) if data in order else len(order)
    key = lambda study: (place(study.data), study.data, study.is_fresh, -study.epochs, study.name)
    return sorted(results, key=key)


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


def select(trainings: Iterable[Training], wanted: Mapping[str, str]) -> list[Training]:
    """Return those in which each of these settings has this value."""
    return [
        training
        for training in trainings
        if all(training.settings.get(name) == value for name, value in wanted.items())
    ]


def distinguishing(rivals: Sequence[Mapping[str, str]], names: Iterable[str]) -> list[str]:
    """Return as few of these settings as tell the rivals apart, the first ones preferred."""
    chosen: list[str] = []
    count = lambda keys: len({tuple(rival[key] for key in keys) for rival in rivals})
    for name in names:
        if count([*chosen, name]) > count(chosen):
            chosen.append(name)
    return chosen


@dataclass(frozen=True)
class Curve:
    """Means over repetitions after 1, 2, … epochs, and half of their intervals, as in `Mean`."""

    epochs: NDArray[np.int64]
    mean: Numbers
    margin: Numbers | None
    repetitions: tuple[tuple[Fold, int], ...]


def final_of(trainings: Iterable[Training]) -> Mean | None:
    """Return the mean accuracy in the end over the repetitions that are done."""
    done = [training.accuracy for training in trainings if training.is_done]
    return mean_of(done) if done else None


def curve_of(trainings: Sequence[Training], metric: str = "valid_accuracy") -> Curve:
    """Return the curve of a configuration's repetitions, as far as every one of them has come."""
    length = min(len(training.curve) for training in trainings)
    values = [[getattr(epoch, metric) for epoch in t.curve[:length]] for t in trainings]
    repetitions = tuple(training.repetition for training in trainings)
    return Curve(np.arange(1, length + 1), *interval(np.array(values, np.float64)), repetitions)


def counted(*repetitions: Collection[tuple[Fold, int]]) -> str:
    """Return how many repetitions there are, of the mean that has fewest to that which has most.

    >>> counted([(0, 0), (1, 0)]), counted([(0, 0)]), counted([(0, 0)], [(0, 0), (0, 1), (0, 2)])
    ('2 folds', '1 fold', '1 to 3 runs')
    """
    most = max(repetitions, key=len)
    fewest, count = min(map(len, repetitions)), len(most)
    noun = "fold" if len({seed for _, seed in most}) < 2 else "run"
    numbers = f"{fewest} to {count}" if fewest < count else str(count)
    return f"{numbers} {noun}{'' if count == 1 else 's'}"


def drop_of(training: Training) -> int | None:
    """Return how many epochs were done when the learning rate dropped; None if it never did."""
    if training.recipe.optimiser.rate_shape != "drop":
        return None
    first = training.curve[0].learning_rate
    lower = (e.epoch for e in training.curve if e.learning_rate < first * (1 - 1e-6))
    return next(lower, None)


def duration(seconds: float) -> str:
    """Return a time in two units.

    >>> duration(7.31), duration(125), duration(7500)
    ('7.3 s', '2 min 05 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


# Configurations: the repetitions of each, and the best of them


@dataclass(frozen=True)
class Repetitions:
    """The trainings of a configuration, which differ in fold and seed alone, in this order."""

    name: str
    settings: Mapping[str, str]
    trainings: tuple[Training, ...]
    is_twin: bool
    """Whether it is a float network beside quantised ones: no degree of freedom matters to it."""

    @property
    def done(self) -> list[Training]:
        """The trainings that reached their last epoch."""
        return [training for training in self.trainings if training.is_done]

    @property
    def accuracy(self) -> Mean | None:
        """The mean accuracy in the end, by which configurations are ranked."""
        return final_of(self.trainings)

    def mean(self, outcome: str) -> Mean | None:
        """Return the mean over the repetitions that are done, if any has this outcome."""
        values = [getattr(training, outcome) for training in self.done]
        known = [value for value in values if value is not None]
        return mean_of(known) if known else None

    def value(self, field: str) -> str | None:
        """Return the value of a field; None where it does not matter."""
        return None if self.is_twin and field in FREEDOMS else self.settings[field]


def repetitions_of(trainings: Sequence[Training]) -> list[Repetitions]:
    """Return the repetitions of each configuration, in the order of the trainings.

    Names do not matter, unless two trainings of equal settings, fold and seed have different ones.
    """
    if not trainings:
        raise ValueError("a report needs at least one training, but none was given.")
    refuse_repeated(trainings)
    groups: dict[Hashable, list[Training]] = {}
    for training in trainings:
        groups.setdefault(_settings_of(training), []).append(training)
    parts: list[tuple[str, list[Training]]] = []
    for group in groups.values():
        by_name: dict[str, list[Training]] = {}
        for training in group:
            name = re.sub(r"(^|,)seed=\d+", "", training.configuration).lstrip(",") or "all"
            by_name.setdefault(name, []).append(training)
        is_one = len({training.repetition for training in group}) == len(group)
        parts += [(next(iter(by_name)), group)] if is_one else by_name.items()
    quantised = {each.recipe.data.name for each in trainings if not each.recipe.network.is_float}
    results = []
    for name, group in parts:
        first, *_ = ordered = sorted(group, key=lambda training: training.repetition)
        is_twin = first.recipe.network.is_float and first.recipe.data.name in quantised
        results.append(Repetitions(name, first.settings, tuple(ordered), is_twin))
    return results


def best_of(configurations: Iterable[Repetitions]) -> list[tuple[Repetitions, Mean]]:
    """Return the configuration with the highest mean accuracy on each data set, and that accuracy.

    Validated trainings come before those on all examples, which only the test set can rank. Float
    networks beside quantised ones are left out.
    """
    ranked: dict[str, list[tuple[Repetitions, Mean]]] = {}
    for each in configurations:
        if not each.is_twin and (mean := each.accuracy):
            ranked.setdefault(each.settings["data"], []).append((each, mean))
    rank = lambda pair: (pair[0].trainings[0].fold != "all", pair[1].value)
    return [max(pairs, key=rank) for pairs in ranked.values()]


def refuse_repeated(trainings: Sequence[Training], places: Sequence[Path] = ()) -> None:
    first: dict[Hashable, int] = {}
    for number, training in enumerate(trainings):
        key = (training.configuration, _settings_of(training), training.repetition)
        before = first.setdefault(key, number)
        if before != number:
            by = f", by {str(places[before])!r} and by {str(places[number])!r}" if places else ""
            raise RunError(
                f"each training must be given once, but fold {training.fold} of "
                f"{training.configuration!r} was given twice{by}: leave one of the two out."
            )


def _settings_of(training: Training) -> Hashable:
    """Return all settings but fold and seed, and whether it was trained on all examples."""
    names = (name for name in NAMES if name not in ("fold", "seed"))
    return training.fold == "all", *(training.settings[name] for name in names)
