"""Tables of trainings, in CSV or Parquet.

A table has a row for every epoch of every unit: what was trained (the fields of the recipe that
every table has, the version of the data set where it is recorded, and every other field that
differs from its default), the metrics of the epoch, the results of the unit, and the device, commit
and precision of steps it was trained with. CSV needs no other package. Parquet, where each column
has the type of its field, needs pyarrow.
"""

import csv
import gzip
import io
import itertools
import math
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from paper.rows import from_row, to_row
from softstair._check import invalid
from softstair._errors import SoftstairError, import_extra
from softstair._files import replacing
from softstair.train import Recipe, RunError
from softstair.train.recipe import OPTIONS, fields_with

Fold = int | Literal["all"]
LARGEST_FILE = 1 << 28
"""Largest table in CSV that is read, in bytes before compression."""
LARGEST_PART = 16_000_000
"""Largest file of a table that is written in parts, in bytes."""
LONGEST_TEXT = 200
LARGEST_NUMBER = 1e100
"""Its square is still finite in float64."""


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
TEXTS = ("device", "commit", "step_precision")
ORIGIN = ("device_seconds", *TEXTS)
"""Columns that a table has only if one of its trainings records them."""
RESULTS = (*OUTCOME, *ORIGIN)
DATA_VERSION, UNKNOWN = "data_version", "unknown"
NAMES = (*OPTIONS, DATA_VERSION)
"""What identifies a training: the fields of its recipe, and the version of the data set."""
SETTINGS = (
    "data", "model", "noise", "forward", "static_mean", "static_std", "interval", "power", "epochs",
    "precision", "seed", "fold",
)  # fmt: skip
"""The fields of a recipe that every table has."""
TIMES = ("epochs", *fields_with("scales_with_epochs"))
"""The settings in which a training of another length differs."""
COLUMNS = {name: f"first_{name}" if name in METRICS else name for name in NAMES}
"""The column of each setting; the learning rate has one for every epoch too."""
DEFAULTS = {**to_row(Recipe()), DATA_VERSION: UNKNOWN}
"""The value of a setting where a table has no column for it."""
OPTIONAL = [name for name, field in OPTIONS.items() if field.is_optional]
KINDS: dict[str, Any] = {
    **{COLUMNS[name]: field.kind for name, field in OPTIONS.items()},
    **dict.fromkeys((*METRICS[1:], *OUTCOME, "device_seconds"), float),
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
    device_seconds   device time of a unit of a grid; while several units train, each is charged an
                     equal share
    device, commit   name of the device, and commit of softstair; "" where they are not recorded
    step_precision   of its steps, such as bfloat16 for auto; "" where it is not recorded
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
    device_seconds: float | None = None
    device: str = ""
    commit: str = ""
    step_precision: str = ""
    data_version: str = UNKNOWN
    path: Path | None = None

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The fields of the recipe as tables have them, {"noise": "uniform", "interval": "none",
        …}, and data_version. Recipes with the same settings are the same training."""
        return {**to_row(self.recipe), DATA_VERSION: self.data_version}

    @property
    def name(self) -> str:
        """The name of its unit, such as uniform-mode-static/fold-0."""
        return f"{self.configuration}/fold-{self.fold}"

    @property
    def fold(self) -> Fold:
        """The fold that it was validated on; "all" if it was trained on all examples."""
        return self.recipe.data.fold

    @property
    def repetition(self) -> tuple[Fold, int]:
        """Fold and seed, in which repetitions of one configuration differ."""
        return self.recipe.data.fold, self.recipe.run.seed

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


def rows(trainings: Iterable[Training], typed: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. Settings are text, or ``typed`` as the recipe has them."""
    trainings = list(trainings)
    # Null is None in typed columns, and must not be taken for an empty cell, the default.
    unlike = [name for name in OPTIONAL if DEFAULTS[name] != "None"] if typed else []
    names = [*SETTINGS, *unlike]
    others = (name for name in NAMES if name not in names)
    names += [name for name in others if any(t.settings[name] != DEFAULTS[name] for t in trainings)]
    origin = [n for n in ORIGIN if any(getattr(t, n) not in ("", None) for t in trainings)]
    for training in trainings:
        settings: dict[str, Any] = {"configuration": training.configuration}
        for name in names:
            is_plain = typed and KINDS.get(COLUMNS[name]) in (bool, int, float)
            cells = training.recipe.to_flat() if is_plain else training.settings
            settings[COLUMNS[name]] = cells[name]
        outcome = {name: getattr(training, name) for name in (*OUTCOME, *origin)}
        for epoch in training.curve:
            yield {**settings, **{name: getattr(epoch, name) for name in METRICS}, **outcome}


def kind_of(path: Path) -> str:
    """Return the ending of the name of a table."""
    return ".csv.gz" if path.name.endswith(".csv.gz") else path.suffix


def check_table(path: Path) -> None:
    """Raise SoftstairError if the name of a file is not that of a table."""
    if kind_of(path) not in READERS:
        raise invalid(
            "table", f"must end in .csv, .csv.gz or .parquet, but {str(path)!r} was given"
        )


def write(trainings: Sequence[Training], path: Path) -> None:
    """Write the table of trainings as CSV or Parquet, by the name of the file.

    Numbers have seven digits in a .csv file, and all of them in the compressed formats.
    """
    check_table(path)
    table = list(rows(trainings, typed=path.suffix == ".parquet"))
    if not table:
        raise SoftstairError("table must have at least one training, but none was given.")
    if path.suffix == ".parquet":
        return _write_parquet(table, path)
    text, is_exact = io.StringIO(), path.suffix == ".gz"
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    for row in table:
        shown = {n: f"{v:.7g}" if isinstance(v, float) else v for n, v in row.items()}
        writer.writerow(row if is_exact else shown)  # None is an empty cell
    data = text.getvalue().encode()
    with replacing(path) as partial:
        partial.write_bytes(gzip.compress(data, mtime=0) if is_exact else data)


def write_parts(
    trainings: Sequence[Training], path: Path, largest: int = LARGEST_PART
) -> list[Path]:
    """Write a table in files of at most ``largest`` bytes: x.parquet, x-2.parquet, …

    Returns the files. A training is never divided. A numbered file is replaced only if all its
    trainings are in this table, or if it is a part of the table that ``path`` has now: it shares no
    unit with that file, and its units are in this table, perhaps with other epochs. Otherwise its
    number is skipped.
    """
    ending, count = kind_of(path), 1
    name = lambda number: path.with_name(f"{path.name.removesuffix(ending)}-{number}{ending}")
    replaced = {old.name for old in _present(path)} if name(2).exists() else set()

    def is_free(part: Path) -> bool:
        present = _present(part)
        is_old = bool(replaced) and replaced.isdisjoint(old.name for old in present)
        besides = TIMES if is_old else ()
        is_known = _identities(present, besides) <= _identities(trainings, besides)
        return not part.exists() or (bool(present) and is_known)

    free, paths = filter(is_free, map(name, itertools.count(2))), [path]
    while True:
        paths += itertools.islice(free, count - len(paths))
        ends = [len(trainings) * number // count for number in range(count + 1)]
        # From the last to the first, so that every unit is in a file at any time.
        for part, first, last in reversed([*zip(paths, ends, ends[1:], strict=False)]):
            write(trainings[first:last], part)
        if count >= len(trainings) or all(part.stat().st_size <= largest for part in paths):
            return paths
        count = min(2 * count, len(trainings))


def _present(path: Path) -> list[Training]:
    """Return the trainings of a file; none if there is no such file, or it is no table."""
    try:
        return load_table(path)
    except RunError:
        return []


def _identities(trainings: Iterable[Training], besides: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the names of units with all settings ``besides`` some."""
    names = [name for name in NAMES if name not in besides]
    return {(each.name, *(each.settings[name] for name in names)) for each in trainings}


def load_table(path: Path) -> list[Training]:
    """Return the trainings of a table; rows of several units may be interleaved."""
    units: dict[tuple[Any, ...], tuple[dict[str, Any], list[Epoch]]] = {}
    try:
        columns, table = READERS[kind_of(path)](path)
        if not columns:
            raise ValueError("it has no row")
        missing = [name for name in NEEDED if name not in columns]
        if 2 * len(missing) > len(NEEDED):
            raise ForeignTable(
                f"{str(path)!r} is not a table of trainings (it has no column "
                f"{', '.join(missing[:3])}): remove it, or write it again from the run "
                "directories."
            )
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        unit_of = itemgetter("configuration", *(n for n in COLUMNS.values() if n in columns))
        results_of = itemgetter(*(name for name in RESULTS if name in columns))
        for row in table:
            first, curve = units.setdefault(unit_of(row), (row, []))
            numbers: list[Any] = [_number(row, name) for name in METRICS[1:]]
            if None in numbers and (numbers.index(None) < 3 or str(row["fold"]) != "all"):
                raise ValueError(f"{METRICS[1 + numbers.index(None)]} is empty")
            curve.append(Epoch(int(row["epoch"]), *numbers))
            if results_of(row) != results_of(first):
                raise ValueError(f"the rows of {row['configuration']!r} have different results")
        if not units:
            raise ValueError("it has no row")
        return [_training(*unit) for unit in units.values()]
    except ForeignTable:
        raise
    except (
        OSError, EOFError, LookupError, TypeError, ValueError, OverflowError, csv.Error, zlib.error,
    ) as error:  # fmt: skip
        message = "".join(c if c.isprintable() else " " for c in str(error))
        reason = " ".join(message.partition(". ")[0].split()).rstrip(".")[:200]
        raise RunError(
            f"{str(path)!r} is not a table of trainings, or is damaged ({reason}): write it again "
            "from the run directories."
        ) from None


def _read_csv(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    opened: Any = (gzip.open if path.suffix == ".gz" else open)(path, "rb")
    with opened as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError("it is too large")
    # Of a table of something else, which may have another encoding, only the header is read.
    columns = next(csv.reader(io.StringIO(data.decode("utf-8-sig", "replace"))), [])

    def records() -> Iterator[dict[str, Any]]:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        for number, row in enumerate(csv.DictReader(text, strict=True), start=2):
            if None in row or None in row.values():
                raise ValueError(f"row {number} has not as many cells as the header")
            yield row

    return columns, records()


def _read_parquet(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Read a table. Null means None in the column of an optional field."""
    table = import_extra("pyarrow.parquet", "tables").read_table(path)
    columns = table.column_names
    nulls = [COLUMNS[name] for name in OPTIONAL if COLUMNS[name] in columns]
    records = table.to_pylist()
    for row in records:
        row |= {name: "None" for name in nulls if row[name] is None}
    return columns, iter(records)


def _write_parquet(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    arrow, parquet = import_extra("pyarrow", "tables"), import_extra("pyarrow.parquet", "tables")
    types: dict[Any, Any] = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = [(name, types.get(KINDS.get(name), arrow.string())) for name in table[0]]
    columns = arrow.Table.from_pylist(table, arrow.schema(schema))
    with replacing(path) as partial:
        parquet.write_table(columns, partial, compression="zstd", compression_level=19)


READERS = {".csv": _read_csv, ".csv.gz": _read_csv, ".parquet": _read_parquet}


def _training(first: Mapping[str, Any], curve: Sequence[Epoch]) -> Training:
    """Return the unit of a row and its epochs; raise ValueError if they are inconsistent."""
    name = str(first["configuration"])
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise ValueError(f"{name[:40]!r} is not a valid name")
    if empty := [field for field in SETTINGS if first[COLUMNS[field]] in ("", None)]:
        raise ValueError(f"{empty[0]} is empty")
    recipe = from_row({field: first.get(COLUMNS[field]) for field in OPTIONS})
    outcome: dict[str, Any] = {column: _number(first, column) for column in OUTCOME}
    for column in TEXTS:
        outcome[column] = text = str(first.get(column) or "")
        if len(text) > LONGEST_TEXT or not text.isprintable():
            raise ValueError(f"{column} is not a valid text")
    if "device_seconds" in first:
        outcome["device_seconds"] = _number(first, "device_seconds")
    version = str(first.get(DATA_VERSION) or UNKNOWN)
    training = Training(name, recipe, tuple(curve), data_version=version, **outcome)
    if [epoch.epoch for epoch in curve] != list(range(len(curve))):
        raise ValueError(f"the epochs of {name!r} are not 0, 1, 2, …")
    if len(curve) > recipe.run.epochs or (training.is_done and len(curve) < recipe.run.epochs):
        raise ValueError(f"{name!r} has {len(curve)} of {recipe.run.epochs} epochs")
    best = training.best_valid_accuracy
    if best is not None and abs(best - max(epoch.valid_accuracy or 0.0 for epoch in curve)) > 1e-6:
        raise ValueError(f"best_valid_accuracy of {name!r} is that of no epoch")
    return training


def _number(row: Mapping[str, Any], name: str) -> float | None:
    """Return a number, or None for an empty cell; raise ValueError if it is out of range."""
    if row[name] in ("", None):
        return None
    number = float(row[name])
    is_accuracy = name.endswith("accuracy")
    least = 0.0 if is_accuracy or name in RESULTS else -LARGEST_NUMBER
    most = 1.0 if is_accuracy else LARGEST_NUMBER
    if not least <= number <= most:
        raise ValueError(f"{name} is {str(row[name])[:40]}, which is out of range")
    return number
