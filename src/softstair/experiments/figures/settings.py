"""Final accuracy by whatever else a design varies: learning rates, stairs, seeds.

Each of these makes studies of their own, which have one title; here they are compared.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from softstair.experiments.design import FREEDOMS
from softstair.experiments.figures.apart import telling
from softstair.experiments.figures.strips import (
    accuracy_axis,
    head,
    label_rows,
    large,
    points,
    subtitle,
)
from softstair.experiments.figures.style import blank, words
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean, mean_of
from softstair.experiments.studies import Study

__all__ = ["by_setting", "settings_of"]

COLOUR = "#1f6fb4"
Facets = dict[str, dict[str, list[Training]]]


def settings_of(title: str, every: Sequence[Study]) -> Facets:
    """The units that are done, by each value of each field that tells studies of a title apart."""
    done = [
        one for study in every if study.title == title for one in study.trainings if one.is_done
    ]
    facets: Facets = {}
    for name in telling(title, every):
        split: dict[str, list[Training]] = {}
        for one in done:
            split.setdefault(one.settings.get(name, "none"), []).append(one)
        if len(split) > 1:
            facets[name] = {value: split[value] for value in _ordered(split)}
    return facets


def by_setting(title: str, every: Sequence[Study]) -> Any:
    """Every configuration is a point; means are of what every value of the field has."""
    facets = settings_of(title, every)
    rows = [len(found) for found in facets.values()]
    figure = blank(7.0, 1.1 + sum(0.27 * count + 0.42 for count in rows))
    grid = figure.subplots(len(facets), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (name, found) in zip(grid, facets.items(), strict=True):
        means, about = _balanced(found, [*FREEDOMS, *(one for one in facets if one != name)])
        for row, (value, trainings) in enumerate(found.items()):
            points(axes, row, trainings, COLOUR)
            if value in means:
                large(axes, row, means[value], COLOUR)
        label_rows(axes, list(found))
        subtitle(axes, words(name), about)
    accuracy_axis(grid[-1])
    head(figure, f"{title}: final accuracy by setting", "")
    return figure


def _ordered(values: dict[str, list[Training]]) -> list[str]:
    """By size if they are numbers, or as they come."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def _balanced(
    found: dict[str, list[Training]], others: Sequence[str]
) -> tuple[dict[str, Mean], str]:
    """The mean of each value, over the combinations of the others and folds that all of them have;
    and of how many."""
    tables: dict[str, dict[tuple[Hashable, int], float]] = {
        value: {
            (tuple(one.settings.get(name) for name in others), one.fold): one.valid_accuracy
            for one in trainings
        }
        for value, trainings in found.items()
    }
    shared = set.intersection(*(set(table) for table in tables.values()))
    combinations = {combination for combination, _ in shared}
    folds = [
        fold
        for fold in sorted({fold for _, fold in shared})
        if all((combination, fold) in shared for combination in combinations)
    ]
    if not folds:
        return {}, "no combination of the others has all of these, so there are no means"
    means = {
        value: mean_of(
            float(np.mean([table[combination, fold] for combination in combinations]))
            for fold in folds
        )
        for value, table in tables.items()
    }
    some = lambda count, what: f"{count} {what}{'' if count == 1 else 's'}"
    return (
        means,
        f"{some(len(combinations), 'combination')} of the others, {some(len(folds), 'fold')}",
    )
