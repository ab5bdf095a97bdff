"""Results of a grid: trainings, read from run directories or from a table, and written as a table.

A table has a row for every epoch of every unit: what was trained (the fields of the recipe that
every table has, the version of the data set where it is recorded, and every other field that has
not its default), what the epoch gave, and what the unit gave in the end. As CSV it needs nothing;
as Parquet, where each column has the type of its field, it needs pyarrow.
"""

import contextlib
import csv
import io
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from softstair._errors import SoftstairError, import_extra
from softstair._files import replacing
from softstair._files import write as write_text
from softstair.train.options import describe
from softstair.train.recipe import FIELDS, Recipe, fields_with
from softstair.train.records import RunError, data_version_of, metrics_of, recipe_of, summary_of

Fold = int | Literal["all"]
DEPTHS = ("*", "*/*", "*/*/*")
"""How deep in a folder run directories and tables may lie."""
LARGEST_FILE = 1 << 30
LARGEST_NUMBER = 1e100
"""Whose square is still a number."""


@dataclass(frozen=True)
class Epoch:
    """A line of metrics; those of validation are None in a run that is not validated."""

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    valid_loss: float | None
    valid_accuracy: float | None


METRICS = tuple(field.name for field in fields(Epoch))
OUTCOME = ("test_accuracy", "best_valid_accuracy", "seconds", "images_per_second")
DATA_VERSION, UNKNOWN = "data_version", "unknown"
NAMES = (*FIELDS, DATA_VERSION)
"""What identifies a training: the fields of its recipe, and the version of the data set."""
SETTINGS = (*fields_with("in_tables"), "seed", "fold")
"""The fields of a recipe that every table has."""
COLUMNS = {name: f"first_{name}" if name in METRICS else name for name in NAMES}
"""The column of each setting; the learning rate has one for every epoch too."""
DEFAULTS = {**Recipe.from_row({}).to_row(), DATA_VERSION: UNKNOWN}
"""The value of a setting where a table has no column for it."""
OPTIONAL = [name for name, field in describe(Recipe).items() if field.is_optional]
KINDS: dict[str, Any] = {
    **{COLUMNS[name]: field.kind for name, field in describe(Recipe).items()},
    **dict.fromkeys((*METRICS[1:], *OUTCOME), float),
    "epoch": int,
}
"""The type of the cells of each column, where it is not text."""
NEEDED = ("configuration", *(COLUMNS[name] for name in SETTINGS), *METRICS, *OUTCOME)
"""Columns that every table has."""


class ForeignTable(RunError):
    """Raised for a table of something else than trainings."""


@dataclass(frozen=True)
class Training:
    """A unit and its results so far.

    configuration    its name, which its folds share
    recipe           what was trained
    curve            its epochs, in order
    best_valid_accuracy, test_accuracy, seconds, images_per_second   once it is done; the second is
                     None where there is no test set
    data_version     of the data set; "unknown" where none is recorded
    path             its run directory, if it was read from one
    """

    configuration: str
    recipe: Recipe
    curve: tuple[Epoch, ...]
    best_valid_accuracy: float | None = None
    test_accuracy: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    data_version: str = UNKNOWN
    path: Path | None = None

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The fields of the recipe as tables have them, {"noise": "uniform", "interval": "none",
        …}, and data_version. Recipes with the same settings are the same training."""
        return {**self.recipe.to_row(), DATA_VERSION: self.data_version}

    @property
    def fold(self) -> Fold:
        """The fold that it was validated on; "all" if it was trained on all examples."""
        return self.recipe.fold

    @property
    def repetition(self) -> tuple[Fold, int]:
        """Fold and seed, in which repetitions of one configuration differ."""
        return self.recipe.fold, self.recipe.seed

    @property
    def is_done(self) -> bool:
        """Whether it came to its last epoch."""
        return self.seconds is not None

    @property
    def valid_accuracy(self) -> float | None:
        """That of its last epoch so far; None if it is not validated."""
        return self.curve[-1].valid_accuracy

    @property
    def accuracy(self) -> float:
        """The accuracy that ranks it: of validation, or of the test set if it is not validated."""
        accuracy = self.test_accuracy if self.fold == "all" else self.valid_accuracy
        return math.nan if accuracy is None else accuracy


def find(folder: Path) -> list[Path]:
    """Return the run directories in a folder and its folders, in order."""
    if (folder / "config.json").is_file():
        return [folder]
    files = _unique(path for depth in DEPTHS for path in folder.glob(f"{depth}/config.json"))
    runs = [path.parent for path in files]
    # Runs inside another are its start and its teacher.
    return sorted((run for run in runs if run.parent not in runs), key=_order)


def collect(folder: Path | str, paths: Iterable[Path] | None = None) -> list[Training]:
    """Return every unit with an epoch, in a folder or in these run directories of it.

    Raises RunError if there is none, or if a run directory is damaged.
    """
    folder = Path(folder)
    chosen = find(folder) if paths is None else paths
    trainings = [training for path in chosen if (training := _read(path, folder)) is not None]
    if not trainings:
        raise RunError(
            f"{str(folder)!r} must hold run directories of softstair train or grid, or be a table "
            "of them (.csv, .parquet), but "
            + ("none has an epoch." if folder.exists() else "it does not exist.")
        )
    return trainings


def readable(folder: Path) -> list[Training]:
    """Return every unit in a folder that has an epoch and is not damaged."""
    trainings: list[Training] = []
    for path in find(folder):
        with contextlib.suppress(RunError):
            trainings += filter(None, [_read(path, folder)])
    return trainings


def load(path: Path | str) -> list[Training]:
    """Return the trainings of a folder of run directories, of a table in CSV or Parquet, or of a
    folder of such tables.

    Raises:
        RunError: If there is none, or one is damaged.
        ForeignTable: If a table is not one of trainings.
    """
    return [training for training, _ in located(Path(path))]


def located(path: Path, passed_over: list[Path] | None = None) -> list[tuple[Training, Path]]:
    """Return what :func:`load` does, each training with its run directory or its table.

    The tables of a folder may lie in its folders, as run directories may; where some are, deeper
    folders are not searched. Other tables beside them are appended to ``passed_over`` if that is
    given, and raise ForeignTable if not.
    """
    if path.suffix in _READERS and path.is_file():
        return [(training, path) for training in _load_table(path)]
    foreign: ForeignTable | None = None
    if path.is_dir() and not find(path):
        for depth in DEPTHS:
            tables = _unique(sorted(p for p in path.glob(depth) if p.suffix in _READERS))
            trainings: list[tuple[Training, Path]] = []
            for table in (table for table in tables if table.is_file()):
                try:
                    trainings += [(training, table) for training in _load_table(table)]
                except ForeignTable as error:
                    if passed_over is None:
                        raise
                    passed_over.append(table)
                    foreign = foreign or error
            if trainings:
                return trainings
    if foreign is not None:
        raise foreign
    return [(training, training.path or path) for training in collect(path)]


def rows(trainings: Iterable[Training], typed: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. Settings are text, or ``typed`` as the recipe has them."""
    trainings = list(trainings)
    # Null is None in typed columns, and must not be taken for an empty cell, the default.
    unlike = [name for name in OPTIONAL if DEFAULTS[name] != "None"] if typed else []
    names = [*SETTINGS, *unlike]
    others = (name for name in NAMES if name not in names)
    names += [name for name in others if any(t.settings[name] != DEFAULTS[name] for t in trainings)]
    for training in trainings:
        settings: dict[str, Any] = {"configuration": training.configuration}
        for name in names:
            is_plain = typed and KINDS.get(COLUMNS[name]) in (bool, int, float)
            cells = vars(training.recipe) if is_plain else training.settings
            settings[COLUMNS[name]] = cells[name]
        outcome = {name: getattr(training, name) for name in OUTCOME}
        for epoch in training.curve:
            yield {**settings, **{name: getattr(epoch, name) for name in METRICS}, **outcome}


def check_table(path: Path) -> None:
    """Raise SoftstairError if the name of a file is not that of a table."""
    if path.suffix not in _READERS:
        raise SoftstairError(
            f"table must end in .csv or .parquet, but {str(path)!r} was given.", field="table"
        )


def write(trainings: Sequence[Training], path: Path) -> None:
    """Write the table of trainings as CSV or Parquet, by the name of the file."""
    check_table(path)
    table = list(rows(trainings, typed=path.suffix == ".parquet"))
    if not table:
        raise SoftstairError("table must have at least one training, but none was given.")
    if path.suffix == ".parquet":
        return _write_parquet(table, path)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    for row in table:
        shown = {n: f"{v:.7g}" if isinstance(v, float) else v for n, v in row.items()}
        writer.writerow(shown)  # None is an empty cell
    write_text(path, text.getvalue())


# Run directories


def _unique(paths: Iterable[Path]) -> list[Path]:
    """Return each file once, even if several links lead to it."""
    known: dict[Path, Path] = {}
    for path in paths:
        known.setdefault(path.resolve(), path)
    return list(known.values())


def _order(path: Path) -> tuple[str, int]:
    """Sort folds by number."""
    number = path.name.removeprefix("fold-")
    return str(path.parent), int(number) if number.isdecimal() else -1


def _read(path: Path, folder: Path) -> Training | None:
    """Return the unit in a run directory; None if it has no epoch."""
    recipe = recipe_of(path)
    if recipe is None:
        return None
    summary = summary_of(path)
    metrics = path / "metrics.jsonl"
    if summary is None and not (metrics.is_file() and metrics.stat().st_size > 0):
        return None
    name = path.parent if path.name.startswith("fold-") else path
    inside = name != folder and folder in name.parents
    return Training(
        configuration=str(name.relative_to(folder)) if inside else name.resolve().name,
        recipe=recipe,
        curve=tuple(Epoch(*(line[name] for name in METRICS)) for line in metrics_of(path)),
        data_version=data_version_of(path) or UNKNOWN,
        path=path,
        **{name: (summary or {}).get(name) for name in OUTCOME},
    )


# Tables


def _load_table(path: Path) -> list[Training]:
    """Return the trainings of a table; rows of several units may be interleaved."""
    units: dict[tuple[str, ...], tuple[dict[str, Any], list[Epoch]]] = {}
    try:
        columns, table = _READERS[path.suffix](path)
        missing = [name for name in NEEDED if name not in columns]
        if columns and 2 * len(missing) > len(NEEDED):
            raise ForeignTable(
                f"{str(path)!r} is not a table of trainings (it has no column "
                f"{', '.join(missing[:3])}): remove it, or write it again from the run "
                "directories."
            )
        if columns and missing:
            raise ValueError(f"it has no column {missing[0]}")
        keys = ["configuration", *(name for name in COLUMNS.values() if name in columns)]
        for row in table:
            first, curve = units.setdefault(tuple(str(row[name]) for name in keys), (row, []))
            numbers: list[Any] = [_number(row, name) for name in METRICS[1:]]
            if None in numbers and (numbers.index(None) < 3 or str(row["fold"]) != "all"):
                raise ValueError(f"{METRICS[1 + numbers.index(None)]} is empty")
            curve.append(Epoch(int(row["epoch"]), *numbers))
            if any(row[name] != first[name] for name in OUTCOME):
                raise ValueError(f"the rows of {row['configuration']!r} have different results")
        if not units:
            raise ValueError("it has no row")
        return [_training(*unit) for unit in units.values()]
    except ForeignTable:
        raise
    except (OSError, LookupError, TypeError, ValueError, OverflowError, csv.Error) as error:
        message = "".join(c if c.isprintable() else " " for c in str(error))
        reason = " ".join(message.partition(". ")[0].split()).rstrip(".")[:200]
        raise RunError(
            f"{str(path)!r} is not a table of trainings, or is damaged ({reason}): write it again "
            "from the run directories."
        ) from None


def _read_csv(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError("it is too large")
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        columns = next(csv.reader(file), [])

    def records() -> Iterator[dict[str, Any]]:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=2):
                if None in row or None in row.values():
                    raise ValueError(f"row {number} has not as many cells as the header")
                yield row

    return columns, records()


def _read_parquet(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Read a table. Null means None in the column of an optional field, but an empty cell in a
    column of text, which older versions wrote for all settings."""
    table = import_extra("pyarrow.parquet", "tables").read_table(path)
    texts = {field.name for field in table.schema if "string" in str(field.type)}
    columns = table.column_names
    nulls = [COLUMNS[name] for name in OPTIONAL if COLUMNS[name] in {*columns} - texts]
    records = table.to_pylist()
    for row in records:
        row |= {name: "None" for name in nulls if row[name] is None}
    return columns, iter(records)


def _write_parquet(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    arrow, parquet = import_extra("pyarrow", "tables"), import_extra("pyarrow.parquet", "tables")
    types: dict[Any, Any] = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    columns = {
        name: arrow.array([row[name] for row in table], types.get(KINDS.get(name), arrow.string()))
        for name in table[0]
    }
    with replacing(path) as partial:
        parquet.write_table(arrow.table(columns), partial)


_READERS = {".csv": _read_csv, ".parquet": _read_parquet}


def _training(first: Mapping[str, Any], curve: Sequence[Epoch]) -> Training:
    """Return the unit of a row and its epochs; raise ValueError if they are inconsistent."""
    name = str(first["configuration"])
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise ValueError(f"{name[:40]!r} is not a valid name")
    if empty := [field for field in SETTINGS if first[COLUMNS[field]] in ("", None)]:
        raise ValueError(f"{empty[0]} is empty")
    recipe = Recipe.from_row({field: first.get(COLUMNS[field]) for field in FIELDS})
    outcome: dict[str, Any] = {column: _number(first, column) for column in OUTCOME}
    version = str(first.get(DATA_VERSION) or UNKNOWN)
    training = Training(name, recipe, tuple(curve), data_version=version, **outcome)
    if [epoch.epoch for epoch in curve] != list(range(len(curve))):
        raise ValueError(f"the epochs of {name!r} are not 0, 1, 2, …")
    if len(curve) > recipe.epochs or (training.is_done and len(curve) < recipe.epochs):
        raise ValueError(f"{name!r} has {len(curve)} of {recipe.epochs} epochs")
    best = training.best_valid_accuracy
    if best is not None and abs(best - max(epoch.valid_accuracy or 0.0 for epoch in curve)) > 1e-6:
        raise ValueError(f"best_valid_accuracy of {name!r} is that of no epoch")
    return training


def _number(row: Mapping[str, Any], name: str) -> float | None:
    """Return a number, or None for an empty cell; raise ValueError if it is out of range."""
    if row[name] in ("", None):
        return None
    number = float(row[name])
    least = 0.0 if name in OUTCOME or name.endswith("accuracy") else -LARGEST_NUMBER
    most = 1.0 if name.endswith("accuracy") else LARGEST_NUMBER
    if not least <= number <= most:
        raise ValueError(f"{name} is {str(row[name])[:40]}, which is out of range")
    return number
