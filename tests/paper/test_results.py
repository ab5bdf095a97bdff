"""What came of a grid: run directories to tables and back, and files that are no such thing."""

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from data.mutations import mutations
from helpers.made import made
from paper import Training, load
from paper.report import gather
from paper.results import find
from paper.tables import ForeignTable, rows, write, write_parts
from softstair.data import load as load_data
from softstair.train import Recipe, RunError, fit
from train.short import recipe

METRICS = ("learning_rate", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy")
OUTCOME = ("best_valid_accuracy", "test_accuracy", "seconds", "images_per_second")
ODD = 'forward=random, "é"'
"""A name that a table must quote."""


class Halt(Exception):
    """The end of a run before its time."""


class After:
    """A watcher that ends the run after an epoch."""

    def begin(self, state: Any) -> None: ...
    def step(self, state: Any) -> None: ...
    def epoch(self, state: Any, metrics: Any) -> None:
        if state.epoch == 2:
            raise Halt


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configurations on two folds, one of which has a test set and one of which is not done;
    and a run that has begun, and no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("store")
    digits = load_data("digits")
    tested = replace(digits, test_x=digits.x[:50], test_y=digits.y[:50])
    fit(recipe(), folder / "forward=mode" / "fold-0", dataset=tested)
    fit(recipe(fold=10, folds=11), folder / "forward=mode" / "fold-10")
    random = recipe(forward="random", weight_quantum=0.5, static_std=True)
    fit(random, folder / ODD / "fold-0")
    with pytest.raises(Halt):
        fit(random.replace(fold=2), folder / ODD / "fold-2", watchers=[After()])
    begun = shutil.copytree(folder / ODD / "fold-0", folder / ODD / "fold-3")
    for path in begun.iterdir():
        if path.is_file() and path.name != "config.json":
            path.unlink()
    torch.set_num_threads(before)
    return folder


@pytest.fixture
def mine(store: Path, tmp_path: Path) -> Path:
    """A store to spoil."""
    return shutil.copytree(store, tmp_path / "store")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=5.1e-7)


# ---- From run directories


def test_every_unit_with_an_epoch_is_found_in_order(store: Path) -> None:
    units = load(store)
    assert [(unit.configuration, unit.fold, len(unit.curve), unit.is_done) for unit in units] == [
        ("forward=mode", 0, 3, True),
        ("forward=mode", 10, 3, True),
        (ODD, 0, 3, True),
        (ODD, 2, 2, False),
    ]
    assert len(find(store)) == 5
    assert [unit.test_accuracy is None for unit in units] == [False, True, True, True]


def test_a_unit_is_what_its_files_say(store: Path) -> None:
    for unit in load(store):
        assert unit.path is not None
        config = json.loads((unit.path / "config.json").read_text())["recipe"]
        metrics = lines(unit.path)
        assert [epoch.epoch for epoch in unit.curve] == list(range(len(metrics)))
        for epoch, line in zip(unit.curve, metrics, strict=True):
            assert [getattr(epoch, name) for name in METRICS] == [line[name] for name in METRICS]
        assert unit.valid_accuracy == metrics[-1]["valid_accuracy"]
        summary: dict[str, Any] = {}
        if unit.is_done:
            summary = json.loads((unit.path / "summary.json").read_text())
            assert summary["best_valid_accuracy"] == max(line["valid_accuracy"] for line in metrics)
        assert [getattr(unit, name) for name in OUTCOME] == [summary.get(name) for name in OUTCOME]
        assert set(unit.settings) == {*config, "data_version"}
        assert unit.settings["data_version"] == "scikit-learn digits"
        still = config["static_mean"] and config["static_std"]
        for name, value in config.items():
            wanted = str(value).lower() if isinstance(value, bool) else str(value)
            if name == "skip" or (still and name in ("interval", "power")):
                wanted = "none"
            assert unit.settings[name] == wanted, name


@pytest.mark.parametrize("where", ["forward=mode", "forward=mode/fold-0"])
def test_a_part_of_a_store_is_a_store(where: str, store: Path) -> None:
    by_path = {unit.path: unit for unit in load(store)}
    part = load(store / where)
    assert part
    for unit in part:
        assert unit == replace(by_path[unit.path], configuration="forward=mode")


# ---- To tables and back


def test_csv_and_back_is_the_same_to_seven_digits(store: Path, tmp_path: Path) -> None:
    units = load(store)
    write(units, tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3 + 3 + 3 + 2 == len(list(rows(units)))
    # What has not its default has a column, besides what always has; the rest has none.
    assert {"weight_quantum", "folds", "static_std", "batch"} <= set(table[0])
    assert not {"first_learning_rate", "optimiser", "momentum"} & set(table[0])
    assert [row["interval"] for row in table] == ["partition"] * 6 + ["none"] * 5
    again = load(tmp_path / "table.csv")
    assert len(again) == len(units)
    for before, after in zip(units, again, strict=True):
        assert after.configuration == before.configuration
        assert after.path is None
        assert (after.fold, after.is_done) == (before.fold, before.is_done)
        assert after.settings == {name: before.settings[name] for name in after.settings}
        for old, new in zip(before.curve, after.curve, strict=True):
            assert old.epoch == new.epoch
            assert all(close(getattr(old, name), getattr(new, name)) for name in METRICS)
        assert all(close(getattr(before, name), getattr(after, name)) for name in OUTCOME)
    # What was rounded once stays as it is.
    write(again, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "table.csv").read_bytes()


def test_parquet_and_back_is_the_same(store: Path, tmp_path: Path) -> None:
    units = load(store)
    write(units, tmp_path / "table.parquet")
    again = load(tmp_path / "table.parquet")
    for before, after in zip(units, again, strict=True):
        assert after.settings == {name: before.settings[name] for name in after.settings}
        assert replace(after, recipe=before.recipe) == replace(before, path=None)


def trained(store: Path, **fields: Any) -> Training:
    """A unit as if it had been trained by another recipe."""
    unit = load(store)[0]
    recipe = Recipe.from_flat(epochs=3, batch=48, **fields)
    name = ",".join(f"{field}={value}" for field, value in fields.items())
    return replace(unit, configuration=name, recipe=recipe)


EVERY: list[dict[str, Any]] = [
    {"drop": None, "period": 7},
    {"drop": 32, "limit": 600, "mean0": -0.25, "std0": 0.5, "folds": 9, "fold": 8},
    {"drop": 1e-7, "learning_rate": 1e-30, "seed": 2**63 - 1, "skip": ("0", "3")},
    {"static_std": True, "truncate": False, "weights": "int4", "data": "None:load"},
]
"""Fields of every kind, with and without a value."""


def test_parquet_has_the_types_of_the_fields(store: Path, tmp_path: Path) -> None:
    units = [trained(store, **fields) for fields in EVERY]
    units = [replace(unit, test_accuracy=None) for unit in units]
    write(units, tmp_path / "table.parquet")
    table = parquet.read_table(tmp_path / "table.parquet")
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    wanted = {
        "int64": "epoch epochs seed fold folds limit batch",
        "double": "drop period mean0 std0 first_learning_rate valid_loss test_accuracy seconds",
        "bool": "static_mean static_std truncate",
        "string": "configuration data weights interval skip precision",
    }
    for kind, names in wanted.items():
        assert {name: types[name] for name in names.split()} == dict.fromkeys(names.split(), kind)
    assert table.column("drop").to_pylist()[::3] == [None, 32.0, 1e-7, 32.0]
    assert table.column("limit").to_pylist()[::3] == [None, 600, None, None]
    assert table.column("static_std").to_pylist()[::3] == [False, False, False, True]
    assert set(table.column("test_accuracy").to_pylist()) == {None}


def concatenated(units: list[Training], file: Path) -> Any:
    """Tables of one unit each, put together: what only one of them has is null in the others."""
    parts = []
    for unit in units:
        write([unit], file)
        parts.append(parquet.read_table(file))
    return pyarrow.concat_tables(parts, promote_options="default")


def as_floats(units: list[Training], file: Path) -> Any:
    """What pandas makes of integers some of which are missing."""
    write(units, file)
    table = parquet.read_table(file)
    for name in ("limit", "fold", "epochs", "seed", "batch"):
        number = table.column_names.index(name)
        table = table.set_column(number, name, table.column(name).cast(pyarrow.float64()))
    return table


@pytest.mark.parametrize(
    ("rewrite", "units"),
    [(concatenated, [{"drop": None}, {"period": 7}, EVERY[1]]), (as_floats, EVERY[:2])],
)
def test_parquet_that_others_wrote_says_the_same(
    rewrite: Callable[..., Any], units: list[dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    trainings = [trained(store, **fields) for fields in units]
    table = rewrite(trainings, tmp_path / "table.parquet")
    parquet.write_table(table, tmp_path / "table.parquet")
    again = load(tmp_path / "table.parquet")
    assert [unit.settings for unit in again] == [unit.settings for unit in trainings]


@pytest.mark.parametrize(("count", "name"), [(4, "table.txt"), (0, "other.csv")])
def test_a_table_needs_a_training_and_the_name_of_a_table(
    count: int, name: str, store: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="table must"):
        write(load(store)[:count], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_it_says_what_to_install(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for act in (
        lambda: write(load(store), tmp_path / "new.parquet"),
        lambda: load(tmp_path / "table.parquet"),
    ):
        with pytest.raises(ImportError, match=r"pip install '\.\[tables\]'"):
            act()
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]


# ---- Damaged and foreign tables


def spoiled(store: Path, file: Path, change: Callable[[list[list[str]]], Any]) -> Path:
    """The table of a store as CSV, with a change to its cells."""
    write(load(store), file)
    with open(file, newline="", encoding="utf-8") as opened:
        cells = list(csv.reader(opened))
    change(cells)
    with open(file, "w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows(cells)
    return file


def no_table(file: Path) -> str:
    with pytest.raises(RunError, match="again from the run directories") as caught:
        load(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def put(cells: list[list[str]], row: int, column: str, value: str) -> None:
    cells[row][cells[0].index(column)] = value


def all_rows(cells: list[list[str]], column: str, value: str) -> None:
    for row in range(1, len(cells)):
        put(cells, row, column, value)


def first_unit(cells: list[list[str]], column: str, value: str) -> None:
    for row in (1, 2, 3):
        put(cells, row, column, value)


CHANGES: dict[str, tuple[Callable[[list[list[str]]], Any], str]] = {
    "no rows": (lambda cells: cells.__delitem__(slice(1, None)), "no row"),
    "nothing": (lambda cells: cells.clear(), "no row"),
    "no noise": (lambda cells: put(cells, 0, "noise", "sound"), "no column noise"),
    "nan": (lambda cells: put(cells, 2, "valid_loss", "nan"), "nan"),
    "too large": (lambda cells: put(cells, 2, "train_loss", "1e308"), "1e308"),
    "no accuracy": (lambda cells: put(cells, 2, "valid_accuracy", ""), ""),
    "half an epoch": (lambda cells: put(cells, 2, "epoch", "1.5"), "1.5"),
    "an epoch missing": (lambda cells: cells.pop(2), "0, 1, 2"),
    "a short row": (lambda cells: cells[2].__delitem__(slice(9, None)), "row 3 has not as many"),
    "a long row": (lambda cells: cells[2].append("1"), "row 3 has not as many"),
    "a unit cut off": (lambda cells: cells.pop(3), "2 of 3 epochs"),
    "more epochs": (lambda cells: all_rows(cells, "epochs", "2"), "3 of 2 epochs"),
    "epochs below": (lambda cells: all_rows(cells, "epochs", "-5"), "epochs must be"),
    "no fold": (lambda cells: first_unit(cells, "fold", ""), "fold is empty"),
    "above one": (lambda cells: put(cells, 2, "valid_accuracy", "2.5"), "valid_accuracy is 2.5"),
    "time runs back": (lambda cells: all_rows(cells, "seconds", "-1"), "seconds is -1"),
    "another truth": (lambda cells: all_rows(cells, "static_mean", "yes"), "static_mean"),
    "another end": (lambda cells: put(cells, 3, "seconds", "1"), "have different results"),
    "another best": (
        lambda cells: first_unit(cells, "best_valid_accuracy", "0.125"),
        "is that of no epoch",
    ),
    "no name": (lambda cells: all_rows(cells, "configuration", "a\x07b"), "is not a valid name"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_spoiled_table_is_refused_with_the_reason(kind: str, store: Path, tmp_path: Path) -> None:
    change, word = CHANGES[kind]
    assert word in no_table(spoiled(store, tmp_path / "table.csv", change))


FOREIGN = [
    b"a,b\n1,2\n",
    b"epoch,seed,other\n",
    b"name,epochs\nfirst\n1,2,3,4\n",
    "prénom,âge\nZoë,3\n".encode("latin-1"),
]


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:12]))
def test_a_table_of_something_else_is_told_from_damage(
    content: bytes, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.csv").write_bytes(content)
    with pytest.raises(ForeignTable) as caught:
        load(tmp_path / "other.csv")
    assert no_table(tmp_path / "other.csv") == str(caught.value)
    # Beside one of ours too; what gathers the units of a report passes over it, and says so.
    write(load(store), tmp_path / "table.csv")
    with pytest.raises(ForeignTable):
        load(tmp_path)
    assert gather([tmp_path]) == (load(tmp_path / "table.csv"), [tmp_path / "other.csv"])
    # Alone it is nothing to show.
    (tmp_path / "table.csv").unlink()
    with pytest.raises(ForeignTable):
        gather([tmp_path])


def test_tables_in_folders_of_a_folder(store: Path, tmp_path: Path) -> None:
    """One that links lead to twice is one; where some are, none is looked for deeper."""
    deep = tmp_path / "all" / "deep" / "table.csv"
    deep.parent.mkdir(parents=True)
    write(load(store), deep)
    (tmp_path / "all" / "same").symlink_to("deep")
    assert load(tmp_path / "all") == load(deep)
    write(load(store)[:1], tmp_path / "all" / "near.csv")
    assert load(tmp_path / "all") == load(tmp_path / "all" / "near.csv")


def outcome(file: Path) -> str:
    """read, refused, or what is wrong with the refusal."""
    try:
        units = load(file)
    except RunError as error:
        message = str(error)
        return "refused" if len(message) < 900 and message.isprintable() else repr(message)
    assert all(unit.curve and isinstance(unit.is_done, bool) for unit in units)
    assert all(math.isfinite(epoch.valid_loss) for unit in units for epoch in unit.curve)
    return "read"


JUNK = [b"", b"\xff\xfe\x00", bytes(1000), b"PAR1" + bytes(100) + b"PAR1", b"x" * 300_000 + b"\n1"]


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_files_that_are_no_tables_and_damaged_ones_are_refused(
    ending: str, store: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"table.{ending}"
    for content in JUNK:
        file.write_bytes(content)
        assert outcome(file) == "refused", content[:20]
    write(load(store), file)
    outcomes = set()
    for mutation in mutations(file.read_bytes(), 60, seed=5):
        file.write_bytes(mutation)
        outcomes.add(outcome(file))
    assert {"refused"} <= outcomes <= {"read", "refused"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("valid_loss", ["a", "b", "c"]),
        ("valid_loss", [[1.0], [2.0], [3.0]]),
        ("valid_loss", [None, None, None]),
        ("epoch", [0.0, math.nan, 2.0]),
        ("epoch", [0, 2, 1]),
        ("a", None),
    ],
    ids=str,
)
def test_parquet_of_other_values(name: str, values: Any, store: Path, tmp_path: Path) -> None:
    table = list(rows(load(store)[:1]))
    columns: dict[str, Any] = {name: [row[name] for row in table] for name in table[0]}
    columns = {**columns, name: values} if values else {name: [1, 2, 3]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
    with pytest.raises(RunError if values else ForeignTable):
        load(tmp_path / "table.parquet")


# ---- Damaged and foreign run directories


@pytest.mark.parametrize("kind", ["nowhere", "foreign", "file", "begun"])
def test_a_folder_without_runs_is_one_sentence(kind: str, mine: Path, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "foreign":
        (path / "notes").mkdir(parents=True)
        (path / "notes" / "metrics.jsonl").write_text("{}")
    if kind == "file":
        path.write_text("not a folder")
    if kind == "begun":
        shutil.copytree(mine / ODD / "fold-3", path / "x" / "fold-3")
    with pytest.raises(RunError, match="must hold run directories"):
        load(path)


RUN = Path("forward=mode/fold-0")


def no_run(mine: Path, name: str) -> str:
    with pytest.raises(RunError) as caught:
        load(mine)
    assert str(mine / RUN / name) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_a_damaged_file_of_a_run_is_named(name: str, mine: Path) -> None:
    for content in (b"", b"[]", b"{", b"\xff", b"{}", b'{"recipe": 3, "seconds": 1}'):
        (mine / RUN / name).write_bytes(content)
        no_run(mine, name)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: text.index("\n") + 1],
        lambda text: text + text,
        lambda text: "[]\n" * 3,
        lambda text: "[" * 100_000,
        lambda text: "",
    ],
)
def test_damaged_metrics_are_named(change: Callable[[str], str], mine: Path) -> None:
    file = mine / RUN / "metrics.jsonl"
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))
    no_run(mine, "metrics.jsonl")
    file.unlink()
    no_run(mine, "metrics.jsonl")


def test_a_table_that_a_spreadsheet_wrote_is_read(store: Path, tmp_path: Path) -> None:
    """With a mark at its beginning, and TRUE and FALSE."""
    write(load(store), tmp_path / "table.csv")
    text = (tmp_path / "table.csv").read_text(encoding="utf-8")
    text = text.replace(",true,", ",TRUE,").replace(",false,", ",FALSE,")
    (tmp_path / "saved.csv").write_text(text, encoding="utf-8-sig")
    assert load(tmp_path / "saved.csv") == load(tmp_path / "table.csv")
    # One that was merged leaves cells empty, which have their defaults.
    head, *lines = text.splitlines()
    merged = [f"{head},statistics", *(f"{line}," for line in lines)]
    (tmp_path / "merged.csv").write_text("\n".join(merged), encoding="utf-8")
    assert load(tmp_path / "merged.csv") == load(tmp_path / "table.csv")


def dropped(column: str) -> Callable[[list[list[str]]], None]:
    def change(cells: list[list[str]]) -> None:
        number = cells[0].index(column)
        for row in cells:
            del row[number]

    return change


def test_tables_without_the_data_version_or_step_precision(store: Path, tmp_path: Path) -> None:
    write(load(store), tmp_path / "new.csv")
    for column, value in (("data_version", "unknown"), ("step_precision", "")):
        units = load(spoiled(store, tmp_path / "less.csv", dropped(column)))
        expected = [replace(unit, **{column: value}) for unit in load(tmp_path / "new.csv")]
        assert units == expected


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_tables_have_the_data_version_and_step_precision_of_each_unit(
    name: str, mine: Path, tmp_path: Path
) -> None:
    fast = json.loads((mine / RUN / "config.json").read_text())
    fast["step"]["precision"] = "float8"
    (mine / RUN / "config.json").write_text(json.dumps(fast))
    config = mine / ODD / "fold-2" / "config.json"
    text = config.read_text().replace("scikit-learn digits", "other, digits")
    config.write_text(json.dumps({**json.loads(text), "step": None}))
    write(load(mine), tmp_path / name)
    units = load(tmp_path / name)
    versions = ["scikit-learn digits"] * 3 + ["other, digits"]
    assert [unit.settings["data_version"] for unit in units] == versions
    assert [unit.step_precision for unit in units] == ["float8", "float32", "float32", ""]
    assert {unit.recipe.run.precision for unit in units} == {"auto"}


def test_a_line_that_is_being_written_is_left_out(mine: Path) -> None:
    """Whoever looks at a grid that trains, or that was killed, may see half a line."""
    file = mine / ODD / "fold-2" / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text + text.splitlines()[1].replace('"epoch": 1', '"epoch": 2')[:100])
    (unfinished,) = (unit for unit in load(mine) if not unit.is_done)
    assert len(unfinished.curve) == 2


def test_links_and_strange_files_beside_the_runs_do_no_harm(mine: Path) -> None:
    before = load(mine)
    (mine / "table.csv").write_text("anything")
    (mine / ".hidden").mkdir()
    (mine / "notes").mkdir()
    (mine / "notes" / "readme").write_text("anything")
    (mine / "loop").symlink_to(mine)
    assert load(mine) == before


def test_parts_of_a_table_replace_only_parts_of_the_same_table(tmp_path: Path) -> None:
    units = made("paper-speech", lambda *_: 0.5, epochs=2, folds=(0, 1))
    others = made("paper-speech", lambda *_: 0.5, epochs=3, folds=(0,))[:2]
    write(others, tmp_path / "t-2.csv")
    (tmp_path / "t-3.csv").write_text("mine")
    (tmp_path / "t-5.csv").mkdir()
    first = write_parts(units, tmp_path / "t.csv", 10_000)
    assert [path.name for path in first[:4]] == ["t.csv", "t-4.csv", "t-6.csv", "t-7.csv"]
    assert write_parts(units, tmp_path / "t.csv", 10_000) == first
    assert [unit.name for path in first for unit in load(path)] == [unit.name for unit in units]
    assert load(tmp_path / "t-2.csv") == others
    assert (tmp_path / "t-3.csv").read_text() == "mine"


@pytest.mark.parametrize("count", [1, 24])
def test_units_trained_again_with_other_epochs_replace_an_old_part(
    tmp_path: Path, count: int
) -> None:
    """Only the last unit of the second part, or all of the table."""
    units, longer = (
        made("paper-speech", lambda *_: 0.5, epochs=epochs, folds=(0,))[:24] for epochs in (2, 3)
    )
    first = write_parts(units, tmp_path / "t.csv", 6_000)
    assert len(first) > 1
    again = [*units[: 24 - count], *longer[24 - count :]]
    assert write_parts(again, tmp_path / "t.csv", 10_000) == first
    assert [unit for path in first for unit in load(path)] == again
    assert len(load(tmp_path)) == len(again)


def test_a_table_in_parts_has_every_unit_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = made("paper-speech", lambda *_: 0.5, epochs=2, folds=(0,))
    names = {unit.name for unit in units}
    write_parts(units, tmp_path / "t.csv", 10_000)
    calls = []

    def write_and_check(part: list[Training], path: Path) -> None:
        write(part, path)
        calls.append(path)
        assert {training.name for training in load(tmp_path)} == names

    monkeypatch.setattr("paper.tables.write", write_and_check)
    assert len(write_parts(units, tmp_path / "t.csv", 4_000)) > 2
    assert len(calls) > 3
