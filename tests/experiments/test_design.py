"""The grids, against an enumeration by hand of what the paper says of them; and what can be asked
of a design."""

import json
import math
import random
import re
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from softstair.data import Dataset
from softstair.experiments import DESIGNS, Configuration, Design, Unit
from softstair.experiments.design import conditions, named, value_of
from softstair.nn import layer_count
from softstair.train import Recipe
from softstair.train.network import make_network
from train.short import is_sentence

pytestmark = pytest.mark.quick

# ---- The oracle: the paper's section on the grid, and nothing of the code's.

NOISES = ("uniform", "triangular", "normal", "logistic")
INTERVALS = ("same start", "same end", "partition", "overlapped")
POWERS = ("homogeneous", "progressive")
FORWARDS = ("expectation", "mode", "random")
NOT_APPLICABLE = ("-", "-")

Point = tuple[
    str, bool, bool, str, str, str
]  # noise, mean static, std static, interval, law, forward


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
TERNARY = {
    "weights": "ternary",
    "weight_quantum": 1.0,
    "features": "ternary",
    "feature_quantum": 1.0,
}
FOUR_BITS = {
    "weights": "int4",
    "weight_quantum": 0.07,
    "features": "uint4",
    "feature_quantum": 0.07,
    "thresholds": "midpoint",
}
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
    "freeze": False,
    "integer_input": False,
    "centre_input": False,
    "statistics": "running",
}
TABLE: dict[str, dict[str, Any]] = {
    "paper-cifar10": {"data": "cifar10", "augment": "crop-flip", **TERNARY, **LONG, **SHARED},
    "paper-svhn": {"data": "svhn", "augment": "crop-flip", **TERNARY, **LONG, **SHARED},
    "paper-speech": {"data": "speech", "augment": "none", **FOUR_BITS, **SHORT, **SHARED},
}
MODELS = {"paper-cifar10": "vgg8", "paper-svhn": "vgg8", "paper-speech": "dscnn"}
LAYERS = {"paper-cifar10": 7, "paper-svhn": 7, "paper-speech": 9}
# "Equivalent noises", half-interval 0.5; the logistic scale turned into a standard deviation.
STDS = {
    "uniform": 0.288675,
    "triangular": 0.204124,
    "normal": 0.255107,
    "logistic": 0.136479 * math.pi / math.sqrt(3),
}


@cache
def units_of(name: str) -> list[Unit]:
    """The units of a design: making 1,320 recipes takes seconds."""
    return list(DESIGNS[name].units())


def point(recipe: Recipe) -> Point:
    """A recipe as a point of the oracle's grid."""
    return collapsed(
        (
            recipe.noise,
            recipe.static_mean,
            recipe.static_std,
            recipe.interval.replace("-", " ").replace("_", " "),
            recipe.power,
            recipe.forward,
        )
    )


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_the_papers_each_combination_once(name: str) -> None:
    expected, number = GRIDS[name]
    assert len(expected) == number
    counted = Counter(point(each.recipe) for each in DESIGNS[name].configurations)
    assert set(counted) == expected
    assert set(counted.values()) == {1}


@pytest.mark.parametrize("name", GRIDS)
def test_every_recipe_has_the_constants_of_the_papers_table(name: str) -> None:
    for each in DESIGNS[name].configurations:
        got = {field: getattr(each.recipe, field) for field in TABLE[name]}
        assert got == TABLE[name], each.name
        assert each.recipe.model in ("auto", MODELS[name])


@pytest.mark.parametrize("name", GRIDS)
def test_the_noise_starts_and_ends_where_the_paper_says(name: str) -> None:
    layers, period = LAYERS[name], TABLE[name]["period"]
    for each in DESIGNS[name].configurations:
        recipe = each.recipe
        schedule = recipe.schedule(layers)
        for layer in range(layers):
            mean, std = schedule(layer, 0.0)
            assert mean == (0.0 if recipe.static_mean else -0.5)
            assert std == pytest.approx(STDS[recipe.noise], abs=1e-6)
            mean, std = schedule(layer, period * layers)
            assert mean == 0.0
            assert std == (pytest.approx(STDS[recipe.noise], abs=1e-6) if recipe.static_std else 0)


@pytest.mark.parametrize("name", ["paper-cifar10", "paper-speech"])
def test_the_networks_are_the_papers(name: str) -> None:
    """auto would be the data's own network; either has the paper's layers and parameters."""
    shape = {"paper-cifar10": (3, 32, 32), "paper-speech": (1, 49, 10)}[name]
    classes = {"paper-cifar10": 10, "paper-speech": 12}[name]
    parameters = {"paper-cifar10": 13_881_994, "paper-speech": 23_168}[name]
    x, y = torch.zeros(2, *shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    data = Dataset("blank", x, y, tuple(map(str, range(classes))), mean=0.0, std=1.0)
    network = make_network(DESIGNS[name].configurations[0].recipe, data)
    assert layer_count(network) == LAYERS[name]
    assert sum(one.numel() for one in network.parameters()) == parameters


@pytest.mark.parametrize("name", GRIDS)
def test_every_configuration_has_five_folds_and_a_name_of_its_own(name: str) -> None:
    design = DESIGNS[name]
    number = GRIDS[name][1]
    assert design.name == name
    assert len({each.name for each in design.configurations}) == number
    assert tuple(design.folds) == (0, 1, 2, 3, 4)
    units = units_of(name)
    assert len(units) == len(design) == {264: 1320, 32: 160}[number]
    pairs = Counter((point(unit.recipe), unit.recipe.fold) for unit in units)
    assert set(pairs) == set(product(GRIDS[name][0], range(5)))
    assert set(pairs.values()) == {1}


@pytest.mark.parametrize("name", GRIDS)
def test_every_unit_has_a_directory_of_its_own_in_the_grids(name: str) -> None:
    folder = Path("some") / "where"
    paths = [unit.path(folder) for unit in units_of(name)]
    # Some file systems do not tell A from a.
    assert len({str(path).casefold() for path in paths}) == len(paths)
    for unit, path in zip(units_of(name), paths, strict=True):
        assert re.fullmatch(r"some/where/[a-z_-]+/fold-[0-4]", path.as_posix())
        assert path == folder / unit.name
        assert path.parent.name == unit.configuration
        assert path.name == f"fold-{unit.recipe.fold}"


@pytest.mark.parametrize("name", GRIDS)
def test_a_name_says_what_the_configuration_is(name: str) -> None:
    for each in DESIGNS[name].configurations:
        noise, mean, std, interval, power, forward = point(each.recipe)
        words = re.split(r"[-_]", each.name)
        assert noise in words
        assert forward in words
        assert ("mean" in words, "std" in words) == (not mean, not std)
        assert ("static" in words) == (mean and std)
        if not (mean and std):
            assert power in words
            assert interval.replace(" ", "_") in each.name


def test_plain_data_holds_every_configuration_once() -> None:
    design = DESIGNS["paper-svhn"]
    plain = json.loads(json.dumps(design.to_json()))
    assert (plain["name"], plain["folds"]) == ("paper-svhn", [0, 1, 2, 3, 4])
    read = {}
    for each in plain["configurations"]:
        name = each.pop("name")
        read[name] = Recipe.from_json(each)
    assert read == {each.name: each.recipe for each in design.configurations}


# ---- where


def said(recipe: Recipe) -> dict[str, str]:
    """What --where calls a recipe's degrees of freedom, from the oracle's point."""
    noise, mean, std, interval, power, forward = point(recipe)
    return {
        "noise": noise,
        "static_mean": "true" if mean else "false",
        "static_std": "true" if std else "false",
        "interval": "none" if interval == "-" else interval.replace(" ", "_"),
        "power": "none" if power == "-" else power,
        "forward": forward,
    }


VALUES = {
    "noise": NOISES,
    "static_mean": ("true", "false"),
    "static_std": ("true", "false"),
    "interval": ("none", *(one.replace(" ", "_") for one in INTERVALS)),
    "power": ("none", *POWERS),
    "forward": FORWARDS,
}


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ({}, 264),
        ({"interval": ["none"]}, 8),
        ({"power": ["none"]}, 8),
        ({"interval": ["partition"]}, 64),  # (264 - 8) / 4
        ({"interval": ["partition", "same_end"]}, 128),
        ({"interval": ["none", "partition"]}, 72),
        ({"static_std": ["true"]}, 72),  # 4 noises, 2 forwards, 1 static or 8 with a moving mean
        ({"static_std": ["true", "false"]}, 264),
        ({"forward": ["expectation"]}, 64),  # dynamic variance alone: 4 noises, 2 means, 8
        ({"noise": ["logistic"], "static_mean": ["true"], "static_std": ["false"]}, 24),
        ({"noise": ["normal"], "interval": ["overlapped"], "power": ["progressive"]}, 8),
        ({"data": ["cifar10"], "epochs": ["500"], "period": ["50.0"]}, 264),
    ],
    ids=str,
)
def test_where_has_the_number_that_counting_gives(wanted: dict[str, Any], number: int) -> None:
    assert len(DESIGNS["paper-cifar10"].where(wanted).configurations) == number


def test_where_is_the_filter_that_it_says() -> None:
    design, draw = DESIGNS["paper-cifar10"], random.Random(5)
    empty = 0
    for _ in range(60):
        fields = draw.sample(list(VALUES), draw.choice((1, 2, 3, 6)))
        wanted = {
            field: draw.sample(VALUES[field], draw.randint(1, len(VALUES[field])))
            for field in fields
        }
        left = tuple(
            each
            for each in design.configurations
            if all(said(each.recipe)[field] in values for field, values in wanted.items())
        )
        if not left:
            empty += 1
            with pytest.raises(ValueError, match="has no configuration with") as caught:
                design.where(wanted)
            assert is_sentence(str(caught.value))
            continue
        found = design.where(wanted)
        assert found.configurations == left
        assert (found.name, found.folds) == (design.name, design.folds)
    assert 0 < empty < 40


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"intervall": ["partition"]}, ["'intervall'", "perhaps interval", "noise, forward"]),
        ({"": ["x"]}, ["''", "noise, forward"]),
        ({"noise": ["unifrom"]}, ["'unifrom'", "perhaps uniform"]),
        ({"recipe": ["x"]}, ["'recipe'"]),
        ({"__class__": ["x"]}, ["'__class__'"]),
        ({"to_json": ["x"]}, ["'to_json'"]),
        ({"interval": ["sideways"]}, ["'sideways'", "partition", "none", "paper-cifar10"]),
        ({"interval": ["partition", "sideways"]}, ["'sideways'", "partition"]),
        ({"interval": ["Partition"]}, ["'Partition'"]),
        ({"interval": [""]}, ["''"]),
        ({"forward": ["hard"]}, ["'hard'", "expectation, mode or random"]),
        ({"forward": ["a\nb"]}, ["'a\\nb'"]),
        ({"static_mean": ["yes"]}, ["'yes'", "true", "false"]),
        ({"epochs": ["100"]}, ["'100'", "must be 500"]),
        ({"interval": ["none"], "static_std": ["false"]}, ["interval=none", "static_std=false"]),
        ({"forward": ["expectation"], "static_std": ["true"]}, ["forward=expectation"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_where_refuses_in_a_sentence(wanted: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"paper-cifar10|degree of freedom") as caught:
        DESIGNS["paper-cifar10"].where(wanted)
    assert is_sentence(str(caught.value)), str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("fold", ["0", "3"])
def test_where_chooses_no_folds(fold: str) -> None:
    with pytest.raises(ValueError, match=r"folds are chosen by .* --folds") as caught:
        DESIGNS["paper-svhn"].where({"fold": [fold]})
    assert is_sentence(str(caught.value))


def test_none_means_that_nothing_moves() -> None:
    for still, field in product((True, False), ("interval", "power")):
        recipe = Recipe(static_mean=True, static_std=still)
        assert (value_of(recipe, field) == "none") is still
    twin = Recipe(weights="float", features="float")
    assert value_of(twin, "interval") == value_of(twin, "power") == "none"
    assert value_of(Recipe(skip=("a", "b")), "skip") == "a,b"


def test_conditions_are_fields_with_their_values() -> None:
    assert conditions([], "--where") == {}
    given = ["static-mean=true", "interval=partition", "interval=none,same_end"]
    found = {"static_mean": ["true"], "interval": ["partition", "none", "same_end"]}
    assert conditions(given, "--where") == found
    for word in ("interval", "=", "=x", "interval=", "a b=c", "ä.b=c", "\n=x", ""):
        with pytest.raises(ValueError, match="--set must be given as field=value") as caught:
            conditions([word], "--set")
        assert repr(word) in str(caught.value)
        assert is_sentence(str(caught.value))


# ---- other designs of the same


@pytest.mark.parametrize(("name", "few"), [("paper-svhn", 100), ("paper-speech", 12)])
def test_rescaled_keeps_all_but_the_times(name: str, few: int) -> None:
    design, small = DESIGNS[name], DESIGNS[name].rescaled(few)
    share = few / TABLE[name]["epochs"]
    times = ("epochs", "period", "drop")
    for before, after in zip(design.configurations, small.configurations, strict=True):
        assert after.name == before.name
        assert after.recipe.epochs == few
        assert after.recipe.period == pytest.approx(TABLE[name]["period"] * share, rel=1e-12)
        assert after.recipe.drop == pytest.approx(TABLE[name]["drop"] * share, rel=1e-12)
        assert set(before.recipe.differences(after.recipe)) == set(times)
    assert small.folds == design.folds
    assert small.rescaled(TABLE[name]["epochs"]) == design
    assert design.where({"noise": ["normal"]}).rescaled(few) == small.where({"noise": ["normal"]})


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "100", None, 10**8])
def test_rescaled_refuses_what_is_no_number_of_epochs(epochs: Any) -> None:
    with pytest.raises(ValueError, match="epochs must be") as caught:
        DESIGNS["paper-svhn"].rescaled(epochs)
    assert is_sentence(str(caught.value))


def test_varied_are_the_fields_that_differ() -> None:
    assert set(DESIGNS["paper-cifar10"].varied()) == set(VALUES)
    few = DESIGNS["paper-svhn"].where({"static_std": ["false"]})
    assert set(few.varied()) == {"forward", "interval", "power"}
    assert few.where({"forward": ["mode"], "power": ["homogeneous"]}).varied() == ("interval",)


A, B = Configuration("a", Recipe()), Configuration("b", Recipe(seed=1, folds=3))


@pytest.mark.parametrize(
    ("configurations", "folds", "words"),
    [
        ((), (0,), ["none was given"]),
        ((A, A), (0,), ["'a'", "two"]),
        ((A,), (), ["0 to 4", "[]"]),
        ((A,), (5,), ["0 to 4", "[5]"]),
        ((A,), (-1,), ["0 to 4", "[-1]"]),
        ((A,), (0, 1, 0), ["different", "[0, 1, 0]"]),
        ((A,), (True,), ["[True]"]),
        ((A,), (0.0,), ["[0.0]"]),
        ((A,), ("0",), ["['0']"]),
        ((A, B), (0, 3), ["0 to 2", "[0, 3]"]),
    ],
)
def test_a_design_refuses_nonsense(configurations: Any, folds: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="was given") as caught:
        Design("x", configurations, folds)
    assert is_sentence(str(caught.value))
    for word in words:
        assert word in str(caught.value)


def test_the_designs_by_name() -> None:
    for name, design in DESIGNS.items():
        assert named(name) is design
    for name in ("", "paper", "PAPER-SVHN", "../paper-svhn", "x\ny"):
        with pytest.raises(ValueError, match="paper-cifar10, paper-svhn, paper-speech") as caught:
            named(name)
        assert is_sentence(str(caught.value))
