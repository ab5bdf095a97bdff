"""Recipes: fields that check themselves, JSON, rows of tables, presets."""

import csv
import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from paper.rows import cell_of, from_row, to_row
from paper.tables import SETTINGS
from softstair._errors import SoftstairError
from softstair.convert.options import StairName, stair_named
from softstair.train import PRESETS, Recipe, RunError, preset
from softstair.train.recipe import OPTIONS, fields_with
from softstair.train.records import recipe_of

pytestmark = pytest.mark.quick

RESULTS = Path(__file__).parents[2] / "results"
WRONG: dict[type, list[Any]] = {
    bool: [None, 0, 1, "True", [True]],
    int: [1.0, 2.5, "2", True, [2], math.nan, 1j, -1, 10**30],
    float: ["1", "x", True, [1.0], 1j, math.nan, math.inf, -math.inf, 10**400],
    str: [0, True, "", b"digits", ["digits"]],
    tuple: [None, 0, "classifier", ("a", 1), {"a": 1}, {"a"}],
}
BEYOND: dict[str, list[Any]] = {
    "limit": [0], "batch": [1], "epochs": [0], "folds": [1, 10**9], "fold": [5], "seed": [2**63],
    "weight_quantum": [0, -1.0, 1e40], "feature_quantum": [0.0], "std0": [-0.1], "period": [0],
    "learning_rate": [-1e-3, 1e300], "momentum": [1.0], "weight_decay": [-1e-9], "drop": [-1.0],
    "drop_factor": [-0.1], "mixup": [1.01], "cutmix": [2.0], "cutout": [-1],
    "label_smoothing": [1.0],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_values_name_the_field(name: str) -> None:
    known = OPTIONS[name]
    wrong = [*WRONG[known.kind], *BEYOND.get(name, [])]
    wrong += ["Mode", " mode", ("uniform",)] if known.choices else []
    wrong += [None] if not known.is_optional else []
    for value in wrong:
        with pytest.raises(SoftstairError, match=name) as caught:
            Recipe.from_flat(**{name: value})
        assert caught.value.field == name, value
        assert len(str(caught.value)) < 300
    if known.is_optional:
        assert Recipe.from_flat(**{name: None})[name] is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("fold", {"fold": 3, "folds": 3}),
        ("kernels", {"kernels": "triton", "compile": "always"}),
        ("augment", {"augment": "shift"}),
        ("cutmix", {"mixup": 0.5, "cutmix": 0.5}),
        ("cutout", {"data": "speech", "cutout": 4}),
        ("time_mask", {"data": "digits", "time_mask": 4}),
        ("momentum", {"optimiser": "nesterov", "momentum": 0.0}),
        ("anneal_from", {"anneal_from": 40.0}),
        ("std0", {"noise": "mine:Laplace"}),
        ("noise", {"noise": "laplace"}),
        ("label_smoothing", {"loss": "mine:Loss", "label_smoothing": 0.1}),
        ("mixup", {"loss": "mine:Loss", "mixup": 0.5}),
        ("period", {"period": "fitted"}),
        ("teacher_weight", {"teacher_weight": 0.5}),
        ("temperature", {"temperature": 0.5}),
        ("epochs", {"epochs": ["x" * 10**6]}),
    ],
)
def test_values_that_contradict_each_other(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(SoftstairError) as caught:
        Recipe.from_flat(**values)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_frozen_and_normalised() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe().run.epochs = 3  # type: ignore[misc]
    assert hash(Recipe.from_flat(skip=["a"])) == hash(Recipe.from_flat(skip=("a",)))
    assert repr(Recipe.from_flat(period=7).noise.period) == "7.0"
    assert Recipe.from_flat(period="auto") == Recipe.from_flat(period=None)


def test_groups_are_not_flat_values() -> None:
    for name in ("data", "noise", "optimiser"):
        value = Recipe()[name]
        with pytest.raises(SoftstairError, match=rf"^{name} must be \w+Options\(…\).*from_flat"):
            Recipe(**{name: value})
        assert Recipe.from_flat(**{name: value}) == Recipe().replace(**{name: value}) == Recipe()
    with pytest.raises(SoftstairError, match="no field 'wieghts'; did you mean 'weights'"):
        Recipe.from_flat(wieghts="int4")


def test_every_field_has_help_and_facts() -> None:
    assert all(len(known.help.split()) >= 2 for known in OPTIONS.values())
    unchanging = set(OPTIONS) - set(fields_with("changes_result"))
    assert unchanging == {"truncate", "compile", "kernels", "capture"}
    assert fields_with("scales_with_epochs") == ("period", "anneal_from", "warm_up", "drop")


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Return values that a field allows, whatever the others are."""
    known = OPTIONS[name]
    low, high = known.within
    numbers = st.floats(1e-6 if low is None else low, high or 1e6)
    kinds: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(low, high),
        float: numbers,
        str: st.sampled_from(known.choices or ["mine", "ü:load"]),
        tuple: st.lists(st.sampled_from(["fc1", "conv.*"])).map(tuple),
    }
    return kinds[known.kind] | st.none() if known.is_optional else kinds[known.kind]


BOUND = "fold folds kernels anneal_from momentum loss bits".split()
FREE = [name for name in OPTIONS if name not in BOUND]
recipes = st.fixed_dictionaries({}, optional={name: values_of(name) for name in FREE}).map(
    lambda values: Recipe.from_flat(
        **{
            **{"data": "mine:load", **values, "augment": "none", "cutmix": 0.0},
            "teacher": values.get("teacher") or "mine",  # which its weight and temperature need
        }
    )
)


@given(recipes)
def test_json_and_row_round_trip(recipe: Recipe) -> None:
    written = json.loads(json.dumps(recipe.to_flat(), allow_nan=False))
    assert repr(Recipe.from_flat(written)) == repr(recipe)
    assert list(written) == list(OPTIONS)
    assert to_row(from_row(to_row(recipe))) == to_row(recipe)


@pytest.mark.parametrize(
    "data",
    [
        None, 5, [], {}, {"data": "digits"}, {"a": 3},
        {**Recipe().to_flat(), "colour": "red"},
        {name: value for name, value in Recipe().to_flat().items() if name != "seed"},
        {**Recipe().to_flat(), "x" * 10**5: 5},
        {**Recipe().to_flat(), "period": 10**400},
        {**Recipe().to_flat(), "skip": {"a": [1]}},
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_json_that_is_no_recipe(data: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"recipe": data}))
    with pytest.raises(RunError, match="the recipe in") as caught:
        recipe_of(tmp_path)
    assert len(str(caught.value)) < 600


def test_cells_may_have_their_own_types() -> None:
    row = {"epochs": 4.0, "static_mean": False, "limit": None, "period": 3, "noise": "normal"}
    expected = Recipe.from_flat(epochs=4, static_mean=False, period=3.0, noise="normal")
    assert from_row(row) == expected
    for name, cell in {"epochs": "4.5", "static_std": "maybe", "interval": "none"}.items():
        with pytest.raises(SoftstairError) as caught:
            from_row({name: cell})
        assert caught.value.field == name


def test_tables_of_results_are_read() -> None:
    count = 0
    for path in RESULTS.rglob("*.csv"):
        with path.open(newline="") as file:
            row = next(csv.DictReader(file))
        if "train_loss" not in row:
            continue
        row["learning_rate"] = row.get("first_learning_rate", "")
        recipe = from_row(row)
        assert all(cell_of(recipe, name) == row[name] for name in SETTINGS), path
        count += 1
    assert count > 10


def test_differences() -> None:
    recipe = Recipe.from_flat(fold=1, kernels="reference", truncate=False, precision="float32")
    assert recipe.differences(Recipe()) == ["fold", "truncate", "precision", "kernels"]


def test_rescaled_in_proportion() -> None:
    short = preset("paper-cifar10").rescaled(100)
    assert (short.run.epochs, short.noise.period, short.optimiser.drop) == (100, 10.0, 80.0)
    assert short.differences(preset("paper-cifar10")) == ["period", "drop", "epochs"]
    assert Recipe.from_flat(drop=None).rescaled(3).optimiser.drop is None
    assert Recipe().rescaled(6).rescaled(2) == Recipe().rescaled(2)
    for epochs in (0, 1.5, True, "3", None):
        with pytest.raises(ValueError, match="epochs"):
            Recipe().rescaled(epochs)  # type: ignore[arg-type]


def test_annealing_may_begin_late() -> None:
    late = Recipe.from_flat(epochs=100, anneal_from="50%", period=None)
    assert (late.noise.anneal_from, late.rescaled(40).noise.anneal_from) == (50.0, 20.0)
    for recipe in (late, late.rescaled(40)):
        schedule = recipe.schedule(7)
        assert schedule.start == 0.5 * recipe.run.epochs
        assert schedule.end == pytest.approx(0.97 * recipe.run.epochs)
    assert Recipe.from_flat(epochs=100, period=None).schedule(4).period == 24.25
    assert from_row(to_row(late)) == Recipe.from_flat(late.to_flat()) == late
    static = late.replace(static_std=True, anneal_from=99.0)  # does not anneal
    assert static.schedule(7).is_static
    with pytest.raises(SoftstairError, match=r"6\.71429 for 7 layers") as caught:
        late.replace(period=7.0).schedule(7)
    assert caught.value.field == "period"
    assert late.replace(period=6.71429).schedule(7).period == 6.71429
    assert late.replace(anneal_from=0.0, period=7.0).schedule(20).end == 140.0
    for wrong in (98.0, "98%", "half", "50 %%"):
        with pytest.raises(SoftstairError, match="anneal_from"):
            late.replace(anneal_from=wrong)


@pytest.mark.parametrize("epochs", [1, 2, 10, 33, 34, 100])
def test_noise_that_is_updated_by_epochs_ends_before_the_last(epochs: int) -> None:
    recipe = Recipe.from_flat(epochs=epochs, update="epoch", period=None)
    last = 0.97 if epochs == 1 else min(epochs - 1, 0.97 * epochs)
    assert recipe.schedule(3).end == pytest.approx(last)
    if 2 < epochs < 34:
        late = recipe.replace(anneal_from=1.0)
        assert late.schedule(3).end == pytest.approx(epochs - 1)
        with pytest.raises(SoftstairError, match="the beginning of the last epoch"):
            late.replace(period=(epochs - 1.9) / 3).schedule(3)


PAPER = ("paper-cifar10", "paper-svhn", "paper-speech")
BEST = (
    "best-cifar10", "best-cifar10-ternary", "best-cifar10-int4", "best-svhn", "best-svhn-ternary",
    "best-svhn-int4", "best-speech", "best-speech-ternary",
)  # fmt: skip


def test_presets() -> None:
    assert set(PRESETS) == {"digits", *PAPER, *BEST}
    for name in PAPER:  # whose other fields the tests of the designs compare with the paper
        paper = preset(name)
        assert paper == paper.replace(noise="uniform", forward="mode", static_mean=True)
        assert paper.noise.static_std
    for name in BEST:
        best = preset(name)
        assert (best.network.init_from, best.optimiser.teacher, best.data.name in name) == (
            "auto",
            "auto",
            True,
        )
        assert best.data.integer_input  # so that it can be exported
        is_int4 = name.endswith("int4") or name == "best-speech"
        assert best.network.weights == ("int4" if is_int4 else "ternary")
    recipe = preset("digits")
    assert recipe == recipe.replace(noise="uniform", interval="partition", static_std=False)
    assert 0 < recipe.schedule(3).end < recipe.run.epochs  # in the end every layer is a hard stair
    for name in ("paper", None):
        with pytest.raises(ValueError, match="preset must be one of digits, paper-cifar10"):
            preset(name)  # type: ignore[arg-type]


def test_stairs_by_name() -> None:
    int4 = Recipe.from_flat(weights="int4", weight_quantum=0.07).network.stair("weights")
    assert int4.levels == pytest.approx([0.07 * k for k in range(-8, 8)])
    assert int4.thresholds == pytest.approx([0.07 * (k + 0.5) for k in range(-8, 7)])
    uint4 = Recipe.from_flat(features="uint4", feature_quantum=0.07).network.stair("features")
    assert uint4.levels == pytest.approx([0.07 * k for k in range(16)])
    floor = Recipe.from_flat(weights="int4", weight_quantum=0.07, thresholds="floor").network.stair(
        "weights"
    )
    assert floor.thresholds == pytest.approx([0.07 * k for k in range(-7, 8)])
    assert Recipe.from_flat(features="float").network.stair("features") is None
    assert Recipe.from_flat(features="float", weights="float").network.is_float
    assert not Recipe.from_flat(features="float").network.is_float
    assert all(len(stair_named(name).levels) >= 2 for name in get_args(StairName))
    with pytest.raises(ValueError, match="stair must be one of heaviside"):
        stair_named("int9")
