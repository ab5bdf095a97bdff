"""The tables of paper/RESULTS.md, and the verdicts, computed again from results/ alone.

Nothing of softstair is imported: the tables are read by csv and pyarrow, intervals are scipy's, and
the paper's design, the cells of each claim and the rules of the verdicts are written down here once
more.
"""

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DETAILS, HOLDS = ROOT / "paper" / "RESULTS.md", ROOT / "docs" / "results.md"
FULL = {"cifar10": 500, "svhn": 500, "speech": 120}
TITLE = {"cifar10": "CIFAR-10", "svhn": "SVHN, regenerated", "speech": "Speech v0.01"}
NOISES = ("uniform", "triangular", "normal", "logistic")
FORWARDS = ("expectation", "mode", "random")
INTERVALS = ("partition", "same_start", "overlapped", "same_end")
POWERS = ("homogeneous", "progressive")
NONE = "–"
READ = (
    "configuration data noise weights statistics std0 precision period centre_input static_mean "
    "seed fold epochs epoch commit learning_rate train_accuracy valid_accuracy test_accuracy"
).split()
"""The columns of Parquet that are read: all of them take three times as long."""

Row = dict[str, Any]
Cells = dict[int, float]


class Unit:
    """One training: its settings, and its validation accuracy by epoch, in per cent."""

    def __init__(self, rows: list[Row]) -> None:
        last = {name: worded(value) for name, value in rows[-1].items()}
        known = {name: word for name, word in last.items() if word}
        self.of = {"statistics": "running", "std0": "None", "centre_input": "false", **known}
        self.name, self.fold, self.data = last["configuration"], int(last["fold"]), last["data"]
        self.epochs, self.statistics = int(last["epochs"]), self.of["statistics"]
        self.curve = [100 * float(row["valid_accuracy"]) for row in rows]
        self.in_training = [100 * float(row["train_accuracy"]) for row in rows]
        self.training = self.in_training[-1]
        self.rates = [float(row["learning_rate"]) for row in rows]
        self.test = 100 * float(last["test_accuracy"]) if last["test_accuracy"] else None
        assert len(rows) == self.epochs, self.name

    def has(self, **wanted: str) -> bool:
        return all(self.of.get(name) == value for name, value in wanted.items())

    def std0(self, default: float) -> float:
        return default if self.of["std0"] == "None" else float(self.of["std0"])

    def before(self) -> float:
        drop = next(at for at, rate in enumerate(self.rates) if rate < 0.5 * self.rates[0])
        return float(np.mean(self.curve[drop - max(1, round(0.02 * self.epochs)) : drop]))


def units(pattern: str) -> list[Unit]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for path in sorted(RESULTS.glob(pattern)):
        for row in rows_of(path):
            if "epoch" not in row:
                break  # a table of something else
            key = path.name, row["configuration"], str(row["fold"]), str(row["seed"])
            found.setdefault(key, []).append(row)
    return [Unit(rows) for rows in found.values()]


def rows_of(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        names = [name for name in parquet.read_schema(path).names if name in READ]
        return parquet.read_table(path, columns=names).to_pylist()
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def worded(value: str | float | bool | None) -> str:
    """A value of Parquet as CSV has it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def trained() -> list[Unit]:
    return units("reproduction/*")


def chosen(name: str, among: Iterable[Unit] | None = None, **wanted: str) -> list[Unit]:
    """The units of a configuration with these settings."""
    among = trained() if among is None else among
    return [unit for unit in among if unit.has(configuration=name, **wanted)]


class Cell(str):
    """What a cell of a table must say; its last digit may be rounded either way at a tie."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        pattern = r"−?\d+\.\d+"
        mine, theirs = (re.findall(pattern, str(one)) for one in (self, other))
        number = lambda word: float(word.replace("−", "-"))
        near = all(abs(number(a) - number(b)) < 0.0505 for a, b in zip(mine, theirs, strict=False))
        return near and re.sub(pattern, "#", self) == re.sub(pattern, "#", str(other))


def shown(value: float | None) -> Cell:
    return Cell(NONE if value is None else f"{value:z.2f}".replace("-", "−"))


def spread(values: list[float]) -> Cell:
    if len(values) < 2:
        return Cell(NONE)
    if len(values) == 2:
        return Cell(f"{shown(min(values))} to {shown(max(values))}")
    return Cell(f"± {shown(half_interval(values))}")


def half_interval(values: list[float]) -> float:
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def bounds(values: list[float]) -> tuple[float, float]:
    """The interval; with one or two folds the range."""
    if len(values) < 3:
        return min(values), max(values)
    value, half = float(np.mean(values)), half_interval(values)
    return value - half, value + half


def figure(values: list[float]) -> str:
    return f"{np.mean(values):.1f} ± {half_interval(values):.1f} points"


def mean(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values and None not in values else None


def table(name: str, page: Path = DETAILS) -> list[Row]:
    """The table between two comments of a page, by the heads of its columns."""
    text = page.read_text(encoding="utf-8")
    match = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", text, re.DOTALL)
    assert match is not None, name
    return rows_in(match[1])


def rows_in(text: str) -> list[Row]:
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


# Coverage


def design(data: str) -> set[str]:
    """The names of the paper's configurations."""
    names = set()
    axes = (NOISES, FORWARDS, (True, False), (True, False), INTERVALS, POWERS)
    for noise, forward, still, narrow, interval, power in itertools.product(*axes):
        if narrow and forward == "expectation":
            continue
        if data != "cifar10" and not (still and (narrow or noise == "uniform")):
            continue
        moving = [what for what, static in (("mean", still), ("std", narrow)) if not static]
        tail = f"{'_'.join(moving)}-{interval}-{power}" if moving else "static"
        names.add(f"{noise}-{forward}-{tail}")
    return names


def test_the_coverage_table_counts_the_units_of_the_papers_design() -> None:
    for row, data in zip(table("coverage"), FULL, strict=True):
        wanted = set(itertools.product(design(data), range(5)))
        assert len(wanted) == {"cifar10": 1320}.get(data, 160)
        mine = [unit for unit in trained() if unit.data == data]
        kinds: dict[tuple[bool, str], set[tuple[str, int]]] = {}
        for unit in mine:
            kind = unit.epochs == FULL[data], unit.statistics
            kinds.setdefault(kind, set()).update({(unit.name, unit.fold)} & wanted)
        running, fresh = (kinds.get((True, one), set()) for one in ("running", "fresh"))
        short = kinds.get((False, "running"), set()) | kinds.get((False, "fresh"), set())
        counts = [len(wanted), len(running), len(fresh - running), len(short - fresh - running)]
        counts.append(len(wanted - running - fresh - short))
        assert list(row.values()) == [TITLE[data], *(f"{count:,}" for count in counts)]


# Levels


def test_levels_at_full_length_are_means_of_the_tables() -> None:
    rows = table("CIFAR-10")
    wanted = {"data": "cifar10", "epochs": "500", "statistics": "running"}
    full = [unit for unit in trained() if unit.has(**wanted)]
    assert {row["configuration"].strip("`") for row in rows} == {unit.name for unit in full}
    for row in rows:
        mine = chosen(row["configuration"].strip("`"), full)
        last = [unit.curve[-1] for unit in mine]
        assert row["folds"] == str(len(mine))
        assert row["validation"] == shown(mean(last))
        assert row["95 %"] == spread(last)
        assert row["test"] == shown(mean([unit.test for unit in mine]))


def test_configurations_are_means_of_the_tables() -> None:
    with open(RESULTS / "configurations.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    quantised = [unit for unit in trained() if unit.of.get("weights") != "float"]
    key = lambda unit: (unit.data, str(unit.epochs), unit.statistics, unit.name)
    assert len(rows) == len({key(unit) for unit in quantised})
    for row in rows:
        wanted = {name: row[name] for name in ("data", "epochs", "statistics")}
        mine = chosen(row["configuration"], quantised, **wanted)
        last = [unit.curve[-1] for unit in mine]
        assert row["folds"] == str(len(mine))
        numbers = [mean(last), None, min(last), max(last), mean([unit.test for unit in mine])]
        if len(last) > 2:
            numbers[1] = half_interval(last)
        names = ("validation", "half_interval_95", "least", "most", "test")
        for name, value in zip(names, numbers, strict=True):
            assert (float(row[name]) if row[name] else None) == pytest.approx(value, abs=0.0051)


def speech(statistics: str = "running") -> list[Unit]:
    """Speech Commands at full length."""
    wanted = {"data": "speech", "epochs": "120", "statistics": statistics}
    return [unit for unit in trained() if unit.has(**wanted)]


def study_of(row: Row) -> Row:
    """The settings of the study that a row of a table is of."""
    data = next(name for name, title in TITLE.items() if title == row["data"])
    return {"data": data, "epochs": row["epochs"], "statistics": row["statistics"]}


@cache
def all_lengths() -> list[Unit]:
    """Every length of the paper's designs, also those beyond the paper's epochs."""
    return [*trained(), *units("variations/speech-*-epochs.parquet")]


def partition_and_static(study: Row) -> list[dict[int, Unit]]:
    """The units of partition and of static noise with the mode, by fold."""
    names = ("uniform-mode-std-partition-homogeneous", "uniform-mode-static")
    return [
        {unit.fold: unit for unit in chosen(name, all_lengths(), **study_of(study))}
        for name in names
    ]


def steps_per_layer(unit: Unit) -> float:
    of_an_epoch = {"cifar10": 40_000, "svhn": 58_605, "speech": 17_796}[unit.data] // 256
    return float(unit.of["period"]) * of_an_epoch


def between(left: str, right: str) -> list[float]:
    """Validation accuracy of one configuration less that of another, for each fold of speech."""
    last = {(unit.name, unit.fold): unit.curve[-1] for unit in speech()}
    return [last[left, fold] - last[right, fold] for fold in range(5)]


def test_tables_by_interval_are_means_of_the_tables() -> None:
    short = [unit for unit in trained() if unit.epochs < FULL[unit.data]]
    cifar10 = [unit for unit in short if unit.data == "cifar10" and unit.has(noise="uniform")]
    last = lambda group: shown(mean([unit.curve[-1] for unit in group]))
    svhn = [unit for unit in longest("svhn") if unit.fold == 0]
    parts = {"decay intervals": cifar10, "speech intervals": speech(), "SVHN intervals": svhn}
    for part, mine in parts.items():
        for row in table(part):
            interval, power = row["decay interval"].replace(" ", "_"), row["power law"]
            for forward in FORWARDS:
                name = f"uniform-{forward}-std-{interval}-{power}"
                name = f"uniform-{forward}-static" if interval == "static_noise" else name
                assert row[forward] == last(chosen(name, mine))
    for row in table("static noise"):
        sides = {noise: chosen(f"{noise}-{row['forward']}-static", short, **study_of(row))
                 for noise in NOISES}  # fmt: skip
        shared = set.intersection(
            *({unit.fold for unit in side} for side in sides.values() if side)
        )
        assert row["folds"] == str(len(shared))
        for noise, side in sides.items():
            assert row[noise] == last([unit for unit in side if unit.fold in shared])


def test_tables_of_causes_follow_from_the_tables() -> None:
    rows = table("steps per layer")
    partitions = chosen("uniform-mode-std-partition-homogeneous", all_lengths())
    assert len(rows) == len({(unit.data, unit.epochs, unit.statistics) for unit in partitions})
    for row in rows:
        partition, static = partition_and_static(row)
        both = sorted(set(partition) & set(static))
        gaps = [partition[fold].curve[-1] - static[fold].curve[-1] for fold in both]
        training = [partition[fold].training - static[fold].training for fold in both]
        assert row["steps per layer"] == f"{steps_per_layer(partition[0]):,.0f}"
        assert row["partition less static"] == shown(mean(gaps))
        assert row["95 % or range"] == spread(gaps)
        assert row["in training"] == shown(mean(training))
        assert row["training: 95 % or range"] == spread(training)
    every = [*trained(), *units("variations/*.csv")]
    for row in table("precisions"):
        named = {"float32": ("float32",), "bfloat16": ("auto", "bfloat16")}[row["precision"]]
        wanted = {"data": "cifar10", "fold": "0", "epochs": row["epochs"], "seed": row["seed"]}
        mine = chosen(row["configuration"].strip("`"), every, statistics="running", **wanted)
        (unit,) = (unit for unit in mine if unit.of["precision"] in named)
        assert [row["validation"], row["test"]] == [shown(unit.curve[-1]), shown(unit.test)]
    within = {"uniform": 0.288675, "triangular": 0.204124, "normal": 0.255107, "logistic": 0.247546}
    for row in table("widths"):
        wanted = {"data": "speech", "epochs": row["epochs"], "statistics": "fresh"}
        mine = [
            unit
            for unit in chosen(f"{row['noise']}-mode-static", every, centre_input="false", **wanted)
            if f"{unit.std0(within[row['noise']]):.3f}" == row["std, quanta"]
        ]
        last = [unit.curve[-1] for unit in mine]
        assert [row["folds"], row["validation"]] == [str(len(mine)), shown(mean(last))]
        assert row["95 % or range"] == spread(last)
        assert row["test"] == shown(mean([unit.test for unit in mine]))


def test_tables_of_centred_input_and_of_the_digits_follow_from_the_tables() -> None:
    both = [*trained(), *units("variations/speech-120-epochs-centred.csv")]
    for row in table("centred"):
        centre = "false" if row["input"] == "x" else "true"
        wanted = {"data": "speech", "epochs": "120", "statistics": row["statistics"]}
        mine = chosen(f"uniform-{row['forward']}-static", both, centre_input=centre, **wanted)
        last = [unit.curve[-1] for unit in mine]
        assert row["folds"] == str(len(mine))
        assert row["validation"] == shown(mean(last))
        assert row["95 % or range"] == spread(last)
        assert row["last 20 epochs"] == shown(mean([np.mean(unit.curve[-20:]) for unit in mine]))
        assert row["test"] == shown(mean([unit.test for unit in mine]))
    rows = table("digits")
    trainings = units("variations/digits-dynamic-means.csv")
    assert len(rows) == len(trainings) == 4
    for row in rows:
        still = {"static": "true", "dynamic": "false"}[row["std"]]
        rate = row["learning rate"]
        (unit,) = (u for u in trainings if u.has(static_std=still, first_learning_rate=rate))
        assert row["validation"] == shown(unit.curve[-1])


def test_dynamic_means_at_full_length_follow_from_the_tables() -> None:
    rows = table("dynamic means at full length")
    units = {
        unit.name.split("-")[1]: unit for unit in full_cifar10() if unit.has(static_mean="false")
    }
    assert [row["forward"] for row in rows] == sorted(units)
    for row in rows:
        unit = units[row["forward"]]
        for epochs in (90, 100, 140, 150, 350, 500):
            assert row[f"after {epochs}, in training"] == shown(unit.in_training[epochs - 1])
        assert row["validation"] == shown(unit.curve[-1])
        (short,) = chosen(unit.name, data="cifar10", epochs="50", fold="0", statistics="running")
        assert row["validation over 50 epochs"] == shown(short.curve[-1])


LONGEST = {"cifar10": "500", "svhn": "100", "speech": "120"}
"""The most epochs for which all decay intervals were trained."""


def longest(data: str) -> list[Unit]:
    """The longest trainings of a data set with running statistics, without float networks."""
    wanted = {"data": data, "epochs": LONGEST[data], "statistics": "running"}
    return [unit for unit in trained() if unit.has(**wanted) and unit.name != "float"]


def cells_of(data: str) -> dict[str, list[Unit]]:
    """The units of each cell of the claims by fold."""
    names = {
        "static, mode": "uniform-mode-static",
        "static, random": "uniform-random-static",
        "partition, mode": "uniform-mode-std-partition-homogeneous",
        "partition, random": "uniform-random-std-partition-homogeneous",
        "partition, expectation": "uniform-expectation-std-partition-homogeneous",
        "same end, expectation": "uniform-expectation-std-same_end-homogeneous",
    }
    units = longest(data)
    assert {u.fold for u in units if u.name not in names.values()} == {0}
    return {
        cell: sorted((u for u in units if u.name == name), key=lambda u: u.fold)
        for cell, name in names.items()
    }


def cifar10() -> dict[str, list[Unit]]:
    """Full length, running statistics: the units of each cell by fold."""
    cells = cells_of("cifar10")
    assert all([u.fold for u in mine] == [*range(5)] for mine in cells.values())
    return cells


def full_cifar10() -> list[Unit]:
    return longest("cifar10")


def on_fold_0() -> dict[str, Unit]:
    """Full length, running statistics: the unit of each configuration."""
    return {u.name: u for u in full_cifar10() if u.fold == 0}


def paired(left: list[Unit], right: list[Unit], kind: str = "validation") -> list[float]:
    """Differences on the folds that both have."""
    value = {
        "validation": lambda u: u.curve[-1],
        "test": lambda u: u.test,
        "training": lambda u: u.training,
    }[kind]
    other = {u.fold: value(u) for u in right}
    return [value(u) - other[u.fold] for u in left if other.get(u.fold) is not None]


@pytest.mark.parametrize(
    ("part", "data"), [("differences", "cifar10"), ("SVHN differences", "svhn")]
)
def test_differences_follow_from_the_tables(part: str, data: str) -> None:
    cells, rows = cells_of(data), table(part)
    assert len(rows) == 7
    for row in rows:
        for kind in ("validation", *(["test"] if data == "cifar10" else [])):
            gaps = paired(cells[row["A"]], cells[row["B"]], kind)
            assert row["folds"] == str(len(gaps))
            assert row[kind] == shown(mean(list(gaps)))
            assert row[f"{kind}: 95 %"] == spread(gaps)


def test_two_verdicts_depend_on_the_other_folds() -> None:
    units, words = full_cifar10(), []
    for place, row in enumerate(table("claims", HOLDS), 1):
        if row["data"] != "CIFAR-10" or row["full length"] == NONE:
            continue
        judges = [Judge([u for u in units if u.fold in folds]) for folds in ((0,), range(5))]
        for judge in judges:
            [*CLAIMS.values()][place - 1](judge)
        if judges[0].verdict() != judges[1].verdict():
            words.append((place, judges[0].verdict()))
    assert words == [(2, "holds"), (4, "holds in part")]


SCHEDULES = {
    "static noise": "uniform-{}-static",
    **{name.replace("_", " "): f"uniform-{{}}-std-{name}-homogeneous" for name in INTERVALS},
}


def test_tables_of_fold_0_follow_from_the_tables() -> None:
    units = on_fold_0()
    rows = [(row, forward, SCHEDULES[row["schedule"]].format(forward))
            for row in table("schedules") for forward in FORWARDS]  # fmt: skip
    assert len(rows) == 15
    for row, head, name in rows:
        unit = units.get(name)
        assert row[head] == shown(unit and unit.curve[-1])
        assert row[f"{head}: test"] == shown(unit and unit.test)


def test_what_each_forward_gains_by_partition_follows_from_the_tables() -> None:
    rows = table("gains")
    assert len(rows) == 6
    for row in rows:
        data = next(name for name, title in TITLE.items() if title == row["data"])
        assert row["epochs"] == LONGEST[data]
        static, partition = (
            sorted(chosen(name.format(row["forward"]), longest(data)), key=lambda unit: unit.fold)
            for name in (SCHEDULES["static noise"], SCHEDULES["partition"])
        )
        for head, side in (("static noise", static), ("partition", partition)):
            assert [unit.fold for unit in side] == [*range(5)]
            assert row[head] == shown(mean([unit.curve[-1] for unit in side]))
        for kind, head in (("validation", "gain"), ("test", "test"), ("training", "training")):
            gaps = paired(partition, static, kind)
            title = {"test": "gain, test", "training": "gain in training"}.get(kind, head)
            assert row[title] == shown(mean(gaps))
            assert row[f"{head}: 95 %"] == spread(gaps)
        ahead = np.mean(paired(partition, static, "training")) > 0
        assert ahead == (row["data"] == "CIFAR-10" and row["forward"] == "random")


def test_random_sampling_beside_the_expectation_follows_from_the_tables() -> None:
    names = [SCHEDULES["partition"].format(forward) for forward in ("random", "expectation")]
    kinds = set.intersection(
        *({(unit.data, unit.epochs, unit.statistics) for unit in chosen(name)} for name in names)
    )
    rows = table("random above expectation")
    assert len(rows) == len(kinds)
    for row in rows:
        random, expectation = (chosen(name, **study_of(row)) for name in names)
        gaps = paired(random, expectation)
        assert row["folds"] == str(len(gaps))
        for head, side in (("random", random), ("expectation", expectation)):
            assert row[head] == shown(mean([unit.curve[-1] for unit in side]))
        assert row["random above expectation"] == shown(mean(gaps))
        assert row["95 % or range"] == spread(gaps)


def test_losses_by_same_end_follow_from_the_tables() -> None:
    rows = table("same end")
    assert len(rows) == 9
    for row in rows:
        data = next(name for name, title in TITLE.items() if title == row["data"])
        assert row["epochs"] == LONGEST[data]
        partition, ends = (
            {u.fold: u for u in chosen(SCHEDULES[name].format(row["forward"]), longest(data))}
            for name in ("partition", "same end")
        )
        assert row["folds"] == str(len(ends))
        for head, side in (("partition", partition), ("same end", ends)):
            mine = [side[fold] for fold in ends]
            assert row[head] == shown(mean([unit.curve[-1] for unit in mine]))
            assert row[f"{head}, in training"] == shown(mean([unit.training for unit in mine]))
        assert row["same end, best epoch"] == shown(mean([max(u.curve) for u in ends.values()]))
        gaps = [partition[fold].curve[-1] - ends[fold].curve[-1] for fold in ends]
        assert row["partition above same end"] == shown(mean(gaps))
        assert row["95 % or range"] == spread(gaps)


def test_noise_types_on_fold_0_follow_from_the_tables() -> None:
    rows = table("noise types")
    assert len(rows) == 4
    for row in rows:
        data = next(name for name, title in TITLE.items() if title == row["data"])
        units = {unit.name: unit for unit in longest(data) if unit.fold == 0}
        for noise in NOISES:
            unit = units.get(f"{noise}-{row['forward']}-static")
            assert row[noise] == shown(unit and unit.curve[-1])
            assert row[f"{noise}, in training"] == shown(unit and unit.training)
        known = [float(row[f"{noise}, in training"]) for noise in NOISES if row[noise] != NONE]
        if row["forward"] == "random":
            assert min(known) == known[0]


def test_verdicts_by_the_last_twenty_epochs_follow_from_the_tables() -> None:
    rows = table("last epochs")
    titles = {
        "Networks trained with static noise of different types converge to about the same "
        "accuracy.": noise_types,
        "Partition can come to about the same accuracy as static noise.": equals_static,
        "Decay intervals that anneal the layers near the input first, partition and same start, "
        "are better than the others.": lambda judge: order(judge, FORWARDS, ("uniform",)),
        "Same end is the worst decay interval, whatever the forward pass.": same_end,
    }
    assert len(rows) == len(titles)
    averaged = [copy(unit) for unit in speech()]
    for unit in averaged:
        unit.curve = [float(np.mean(unit.curve[-20:]))]
    for row in rows:
        for head, mine in (("last epoch", speech()), ("mean of the last 20 epochs", averaged)):
            judge = Judge(mine)
            titles[row["the paper says"]](judge)
            assert row[head] == judge.verdict()


def test_the_cost_follows_from_the_benchmark() -> None:
    bench = json.loads((RESULTS / "speed-h200.json").read_text(encoding="utf-8"))["partition"]
    for row, key in zip(table("cost"), ("static_seconds", "seconds"), strict=True):
        assert row["seconds of a unit"] == f"{bench[key]:.0f}"
        assert row["hours of 1,320 units"] == f"{1320 * bench[key] / 3600:.0f}"


# Claims


class Judge:
    """The cells of one study, and the rules by which their differences become a verdict."""

    def __init__(self, mine: list[Unit]) -> None:
        self.mine, self.epochs = mine, mine[0].epochs
        self.cells: dict[str, tuple[Cells, str, int]] = {}
        self.gaps: dict[str, list[float]] = {}
        self.words: list[str] = []
        self.used: set[tuple[str, int]] = set()

    def group(self, names: Iterable[str], fold: int | None = None) -> list[Unit]:
        return [u for u in self.mine if u.name in names and fold in (None, u.fold)]

    def there(self, names: list[str]) -> list[str]:
        return [name for name in names if self.group([name])]

    def folds(self, names: Iterable[str]) -> set[int]:
        """The folds that each of these configurations has."""
        return set.intersection(*({unit.fold for unit in self.group([name])} for name in names))

    def side(self, label: str, names: set[str], folds: set[int], before: bool) -> Cells:
        """The mean of these configurations on each fold; the one with most folds is listed."""
        value = Unit.before if before else (lambda unit: unit.curve[-1])
        groups = {fold: self.group(names, fold) for fold in sorted(folds)}
        cell = {fold: float(np.mean([*map(value, group)])) for fold, group in groups.items()}
        tests = mean(mean(unit.test for unit in group) for group in groups.values())
        if len(cell) > len(self.cells.get(label, ({},))[0]):
            self.cells[label] = cell, NONE if before else shown(tests), len(names)
        self.used |= {(unit.name, unit.fold) for group in groups.values() for unit in group}
        return cell

    def sides(
        self, wanted: dict[str, list[str]], before: bool = False, tail: str = "",
        parallel: bool = False,
    ) -> dict[str, Cells]:  # fmt: skip
        """The sides that are there, on the folds that all of them have: with the configurations,
        one of each side, that share most folds. Lists that run in parallel are matched place by
        place."""
        known = {label: names for label, names in wanted.items() if self.there(names)}
        matched = (
            zip(*known.values(), strict=True) if parallel else itertools.product(*known.values())
        )
        matched = [names for names in matched if self.folds(names)]
        folds = max(map(self.folds, matched), key=len, default=set())
        kept = [names for names in matched if folds <= self.folds(names)]
        return {
            label: self.side(label + tail, {names[at] for names in kept}, folds, before)
            for at, label in enumerate(known if kept else ())
        }

    def gap(self, label: str, one: Cells, other: Cells) -> list[float]:
        self.gaps[label] = [one[fold] - other[fold] for fold in one if fold in other]
        return self.gaps[label]

    def above(self, values: list[float]) -> None:
        value, low = float(np.mean(values)), bounds(values)[0]
        counts = low > 0 and (len(values) > 2 or value >= 1)
        self.words.append("does not hold" if value <= 0 else PART[counts])

    def same(self, values: list[float], least: float, most: float) -> None:
        low, high = bounds(values)
        outside = low > most or high < least
        inside = least <= low and high <= most
        self.words.append("does not hold" if outside else PART[inside])

    def so(self, good: bool) -> None:
        self.words.append("holds" if good else "does not hold")

    def verdict(self) -> str:
        return self.words[0] if len(set(self.words)) == 1 else "holds in part"


PART = {True: "holds", False: "holds in part"}


def static(forward: str) -> list[str]:
    return [f"{noise}-{forward}-static" for noise in NOISES]


def moving(forward: str, interval: str, noise: str = "uniform") -> list[str]:
    return [f"{noise}-{forward}-std-{interval}-{power}" for power in POWERS]


def level(judge: Judge, label: str, names: list[str], aim: float) -> None:
    (cell,) = judge.sides({label: judge.there(names)}).values()
    gap = judge.gap(f"below the paper's {aim:.0f} %", dict.fromkeys(cell, aim), cell)
    judge.so(float(np.mean(gap)) <= 1.5)


def by_interval(forward: str, noise: str) -> dict[str, list[str]]:
    return {name.replace("_", " "): moving(forward, name, noise) for name in INTERVALS}


def intervals(judge: Judge, forward: str, tail: str = "") -> dict[str, Cells]:
    return judge.sides(by_interval(forward, "uniform"), tail=tail, parallel=True)


def pairs(
    judge: Judge, names: dict[str, list[str]], tail: str
) -> Iterator[tuple[str, str, dict[str, Cells]]]:
    """Those that should be better beside those that should be worse, two by two."""
    if not judge.there(names["same end"]):
        return
    for one in names:
        if judge.there(names[one]):
            judge.cells[one + tail] = {}, NONE, 0  # in this order
    lists = [(one, "overlapped") for one in ("partition", "same start")]
    lists += [(one, "same end") for one in ("partition", "same start", "overlapped")]
    for two in lists:
        sides = judge.sides({one: names[one] for one in two}, tail=tail, parallel=True)
        if len(sides) == 2:
            yield *two, sides


def mode_above_random(judge: Judge) -> None:
    sides = judge.sides({one: static(one) for one in ("mode", "random")}, parallel=True)
    judge.above(judge.gap("mode above random", sides["mode"], sides["random"]))


def drop(judge: Judge) -> None:
    names = {one: static(one) for one in ("mode", "random")}
    before = judge.sides(names, before=True, tail=" / before the drop", parallel=True)
    last = judge.sides(names, parallel=True)
    gains = {
        one: dict(zip(last[one], judge.gap(f"gain of {one}", last[one], before[one]), strict=True))
        for one in names
    }
    judge.above(judge.gap("mode gains more by", gains["mode"], gains["random"]))


def by_noise(judge: Judge, forward: str) -> dict[str, Cells]:
    names = {noise: judge.there([f"{noise}-{forward}-static"]) for noise in NOISES}
    return judge.sides(names, tail=f" / {forward}") if sum(map(len, names.values())) > 1 else {}


def noise_types(judge: Judge) -> None:
    for forward in ("mode", "random"):
        if sides := by_noise(judge, forward):
            ranked = sorted(sides.values(), key=lambda cell: float(np.mean(list(cell.values()))))
            gap = judge.gap(f"largest difference, {forward}", ranked[-1], ranked[0])
            judge.same(gap, -1, 1)


def uniform_worse(judge: Judge) -> None:
    sides = by_noise(judge, "random")
    others = [sides[noise] for noise in NOISES[1:] if noise in sides]
    rest = {fold: float(np.mean([cell[fold] for cell in others])) for fold in others[0]}
    judge.above(judge.gap("mean of the others above uniform", rest, sides["uniform"]))


def variability(judge: Judge) -> None:
    for forward in ("mode", "random"):
        stds = {}
        for noise in by_noise(judge, forward):
            curves = [unit.curve[-(judge.epochs // 6) :]
                      for unit in judge.group([f"{noise}-{forward}-static"])]  # fmt: skip
            stds[noise] = float(np.std(curves, axis=0, ddof=1).mean())
            judge.gaps[f"std over folds, {noise} / {forward}"] = [stds[noise]]
        if stds:
            judge.so(min(stds, key=stds.__getitem__) == "triangular")
            judge.so(max(stds, key=stds.__getitem__) == "uniform")


def highest(options: dict[str, dict[str, Cells]], level: Callable[[list[float]], float]) -> str:
    """The option of the highest level, of those with most folds, on these folds."""
    folds = {name: set(next(iter(cells.values()))) for name, cells in options.items() if cells}
    most = max(folds.values(), key=len)
    means = lambda name: [np.mean([cell[f] for f in most]) for cell in options[name].values()]
    return max((name for name in folds if most <= folds[name]), key=lambda one: level(means(one)))


def expectation_level(judge: Judge) -> None:
    names = [name for interval in INTERVALS for name in moving("expectation", interval)]
    scratch = Judge(judge.mine)
    best = highest({name: scratch.sides({"": [name]}) for name in judge.there(names)}, max)
    interval, power = best.rsplit("-", 2)[1:]
    level(judge, f"best: {interval.replace('_', ' ')} / {power}", [best], 79)


def with_static(judge: Judge, forward: str, before: bool = False) -> dict[str, Cells]:
    names = {f"partition / {forward}": judge.there(moving(forward, "partition"))}
    names["static / mode"] = judge.there(["uniform-mode-static"])
    return judge.sides(names, before, " / before the drop" if before else "")


def below_static(judge: Judge) -> None:
    sides = with_static(judge, "expectation")
    judge.above(judge.gap("static noise above partition", *list(sides.values())[::-1]))


def order(judge: Judge, forwards: tuple[str, ...], noises: tuple[str, ...]) -> None:
    for forward, noise in itertools.product(forwards, noises):
        name = noise if len(forwards) == 1 else forward
        for one, other, sides in pairs(judge, by_interval(forward, noise), f" / {name}"):
            judge.above(judge.gap(f"{one} above {other}, {name}", sides[one], sides[other]))


def power_law(judge: Judge) -> None:
    for interval in ("partition", "same start"):
        names = {power: [f"uniform-expectation-std-{interval.replace(' ', '_')}-{power}"]
                 for power in POWERS}  # fmt: skip
        sides = judge.sides(names, tail=f" / {interval}")
        label = f"homogeneous above progressive, {interval}"
        judge.above(judge.gap(label, sides["homogeneous"], sides["progressive"]))


def random_gains(judge: Judge) -> None:
    names = {f"partition / {one}": moving(one, "partition") for one in ("random", "expectation")}
    sides = judge.sides(names, parallel=True)
    gap = judge.gap("random above expectation", *sides.values())
    judge.above(gap)
    if judge.epochs == 500 and float(np.mean(gap)) < 2.5:
        judge.so(False)


def mitigates(judge: Judge) -> None:
    names = {
        f"{interval.replace('_', ' ')} / {forward}": moving(forward, interval)
        for forward in ("expectation", "random")
        for interval in ("partition", "same_end")
    }
    sides = judge.sides(names, parallel=True)
    losses = {}
    for forward in ("expectation", "random"):
        ends = sides[f"partition / {forward}"], sides[f"same end / {forward}"]
        gap = judge.gap(f"partition above same end, {forward}", *ends)
        losses[forward] = dict(zip(ends[0], gap, strict=True))
    judge.above(judge.gap("less with random by", losses["expectation"], losses["random"]))


def until_the_drop(judge: Judge) -> None:
    before, last = with_static(judge, "mode", before=True), with_static(judge, "mode")
    label = "partition above static noise, before the drop"
    judge.same(judge.gap(label, *before.values()), -1.5, 1.5)
    label = "static noise above partition, last epoch"
    judge.above(judge.gap(label, *list(last.values())[::-1]))


def same_end(judge: Judge) -> None:
    for forward in FORWARDS:
        for one, other, sides in pairs(judge, by_interval(forward, "uniform"), f" / {forward}"):
            if other == "same end":
                judge.above(judge.gap("", sides[one], sides[other]))
                del judge.gaps[""]
        sides = intervals(Judge(judge.mine), forward)
        if last := sides.pop("same end", None):
            lowest = min(sides.values(), key=lambda cell: float(np.mean(list(cell.values()))))
            judge.gap(f"next above same end, {forward}", lowest, last)


def synchronisation(judge: Judge) -> None:
    scratch = Judge(judge.mine)
    wide = highest({one: intervals(scratch, one) for one in FORWARDS}, np.ptp)
    narrow = highest({one: by_noise(scratch, one) for one in ("mode", "random")}, np.ptp)
    groups = [intervals(judge, wide, f" / {wide}")]
    names = {noise: [f"{noise}-{narrow}-static"] for noise in NOISES}
    groups.append(judge.sides(names, tail=f" / static / {narrow}"))
    spreads = []
    labels = (f"decay intervals differ by, {wide}", f"static noise types differ by, {narrow}")
    for label, sides in zip(labels, groups, strict=True):
        ranked = sorted(sides.values(), key=lambda cell: float(np.mean(list(cell.values()))))
        gap = judge.gap(label, ranked[-1], ranked[0])
        spreads.append(dict(zip(ranked[0], gap, strict=True)))
    judge.above(judge.gap("decay intervals by more", *spreads))


def equals_static(judge: Judge) -> None:
    names = {f"partition / {one}": judge.there(moving(one, "partition")) for one in FORWARDS}
    names |= {f"static / {one}": judge.there([f"uniform-{one}-static"]) for one in FORWARDS[1:]}
    sides = judge.sides(names)
    best = [max((cell for label, cell in sides.items() if label.startswith(kind)),
                key=lambda cell: float(np.mean(list(cell.values()))))
            for kind in ("partition", "static")]  # fmt: skip
    judge.same(judge.gap("best of partition above best of static noise", *best), -1.5, np.inf)


CLAIMS = {
    "Static noise, mode": lambda judge: level(judge, "static / mode", static("mode"), 86),
    "Static noise, random": lambda judge: level(judge, "static / random", static("random"), 82),
    "Mode above random": mode_above_random,
    "Mode and the learning rate": drop,
    "Noise type under static noise": noise_types,
    "Uniform noise with random sampling": uniform_worse,
    "Dynamic noise, expectation": expectation_level,
    "Expectation below static noise": below_static,
    "Decay intervals, expectation": lambda judge: order(judge, ("expectation",), ("uniform",)),
    "The same under other noise types": lambda judge: order(judge, ("expectation",), NOISES[1:]),
    "Power law": power_law,
    "Random sampling with partition": random_gains,
    "Random sampling with same end": mitigates,
    "Mode with partition against static noise": until_the_drop,
    "Same end": same_end,
    "Synchronisation over noise type": synchronisation,
    "SVHN: static noise types": noise_types,
    "SVHN: decay intervals": lambda judge: order(judge, FORWARDS, ("uniform",)),
    "SVHN: same end": same_end,
    "Speech Commands: static noise types": noise_types,
    "Speech Commands: decay intervals": lambda judge: order(judge, FORWARDS, ("uniform",)),
    "Speech Commands: same end": same_end,
    "Speech Commands: variability": variability,
    "Speech Commands: partition against static noise": equals_static,
}


@cache
def judged() -> dict[tuple[str, ...], list[Row]]:
    """The rows of results/claims.csv by title, data, epochs and statistics."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows_of(RESULTS / "claims.csv"):
        key = row["title"], row["data"], row["epochs"], row["statistics"]
        found.setdefault(key, []).append(row)
    return found


def in_file(values: list[float], test: str = NONE) -> list[object]:
    """Value, half interval, least, most and test, as the file has them."""
    half = half_interval(values) if len(values) > 2 else None
    numbers = [float(np.mean(values)), half, min(values), max(values)]
    cells = [None if n is None else pytest.approx(n, abs=0.0051) for n in numbers]
    return [*cells, None if test == NONE else Cell(test)]


def read(row: Row) -> list[object]:
    numbers = [row[name] for name in ("value", "half_interval_95", "least", "most")]
    return [*(float(n) if n else None for n in numbers), row["test"] or None]


@pytest.mark.parametrize("title", CLAIMS)
def test_a_verdict_follows_from_its_rows_and_they_from_the_tables(title: str) -> None:
    studies = {key: rows for key, rows in judged().items() if key[0] == title}
    assert bool(studies)
    for (_, data, epochs, statistics), rows in studies.items():
        mine = [u for u in trained() if u.has(data=data, epochs=epochs, statistics=statistics)]
        left_out = unlearned(mine)
        judge = Judge([unit for unit in mine if unit.name not in left_out])
        CLAIMS[title](judge)
        expected: list[list[object]] = [
            [label, "accuracy", str(count), str(len(cell)), *in_file([*cell.values()], test)]
            for label, (cell, test, count) in judge.cells.items()
        ]
        for label, gap in judge.gaps.items():
            folds = "" if "std" in label else str(len(gap))
            expected.append([label, "difference", "", folds, *in_file(gap)])
        about = ("quantity", "kind", "configurations", "folds")
        assert [[*(row[name] for name in about), *read(row)] for row in rows] == expected
        word = judge.verdict()
        word = "holds in part" if word == "holds" and rows[0]["without"] else word
        assert (rows[0]["verdict"], rows[0]["trainings"]) == (word, str(len(judge.used)))


def unlearned(mine: list[Unit]) -> set[str]:
    """Static noise in shortened trainings of CIFAR-10 below half of the paper's level."""
    names = set()
    for forward, half in (("mode", 43), ("random", 41)):
        for name in static(forward):
            last = [unit.curve[-1] for unit in chosen(name, mine)]
            if last and mine[0].data == "cifar10" and mine[0].epochs < 500 and np.mean(last) < half:
                names.add(name)
    return names


def test_the_page_has_the_verdicts_of_the_file() -> None:
    page, counts = table("claims", HOLDS), dict.fromkeys(("holds", "holds in part"), 0)
    kinds: dict[tuple[str, bool, str], tuple[int, str]] = {}
    for (title, data, epochs, statistics), rows in judged().items():
        kind = title, int(epochs) == FULL[data], statistics
        longest = max(kinds.get(kind, (0, "")), (int(epochs), rows[0]["verdict"]))
        kinds[kind] = longest
    assert len(page) == len(CLAIMS)
    for row, title in zip(page, CLAIMS, strict=True):
        wanted = [(title, True, "running"), (title, False, "running"), (title, True, "fresh")]
        words = [kinds.get(kind, (0, NONE))[1] for kind in wanted]
        assert [*row.values()][3:] == words
        counts[words[0]] = counts.get(words[0], 0) + 1
    listed = f"holds {counts['holds']}, holds in part {counts['holds in part']}, does not hold "
    listed += f"{counts['does not hold']}, not tested {counts[NONE]}."
    assert listed in HOLDS.read_text(encoding="utf-8")
