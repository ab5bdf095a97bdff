"""What tells studies of one data set apart, in words: a learning rate, a seed, stairs."""

from collections.abc import Sequence

from softstair.experiments.design import FIELDS, FREEDOMS
from softstair.experiments.figures.style import words
from softstair.experiments.studies import Study

__all__ = ["apart", "telling", "titled"]

TITLED = ("epochs", "statistics")
"""What the title of a study says."""


def telling(title: str, every: Sequence[Study]) -> list[str]:
    """As few fields of a recipe as tell the studies of one title apart."""
    rivals = [one.trainings[0].settings for one in every if one.title == title]
    chosen: list[str] = []
    seen = 1
    for name in FIELDS:
        if name in (*FREEDOMS, *TITLED, "fold"):
            continue
        found = len({tuple(one.get(key) for key in (*chosen, name)) for one in rivals})
        if found > seen:
            chosen, seen = [*chosen, name], found
    return chosen


def apart(study: Study, every: Sequence[Study]) -> str:
    """Such as "learning rate 0.001, seed 0": what tells it from others of the same title."""
    own = study.trainings[0].settings
    names = telling(study.title, every)
    return ", ".join(f"{words(name)} {own.get(name, 'none')}" for name in names)


def titled(study: Study, every: Sequence[Study]) -> str:
    """The title of a study, with what tells it from others of the same title."""
    return ", ".join(filter(None, [study.title, apart(study, every)]))
