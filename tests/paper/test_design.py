"""The paper's grids against an enumeration by hand, what can be asked of a design, and designs in
TOML files."""

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paper import DESIGNS, Configuration, Design, design
from paper.design import parse, read_design
from softstair.train import PRESETS, Recipe

# ---- The oracle: the paper's section on the grid, and nothing of the code's.

NOISES = ("uniform", "triangular", "normal", "logistic")
INTERVALS = ("same start", "same end", "partition", "overlapped")
POWERS = ("homogeneous", "progressive")
FORWARDS = ("expectation", "mode", "random")
NOT_APPLICABLE = ("-", "-")

Point = tuple[str, bool, bool, str, str, str]
"""Noise, mean static, std static, interval, law, forward."""


def collapsed(point: Point) -> Point:
    """Interval and law do not matter where nothing decays."""
    noise, mean, std, interval, power, forward = point
    return (noise, mean, std, *(NOT_APPLICABLE if mean and std else (interval, power)), forward)


def grid_of_cifar10() -> set[Point]:
    """384 combinations, of which 264 are different and wanted."""
    whole = list(product(NOISES, (True, False), (True, False), INTERVALS, POWERS, FORWARDS))
    assert len(whole) == 384
    different = set(map(collapsed, whole))
    assert len(different) == 384 - 96 + 12
    return {one for one in different if not (one[2] and one[5] == "expectation")}


def grid_of_the_others() -> set[Point]:
    """8 static ones and 24 with a dynamic variance."""
    static = {(noise, True, True, "-", "-", way) for noise in NOISES for way in ("mode", "random")}
    dynamic = {("uniform", True, False, *rest) for rest in product(INTERVALS, POWERS, FORWARDS)}
    return static | dynamic


GRIDS = {
    "paper-cifar10": (grid_of_cifar10(), 264),
    "paper-svhn": (grid_of_the_others(), 32),
    "paper-speech": (grid_of_the_others(), 32),
}
QUANTA = ("weights", "weight_quantum", "features", "feature_quantum")
TERNARY = dict(zip(QUANTA, ("ternary", 1.0, "ternary", 1.0), strict=True))
FOUR_BITS = dict(zip(QUANTA, ("int4", 0.07, "uint4", 0.07), strict=True))
LONG = {"period": 50.0, "epochs": 500, "drop": 400.0}
SHORT = {"period": 10.0, "epochs": 120, "drop": 100.0}
SHARED = {
    "drop_factor": 0.1,
    "optimiser": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "batch": 256,
    "last_layer": "float",
    "update": "epoch",
    "folds": 5,
    "limit": None,
    "skip": (),
    "integer_input": False,
    "centre_input": False,
    "statistics": "running",
    "thresholds": "midpoint",
    "precision": "auto",
    "mean0": None,
    "std0": None,
}
TABLE: dict[str, dict[str, Any]] = {
    "paper-cifar10": {"data": "cifar10", "augment": "crop-flip", **TERNARY, **LONG, **SHARED},
    "paper-svhn": {"data": "svhn", "augment": "crop-flip", **TERNARY, **LONG, **SHARED},
    "paper-speech": {"data": "speech", "augment": "none", **FOUR_BITS, **SHORT, **SHARED},
}
MODELS = {"paper-cifar10": "vgg8", "paper-svhn": "vgg8", "paper-speech": "dscnn"}


def point(recipe: Recipe) -> Point:
    """A recipe as a point of the oracle's grid."""
    interval = recipe.noise.interval.replace("_", " ")
    moving = (recipe.noise.static_mean, recipe.noise.static_std, interval, recipe.noise.power)
    return collapsed((recipe.noise.name, *moving, recipe.noise.forward))


@pytest.mark.quick
@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_the_papers_each_combination_once_on_five_folds(name: str) -> None:
    expected, number = GRIDS[name]
    design = DESIGNS[name]
    assert len(expected) == number
    assert len(design) == 5 * number
    assert (design.name, design.folds) == (name, (0, 1, 2, 3, 4))
    counted = Counter(point(each.recipe) for each in design.configurations)
    assert set(counted) == expected
    assert set(counted.values()) == {1}
    for each in design.configurations:
        got = {field: each.recipe[field] for field in TABLE[name]}
        assert got == TABLE[name], each.name
        assert each.recipe.network.model in ("auto", MODELS[name])


@pytest.mark.parametrize("name", GRIDS)
def test_a_configuration_is_named_by_its_degrees_of_freedom(name: str) -> None:
    folder = Path("some/where")
    few = replace(DESIGNS[name], folds=(0, 4))
    paths = [unit.path(folder) for unit in few.units()]
    # Some file systems do not tell A from a.
    assert len({str(path).casefold() for path in paths}) == len(paths) == len(few)
    for unit, path in zip(few.units(), paths, strict=True):
        assert re.fullmatch(r"some/where/[a-z_-]+/fold-[04]", path.as_posix())
        assert path == folder / unit.name
        noise, mean, std, interval, power, forward = point(unit.recipe)
        moving = "_".join(what for what, still in (("mean", mean), ("std", std)) if not still)
        rest = f"{moving}-{interval.replace(' ', '_')}-{power}" if moving else "static"
        assert unit.configuration == f"{noise}-{forward}-{rest}"


# ---- where


def words_of(recipe: Recipe) -> dict[str, str]:
    """A recipe's degrees of freedom as text, from the oracle's point."""
    noise, mean, std, interval, power, forward = point(recipe)
    return {
        "noise": noise,
        "static_mean": "true" if mean else "false",
        "static_std": "true" if std else "false",
        "interval": "none" if interval == "-" else interval.replace(" ", "_"),
        "power": "none" if power == "-" else power,
        "forward": forward,
    }


def test_where_is_the_filter_that_it_says() -> None:
    design, draw = DESIGNS["paper-cifar10"], random.Random(5)
    rows = [words_of(each.recipe) for each in design.configurations]
    values = {field: sorted({row[field] for row in rows}) for field in rows[0]}
    assert set(design.varied()) == set(values)
    empty = 0
    for _ in range(60):
        fields = draw.sample(list(values), draw.choice((1, 2, 3, 6)))
        wanted = {
            field: draw.sample(values[field], draw.randint(1, len(values[field])))
            for field in fields
        }
        left = tuple(
            each
            for each, row in zip(design.configurations, rows, strict=True)
            if all(row[field] in allowed for field, allowed in wanted.items())
        )
        if not left:
            empty += 1
            with pytest.raises(ValueError, match="has no configuration with"):
                design.where(wanted)
            continue
        assert design.where(wanted) == replace(design, configurations=left)
    assert 0 < empty < 40


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({"intervall": ["partition"]}, "^a field must be one of .*did you mean 'interval'"),
        ({"noise": ["unifrom"]}, "did you mean 'uniform'"),
        ({"to_json": ["x"]}, "'to_json'"),
        ({"interval": ["partition", "sideways"]}, "'sideways'"),
        ({"forward": ["hard"]}, "expectation, mode, random"),
        ({"interval": ["none"], "static_std": ["false"]}, "no configuration with interval=none"),
        ({"fold": ["0"]}, "folds are chosen by"),
    ],
)
def test_where_refuses_what_no_configuration_has(wanted: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DESIGNS["paper-cifar10"].where(wanted)


# ---- other designs of the same


def test_folds_are_those_that_every_configuration_has() -> None:
    pair = (Configuration("a", Recipe()), Configuration("b", Recipe.from_flat(seed=1, folds=3)))
    with pytest.raises(ValueError, match="0 to 2"):
        Design("x", pair, (0, 3))


# ---- Files

EXAMPLE = """
name = "quanta"
folds = [0, 1]
[recipe]
epochs = 20
[vary]
forward = ["mode", "random"]
interval = ["partition", "same_end"]
[[without]]
forward = "random"
interval = "same_end"
"""


def put(folder: Path, text: str | bytes, name: str = "mine.toml") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def test_a_design_is_what_its_file_says(tmp_path: Path) -> None:
    design = read_design(put(tmp_path, EXAMPLE))
    base = PRESETS["digits"].rescaled(20)
    wanted = {
        "forward=mode,interval=partition": base.replace(forward="mode", interval="partition"),
        "forward=mode,interval=same_end": base.replace(forward="mode", interval="same_end"),
        "forward=random,interval=partition": base.replace(forward="random", interval="partition"),
    }
    assert {each.name: each.recipe for each in design.configurations} == wanted
    assert (design.name, design.folds, len(design)) == ("quanta", (0, 1), 6)
    assert read_design(put(tmp_path, EXAMPLE.replace("\n", "\r\n"))) == design
    empty = read_design(put(tmp_path, "", "a_name-1.toml"))
    assert (empty.name, empty.folds, empty.names_folds) == ("a_name-1", (0, 1, 2, 3, 4), False)
    assert empty.configurations == (Configuration("all", PRESETS["digits"]),)


def test_epochs_scale_period_and_drop_unless_these_are_given() -> None:
    times = lambda table: [
        (each.recipe.run.epochs, each.recipe.noise.period, each.recipe.optimiser.drop)
        for each in parse({"preset": "paper-speech", **table}).configurations
    ]
    assert times({"recipe": {"epochs": 12}}) == [(12, 1.0, 10.0)]
    assert times({"recipe": {"epochs": 12, "period": 3}}) == [(12, 3.0, 10.0)]
    assert times({"vary": {"epochs": [12, 60]}}) == [(12, 1.0, 10.0), (60, 5.0, 50.0)]
    (late,) = parse(
        {"recipe": {"epochs": 12, "anneal_from": "50%", "period": "None"}}
    ).configurations
    assert (late.recipe.noise.anneal_from, late.recipe.noise.period) == (6.0, None)
    both = {"vary": {"period": [1, 2], "epochs": [12, 60]}}
    assert set(times(both)) == {(12, 1, 10), (60, 1, 50), (12, 2, 10), (60, 2, 50)}


WITHOUT: list[tuple[dict[str, list[Any]], list[dict[str, Any]], list[str]]] = [
    (
        {"forward": ["mode", "random"], "seed": [0, 1]},
        [{"forward": "mode"}, {"forward": "random", "seed": 1}],
        ["forward=random,seed=0"],
    ),
    ({"seed": [0, 1, 2]}, [{"seed": [0, 2]}], ["seed=1"]),
    ({"skip": [["0"], ["3"], ["6"]]}, [{"skip": [["0"], ["6"]]}], ["skip=3"]),
    ({"skip": [["0"], ["3"]]}, [{"skip": ["0"]}], ["skip=3"]),
    ({"drop": ["None", 3.0]}, [{"drop": "None"}], ["drop=3.0"]),
    # Static noise has one configuration, whatever its interval: it is there, or left out.
    (
        {"static_std": [True, False], "interval": ["partition", "same_end"]},
        [{"static_std": True}],
        ["static_std=false,interval=partition", "static_std=false,interval=same_end"],
    ),
    (
        {"static_std": [True, False], "interval": ["partition", "same_end"]},
        [{"static_std": True, "interval": "partition"}, {"static_std": False}],
        ["static_std=true,interval=none"],
    ),
]


@pytest.mark.parametrize(("vary", "without", "names"), WITHOUT, ids=str)
def test_without_leaves_out_what_has_all_of_its_values(
    vary: dict[str, Any], without: list[Any], names: list[str]
) -> None:
    design = parse({"vary": vary, "without": without})
    assert [each.name for each in design.configurations] == names


def test_rows_are_listed_one_by_one_and_combined_with_what_varies() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "base"},
        {"name": "late-2.0", "anneal_from": "25%", "period": "None", "epochs": 40},
        {"forward": "random", "skip": ["0"]},
        {},
    ]
    design = parse({"rows": rows, "vary": {"seed": [0, 1]}, "recipe": {"batch": 32}})
    base = PRESETS["digits"].replace(batch=32)
    wanted = {
        "base": base,
        "late-2.0": base.rescaled(40).replace(anneal_from=10.0, period=None),
        "skip=0,forward=random": base.replace(forward="random", skip=("0",)),
        "": base,
    }
    assert {each.name: each.recipe for each in design.configurations} == {
        f"{name},seed={seed}".strip(","): recipe.replace(seed=seed)
        for name, recipe in wanted.items()
        for seed in (0, 1)
    }
    alone = parse({"rows": rows[:2], "without": [{"epochs": 20}]})
    assert [each.name for each in alone.configurations] == ["late-2.0"]


@pytest.mark.parametrize("value", ["../../x:f", "/etc:f", "a\x00b:f", "..", "é" * 90, "a" * 5000])
def test_a_value_never_leaves_the_grids_folder(value: str, tmp_path: Path) -> None:
    (unit,) = parse({"vary": {"data": [value]}, "folds": [0]}).units()
    path = unit.path(tmp_path / "grid")
    assert path.resolve() == tmp_path.resolve() / "grid" / unit.configuration / "fold-0"
    assert unit.configuration.isprintable()
    path.mkdir(parents=True)


BAD: dict[str, tuple[str | bytes, str]] = {
    "binary": (b"\xff\xfe\x00\x01", "utf-8"),
    "huge": ("#" * ((1 << 20) + 1), "too long"),
    "half a line": ("[vary", "end of document"),
    "lists for ever": ("name = " + "[" * 100_000, "see docs"),
    "digits for ever": ("[vary]\nseed = [" + "9" * 5000 + "]", "4300 digits"),
    "unknown key": ("nmae = 'x'", "name, preset, folds, recipe, rows, vary, without, but 'nmae'"),
    "name of a number": ("name = 3", "name must be a str, but 3"),
    "unknown preset": ("preset = 'cifar'", "paper-cifar10"),
    "without of numbers": ("without = [3]", "without must be tables"),
    "without of nothing": ("[[without]]", "each with a field"),
    "name of a path": ("name = '../x'", "letters"),
    "name of lines": ('name = "a\\nb"', r"'a\\nb'"),
    "unknown field": ("[recipe]\nforwrad = 'mode'", "did you mean 'forward'"),
    "unknown without": ("[[without]]\nfoward = 'mode'", "did you mean 'forward'"),
    "wrong type": ("[recipe]\nepochs = 'many'", "epochs must be .*'many'"),
    "None for a number that must be": ("[recipe]\nbatch = 'None'", "batch"),
    "unfit together": ("[recipe]\nmixup = 0.5\ncutmix = 0.5", "cutmix"),
    "no list": ("[vary]\nforward = 'mode'", "forward must vary over a list"),
    "deeper": ("[vary]\nforward = [['mode']]", "forward"),
    "fold": ("[vary]\nfold = [0, 1]", "folds = "),
    "folds vary": ("[vary]\nfolds = [2, 5]", "folds = "),
    "twice": ("[vary]\nforward = ['mode', 'mode']", "forward must vary over different"),
    "rows of numbers": ("rows = [3]", "rows must be tables"),
    "no row": ("rows = []", "at least one configuration"),
    "name of a row": ("rows = [{name = '../x'}]", "name must be of letters"),
    "rows of one name": ("rows = [{name = 'a'}, {name = 'a', seed = 1}]", "same name, 'a'"),
    "folds in a row": ("rows = [{folds = 3}]", "folds = "),
    "in rows and vary": ("rows = [{seed = 1}]\nvary = {seed = [0]}", "seed must be in rows or"),
    "a value that nothing has": ("[[without]]\nforward = 'random'", "forward in without"),
    "no value in without": ("[vary]\nseed = [0, 1]\n[[without]]\nseed = []", "seed in without"),
    "alike": ("[vary]\nmodel = ['a b:f', 'a_b:f']", "same name, 'model=a_b_f'"),
    "nothing left": ("[[without]]\nforward = 'mode'", "at least one configuration"),
    "fold too high": ("folds = [5]", "0 to 4"),
    "folds of a Boolean": ("folds = [true]", "folds must be"),
    "more folds than memory": ("[recipe]\nfolds = 1000000000", "folds must be .* to 1000000"),
    "no fold": ("folds = []", "folds must be"),
    "a fold twice": ("folds = [0, 1, 0]", "different integers"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_design_is_refused_with_its_file_and_reason(kind: str, tmp_path: Path) -> None:
    text, match = BAD[kind]
    with pytest.raises(ValueError, match=rf"(?s)mine\.toml.*{match}") as caught:
        read_design(put(tmp_path, text))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_a_path_that_holds_no_design(tmp_path: Path) -> None:
    for path, match in (("no.toml", "existing TOML"), (".", "directory"), ("x" * 300, "too long")):
        with pytest.raises(ValueError, match=match):
            read_design(tmp_path / path)
    put(tmp_path, "", "mygrid.toml")
    for path in ("mygrid", "mygrd.toml"):
        with pytest.raises(ValueError, match=r"was given; did you mean 'mygrid\.toml'\?"):
            read_design(tmp_path / path)
    with pytest.raises(ValueError, match=r"other\.toml' was given\.$"):
        read_design(tmp_path / "other.toml")


def test_more_configurations_than_anybody_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(design, "MOST_CONFIGURATIONS", 30)
    assert len(parse({"vary": {"seed": list(range(30))}}).configurations) == 30
    many = {field: list(range(2, 1002)) for field in ("seed", "batch", "epochs")}
    # Refused before they are counted.
    for table in ({"rows": [{}] * 11, "vary": {"seed": [0, 1, 2]}}, {"vary": many}):
        with pytest.raises(ValueError, match="at most 30 configurations"):
            parse(table)
