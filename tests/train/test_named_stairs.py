"""Recipes with `bits`: names instead of stairs and quanta, from training to deployment."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from short import recipe, result, stopped, uninterrupted
from torch import nn

import softstair as ss
from paper.design import changed
from paper.rows import from_row, to_row
from softstair import zoo
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum
from softstair.convert.options import name_of
from softstair.data import load, split
from softstair.data.batches import Examples
from softstair.train import Recipe, fit, trained_network
from softstair.train.metrics import chosen_inputs
from softstair.train.network import levels_of, make_network
from softstair.train.recipe import preset

DIGITS = load("digits")
MIXED = "features.1=int8,classifier=int8,*=ternary"


stairs = ss.nn.stair_modules


def names(network: nn.Module) -> dict[str, str | None]:
    return {k.removesuffix(".weight_stair"): name_of(m.stair) for k, m in stairs(network)}


# The recipe


def test_bits_exclude_stairs_and_quanta() -> None:
    others: dict[str, Any] = {
        "weights": "int4", "features": "float", "first_layer": "int8", "weight_quantum": 0.5,
        "feature_quantum": 0.5, "thresholds": "floor",
    }  # fmt: skip
    for name, value in others.items():
        with pytest.raises(SoftstairError, match=f"{name} must be left out with `bits`") as caught:
            Recipe.from_flat(bits="int4", **{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("bits", ["int9", "stem=int9,*=int4", "*=int4,stem=int8", "stem=", ""])
def test_wrong_bits_are_refused_before_there_is_a_network(bits: str) -> None:
    with pytest.raises(SoftstairError, match=r"^bits must ") as caught:
        Recipe.from_flat(bits=bits)
    assert caught.value.field == "bits"


def test_bits_replace_the_stairs_of_a_preset() -> None:
    best = preset("best-cifar10-int4")
    recipe = changed(best, {"bits": "ternary"})
    assert (recipe.network.bits, recipe.network.weights, recipe.network.feature_quantum) == (
        "ternary",
        "ternary",
        1.0,
    )
    assert recipe.optimiser.learning_rate == best.optimiser.learning_rate
    with pytest.raises(SoftstairError, match="weights must be left out with `bits`"):
        changed(best, {"bits": "ternary", "weights": "ternary"})


def test_a_recipe_in_float_by_name_is_the_float_twin() -> None:
    assert Recipe.from_flat(bits="float").network.is_float
    assert not Recipe.from_flat(bits="float/uint4").network.is_float
    assert not Recipe.from_flat(bits="int4").network.is_float
    assert from_row(to_row(Recipe.from_flat(bits=MIXED))) == Recipe.from_flat(bits=MIXED)


def test_names_of_the_stairs_of_a_recipe() -> None:
    assert levels_of(Recipe()) == "ternary"
    assert levels_of(Recipe.from_flat(weights="int4", features="ternary")) == "int4/ternary"
    assert levels_of(Recipe.from_flat(bits=MIXED)) == MIXED


def test_names_choose_how_quanta_and_latent_weights_are_trained() -> None:
    named, given = Recipe.from_flat(bits="int4"), Recipe.from_flat(weights="int4", features="uint4")
    assert named.network.calibrates
    assert named.replace(quanta="learned").network.calibrates
    assert not given.network.calibrates
    assert given.replace(quanta="calibrated").network.calibrates
    assert not given.replace(quanta="learned").network.calibrates  # from the quantum that is given
    assert not named.replace(quanta="fixed").network.calibrates
    assert named.optimiser.latent_rate_for(0.5, has_bits=True) == 0.015
    fast = named.replace(latent_rate=0.1).optimiser
    assert fast.latent_rate_for(0.5, has_bits=True) == 0.05
    sgd = named.replace(optimiser="sgd").optimiser
    assert sgd.latent_rate_for(0.5, has_bits=True) == sgd.learning_rate
    assert given.optimiser.latent_rate_for(0.5) == given.optimiser.learning_rate


# The network


def test_the_last_layer_stays_in_float_unless_a_pattern_names_it() -> None:
    plain = names(make_network(recipe(bits="int4"), DIGITS))
    assert set(plain.values()) == {"int4", "uint4"}
    assert "classifier" not in plain
    mixed = names(make_network(recipe(bits=MIXED), DIGITS))
    assert mixed["classifier"] == mixed["features.1"] == "int8"
    assert mixed["features.3"] == "uint8"
    assert set(mixed.values()) == {"int8", "uint8", "ternary"}
    last = names(make_network(recipe(bits="int4", last_layer="stair"), DIGITS))
    assert last["classifier"] == "int4"


def test_names_of_layers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SoftstairError, match="did you mean 'classifier'") as caught:
        fit(recipe(bits="clasifier=int8,*=int4"), tmp_path)
    assert caught.value.field == "bits"


def test_a_float_start_keeps_its_weights_and_fits_their_quanta(tmp_path: Path) -> None:
    float_twin = recipe(weights="float", features="float", epochs=1)
    fit(float_twin, tmp_path / "float")
    still = {"learning_rate": 0.0, "latent_rate": 0.0, "epochs": 1}
    started = recipe(bits="int4", init_from=str(tmp_path / "float"), **still)
    fit(started, tmp_path / "run")
    before, after = (trained_network(tmp_path / name, DIGITS) for name in ("float", "run"))
    weight = before.get_parameter("features.1.weight")
    layer: Any = after.get_submodule("features.1")
    fitted = fit_quantum(weight, layer.weight_stair.stair, per_channel=True)
    assert layer.weight_stair.stair == fitted
    assert torch.equal(fitted.index(layer.weight), fitted.index(weight))
    inside = (weight / torch.tensor(fitted.quantum)[:, None]).abs() < 7  # others may be clipped
    assert torch.equal(layer.weight[inside], weight[inside])


# Runs


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    "changes",
    [{"bits": "int4"}, {"quanta": "calibrated"}, {"bits": "int4", "quanta": "learned"}],
    ids=["named", "given", "learned"],
)
def test_features_are_calibrated_before_the_first_step(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """On examples that the seed chooses; the quanta of weights are those of the recipe."""
    still = {"learning_rate": 0.0, "latent_rate": 0.0, "epochs": 1}
    chosen = recipe(**still, **changes)
    fit(chosen, tmp_path)
    quanta = {name: s.stair.quantum for name, s in stairs(trained_network(tmp_path, DIGITS))}
    torch.manual_seed(chosen.run.seed)
    data = DIGITS.sample(200)
    net = make_network(chosen, data)
    part = split(data, chosen.data.fold, chosen.data.folds)[0]
    examples = Examples(data.x[part], data.y[part], *data.numbers(), torch.device("cpu"))
    inputs = chosen_inputs(examples, chosen.run.batch, chosen.run.seed)
    before = {name: s.stair.quantum for name, s in stairs(net)}
    assert quanta == ss.calibrate(net, inputs, weights=None)
    is_same = {name: quanta[name] == quantum for name, quantum in before.items()}
    assert is_same == {name: name.endswith("weight_stair") for name in before}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "changes",
    [
        {"bits": "int4", "augment": "crop"},
        {"bits": "int4", "augment": "crop", "quanta": "learned"},
        # The quanta of a float start are not those of the network that the resumed run builds.
        {"bits": "features.1=int8,*=int4", "init_from": "auto", "latent_rate": 0.03},
    ],
    ids=["calibrated", "learned", "started"],
)
def test_a_stopped_run_keeps_its_quanta_and_is_not_calibrated_again(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(**changes, clip_latent=True, epochs=2)
    wanted = uninterrupted(tmp_path / "whole", chosen)
    out = tmp_path / "parts"
    stopped(chosen, out, 1, 2)
    monkeypatch.delattr(import_module("softstair.train.fit"), "calibrate")
    fit(chosen, out, resume=True)
    assert result(out) == wanted


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("bits", ["int4", "ternary", MIXED])
def test_written_exported_and_verified(bits: str, tmp_path: Path, run: Any) -> None:
    fit(recipe(bits=bits, epochs=1), tmp_path / "run")
    trained = trained_network(tmp_path / "run", DIGITS)
    file = tmp_path / "run" / "network.safetensors"
    loaded = zoo.load(file)
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(trained(x), loaded(x))
    assert names(trained) == names(loaded)
    code, out, err = run("verify", file, "--runtimes", "onnxruntime", "--limit", 60)
    assert (code, err) == (0, "")
    assert "eval(): 0 of " in out
    assert re.search(r"onnxruntime +│ +[0-9,]+ │ +0 │", out)
