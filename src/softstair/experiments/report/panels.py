"""Which lines of the page may lie in one chart: those of one data set, trained and measured alike.

Learning rates, seeds or stairs that a design varies are to be compared, and lie in one chart.
"""

from collections import Counter
from collections.abc import Sequence

from softstair.experiments.report import names
from softstair.experiments.report.study import Folds

__all__ = ["STUDY", "ordered", "titles"]

STUDY = "study"
"""The name of what is no field of a recipe, but tells the panels apart as one would."""
ALIKE = ("epochs", "statistics", "precision", "model", "data_version")


def titles(lines: Sequence[Folds]) -> list[str]:
    """What each line's chart is of: its data set, and in what that has others beside it.

    Such as "CIFAR-10, 500 epochs, running statistics".
    """
    told: dict[str, list[str]] = {}
    for line in lines:
        data = line.settings["data"]
        if data not in told:
            rivals = [other.settings for other in lines if other.settings["data"] == data]
            every = {name: {one.get(name) for one in rivals} for name in ALIKE}
            told[data] = [name for name, values in every.items() if len(values) > 1]
    return [
        ", ".join([names.value("data", one["data"]), *(_said(n, one) for n in told[one["data"]])])
        for one in (line.settings for line in lines)
    ]


def ordered(lines: Sequence[Folds], every: Sequence[str]) -> list[str]:
    """The titles, each once: those of one data set together, that of most lines first."""
    data = [line.settings["data"] for line in lines]
    place = {title: data.index(one) for one, title in zip(data, every, strict=True)}
    count = Counter(every)
    return sorted(count, key=lambda title: (place[title], -count[title]))


def _said(name: str, settings: dict[str, str]) -> str:
    value = names.value(name, settings[name])
    named_first = name in ("model", "data_version")
    return f"{names.field(name)} {value}" if named_first else f"{value} {names.field(name)}"
