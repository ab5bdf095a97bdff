"""Recipes: every field refuses nonsense in a sentence, and what is sound survives JSON."""

import csv
import json
import math
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from short import is_sentence

from softstair._errors import SoftstairError
from softstair.schedule import INTERVALS, POWERS
from softstair.train import PRESETS, Recipe, preset
from softstair.train.groups import StairName, stair_named
from softstair.train.recipe import fields_with

pytestmark = pytest.mark.quick

NAMES = [field.name for field in fields(Recipe)]
RESULTS = Path(__file__).parents[2] / "results"
STAIRS = (*get_args(StairName), "float")
NO_NUMBER = ["1", "x", True, False, [1.0], {}, 1j, math.nan, math.inf, -math.inf, 10**400]
NO_FLOAT = [None, *NO_NUMBER]
NO_WHOLE = [None, 1.0, 2.5, "2", True, False, [2], math.nan, math.inf, 1j, -1, -(10**30), 10**30]
NO_WORD = [None, 0, True, 1.5, "", "Mode", " mode", "mode\n", ["mode"], ("uniform",), b"mode", {}]
NO_FLAG = [None, 0, 1, 0.0, "True", "False", "yes", [], [True]]
NO_NAME = [None, 0, True, 1.5, "", b"digits", ["digits"], {}]

BAD: dict[str, list[Any]] = {
    "data": NO_NAME,
    "model": NO_NAME,
    "limit": [0, *[value for value in NO_WHOLE if value is not None]],
    "augment": [*NO_WORD, "flip"],
    "integer_input": NO_FLAG,
    "centre_input": NO_FLAG,
    "weights": [*NO_WORD, "int9", "int", "uint16"],
    "weight_quantum": [*NO_FLOAT, 0, 0.0, -1.0, 1e40],
    "features": [*NO_WORD, "int1", "Float"],
    "feature_quantum": [*NO_FLOAT, 0, 0.0, -1.0, 1e40],
    "thresholds": [*NO_WORD, "ceiling"],
    "last_layer": [*NO_WORD, "int4"],
    "skip": [None, 0, True, "classifier", ("a", 1), [None], {"a": 1}, {"a"}, [["a"]]],
    "noise": [*NO_WORD, "gaussian"],
    "forward": [*NO_WORD, "soft"],
    "static_mean": NO_FLAG,
    "static_std": NO_FLAG,
    "mean0": NO_NUMBER,
    "std0": [*NO_NUMBER, -0.1, -1e-300],
    "interval": [*NO_WORD, "same-start"],
    "power": [*NO_WORD, "linear"],
    "period": [*NO_FLOAT, 0, 0.0, -1.0],
    "update": [*NO_WORD, "step"],
    "truncate": NO_FLAG,
    "freeze": NO_FLAG,
    "optimiser": [*NO_WORD, "adamw"],
    "learning_rate": [*NO_FLOAT, -1e-3, 1e300],
    "momentum": [*NO_FLOAT, -0.1, 1.0, 2],
    "weight_decay": [*NO_FLOAT, -1e-9, 1e300],
    "drop": [*NO_NUMBER, -1.0, 1e300],
    "drop_factor": [*NO_FLOAT, -0.1, 1e300],
    "batch": [*NO_WHOLE, 0, 1],
    "epochs": [*NO_WHOLE, 0],
    "statistics": [*NO_WORD, "old"],
    "fold": [*NO_WHOLE, 5, 6],
    "folds": [*NO_WHOLE, 0, 1],
    "seed": [*NO_WHOLE, 2**63],
    "precision": [*NO_WORD, "float16"],
    "compile": [*NO_WORD, True, "yes"],
    "kernels": [*NO_WORD, "cuda"],
    "capture": [*NO_WORD, True, "yes"],
}


def test_every_field_is_tried() -> None:
    assert list(BAD) == NAMES


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_refused_in_a_sentence_that_names_the_field(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=name) as caught:
            Recipe(**{name: value})
        assert type(caught.value) in (ValueError, SoftstairError), (name, value)
        assert is_sentence(str(caught.value)), (name, value, str(caught.value))
        with pytest.raises(ValueError, match=name):
            replace(Recipe(), **{name: value})


@pytest.mark.parametrize("name", [name for name in BAD if None not in BAD[name]])
def test_none_where_it_means_something(name: str) -> None:
    assert getattr(Recipe(**{name: None}), name) is None


def test_a_compiler_makes_kernels_of_its_own() -> None:
    with pytest.raises(ValueError, match="kernels must be auto or reference with compile=always"):
        Recipe(kernels="triton", compile="always")
    assert Recipe(kernels="triton").kernels == "triton"


def test_a_refusal_is_short_however_long_the_value() -> None:
    for name in ("noise", "epochs", "period", "data", "skip", "static_mean", "drop", "limit"):
        for value in (["x" * 10**6, 1], {"x": "y" * 10**6}, ["x"] * 10**5 + [1]):
            with pytest.raises(ValueError, match=name) as caught:
                Recipe(**{name: value})
            assert is_sentence(str(caught.value)), str(caught.value)[:300]


def test_a_bound_that_is_told_is_the_bound() -> None:
    """Whoever is told "a number from 0" may think that every number from 0 will do."""
    for name in ("learning_rate", "weight_decay", "drop", "drop_factor", "weight_quantum"):
        with pytest.raises(ValueError, match=name) as caught:
            Recipe(**{name: 1e300})
        before = str(caught.value).partition(", but ")[0]
        assert any(word in before for word in ("1e+06", "1e6", "10^", "1e9", "1e+09", " to ")), (
            before
        )


def test_fields_that_go_together() -> None:
    with pytest.raises(ValueError, match="fold must be less than folds, 3"):
        Recipe(fold=3, folds=3)
    with pytest.raises(ValueError, match="freeze goes with truncate"):
        Recipe(freeze=True, truncate=False)
    assert Recipe(fold=2, folds=3).fold == 2


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe().epochs = 3  # type: ignore[misc]
    assert hash(Recipe(skip=["a"])) == hash(Recipe(skip=("a",)))  # type: ignore[arg-type]


def test_whole_numbers_become_floats_where_the_field_is_one() -> None:
    assert repr(Recipe(period=7).period) == "7.0"
    assert Recipe(period=7).to_json() == Recipe(period=7.0).to_json()


positive = st.floats(1e-30, 1e30, allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
small = st.floats(0, 1e6)
texts = st.text(min_size=1, max_size=8)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "data": texts,
    "model": texts,
    "limit": st.none() | st.integers(1, 10**12),
    "augment": st.sampled_from(["none", "crop", "crop-flip"]),
    "integer_input": st.booleans(),
    "centre_input": st.booleans(),
    "weights": st.sampled_from(STAIRS),
    "weight_quantum": positive,
    "features": st.sampled_from(STAIRS),
    "feature_quantum": positive,
    "thresholds": st.sampled_from(["midpoint", "floor"]),
    "last_layer": st.sampled_from(["float", "stair"]),
    "skip": st.lists(texts, max_size=3).map(tuple),
    "noise": st.sampled_from(["uniform", "triangular", "normal", "logistic"]),
    "forward": st.sampled_from(["expectation", "mode", "random", "hard"]),
    "static_mean": st.booleans(),
    "static_std": st.booleans(),
    "mean0": st.none() | finite,
    "std0": st.none() | st.floats(0, 1e300),
    "interval": st.sampled_from(INTERVALS),
    "power": st.sampled_from(POWERS),
    "period": st.floats(1e-300, 1e300),
    "update": st.sampled_from(["iteration", "epoch"]),
    "optimiser": st.sampled_from(["adam", "sgd"]),
    "learning_rate": small,
    "momentum": st.floats(0, 0.999),
    "weight_decay": small,
    "drop": st.none() | small,
    "drop_factor": small,
    "batch": st.integers(2, 10**9),
    "epochs": st.integers(1, 10**7),
    "statistics": st.sampled_from(["running", "fresh"]),
    "folds": st.integers(7, 10**9),
    "fold": st.integers(0, 6),
    "seed": st.integers(0, 2**63 - 1),
    "precision": st.sampled_from(["auto", "float32", "tf32", "bfloat16"]),
    "compile": st.sampled_from(["auto", "always", "never"]),
    "kernels": st.sampled_from(["auto", "reference"]),
    "capture": st.sampled_from(["auto", "always", "never"]),
}
recipes = st.fixed_dictionaries({}, optional=GOOD).map(lambda given: {"folds": 7, **given})


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_json_round_trip(values: dict[str, Any]) -> None:
    recipe = Recipe(**values)
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json(), allow_nan=False)))
    assert again == recipe
    assert repr(again) == repr(recipe)
    assert again.differences(recipe) == []
    assert list(recipe.to_json()) == NAMES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(json_values, st.sampled_from(NAMES))
def test_any_json_is_a_recipe_or_refused(value: Any, name: str) -> None:
    for data in (value, {**Recipe().to_json(), name: value}):
        sentence = "It is a recipe."
        try:
            recipe = Recipe.from_json(data)
            assert recipe == Recipe.from_json(recipe.to_json())
        except ValueError as error:
            sentence = str(error)
        assert is_sentence(sentence), sentence


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        5,
        "digits",
        [],
        {},
        {"data": "digits"},
        {1: 2, "a": 3},
        {None: 1},
        {(1, 2): 3, "x": 0},
        {**Recipe().to_json(), "colour": "red"},
        {name: value for name, value in Recipe().to_json().items() if name != "seed"},
        {**Recipe().to_json(), 5: 5},
        {**Recipe().to_json(), **{"x" * 40 + str(i): i for i in range(1000)}},
        {**Recipe().to_json(), "period": 10**400},
        {**Recipe().to_json(), "a\nb": 1},
    ],
    ids=lambda value: str(value)[:20],
)
def test_garbage_is_refused(garbage: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Recipe.from_json(garbage)
    assert is_sentence(str(caught.value)), str(caught.value)


def test_old_recipes_have_the_values_they_were_trained_with() -> None:
    written = Recipe(forward="random").to_json()
    del written["integer_input"], written["statistics"], written["centre_input"]
    assert Recipe.from_json(written) == Recipe(forward="random", centre_input=False)
    with pytest.raises(ValueError, match="seed missing"):
        Recipe.from_json({name: value for name, value in written.items() if name != "seed"})


def test_rescaled_in_proportion() -> None:
    short = preset("paper-cifar10").rescaled(100)
    assert (short.epochs, short.period, short.drop) == (100, 10.0, 80.0)
    assert short.differences(preset("paper-cifar10")) == ["period", "drop", "epochs"]
    assert preset("paper-speech").rescaled(60).period == 5.0
    assert preset("paper-speech").rescaled(60).drop == 50.0
    assert Recipe(drop=None).rescaled(3).drop is None
    assert Recipe().rescaled(Recipe().epochs) == Recipe()
    for epochs in (0, -1, 1.5, True, "3", None, math.nan):
        with pytest.raises(ValueError, match="epochs"):
            Recipe().rescaled(epochs)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 1000))
def test_rescaling_keeps_the_shares(first: int, second: int) -> None:
    recipe = Recipe(epochs=first, period=first / 8, drop=first * 0.75).rescaled(second)
    assert recipe.period / second == pytest.approx(1 / 8)
    assert recipe.drop is not None
    assert recipe.drop / second == pytest.approx(0.75)


def test_the_learning_rate_drops_where_it_should() -> None:
    recipe = preset("paper-cifar10")
    rates = [recipe.learning_rate_at(epoch) for epoch in range(500)]
    assert rates == [1e-3] * 400 + [1e-3 * 0.1] * 100
    assert Recipe(drop=None).learning_rate_at(10**9) == 1e-3
    assert Recipe(drop=0.0).learning_rate_at(0) == pytest.approx(1e-4)
    assert [Recipe(drop=5.6).learning_rate_at(i) < 1e-3 for i in (5, 6)] == [False, True]
    assert [Recipe(drop=6.0).learning_rate_at(i) < 1e-3 for i in (5, 6)] == [False, True]


# What the paper says, section by section, as it is written there.
PAPER: dict[str, dict[str, Any]] = {
    "paper-cifar10": {
        "data": "cifar10", "model": "vgg8", "augment": "crop-flip", "period": 50.0, "epochs": 500,
        "drop": 400.0, "weights": "ternary", "features": "ternary", "weight_quantum": 1.0,
        "feature_quantum": 1.0,
    },
    "paper-svhn": {
        "data": "svhn", "model": "vgg8", "augment": "crop-flip", "period": 50.0, "epochs": 500,
        "drop": 400.0, "weights": "ternary", "features": "ternary", "weight_quantum": 1.0,
        "feature_quantum": 1.0,
    },
    "paper-speech": {
        "data": "speech", "model": "dscnn", "augment": "none", "period": 10.0, "epochs": 120,
        "drop": 100.0, "weights": "int4", "features": "uint4", "weight_quantum": 0.07,
        "feature_quantum": 0.07,
    },
}  # fmt: skip
COMMON = {
    "optimiser": "adam", "learning_rate": 1e-3, "weight_decay": 0.0, "batch": 256, "folds": 5,
    "drop_factor": 0.1, "thresholds": "midpoint", "last_layer": "float", "skip": (),
    "noise": "uniform", "forward": "mode",
    "static_mean": True, "static_std": True, "update": "epoch", "limit": None,
    "precision": "auto", "centre_input": False,
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_presets_say_what_the_paper_says(name: str) -> None:
    recipe = preset(name)
    for field, value in {**COMMON, **PAPER[name]}.items():
        assert getattr(recipe, field) == value, field
    layers = 9 if name == "paper-speech" else 7
    schedule = recipe.schedule(layers)
    assert all(schedule(0, t) == (0.0, pytest.approx(0.288675, abs=1e-6)) for t in (0, 400, 1e6))


def test_the_digits_preset_is_a_partition() -> None:
    recipe = preset("digits")
    assert recipe == Recipe() == PRESETS["digits"]
    assert recipe.centre_input
    assert (recipe.noise, recipe.forward, recipe.interval) == ("uniform", "mode", "partition")
    assert (recipe.static_mean, recipe.static_std) == (True, False)
    # By the last epoch, every layer of the network is a hard stair.
    assert recipe.schedule(2).end < recipe.epochs


def test_there_are_these_presets_and_no_others() -> None:
    assert set(PRESETS) == {"digits", *PAPER}
    for name in ("", "paper", "Digits", None, 3):
        with pytest.raises(
            ValueError, match="preset must be one of digits, paper-cifar10"
        ) as error:
            preset(name)  # type: ignore[arg-type]
        assert is_sentence(str(error.value))


@pytest.mark.parametrize(
    ("noise", "std"),
    [("uniform", 0.288675), ("triangular", 0.204124), ("normal", 0.255107), ("logistic", 0.247546)],
)
def test_first_noise_is_the_papers(noise: Any, std: float) -> None:
    schedule = Recipe(noise=noise).schedule(1)
    assert schedule(0, 0.0) == (0.0, pytest.approx(std, abs=1e-6))
    dynamic = Recipe(noise=noise, static_mean=False).schedule(1)
    assert dynamic(0, 0.0) == (-0.5, pytest.approx(std, abs=1e-6))


def test_stairs_by_name() -> None:
    int4 = Recipe(weights="int4", weight_quantum=0.07).stair("weights")
    assert int4 is not None
    assert int4.levels == pytest.approx([0.07 * k for k in range(-8, 8)])
    assert int4.thresholds == pytest.approx([0.07 * (k + 0.5) for k in range(-8, 7)])
    uint4 = Recipe(features="uint4", feature_quantum=0.07).stair("features")
    assert uint4 is not None
    assert uint4.levels == pytest.approx([0.07 * k for k in range(16)])
    assert uint4.thresholds == pytest.approx([0.07 * (k + 0.5) for k in range(15)])
    floor = Recipe(weights="int4", weight_quantum=0.07, thresholds="floor").stair("weights")
    assert floor is not None
    assert floor.thresholds == pytest.approx([0.07 * k for k in range(-7, 8)])
    ternary = Recipe().stair("weights")
    assert ternary is not None
    assert (ternary.levels, ternary.thresholds) == ((-1.0, 0.0, 1.0), (-0.5, 0.5))
    assert Recipe(features="float").stair("features") is None
    assert Recipe(features="float", weights="float").is_float
    assert not Recipe(features="float").is_float
    for name in get_args(StairName):
        assert len(stair_named(name).levels) >= 2
    for name in ("float", "int9", "int04", "", None):
        with pytest.raises(ValueError, match="stair must be one of heaviside"):
            stair_named(name)  # type: ignore[arg-type]


def test_fields_with_a_fact() -> None:
    assert fields_with("paper_axis") == (
        "noise", "forward", "static_mean", "static_std", "interval", "power",
    )  # fmt: skip
    unchanging = set(NAMES) - set(fields_with("changes_result"))
    assert unchanging == {"truncate", "compile", "kernels", "capture"}
    assert set(fields_with("scales_with_epochs")) == {"period", "drop"}
    assert "weights" in fields_with("architecture")
    assert "epochs" not in fields_with("architecture")


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_row_round_trip(values: dict[str, Any]) -> None:
    row = Recipe(**{**values, "skip": ("fc1", "conv.*")}).to_row()
    assert Recipe.from_row(row).to_row() == row


def test_cells_may_have_their_own_types() -> None:
    row = {"epochs": 4.0, "static_mean": False, "limit": None, "period": 3, "noise": "normal"}
    expected = Recipe(epochs=4, static_mean=False, period=3.0, noise="normal", centre_input=False)
    assert Recipe.from_row(row) == expected
    for name, cell in {"epochs": "4.5", "static_std": "maybe", "interval": "none"}.items():
        with pytest.raises(SoftstairError) as caught:
            Recipe.from_row({name: cell})
        assert caught.value.field == name


def test_tables_of_results_are_read() -> None:
    count = 0
    for path in RESULTS.rglob("*.csv"):
        with path.open(newline="") as file:
            row = next(csv.DictReader(file))
        if "train_loss" not in row:
            continue
        row["learning_rate"] = row.get("first_learning_rate", "")
        recipe = Recipe.from_row(row)
        assert all(recipe.cell(name) == row[name] for name in fields_with("in_tables")), path
        count += 1
    assert count > 10
