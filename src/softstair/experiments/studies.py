"""Studies: trainings that may be compared, for they differ in degrees of freedom and folds alone.

A folder may hold more than one: two data sets, or the same grid over 100 and over 500 epochs. What
is compared, drawn or tested is always of one study.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from softstair.experiments.design import FREEDOMS
from softstair.experiments.results import DATA_VERSION, UNKNOWN, Training

__all__ = ["DYNAMIC", "STATIC", "TITLES", "Study", "select", "studies"]

STATIC: Mapping[str, str] = {"static_mean": "true", "static_std": "true"}
"""Noise that stays as it is: a straight-through estimator."""
DYNAMIC: Mapping[str, str] = {"static_mean": "true", "static_std": "false"}
"""Noise whose std is annealed and whose mean stays: the paper's dynamic noise."""
TITLES = {"cifar10": "CIFAR-10", "svhn": "SVHN", "speech": "Speech Commands", "digits": "Digits"}
_NO_MATTER = ("fold", "truncate", "compile", "kernels", "capture")
"""Folds are what is averaged over, and the others are how it is computed, not what."""


@dataclass(frozen=True)
class Study:
    """What was trained on one data set, with everything but degrees of freedom and folds alike.

    name        such as cifar10; cifar10-epochs-100, where there is another of the same data
    trainings   one for each combination of degrees of freedom and each fold
    version     of the data set, where there is a study of another version of it; else empty
    """

    name: str
    trainings: tuple[Training, ...]
    version: str = ""

    @property
    def data(self) -> str:
        """The data set, as a recipe names it."""
        return self.trainings[0].settings["data"]

    @property
    def epochs(self) -> int:
        """How many it takes to be done."""
        return int(self.trainings[0].settings["epochs"])

    @property
    def is_fresh(self) -> bool:
        """Whether it was evaluated with fresh statistics, and not with running ones."""
        return self.trainings[0].settings.get("statistics") == "fresh"

    @property
    def statistics(self) -> str:
        """Those that its batch normalisations were evaluated with: running or fresh."""
        return "fresh" if self.is_fresh else "running"

    @property
    def scale(self) -> str:
        """Such as 500 epochs; and what is not as the paper has it: 500 epochs, fresh statistics."""
        words = [f"{self.epochs} epochs"]
        words += ["fresh statistics"] if self.is_fresh else []
        words += [f"data version {self.version}"] if self.version else []
        return ", ".join(words)

    @property
    def title(self) -> str:
        """Such as CIFAR-10, 500 epochs."""
        return f"{TITLES.get(self.data, self.data)}, {self.scale}"


def studies(trainings: Iterable[Training]) -> list[Study]:
    """The studies among trainings: the paper's data sets first, of each those with running
    statistics first, as the paper evaluates, and of those the longest first.

    Float twins are left out, since no degree of freedom touches them. Of two units that are the
    same training under two names, the one that is done stays, or else the first.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[tuple[str, ...], Training]] = {}
    for one in trainings:
        if one.settings.get("weights") == one.settings.get("features") == "float":
            continue
        known = one.settings.items()
        same = tuple((k, v) for k, v in known if k not in FREEDOMS and k not in _NO_MATTER)
        which = tuple(one.settings[name] for name in (*FREEDOMS, "fold"))
        units = groups.setdefault(tuple(sorted(same)), {})
        if which not in units or (one.is_done and not units[which].is_done):
            units[which] = one
    shared = [dict(same) for same in groups]
    versions = Counter(data for data, _ in {(one["data"], _version(one)) for one in shared})
    found = [
        Study(name, tuple(units.values()), _version(same) if versions[same["data"]] > 1 else "")
        for name, same, units in zip(_names(shared), shared, groups.values(), strict=True)
    ]
    order = list(TITLES)
    place = {one.data: len(order) for one in found} | {data: i for i, data in enumerate(order)}
    order_of = lambda one: (place[one.data], one.data, one.is_fresh, -one.epochs, one.name)
    return sorted(found, key=order_of)


def _version(settings: Mapping[str, str]) -> str:
    return settings.get(DATA_VERSION, UNKNOWN)


def select(trainings: Iterable[Training], wanted: Mapping[str, str]) -> list[Training]:
    """Those in which each of these settings has this value."""
    return [
        one
        for one in trainings
        if all(one.settings.get(name) == value for name, value in wanted.items())
    ]


def _names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each study, fit for a file: its data set, and what tells it from others of it."""
    names = []
    for one in settings:
        rivals = [other for other in settings if other["data"] == one["data"]]
        words = [one["data"], *(f"{key}-{one.get(key, 'none')}" for key in _telling(rivals))]
        names.append(re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-."))
    return names


def _telling(rivals: Sequence[Mapping[str, str]]) -> list[str]:
    """As few settings as tell them apart: periods and drops follow the epochs."""
    telling: list[str] = []
    seen = 1
    for key in dict.fromkeys(["epochs", *(key for other in rivals for key in other)]):
        found = len({tuple(other.get(name) for name in (*telling, key)) for other in rivals})
        if found > seen:
            telling, seen = [*telling, key], found
    return telling
