"""What tells studies of one data set apart, in words: a learning rate, a seed, stairs."""

from collections.abc import Sequence

from softstair.experiments.design import FIELDS, FREEDOMS
from softstair.experiments.figures.style import words
from softstair.experiments.studies import Study

__all__ = ["apart", "telling"]

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


def apart(study: Study, names: Sequence[str]) -> str:
    """Such as "learning rate 0.001, seed 0": what it has in the fields that tell it from others."""
    own = study.trainings[0].settings
    return ", ".join(f"{words(name)} {own.get(name, 'none')}" for name in names)
