"""The paper's claims: claims.toml says what is compared, this module turns that into verdicts.

A claim is judged once by each study of its data set. The verdict is that of the longest study with
running statistics, as the paper evaluates; the others are given beside it.

level    Levels of the paper are judged by trainings of full length only.
parts    A claim of several parts holds if all of them do, does not hold if none does, and else
         holds in part. It holds in part at best if some of what it speaks of was not trained.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from paper.design import FORWARDS
from paper.mean import FEWEST, Mean, mean_of
from paper.studies import (
    DYNAMIC,
    FULL,
    STATIC,
    TITLES,
    Study,
    counted,
    decisive,
    studies,
)
from paper.tables import Training
from paper.verdicts import (
    Cell,
    Folds,
    Gap,
    Group,
    Repetition,
    Word,
    aligned,
    compare,
    difference,
)
from softstair.noise import names as noise_names
from softstair.schedule import INTERVALS, POWERS

TAIL = 6
"""Variability is that of the last sixth of the epochs: the last 20 of 120."""
MOST_GAPS = 3
"""A sentence has so many differences at most; a table has all of them."""
WORDS: dict[str, Mapping[str, str]] = {
    "static": STATIC,
    **{noise: {"noise": noise} for noise in noise_names()},
    **{forward: {"forward": forward} for forward in FORWARDS},
    **{interval: {**DYNAMIC, "interval": interval} for interval in INTERVALS},
    **{power: {"power": power} for power in POWERS},
}
"""The settings that each word of a cell stands for."""
Compared = tuple[Group, dict[str, Cell]]
"""A group that is tested, and its cells."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about a data set; claims.toml describes the fields."""

    name: str
    data: str
    title: str
    says: str
    groups: tuple[Group, ...]
    needs: str = ""
    gaps: tuple[Gap, ...] = ()
    keep: Literal["all", "widest", "best"] = "all"
    variability: bool = False
    all_cells: bool = True

    def of(self, parts: Iterable[Study]) -> "Finding":
        mine = [decisive(each) for each in parts if each.data == self.data and each.is_validated]
        verdicts = tuple(judge(self, study) for study in mine if study.trainings)
        return Finding(self.name, self.data, self.title, self.says, verdicts)


@dataclass(frozen=True)
class Judgement:
    """The verdict of one study on a claim, and what it follows from.

    cells      accuracies, by label; of several differences, from the one with the most folds
    gaps       differences and other quantities, by label
    missing    what the claim speaks of and was not trained
    needs      what it takes to test the claim, where it was not tested
    trainings  how many trainings the differences are computed from
    """

    verdict: Word
    study: Study
    cells: Mapping[str, Cell] = field(default_factory=dict)
    gaps: Mapping[str, Mean] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    needs: str = ""
    trainings: int = 0

    @property
    def sentence(self) -> str:
        """What was measured: evaluation, length, folds, accuracies, differences, what is absent."""
        if self.verdict == "not tested":
            return f"{self.study.title}: it takes {self.needs}."
        parts = [", ".join(f"{label} {cell.mean}" for label, cell in self.cells.items())]
        if len(self.gaps) <= MOST_GAPS:
            parts += [f"{label}: {gap.in_hundredths()} points" for label, gap in self.gaps.items()]
        if self.missing:
            parts.append(f"without {', '.join(self.missing)}")
        scale = f"{self.study.epochs} epochs, {self.study.statistics} statistics"
        folds = counted(*(cell.folds for cell in self.cells.values()))
        return f"Validation, {scale}, {folds}: {'; '.join(parts)}."


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


def judge(claim: Claim, study: Study) -> Judgement:
    """Return the verdict of one study.

    If the groups of the claim have no fold in common on the configurations that are compared, the
    claim is judged on the first fold on which that is possible.
    """
    folds = sorted({training.repetition for training in study.trainings})
    of = lambda fold: tuple(each for each in study.trainings if each.repetition == fold)
    parts = (study, *(replace(study, trainings=of(fold)) for fold in folds))
    needs = claim.needs or f"trainings over {FULL[claim.data]} epochs"
    found = filter(None, (_judged(claim, part) for part in parts))
    return next(found, Judgement("not tested", study, needs=needs))


def _judged(claim: Claim, study: Study) -> Judgement | None:
    is_full = study.epochs >= FULL[claim.data]
    families: dict[str, list[Compared]] = {}
    for group in claim.groups:
        compared = families.setdefault(group.family, [])
        if cells := compare(study, group):
            compared.append((group, cells))
    if not all(families.values()) or not (claim.needs or is_full):
        return None
    kept = [pair for pairs in families.values() for pair in _kept(claim, pairs)]
    value = partial(_variability, study) if claim.variability else attrgetter("folds")
    words: list[Word] = []
    shown: dict[str, Mean] = {}
    gaps: dict[str, Folds] = {}
    every: dict[str, Cell] = {}
    used: dict[str, Cell] = {}
    units: set[tuple[str, Repetition]] = set()
    for group, cells in [*kept, (Group({}, claim.gaps), every)]:
        for gap in group.gaps:
            folds, sides = difference(gap, cells, gaps, value)
            if not folds:
                continue
            mean = mean_of(folds.values())
            words += gap.judge(mean, is_full)
            if gap.label is not None:
                gaps[gap.label] = folds
                shown[gap.label.format(group.name.replace("_", " "))] = mean
            for label, cell in sides.items():
                units |= {(run.configuration, run.repetition) for run in cell.trainings}
                known = used.get(group.label(label), cell)
                used[group.label(label)] = max(known, cell, key=lambda each: len(each.folds))
        every |= {group.label(label): cell for label, cell in cells.items()}
    if not words:  # the groups share no fold
        return None
    missing = tuple(_missing(claim, kept, used)) if claim.all_cells else ()
    verdict = words[0] if len(set(words)) == 1 else "holds in part"
    if verdict == "holds" and missing:
        verdict = "holds in part"
    ordered = {label: used[label] for label in every if label in used}
    return Judgement(verdict, study, ordered, shown, missing, trainings=len(units))


def _kept(claim: Claim, pairs: Sequence[Compared]) -> Sequence[Compared]:
    """Return the groups that are judged. The best or the widest group is chosen among those with
    the most folds, by their accuracies on these folds."""
    if claim.keep == "all":
        return pairs
    same = [aligned(cells) for _, cells in pairs]
    folds = [set(next(iter(cells.values())).folds) for cells in same]
    most, reduce = max(folds, key=len), np.ptp if claim.keep == "widest" else np.max
    mean = lambda cell: np.mean([cell.folds[fold] for fold in most])
    among = [at for at in range(len(pairs)) if folds[at] >= most]
    return [pairs[max(among, key=lambda at: reduce([*map(mean, same[at].values())]))]]


def _variability(study: Study, cell: Cell) -> Folds:
    """The std over folds, averaged over the last epochs, as if of one fold."""
    last = max(1, study.epochs // TAIL)
    curves = [[epoch.valid_accuracy for epoch in run.curve[-last:]] for run in cell.trainings]
    return {(0, 0): float(np.std(np.array(curves, np.float64), axis=0, ddof=1).mean())}


def _missing(claim: Claim, compared: Sequence[Compared], used: Mapping[str, Cell]) -> Iterator[str]:
    """Groups that are not there, and cells that not all groups have."""
    absent: dict[str, bool] = {}
    if claim.keep == "all":
        there = {group.name for group, _ in compared}
        absent = {group.name: group.name not in there for group in claim.groups}
    for group, cells in compared:
        for label in group.cells:
            name = label.partition(" /")[0]
            absent[name] = label not in cells or absent.get(name, False)
    yield from (name.replace("_", " ") for name, is_absent in absent.items() if is_absent)
    if claim.variability and any(len(cell.folds) < FEWEST for cell in used.values()):
        yield "a third fold"


# The file of claims


def _groups(table: Mapping[str, Any], each: Sequence[str] | None) -> Iterator[Group]:
    """The groups that an entry of ``groups`` describes: one for each word of ``each``."""
    facts = dict(table)
    given, label, cells = facts.pop("given", ""), facts.pop("label", "{}"), facts.pop("cells")
    own_each, apart = facts.pop("each", [""]), facts.pop("apart", False)
    facts["gaps"] = tuple(Gap(**gap) for gap in facts.get("gaps", ()))
    for name in each or own_each:
        settings: dict[str, dict[str, str]] = {}
        for words in cells:
            own = settings.setdefault(label.format(words.replace(" ", " / ")), {})
            for word in f"{given} {name} {words}".split():
                own |= WORDS[word]
        parts = [{cell: settings[cell]} for cell in settings] if apart else [settings]
        yield from (Group(part, name=name, family=label, **facts) for part in parts)


def _claims() -> tuple[Claim, ...]:
    text = files(__package__).joinpath("claims.toml").read_text(encoding="utf-8")
    tables = {table["name"]: table for table in tomllib.loads(text)["claim"]}
    claims = []
    for table in tables.values():
        facts = {**tables.get(table.get("like"), {}), **table}
        facts.pop("like", None)
        each = facts.pop("each", None)
        groups = [group for part in facts.pop("groups") for group in _groups(part, each)]
        gaps = tuple(Gap(**gap) for gap in facts.pop("gaps", ()))
        claims.append(Claim(**facts, groups=tuple(groups), gaps=gaps))
    return tuple(claims)


CLAIMS = _claims()
"""In the paper's order."""
