"""The loop: what it does in every step and epoch, told from outside, or by a loop of our own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short import RECIPE, is_sentence, metrics_of, recipe
from torch import Tensor, nn

import softstair as ss
from softstair.data import Dataset
from softstair.data.batches import Examples
from softstair.data.digits import load as load_digits
from softstair.data.folds import split
from softstair.models import build
from softstair.train import Recipe, train, trained_network
from softstair.train.execution import choose_device, matmul_precision
from softstair.train.metrics import evaluate
from softstair.train.network import make_network
from softstair.train.state import State


class Notes:
    """A watcher that writes everything down."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.rates: list[float] = []
        self.noises: list[Any] = []
        self.begun: list[tuple[int, int]] = []
        self.metrics: list[dict[str, Any]] = []
        self.state: State | None = None

    def begin(self, state: State) -> None:
        self.begun.append((state.epoch, state.step))
        self.state = state

    def step(self, state: State) -> None:
        assert state.order is not None
        size = state.recipe.batch
        self.batches.append(state.order[(state.step - 1) * size : state.step * size].tolist())
        self.rates.append(state.optimiser.param_groups[0]["lr"])
        if state.annealer is not None:
            self.noises.append(state.annealer.noise)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)


def noted(out: Path, recipe: Recipe = RECIPE, **given: Any) -> tuple[Notes, dict[str, Any]]:
    notes = Notes()
    return notes, train(recipe, out, watchers=[notes], **given)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics_of(out).decode().splitlines()]


def small_dataset(count: int = 60, classes: int = 3, test: bool = True) -> Dataset:
    """Images whose class is the brightest third."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % classes
    x = torch.randint(0, 100, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    for index, label in enumerate(y.tolist()):
        x[index, 0, 2 * label : 2 * label + 2] += 120
    names = tuple("abcdefghij"[:classes])
    more = {"test_x": x[:20], "test_y": y[:20]} if test else {}
    return Dataset("thirds", x, y, names, mean=100.0, std=60.0, **more)


def small_model(classes: int = 3) -> nn.Module:
    hidden = [nn.Linear(36, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(24, classes))


# The order of things


def test_every_epoch_is_a_permutation_without_its_remainder(tmp_path: Path) -> None:
    notes, _ = noted(tmp_path / "x", recipe(batch=30))
    assert [len(batch) for batch in notes.batches] == [30] * 15  # 160 // 30 = 5, three epochs
    epochs = [list(chain(*notes.batches[5 * i : 5 * i + 5])) for i in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 150
        assert set(epoch) <= set(range(160))
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(range(160)) == set().union(*epochs)


def test_the_order_comes_of_the_seed_alone(tmp_path: Path) -> None:
    orders = []
    for name, changes in {"a": {}, "b": {"forward": "random"}, "c": {"seed": 1}}.items():
        orders.append(noted(tmp_path / name, recipe(**changes))[0].batches)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_the_same_twice_and_another_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(len(name) + ord(name))  # whatever the caller's streams are at
        train(recipe(forward="random", augment="crop-flip"), tmp_path / name)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    train(recipe(forward="random", augment="crop-flip", seed=1), tmp_path / "c")
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_the_callers_random_streams_are_untouched(tmp_path: Path) -> None:
    import random

    before = torch.get_rng_state(), random.getstate()
    train(recipe(forward="random", augment="crop"), tmp_path / "x")
    trained_network(tmp_path / "x", load_digits())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_the_learning_rate_drops_at_its_epoch(tmp_path: Path) -> None:
    notes, _ = noted(tmp_path / "x", recipe(drop=2.0, drop_factor=0.25))
    assert notes.rates == [1e-3] * 10 + [2.5e-4] * 5
    assert [line["learning_rate"] for line in lines(tmp_path / "x")] == [1e-3, 1e-3, 2.5e-4]
    notes, _ = noted(tmp_path / "y", recipe(drop=1.2, epochs=2))
    assert notes.rates == pytest.approx([1e-3] * 6 + [1e-4] * 4)  # in the middle of an epoch


@pytest.mark.parametrize("update", ["iteration", "epoch"])
@pytest.mark.parametrize("interval", ["partition", "same_end"])
def test_the_noise_is_the_schedules(update: Any, interval: Any, tmp_path: Path) -> None:
    one = recipe(update=update, interval=interval, static_mean=False, period=0.9)
    notes, _ = noted(tmp_path / "x", one)
    layers = len(notes.noises[0])
    schedule = ss.Schedule(
        layers=layers, period=0.9, interval=interval, static_mean=False, std0=0.5 / 3**0.5
    )
    times = [step // 5 if update == "epoch" else step / 5 for step in range(15)]
    for noise, t in zip(notes.noises, times, strict=True):
        expected = [schedule(layer, t) for layer in range(layers)]
        assert [one for layer in noise for one in layer] == pytest.approx(
            [one for layer in expected for one in layer], abs=1e-12
        )
    for epoch, line in enumerate(lines(tmp_path / "x")):
        t = times[5 * epoch + 4]  # that of the epoch's last step
        assert line["noise"] == [
            pytest.approx(schedule(layer, t), abs=1e-12) for layer in range(layers)
        ]
        gone = [layer for layer in range(layers) if schedule(layer, t)[1] == 0]
        assert line["annealed"] == gone


def test_a_training_written_out_by_hand(tmp_path: Path) -> None:
    """The same numbers, from a loop that shares nothing with ours but the library below it."""
    one = recipe(epochs=2, period=0.6, drop=1.0)
    train(one, tmp_path / "x")
    data = load_digits().sample(200)
    parts = split(data, 0, 5)
    x = [(data.x[part].float() - 8) / 8 for part in parts]
    y = [data.y[part] for part in parts]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        stair = ss.Stair.ternary()
        model = build("digits", 10, (1, 8, 8))
        net = ss.quantise(model, stair, stair, skip="classifier", example_inputs=x[0][:2])
        adam = torch.optim.Adam(net.parameters(), 1e-3)
        annealer = ss.Annealer(net, ss.Schedule.for_network(net, period=0.6), steps_per_unit=5)
        generator = torch.Generator().manual_seed(0)
        for epoch in range(2):
            order = torch.randperm(160, generator=generator)
            losses, right = [], 0
            adam.param_groups[0]["lr"] = 1e-3 * 0.1**epoch
            net.train()
            for batch in order.split(32):
                annealer.step()
                scores = net(x[0][batch])
                loss = F.cross_entropy(scores, y[0][batch])
                adam.zero_grad()
                loss.backward()
                adam.step()
                losses.append(loss.item())
                right += int((scores.argmax(1) == y[0][batch]).sum())
            net.eval()
            with torch.no_grad():
                scores = net(x[1])
            line = lines(tmp_path / "x")[epoch]
            assert line["train_loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)
            assert line["train_accuracy"] == right / 160
            assert line["valid_accuracy"] == float((scores.argmax(1) == y[1]).double().mean())
            assert line["valid_loss"] == pytest.approx(
                float(F.cross_entropy(scores, y[1])), rel=1e-5
            )


# What evaluation is


@pytest.mark.parametrize("forward", ["random", "expectation"])
def test_evaluation_is_without_noise_and_in_integers(forward: Any, tmp_path: Path) -> None:
    data = load_digits().sample(200)
    net = make_network(recipe(forward=forward, epochs=1), data)
    ss.Annealer(net, ss.Schedule.for_network(net, period=5.0), steps_per_unit=5).step()
    net.train()
    examples = Examples(data.x, data.y, data.mean, data.std)
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda *given: seen.append(given[2]))
        for module in net.modules()
        if type(module).__name__ == "StairActivation"
    ]
    state = torch.get_rng_state()
    first, second = evaluate(net, examples), evaluate(net, examples)
    assert first == second
    assert torch.equal(state, torch.get_rng_state())
    assert net.training
    assert len(hooks) >= 2
    assert all(set(values.unique().tolist()) <= {-1.0, 0.0, 1.0} for values in seen)


def test_evaluation_against_all_at_once() -> None:
    """More than one chunk, and a last one of another size."""
    data = load_digits()
    net = build("digits", 10, (1, 8, 8)).eval()
    chunks = [0]

    def count() -> None:
        chunks[0] += 1

    loss, accuracy = evaluate(net, Examples(data.x, data.y, data.mean, data.std), count)
    with torch.no_grad():
        scores = net((data.x.float() - 8) / 8).double()
    assert chunks[0] == 4
    assert accuracy == float((scores.argmax(1) == data.y).double().mean())
    assert loss == pytest.approx(float(F.cross_entropy(scores, data.y)), rel=1e-6)
    assert not net.training


def test_the_trained_network_is_the_one_that_was_measured(tmp_path: Path) -> None:
    for name, one in {
        "stair": recipe(),
        "float": recipe(weights="float", features="float"),
    }.items():
        summary = train(one, tmp_path / name)
        data = load_digits().sample(200)
        net = trained_network(tmp_path / name, data)
        assert not net.training
        _, valid = split(data, 0, 5)
        examples = Examples(data.x[valid], data.y[valid], data.mean, data.std)
        assert evaluate(net, examples)[1] == summary["valid_accuracy"]
        assert evaluate(net, examples)[0] == lines(tmp_path / name)[-1]["valid_loss"]


# Recipes of every kind


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": "float", "features": "float"},
        {"weights": "float"},
        {"features": "float"},
        {"precision": "bfloat16"},
        {"optimiser": "sgd", "learning_rate": 0.05},
        {"weights": "int4", "weight_quantum": 0.07, "features": "uint4", "feature_quantum": 0.07},
        {"last_layer": "stair"},
        {"noise": "logistic", "forward": "expectation"},
        {"static_std": True, "forward": "hard"},
        {"std0": 0.0},
        {"update": "epoch", "freeze": True},
    ],
    ids=str,
)
def test_it_learns(changes: dict[str, Any], tmp_path: Path) -> None:
    """Better than chance by far, within six epochs on 300 digits; or at least it runs."""
    slow = "precision" in changes  # a hundredfold, where the processor has no such numbers
    one = replace(
        Recipe(limit=100 if slow else 300, batch=16).rescaled(2 if slow else 6), **changes
    )
    summary = train(one, tmp_path / "x")
    untrainable = slow or changes.get("std0") == 0.0
    assert summary["valid_accuracy"] > (0.05 if untrainable else 0.4), summary["valid_accuracy"]
    first, last = lines(tmp_path / "x")[0], lines(tmp_path / "x")[-1]
    assert untrainable or last["train_loss"] < first["train_loss"]
    assert ("noise" in first) == (not one.is_float)


def test_a_training_ends_though_its_noise_becomes_very_narrow(tmp_path: Path) -> None:
    """With a progressive power, the std falls below the spacing of float32 before it is 0."""
    narrow = recipe(static_mean=False, power="progressive", batch=8, epochs=2, period=2.0)
    train(narrow, tmp_path / "run")
    stds = [narrow.schedule(3)(0, step / 20)[1] for step in range(40)]
    assert 0 < stds[-1] < 1e-8
    assert len(metrics_of(tmp_path / "run").splitlines()) == 2


def test_evaluation_of_bfloat16_is_in_float32(tmp_path: Path) -> None:
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.inner(x)
            if len(x) > 2:  # not where it is merely tried out
                dtypes[self.training].add(scores.dtype)
            return scores

    one = recipe(precision="bfloat16", weights="float", features="float", limit=None, batch=16)
    train(one, tmp_path / "x", dataset=small_dataset(), model=Told())
    # Where oneDNN cannot do it, torch would switch it off for all that comes after.
    assert torch._C._get_mkldnn_enabled()
    assert dtypes == {True: {torch.bfloat16}, False: {torch.float32}}


def products() -> tuple[bool, str]:
    """How torch takes convolutions on a GPU, and other products, of float32."""
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


def test_products_of_float32_are_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training as the recipe says, in evaluation always; then they are the user's again."""
    seen: dict[bool, set[tuple[bool, str]]] = {True: set(), False: set()}

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:  # not where it is merely tried out
                seen[self.training].add(products())
            scores: Tensor = self.inner(x)
            return scores

    def see(**changes: Any) -> dict[bool, set[tuple[bool, str]]]:
        for found in seen.values():
            found.clear()
        one = recipe(weights="float", features="float", limit=None, batch=16, **changes)
        train(
            one,
            tmp_path / str(len(list(tmp_path.iterdir()))),
            dataset=small_dataset(),
            model=Told(),
        )
        return seen

    whole = (False, "highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("medium")
    try:
        theirs = (True, "medium")
        assert products() == theirs
        assert see(precision="float32") == {True: {whole}, False: {whole}}
        assert products() == theirs
        assert see(precision="auto") == {True: {whole}, False: {whole}}
        assert see(precision="bfloat16") == {True: {theirs}, False: {whole}}
        assert products() == theirs
        with matmul_precision("tf32"):
            assert products() == (True, "high")
        assert products() == theirs
    finally:
        torch.set_float32_matmul_precision("highest")


TOLD_BY_OPERATION = """
import torch
from softstair.train.execution import matmul_precision

b = torch.backends
on_cpu = (b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
one = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, *on_cpu)
b.fp32_precision = "ieee"
with matmul_precision("float32"):
    pass
b.fp32_precision = "tf32"  # which all follow that were not told themselves
assert {each.fp32_precision for each in one} == {"tf32"}
for told, what in (
    (b.cuda.matmul, "tf32"), (b.cudnn.conv, "ieee"), (b, "tf32"), (b.cudnn.rnn, "ieee"),
    (b.mkldnn, "bf16"), (b.mkldnn.conv, "ieee"),
):
    told.fp32_precision = what
    before = [each.fp32_precision for each in one]
    for precision, called in (("float32", "ieee"), ("tf32", "tf32")):
        with matmul_precision(precision):
            assert {each.fp32_precision for each in one} == {called}
            assert b.cudnn.allow_tf32 == b.cuda.matmul.allow_tf32 == (called == "tf32")
        assert [each.fp32_precision for each in one] == before
"""


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch tells operations apart since 2.9"
)
def test_products_that_torch_was_told_of_by_operation() -> None:
    """Which makes the older settings unreadable, in that process for good."""
    words = [sys.executable, "-W", "error", "-c", TOLD_BY_OPERATION]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_tf32_is_refused_where_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16 on cpu, .*'tf32' was given"):
        train(recipe(precision="tf32"), tmp_path / "x")


def test_folds_differ_and_cover_everything(tmp_path: Path) -> None:
    data = load_digits().sample(200)
    valid = [set(split(data, fold, 5)[1].tolist()) for fold in range(5)]
    assert set.union(*valid) == set(range(200))
    found = [train(recipe(fold=fold, epochs=1), tmp_path / str(fold)) for fold in range(2)]
    assert metrics_of(tmp_path / "0") != metrics_of(tmp_path / "1")
    assert [one["config"]["recipe"]["fold"] for one in found] == [0, 1]


# The user's own


def test_own_data_and_model(tmp_path: Path) -> None:
    one = Recipe(batch=16, folds=3, period=2.0, epochs=8, drop=None, learning_rate=0.01)
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    summary = train(one, tmp_path / "x", dataset=small_dataset(), model=model)
    assert summary["test_accuracy"] > 0.7
    assert summary["config"]["data"]["name"] == "thirds"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    net = trained_network(tmp_path / "x", small_dataset(), small_model())
    data = small_dataset()
    assert data.test_x is not None
    assert data.test_y is not None
    test = Examples(data.test_x, data.test_y, data.mean, data.std)
    assert evaluate(net, test)[1] == summary["test_accuracy"]


def test_an_own_float_model_is_not_trained_in_place(tmp_path: Path) -> None:
    one = Recipe(batch=16, folds=3, epochs=2, weights="float", features="float")
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("a", "b"):
        train(one, tmp_path / name, dataset=small_dataset(), model=model)
        trained_network(tmp_path / name, small_dataset(), model)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert model.training
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


def test_no_test_set_no_test_accuracy(tmp_path: Path) -> None:
    one = Recipe(batch=16, folds=3, epochs=1)
    summary = train(one, tmp_path / "x", dataset=small_dataset(test=False), model=small_model())
    assert summary["test_accuracy"] is None
    assert json.loads((tmp_path / "x" / "summary.json").read_text()) == summary


def test_own_model_and_data_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from softstair.data import Dataset\n"
        "def network(classes, shape):\n"
        "    size = shape[0] * shape[1] * shape[2]\n"
        "    hidden = nn.Linear(size, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU()\n"
        "    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(9, classes))\n"
        "def data(root=None):\n"
        "    y = torch.arange(40) % 2\n"
        "    x = (y * 200).to(torch.uint8).reshape(40, 1, 1, 1).expand(40, 1, 2, 2).clone()\n"
        "    return Dataset('halves', x, y, ('dark', 'bright'), 100.0, 100.0)\n"
        "def wrong(root=None):\n"
        "    return 5\n"
        "def raising(root=None):\n"
        "    raise RuntimeError('no\\nway')\n"
    )
    monkeypatch.chdir(tmp_path)
    one = Recipe(epochs=2, batch=8, model="ours:network", limit=None)
    summary = train(one, tmp_path / "x")
    assert summary["config"]["recipe"]["model"] == "ours:network"
    both = replace(one, data="ours:data")
    summary = train(both, tmp_path / "y")
    assert summary["config"]["data"]["name"] == "halves"
    for data in (
        "ours:wrong",
        "ours:raising",
        "ours:missing",
        "nowhere:data",
        "ours:",
        ":x",
        "a b:c",
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            train(replace(both, data=data), tmp_path / "z")
        assert is_sentence(str(caught.value)), str(caught.value)
    with pytest.raises(ValueError, match="model") as caught:
        train(replace(both, model="auto"), tmp_path / "z")
    assert is_sentence(str(caught.value)), str(caught.value)


def test_models_that_do_not_fit_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def net(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *layers)

    wrong: dict[str, nn.Module] = {
        "too few classes": net(nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 2)),
        "another size": net(nn.Linear(35, 9), nn.ReLU(), nn.Linear(9, 3)),
        "one number": net(nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 3), nn.Flatten(0)),
        "images": nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 1)),
        "no layer": nn.Identity(),
        "no activation": net(nn.Linear(36, 3)),
    }
    for name, model in wrong.items():
        for floats in ("float", "ternary"):
            one = Recipe(batch=16, folds=3, epochs=1, weights=floats, features=floats)  # type: ignore[arg-type]
            if name in ("no layer", "no activation") and floats == "float":
                continue
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                train(one, tmp_path / "x", dataset=small_dataset(), model=model)
            assert is_sentence(str(caught.value)), (name, str(caught.value))


def test_data_that_will_not_do(tmp_path: Path) -> None:
    data = small_dataset()
    empty = replace(data, x=data.x[:0], y=data.y[:0])
    for dataset, changes, word in [
        (empty, {}, "folds"),
        (replace(data, x=data.x[:2], y=data.y[:2]), {}, "folds"),
        (data, {"batch": 41}, "batch"),
        (data, {"folds": 61}, "folds"),
        (data, {"limit": 2}, "folds"),
        (data, {"limit": 20}, "batch"),
    ]:
        one = replace(Recipe(batch=16, folds=3, epochs=1), **changes)
        with pytest.raises(ValueError, match=word) as caught:
            train(one, tmp_path / "x", dataset=dataset, model=small_model())
        assert is_sentence(str(caught.value)), str(caught.value)
    just = Recipe(batch=40, folds=3, epochs=1)
    assert train(just, tmp_path / "x", dataset=data, model=small_model())["epochs"] == 1


def test_limit(tmp_path: Path) -> None:
    notes, summary = noted(tmp_path / "x", recipe(limit=100, batch=10, epochs=1))
    assert len(notes.batches) == 8
    assert summary["config"]["data"]["examples"] == 100
    notes, summary = noted(tmp_path / "y", recipe(limit=10**6, batch=500, epochs=1))
    assert summary["config"]["data"]["examples"] == 1797


# What is told


def test_the_summary_and_the_metrics(tmp_path: Path) -> None:
    import time

    begun = time.monotonic()
    notes, summary = noted(tmp_path / "x")
    seconds = time.monotonic() - begun
    assert json.loads((tmp_path / "x" / "summary.json").read_text()) == summary
    assert 0 < summary["seconds"] <= seconds
    assert summary["images_per_second"] == pytest.approx(3 * 5 * 32 / summary["seconds"])
    found = lines(tmp_path / "x")
    assert found == notes.metrics
    assert [line["epoch"] for line in found] == [0, 1, 2]
    accuracies = [line["valid_accuracy"] for line in found]
    assert summary["valid_accuracy"] == accuracies[-1]
    assert summary["best_valid_accuracy"] == max(accuracies)
    assert summary["epochs"] == 3
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config == summary["config"]
    assert Recipe.from_json(config["recipe"]) == RECIPE
    assert set(config["versions"]) >= {"softstair", "torch", "python"}
    assert config["recipe"]["seed"] == 0


def test_watchers_are_told_where_a_run_goes_on(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    class Break(Notes):
        def epoch(self, state: State, metrics: dict[str, Any]) -> None:
            raise Enough

    watchers: Sequence[Any] = [Notes(), Break()]
    with pytest.raises(Enough):
        train(RECIPE, tmp_path / "x", watchers=watchers)
    notes = Notes()
    train(RECIPE, tmp_path / "x", resume=True, watchers=[notes])
    assert watchers[0].begun == [(0, 0)]
    assert len(notes.begun) == 1
    assert len(notes.metrics) + notes.begun[0][0] == 3


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("", "gpu", "cuda:77", "meta", "cpu:x", "0", "mps:9", "xla", "hpu"):
        with pytest.raises(ValueError, match="device"):
            choose_device(name)


@pytest.mark.parametrize("asked", ["nonsense", "triton"])
def test_kernels_that_are_not_there_are_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """By the environment or by the recipe: one sentence, and nothing is left behind."""
    monkeypatch.setenv("SOFTSTAIR_KERNELS", asked)
    with pytest.raises(ValueError, match=r"must be (one of auto|auto or reference)") as caught:
        train(RECIPE, tmp_path / "run", device="cpu")
    assert is_sentence(str(caught.value))
    monkeypatch.delenv("SOFTSTAIR_KERNELS")
    with pytest.raises(ValueError, match="kernels must be auto or reference"):
        train(recipe(kernels="triton"), tmp_path / "run", device="cpu")
    train(RECIPE, tmp_path / "run", device="cpu")  # a fresh run: nothing was in its way
