"""Which network a recipe makes, what is said of it, and whose code makes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import softstair as ss
from networks import HeadFirst
from softstair._errors import SoftstairError
from softstair.data import load
from softstair.models import last_layer
from softstair.train import Recipe, RunError, fit, trained_network
from softstair.train.network import advice, describe_network, make_network
from softstair.train.records import data_version_of
from softstair.train.settings import choose_threads
from softstair.train.state import State

pytestmark = pytest.mark.quick

SHORT = Recipe.from_flat(limit=200, epochs=1, batch=32, period=0.2)


def test_the_last_layer_is_the_last_that_is_called() -> None:
    assert last_layer(HeadFirst(), torch.zeros(2, 1, 8, 8)) == "head"
    assert last_layer(HeadFirst()) == "body", "without an example, the order of the modules"
    network = make_network(SHORT, load("digits"), HeadFirst())
    assert isinstance(network.body, ss.nn.StairLinear)
    assert type(network.head) is nn.Linear


def test_an_infinity_that_was_there_from_the_start_is_no_accident(tmp_path: Path) -> None:
    assert fit(SHORT, tmp_path / "run", model=HeadFirst())["epochs"] == 1


def test_a_run_says_what_became_of_every_layer(tmp_path: Path) -> None:
    fit(SHORT, tmp_path / "stair")
    table = (tmp_path / "stair" / "network.txt").read_text()
    assert table.count("stair weights") == table.count("ternary stair instead of ReLU") == 3
    fit(SHORT.replace(weights="float", features="float"), tmp_path / "float")
    assert "nothing was quantised" in (tmp_path / "float" / "network.txt").read_text()


def test_code_that_a_run_names_is_called_only_by_the_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.py").write_text(
        "from torch import nn\nfrom pathlib import Path\n"
        "def build():\n    Path('called').touch()\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    fit(SHORT.replace(model="payload:build"), "run")
    Path("called").unlink()
    with pytest.raises(SoftstairError, match="somebody else"):
        trained_network("run", load("digits"))
    assert not Path("called").exists()
    trained_network("run", load("digits"), own_code=True)
    assert Path("called").exists()


def test_the_model_of_a_run_may_be_given_as_the_function_that_returns_it(tmp_path: Path) -> None:
    def make(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))

    fit(SHORT, tmp_path / "run", model=make(10))
    x = torch.randn(5, 1, 8, 8)
    first, second = (
        trained_network(tmp_path / "run", load("digits"), model) for model in (make(10), make)
    )
    assert torch.equal(first(x), second(x))
    with pytest.raises(SoftstairError, match="'resnet' must be a function that returns a"):
        trained_network(tmp_path / "run", load("digits"), "resnet")  # type: ignore[arg-type]
    with pytest.raises(SoftstairError, match=r"'<lambda>' must return .*ZeroDivisionError"):
        trained_network(tmp_path / "run", load("digits"), lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_folds_are_named_where_a_network_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "fold-0").mkdir()
    with pytest.raises(SoftstairError, match="but folds: name one, such as fold-0"):
        trained_network(tmp_path, load("digits"))


def test_a_run_records_its_data_version_and_is_resumed_with_no_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    digits = load("digits")
    summary = fit(SHORT, run, dataset=digits)
    config = json.loads((run / "config.json").read_text())
    assert summary["config"]["data"]["version"] == "scikit-learn digits"
    assert config["data"]["version"] == data_version_of(run) == "scikit-learn digits"
    (run / "summary.json").unlink()
    for changed in ({"version": "other digits"}, {"centred": (7.0, 4.0)}):
        with pytest.raises(RunError, match="data ="):
            fit(SHORT, run, dataset=replace(digits, **changed), resume=True)
    # Of data of one's own it may be unknown.
    own = fit(SHORT, tmp_path / "own", dataset=replace(digits, version=None))
    assert "version" not in own["config"]["data"]


def state(recipe: Recipe, model: nn.Module | None = None) -> State:
    return State(recipe, make_network(recipe, load("digits"), model), 1437, torch.device("cpu"))


def test_advice_is_given_where_it_is_due_and_nowhere_else() -> None:
    assert advice(state(Recipe())) == []
    assert advice(state(Recipe.from_flat(weights="float", features="float"))) == []
    (late,) = advice(state(Recipe.from_flat(epochs=20)))
    assert "layer 2 will still have noise" in late
    by_epochs = Recipe.from_flat(epochs=10, update="epoch", period=9.5 / 3, drop=None)
    assert (
        "layer 2 will still have noise in the last step, at epoch 9" in advice(state(by_epochs))[0]
    )
    assert advice(state(by_epochs.replace(period=None))) == []
    (static,) = advice(state(Recipe.from_flat(static_std=True, anneal_from="50%")))
    assert "will not anneal" in static
    (narrow,) = advice(state(Recipe.from_flat(static_mean=False)))
    assert narrow.startswith("the noise narrows faster than its mean moves")
    follows = Recipe.from_flat(static_mean=False, static_std=True, learning_rate=3e-3)
    assert advice(state(follows)) == []
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    (plain,) = advice(state(Recipe(), bare))
    assert "no normalisation" in plain


def test_small_networks_train_on_one_thread() -> None:
    torch.set_num_threads(2)
    try:
        assert choose_threads(make_network(Recipe(), load("digits")), batch=64) == 1
        assert choose_threads(nn.Linear(4096, 4096), batch=64) == 2
        assert choose_threads(nn.Conv2d(1, 1, 1), batch=2) == 2
    finally:
        torch.set_num_threads(1)


def test_a_run_goes_on_with_its_own_threads_even_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    first = fit(SHORT, tmp_path, threads=2)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    for name in ("summary.json", "metrics.jsonl", "network.txt"):
        (tmp_path / name).unlink()
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    again = fit(SHORT, tmp_path, resume=True)
    assert again["config"]["threads"] == first["config"]["threads"] == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert (tmp_path / "network.txt").exists()


def test_what_exports_is_said_before_training_for_any_zero_of_the_input() -> None:
    data = replace(load("digits"), mean=8.3)
    for recipe in (SHORT, SHORT.replace(integer_input=True)):
        text, exports = describe_network(make_network(recipe, data), recipe, data)
        assert exports is not None
        assert exports.startswith("freezes; C needs about")
        assert text.endswith(exports)
    floats = SHORT.replace(weights="float", features="float")
    assert describe_network(make_network(floats, data), floats, data)[1] is None


class InPairs(HeadFirst):
    """A network that takes batches of an even number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x) // 2, 2, -1).flatten(0, 1))


def test_a_network_that_cannot_be_reported_is_trained_all_the_same() -> None:
    recipe, data = SHORT.replace(model="auto"), load("digits")
    network = make_network(recipe, data, InPairs())
    text, exports = describe_network(network, recipe, data)
    assert exports is not None
    assert exports.startswith("does not freeze: ")
    assert exports in text
