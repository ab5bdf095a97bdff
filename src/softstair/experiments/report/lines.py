"""The lines of the page: a configuration each, the mean of its folds; and what tells them apart."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from softstair.experiments.design import FREEDOMS
from softstair.experiments.figures.style import in_order
from softstair.experiments.results import NAMES, SETTINGS, Training, located
from softstair.experiments.studies import TITLES, Mean, mean_of
from softstair.train.records import RunError

__all__ = ["ReportLine", "arranged", "gather", "in_words", "study_titles", "varied"]

FIELD_WORDS = {"power": "power law", "data": "data set"}
VALUE_WORDS = {
    "data": TITLES,
    "model": {"auto": "the data’s own"},
    "static_mean": {"true": "yes", "false": "no"},
    "static_std": {"true": "yes", "false": "no"},
    "interval": {"none": "static"},
    "power": {"none": "static"},
}
SEPARATING = ("epochs", "statistics", "precision", "model", "data_version")
"""Fields that separate the studies of a data set. Lines that differ in them never share a chart;
learning rates, seeds or stairs are there to be compared, and do."""


@dataclass(frozen=True)
class ReportLine:
    """A configuration: the trainings that differ in their fold only, by fold.

    Args:
        is_twin: Whether it is a float network beside quantised ones. Degrees of freedom do not
            matter to it.
    """

    name: str
    settings: Mapping[str, str]
    trainings: tuple[Training, ...]
    is_twin: bool = False

    @property
    def done(self) -> list[Training]:
        """The trainings that reached their last epoch."""
        return [training for training in self.trainings if training.is_done]

    @property
    def shown(self) -> list[Training]:
        """The trainings that its curve averages: those that are done, or all until one is."""
        return self.done or list(self.trainings)

    def mean(self, outcome: str) -> Mean | None:
        """Return the mean over the folds that are done, if any has this outcome."""
        values = [getattr(training, outcome) for training in self.done]
        known = [value for value in values if value is not None]
        return mean_of(known) if known else None

    def value(self, field: str) -> str | None:
        """Return the value of a field; None where it does not matter."""
        return None if self.is_twin and field in FREEDOMS else self.settings[field]


def gather(paths: Iterable[Path]) -> tuple[list[Training], list[Path]]:
    """Return the trainings in folders and tables, and the tables of something else beside them.

    Raises:
        RunError: If a training is in two places.
    """
    passed_over: list[Path] = []
    pairs = [pair for path in paths for pair in located(path, passed_over)]
    trainings = [training for training, _ in pairs]
    _refuse_repeated(trainings, [place for _, place in pairs])
    return trainings, passed_over


def arranged(trainings: Sequence[Training]) -> list[ReportLine]:
    """Return the lines, in the order of the trainings.

    Settings tell lines apart too: grids of several data sets may use the same names.
    """
    if not trainings:
        raise ValueError("a report needs at least one training, but none was given.")
    _refuse_repeated(trainings)
    groups: dict[Hashable, list[Training]] = {}
    for training in trainings:
        groups.setdefault(_identity(training), []).append(training)
    quantised = {each.recipe.data for each in trainings if not each.recipe.is_float}
    lines = []
    for group in groups.values():
        folds = tuple(sorted(group, key=lambda training: training.fold))
        recipe = folds[0].recipe
        is_twin = recipe.is_float and recipe.data in quantised
        lines.append(ReportLine(folds[0].configuration, folds[0].settings, folds, is_twin))
    return lines


def varied(lines: Sequence[ReportLine], strict: bool = False) -> list[str]:
    """Return the fields in which lines differ.

    Fields that another one determines, such as the quanta of each data set, are left out; but for
    those of the paper's tables, unless ``strict``.
    """
    chosen: list[str] = []
    for name in dict.fromkeys((*SETTINGS, *NAMES)):
        if name == "fold":
            continue
        if len(values_of(lines, name)) > 1 and (
            name in SETTINGS or not any(_determines(lines, other, name) for other in chosen)
        ):
            chosen.append(name)
    if strict:
        for name in reversed(chosen[:]):
            if any(_determines(lines, other, name) for other in chosen if other != name):
                chosen.remove(name)
    return chosen


def values_of(lines: Iterable[ReportLine], field: str) -> list[str]:
    """Return the values of a field: in the paper's order, or by size, or as they come."""
    every = dict.fromkeys(line.value(field) for line in lines)
    return in_order(field, [value for value in every if value is not None])


def in_words(field: str, value: str | None = None) -> str:
    """Return a field, or one of its values, as the page has it.

    >>> in_words("static_mean"), in_words("interval", "same_end"), in_words("power", "none")
    ('static mean', 'same end', 'static')
    """
    if value is None:
        return FIELD_WORDS.get(field, field.replace("_", " "))
    plain = value.replace("_", " ") if field == "interval" else value
    return VALUE_WORDS.get(field, {}).get(value, plain)


def study_titles(lines: Sequence[ReportLine]) -> tuple[list[str], list[str]]:
    """Return the study of each line, such as "CIFAR-10, 500 epochs", and all studies in order.

    The studies of one data set follow each other, that of most lines first.
    """
    fields: dict[str, list[str]] = {}
    for data in dict.fromkeys(line.settings["data"] for line in lines):
        rivals = [line.settings for line in lines if line.settings["data"] == data]
        fields[data] = [name for name in SEPARATING if len({row[name] for row in rivals}) > 1]
    titles, place = [], {}
    for settings in (line.settings for line in lines):
        data = settings["data"]
        words = [_described(name, settings[name]) for name in fields[data]]
        titles.append(", ".join([in_words("data", data), *words]))
        place[titles[-1]] = list(fields).index(data)
    count = Counter(titles)
    return titles, sorted(count, key=lambda title: (place[title], -count[title]))


def _described(field: str, value: str) -> str:
    field_first = field in ("model", "data_version")
    words = [in_words(field), in_words(field, value)]
    return " ".join(words if field_first else reversed(words))


def _refuse_repeated(trainings: Sequence[Training], places: Sequence[Path] = ()) -> None:
    first: dict[Hashable, int] = {}
    for number, training in enumerate(trainings):
        before = first.setdefault((_identity(training), training.fold), number)
        if before != number:
            by = f", by {str(places[before])!r} and by {str(places[number])!r}" if places else ""
            raise RunError(
                f"each training must be given once, but fold {training.fold} of "
                f"{training.configuration!r} was given twice{by}: leave one of the two out."
            )


def _identity(training: Training) -> Hashable:
    settings = training.settings
    return training.configuration, *(settings[name] for name in NAMES if name != "fold")


def _determines(lines: Sequence[ReportLine], field: str, other: str) -> bool:
    """Return whether each value of a field comes with one value of the other."""
    pairs = {(line.settings[field], line.settings[other]) for line in lines}
    return len(pairs) == len({line.settings[field] for line in lines})
