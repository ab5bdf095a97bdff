"""What came of a grid: read from its run directories, which are the store, or from a table.

The tidy table has a row for every epoch of every unit: what was trained (:data:`SETTINGS`, the
version of the data set where it is recorded, and every other field of a recipe that has not its
default), what the epoch gave, and what the unit gave in the end. As CSV it needs nothing; as
Parquet, where each column has the type of its field, it needs pyarrow.
"""

import contextlib
import csv
import io
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from softstair._files import replacing
from softstair.experiments import _parquet
from softstair.experiments.design import FIELDS, HINTS, OPTIONAL, value_of
from softstair.train.recipe import OLDER_VALUES, Recipe
from softstair.train.records import RunError, data_version_of, metrics_of, recipe_of, summary_of

__all__ = [
    "DATA_VERSION",
    "NAMES",
    "UNKNOWN",
    "Epoch",
    "ForeignTable",
    "Training",
    "collect",
    "find",
    "load",
    "located",
    "rows",
    "write",
]

SETTINGS = (
    "data", "model", "noise", "forward", "static_mean", "static_std", "interval", "power",
    "epochs", "precision", "seed", "fold",
)  # fmt: skip
"""The fields of a recipe that the table always has, in words as ``--where`` has them."""
TABLES = (".csv", ".parquet")
DEPTHS = ("*", "*/*", "*/*/*")
"""How deep in a folder run directories and tables may lie."""
LARGEST = 1 << 30
LARGEST_NUMBER = 1e100
"""Whose square is still a number."""


@dataclass(frozen=True)
class Epoch:
    """A line of metrics."""

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    valid_loss: float
    valid_accuracy: float


OUTCOME = ("test_accuracy", "best_valid_accuracy", "seconds", "images_per_second")
METRICS = tuple(field.name for field in fields(Epoch))
DATA_VERSION, UNKNOWN = "data_version", "unknown"
NAMES = (*FIELDS, DATA_VERSION)
"""What tells trainings apart: the fields of a recipe, and the version of the data set."""
COLUMNS = {name: f"first_{name}" if name in METRICS else name for name in NAMES}
"""The column of each of these; that of the learning rate has one for every epoch too."""
DEFAULTS = {name: value_of(Recipe(**OLDER_VALUES), name) for name in FIELDS}
DEFAULTS |= {DATA_VERSION: UNKNOWN}
"""The value of a field where a table has no column for it: as in tables older than the field."""


def _kind(hint: Any) -> type:
    """What the values of a field are by its annotation, but for None."""
    return next((kind for kind in (bool, int, float) if kind in (hint, *get_args(hint))), str)


KINDS = {COLUMNS[name]: _kind(HINTS[name]) for name in FIELDS}
KINDS |= {DATA_VERSION: str, "configuration": str}
KINDS |= {**dict.fromkeys((*METRICS, *OUTCOME), float), "epoch": int}
"""What the cells of each column are."""
NEEDED = ("configuration", *(COLUMNS[one] for one in SETTINGS), *METRICS, *OUTCOME)
"""Columns that every table has."""


class ForeignTable(RunError):
    """A file that is a table of something else, as its columns say; not one of ours with damage."""


@dataclass(frozen=True)
class Training:
    """A unit and what came of it so far.

    configuration    its name, which its folds share
    settings         what was trained, in words: {"noise": "uniform", "interval": "none", …}; the
                     fields of the recipe, and data_version, which is "unknown" where none is
                     recorded
    curve            its epochs, in order
    test_accuracy, best_valid_accuracy, seconds, images_per_second   once it is done; the first is
                     None where there is no test set
    path             its run directory, if it was read from one
    """

    configuration: str
    settings: Mapping[str, str]
    curve: tuple[Epoch, ...]
    best_valid_accuracy: float | None = None
    test_accuracy: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    path: Path | None = None

    @property
    def fold(self) -> int:
        """Which fold it was validated on."""
        return int(self.settings["fold"])

    @property
    def is_done(self) -> bool:
        """Whether it came to its last epoch."""
        return self.seconds is not None

    @property
    def valid_accuracy(self) -> float:
        """That of its last epoch so far."""
        return self.curve[-1].valid_accuracy


def find(folder: Path) -> list[Path]:
    """The run directories in a folder, and in its folders, in order."""
    if (folder / "config.json").is_file():
        return [folder]
    found: dict[Path, Path] = {}  # each once, whichever links lead to it
    for depth in DEPTHS:
        for path in folder.glob(f"{depth}/config.json"):
            found.setdefault(path.resolve(), path)
    return sorted((path.parent for path in found.values()), key=_order)


def collect(folder: Path | str, paths: Iterable[Path] | None = None) -> list[Training]:
    """Every unit in a folder that has an epoch to show, done or not; or those in these paths."""
    folder = Path(folder)
    chosen = find(folder) if paths is None else paths
    found = [training for path in chosen if (training := _read(path, folder)) is not None]
    if not found:
        raise RunError(
            f"{str(folder)!r} must hold run directories, as softstair grid and softstair train "
            "make them, or tables of them, or be one, but "
            + ("there is none with an epoch done." if folder.exists() else "it does not exist.")
        )
    return found


def readable(folder: Path) -> list[Training]:
    """Every unit in a folder that has an epoch to show, but for those that are damaged."""
    found = []
    for path in find(folder):
        with contextlib.suppress(RunError):
            found += [one] if (one := _read(path, folder)) is not None else []
    return found


def load(path: Path | str) -> list[Training]:
    """What came of a grid: of a folder of run directories, of a table in CSV or Parquet, or of a
    folder of such tables. A table of something else is refused with :class:`ForeignTable`."""
    return [one for one, _ in located(Path(path))]


def located(path: Path, passed_over: list[Path] | None = None) -> list[tuple[Training, Path]]:
    """What :func:`load` gives, each unit with its run directory or its table.

    The tables of a folder may lie in its folders, as run directories may; where some are, none is
    looked for deeper. With a list for them, tables of something else that lie beside others are
    put there, and not refused.
    """
    if path.suffix in TABLES and path.is_file():
        return [(one, path) for one in _table(path)]
    foreign: ForeignTable | None = None
    if path.is_dir() and not find(path):
        for depth in DEPTHS:
            found: list[tuple[Training, Path]] = []
            for table in _tables(path, depth):
                try:
                    found += [(one, table) for one in _table(table)]
                except ForeignTable as error:
                    if passed_over is None:
                        raise
                    passed_over.append(table)
                    foreign = foreign or error
            if found:
                return found
    if foreign is not None:
        raise foreign
    return [(one, one.path or path) for one in collect(path)]


def rows(
    trainings: Iterable[Training], always: Sequence[str] = SETTINGS
) -> Iterator[dict[str, str | float | None]]:
    """The tidy table: a row for every epoch of every unit; with these settings, and every other
    that has not its default somewhere."""
    trainings = list(trainings)
    settings = _columns(trainings, always)
    for one in trainings:
        same = {"configuration": one.configuration}
        same |= {COLUMNS[name]: _setting(one, name) for name in settings}
        outcome = {name: getattr(one, name) for name in OUTCOME}
        for epoch in one.curve:
            yield {**same, **{name: getattr(epoch, name) for name in METRICS}, **outcome}


def write(trainings: Sequence[Training], path: Path) -> None:
    """Writes the tidy table, as CSV or Parquet by the name of the file."""
    # Null is None in Parquet, and must not be taken for an empty cell, which is the default.
    unlike = [name for name in OPTIONAL if DEFAULTS[name] != "None"]
    always = (*SETTINGS, *unlike) if path.suffix == ".parquet" else SETTINGS
    table = list(rows(trainings, always))
    if not table:
        raise ValueError("a table must be of one unit at least, but none was given.")
    if path.suffix == ".parquet":
        return _parquet.write(table, KINDS, path)
    if path.suffix != ".csv":
        raise ValueError(f"a table must end in .csv or .parquet, but {str(path)!r} was given.")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _short(value) for name, value in row.items()} for row in table)
    with replacing(path) as partial:
        partial.write_text(text.getvalue(), encoding="utf-8")


def _order(path: Path) -> tuple[str, int]:
    """Folds by number, the tenth after the ninth."""
    number = path.name.removeprefix("fold-")
    return str(path.parent), int(number) if number.isdecimal() else -1


def _read(path: Path, folder: Path) -> Training | None:
    recipe = recipe_of(path)
    if recipe is None:
        return None
    summary = summary_of(path)
    if summary is None and not _has_epochs(path):
        return None
    lines = [{name: line[name] for name in METRICS} for line in metrics_of(path)]
    name = path.parent if path.name.startswith("fold-") else path
    inside = name != folder and folder in name.parents
    return Training(
        configuration=str(name.relative_to(folder)) if inside else name.resolve().name,
        settings={
            **{name: value_of(recipe, name) for name in FIELDS},
            DATA_VERSION: data_version_of(path) or UNKNOWN,
        },
        curve=tuple(Epoch(**line) for line in lines),
        path=path,
        **{name: (summary or {}).get(name) for name in OUTCOME},
    )


def _has_epochs(path: Path) -> bool:
    file = path / "metrics.jsonl"
    return file.is_file() and file.stat().st_size > 0


def _columns(trainings: Sequence[Training], always: Sequence[str]) -> list[str]:
    """The settings that a table shows."""
    others = [
        name
        for name in NAMES
        if name not in always and any(_setting(one, name) != DEFAULTS[name] for one in trainings)
    ]
    return [*always, *others]


def _setting(one: Training, name: str) -> str:
    return one.settings.get(name, DEFAULTS[name])


def _short(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _tables(folder: Path, depth: str) -> list[Path]:
    """The tables so deep in a folder, in order; each once, whichever links lead to it."""
    found: dict[Path, Path] = {}
    for path in sorted(one for one in folder.glob(depth) if one.suffix in TABLES):
        if path.is_file():
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _table(path: Path) -> list[Training]:
    return _from_rows(path, _csv_rows(path) if path.suffix == ".csv" else _parquet_rows(path))


def _csv_rows(path: Path) -> list[dict[str, str]]:
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("it is too long to be one")
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            _refuse_foreign(path, next(csv.reader(file), []))
        with open(path, encoding="utf-8-sig", newline="") as file:
            found = [dict(row) for row in csv.DictReader(file, strict=True)]
        for number, row in enumerate(found, start=2):
            if None in row or None in row.values():
                raise ValueError(f"row {number} has not as many cells as the first")
        return found
    except ForeignTable:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise _no_table(path, error) from None


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        names, found = _parquet.read(path, [COLUMNS[name] for name in OPTIONAL])
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise _no_table(path, error) from None
    _refuse_foreign(path, names)
    return found


def _refuse_foreign(path: Path, names: Sequence[str]) -> None:
    """Refuses columns most of which are not ours; where few are missing, that is damage."""
    missing = [name for name in NEEDED if name not in names]
    if names and 2 * len(missing) > len(NEEDED):
        raise ForeignTable(
            f"{str(path)!r} is no table of softstair grid --table (it has no column "
            f"{', '.join(missing[:3])}): take it away, or write it again from the run directories."
        )


def _from_rows(path: Path, table: list[dict[str, Any]]) -> list[Training]:
    """The units that a table tells of; the rows of one lie together."""
    try:
        for name in NEEDED:
            if table and name not in table[0]:
                raise ValueError(f"it has no column {name}")
        units: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in table:
            settings = [column for column in COLUMNS.values() if column in row]
            key = tuple(str(row[name]) for name in ("configuration", *settings))
            units.setdefault(key, []).append(row)
        found = [_from_curve(curve) for curve in units.values()]
        if not found:
            raise ValueError("it has no row")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise _no_table(path, error) from None
    return found


def _from_curve(curve: list[dict[str, Any]]) -> Training:
    """The unit of these rows, if it can be one."""
    name = str(curve[0]["configuration"])
    if any(unicodedata.category(one) == "Cc" for one in name):
        raise ValueError(f"{name[:40]!r} is no name of a configuration")
    epochs = [
        Epoch(int(row["epoch"]), *(_number(row, one) for one in METRICS[1:])) for row in curve
    ]
    if [one.epoch for one in epochs] != list(range(len(epochs))):
        raise ValueError(f"the epochs of {name!r} are not 0, 1, 2, …")
    settings = _settings(curve[0])
    outcome: dict[str, Any] = {
        one: None if curve[0][one] in ("", None) else _number(curve[0], one) for one in OUTCOME
    }
    if any(row[one] != curve[0][one] for row in curve for one in OUTCOME):
        raise ValueError(f"the rows of {name!r} differ in what came of it")
    found = Training(name, settings, tuple(epochs), **outcome)
    wanted, best = _whole(settings, "epochs"), found.best_valid_accuracy
    if len(epochs) > wanted or (found.is_done and len(epochs) < wanted):
        raise ValueError(f"{name!r} has {len(epochs)} of {wanted} epochs")
    if best is not None and abs(best - max(one.valid_accuracy for one in epochs)) > 1e-6:
        raise ValueError(f"the best_valid_accuracy of {name!r} is not that of an epoch")
    return found


def _settings(row: Mapping[str, Any]) -> dict[str, str]:
    """What was trained, in words, each of which can be."""
    settings = dict(DEFAULTS)
    for field, column in COLUMNS.items():
        value = row.get(column)
        if field not in SETTINGS and value in ("", None):
            continue  # tables that were put together leave empty what only some have
        settings[field] = _words(value, KINDS[column])
    fold, folds = (_whole(settings, one) for one in ("fold", "folds"))
    if fold >= folds:
        raise ValueError(f"{fold} is no fold of {folds}, which count from 0")
    for field in ("static_mean", "static_std"):
        if settings[field] not in ("true", "false"):
            raise ValueError(f"{field} is {settings[field][:40]!r}, and not true or false")
    return settings


def _words(value: Any, kind: type) -> str:
    """A setting as ``--where`` has it, from the cell of a table that others may have written.

    >>> _words("TRUE", bool), _words(4.0, int), _words(9, float)
    ('true', '4', '9.0')
    """
    if kind is bool:
        return str(value).lower()
    is_number = kind is not str and type(value) in (int, float)
    return str(kind(value)) if is_number and kind(value) == value else str(value)


def _number(row: Mapping[str, Any], name: str) -> float:
    """A number that a training can have given."""
    number = float(row[name])
    if name.endswith("accuracy"):
        good = 0 <= number <= 1
    else:
        good = (0 if name in OUTCOME else -LARGEST_NUMBER) <= number < LARGEST_NUMBER
    if not good:
        raise ValueError(f"{name} is {str(row[name])[:40]}, and cannot be")
    return number


def _whole(settings: Mapping[str, str], name: str) -> int:
    value = settings[name]
    if not (value.isascii() and value.isdecimal() and len(value) <= 10):
        raise ValueError(f"{name} is {value[:40]!r}, and no whole number")
    return int(value)


def _no_table(path: Path, error: Exception) -> RunError:
    said = "".join(one if one.isprintable() else " " for one in str(error))
    reason = " ".join(said.partition(". ")[0].split()).rstrip(".")[:200]
    return RunError(
        f"{str(path)!r} is no table of softstair grid --table, or was damaged ({reason}): write it "
        "again from the run directories."
    )
