"""The loop: what it does in each step and epoch, compared with a loop written by hand."""

import json
import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short import RECIPE, At, is_sentence, lines_of, metrics_of, recipe, stopped
from torch import Tensor, nn

import softstair as ss
from softstair import zoo
from softstair.data import Dataset, load, split
from softstair.data.batches import Examples
from softstair.models import build
from softstair.train import Recipe, fit, trained_network
from softstair.train.metrics import evaluate
from softstair.train.records import metrics_of as read_metrics, summary_of
from softstair.train.settings import choose_device, matmul_precision
from softstair.train.state import State


class Notes:
    """A watcher that keeps everything."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.noises: list[Any] = []
        self.metrics: list[dict[str, Any]] = []

    def begin(self, state: State) -> None:
        pass

    def step(self, state: State) -> None:
        assert state.order is not None
        size = state.recipe.run.batch
        self.batches.append(state.order[(state.step - 1) * size : state.step * size].tolist())
        if state.annealer is not None:
            self.noises.append(state.annealer.noise)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)


def noted(out: Path, recipe: Recipe = RECIPE, **given: Any) -> tuple[Notes, dict[str, Any]]:
    notes = Notes()
    return notes, fit(recipe, out, watchers=[notes], **given)


def small_dataset(count: int = 60, test: bool = True) -> Dataset:
    """Images whose class is the brightest third."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    x = torch.randint(0, 100, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    for index, label in enumerate(y.tolist()):
        x[index, 0, 2 * label : 2 * label + 2] += 120
    more = {"test_x": x[:20], "test_y": y[:20]} if test else {}
    return Dataset("thirds", x, y, tuple("abc"), mean=100.0, std=60.0, **more)


def small_model() -> nn.Module:
    torch.manual_seed(0)  # otherwise its weights depend on the tests before
    hidden = [nn.Linear(36, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(24, 3))


# Order, seeds, learning rate, noise


def test_every_epoch_is_a_permutation_without_its_remainder_and_the_files_say_so(
    tmp_path: Path,
) -> None:
    chosen = recipe(batch=30)
    notes, summary = noted(tmp_path / "x", chosen)
    assert [len(batch) for batch in notes.batches] == [30] * 15  # 160 // 30 = 5, three epochs
    epochs = [list(chain(*notes.batches[5 * i : 5 * i + 5])) for i in range(3)]
    assert all(len(set(epoch)) == 150 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(range(160)) == set().union(*epochs)
    assert json.loads((tmp_path / "x" / "summary.json").read_text()) == summary
    assert summary["images_per_second"] == pytest.approx(3 * 5 * 30 / summary["seconds"])
    assert lines_of(tmp_path / "x") == notes.metrics
    assert [line["epoch"] for line in notes.metrics] == [0, 1, 2]
    accuracies = [line["valid_accuracy"] for line in notes.metrics]
    assert summary["valid_accuracy"] == accuracies[-1]
    assert summary["best_valid_accuracy"] == max(accuracies)
    assert (summary["epochs"], summary["config"]["data"]["examples"]) == (3, 200)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config == summary["config"]
    assert Recipe.from_flat(config["recipe"]) == chosen
    assert set(config["versions"]) >= {"softstair", "torch", "python"}


def test_the_seed_decides_everything_and_the_caller_keeps_its_own(tmp_path: Path) -> None:
    drawn = recipe(forward="random", augment="crop-flip", epochs=1)
    orders = {}
    for name, changes in {"a": {}, "b": {}, "c": {"seed": 1}, "d": {"forward": "mode"}}.items():
        torch.manual_seed(ord(name))
        before = torch.get_rng_state(), random.getstate()
        orders[name] = noted(tmp_path / name, drawn.replace(**changes))[0].batches
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")
    assert orders["a"] == orders["d"]
    assert orders["a"] != orders["c"]


@pytest.mark.parametrize(
    ("update", "interval"), [("iteration", "partition"), ("epoch", "same_end")]
)
def test_the_noise_is_the_schedules(update: Any, interval: Any, tmp_path: Path) -> None:
    chosen = recipe(update=update, interval=interval, static_mean=False, period=0.9)
    notes, _ = noted(tmp_path / "x", chosen)
    layers = len(notes.noises[0])
    schedule = ss.Schedule(
        layers=layers, period=0.9, interval=interval, static_mean=False, std0=0.5 / 3**0.5
    )
    times = [step // 5 if update == "epoch" else step / 5 for step in range(15)]
    for noise, t in zip(notes.noises, times, strict=True):
        expected = [schedule(layer, t) for layer in range(layers)]
        assert list(chain(*noise)) == pytest.approx(list(chain(*expected)), abs=1e-12)
    for epoch, line in enumerate(lines_of(tmp_path / "x")):
        t = times[5 * epoch + 4]  # that of the epoch's last step
        expected = [schedule(layer, t) for layer in range(layers)]
        assert list(chain(*line["noise"])) == pytest.approx(list(chain(*expected)), abs=1e-12)
        assert line["annealed"] == [layer for layer in range(layers) if expected[layer][1] == 0]


def test_training_equals_a_loop_written_by_hand(tmp_path: Path) -> None:
    """It shares nothing with ours but the library below it."""
    fit(recipe(epochs=2, period=0.6, drop=1.0), tmp_path / "x")
    data = load("digits").sample(200)
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
            losses, correct = [], 0
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
                correct += int((scores.argmax(1) == y[0][batch]).sum())
            net.eval()
            with torch.no_grad():
                scores = net(x[1])
            line = lines_of(tmp_path / "x")[epoch]
            assert line["learning_rate"] == pytest.approx(1e-3 * 0.1**epoch)
            assert line["train_loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)
            assert line["train_accuracy"] == correct / 160
            assert line["valid_accuracy"] == float((scores.argmax(1) == y[1]).double().mean())
            expected = float(F.cross_entropy(scores, y[1]))
            assert line["valid_loss"] == pytest.approx(expected, rel=1e-5)


# Recipes of every kind


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": "float", "features": "float"},
        {"weights": "float"},
        {"features": "float"},
        {"optimiser": "sgd", "learning_rate": 0.05},
        {"weights": "int4", "weight_quantum": 0.07, "features": "uint4", "feature_quantum": 0.07},
        {"last_layer": "stair"},
        {"noise": "logistic", "forward": "expectation"},
        {"static_std": True, "forward": "hard"},
        {"update": "epoch"},
    ],
    ids=str,
)
def test_recipes_learn(changes: dict[str, Any], tmp_path: Path) -> None:
    chosen = Recipe.from_flat(limit=300, batch=16).rescaled(6).replace(**changes)
    assert fit(chosen, tmp_path)["valid_accuracy"] > 0.4
    first, *_, last = lines_of(tmp_path)
    assert last["train_loss"] < first["train_loss"]
    assert ("noise" in first) == (not chosen.network.is_float)


class Settings(nn.Module):
    """Notes dtypes and precision settings, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.notes: dict[bool, set[Any]] = {True: set(), False: set()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Settings":
        copied = Settings()
        copied.load_state_dict(self.state_dict())
        copied.notes = self.notes
        return copied

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.inner(x)
        if len(x) > 2:  # not where the model is only tried
            self.notes[self.training].add((scores.dtype, *precision()))
        return scores


def precision() -> tuple[bool, str]:
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


def test_evaluation_is_in_float32_and_the_caller_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, callers = (False, "highest"), (True, "medium")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("medium")
    try:
        for name in ("float32", "auto", "bfloat16"):
            model = Settings()
            chosen = recipe(precision=name, weights="float", features="float", limit=None, batch=16)
            chosen = chosen.replace(epochs=1)
            fit(chosen, tmp_path / name, dataset=small_dataset(), model=model)
            step = (torch.float32, *exact)
            if name == "bfloat16":
                step = (torch.bfloat16, *callers)
            assert model.notes == {True: {step}, False: {(torch.float32, *exact)}}
            assert precision() == callers
            # Where oneDNN has no bfloat16, torch would switch it off for good.
            assert torch._C._get_mkldnn_enabled()
        with matmul_precision("tf32"):
            assert precision() == (True, "high")
        assert precision() == callers
    finally:
        torch.set_float32_matmul_precision("highest")


SET_BY_OPERATION = """
import torch
from softstair.train.settings import matmul_precision

b = torch.backends
every = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
b.fp32_precision = "ieee"
with matmul_precision("float32"):
    pass
b.fp32_precision = "tf32"  # which all follow that were not set themselves
assert {each.fp32_precision for each in every} == {"tf32"}
for backend, value in (
    (b.cuda.matmul, "tf32"), (b.cudnn.conv, "ieee"), (b, "tf32"), (b.cudnn.rnn, "ieee"),
    (b.mkldnn, "bf16"), (b.mkldnn.conv, "ieee"),
):
    backend.fp32_precision = value
    before = [each.fp32_precision for each in every]
    for precision, name in (("float32", "ieee"), ("tf32", "tf32")):
        with matmul_precision(precision):
            assert {each.fp32_precision for each in every} == {name}
            assert b.cudnn.allow_tf32 == b.cuda.matmul.allow_tf32 == (name == "tf32")
        assert [each.fp32_precision for each in every] == before
"""


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch has it by operation since 2.9"
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_precision_that_was_set_by_operation(capfd: pytest.CaptureFixture[str]) -> None:
    """It makes the older settings unreadable, in that process for good: in a fork of this one."""
    child = multiprocessing.get_context("fork").Process(target=exec, args=(SET_BY_OPERATION, {}))
    child.start()
    child.join(120)
    assert (child.exitcode, capfd.readouterr().err) == (0, "")


# Own data and models


def test_own_data_and_model(tmp_path: Path) -> None:
    chosen = Recipe.from_flat(
        batch=16, folds=3, period=2.0, epochs=8, drop=None, learning_rate=0.01
    )
    model, data = small_model(), small_dataset()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    summary = fit(chosen, tmp_path / "x", dataset=data, model=model)
    assert summary["test_accuracy"] > 0.7
    assert summary["config"]["data"]["name"] == "thirds"
    net = trained_network(tmp_path / "x", data, small_model())
    assert data.test_x is not None
    assert data.test_y is not None
    test = Examples(data.test_x, data.test_y, data.mean, data.std)
    assert evaluate(net, test)[1] == summary["test_accuracy"]
    as_float = chosen.replace(weights="float", features="float", epochs=1)
    summary = fit(as_float, tmp_path / "y", dataset=small_dataset(test=False), model=model)
    assert summary["test_accuracy"] is None
    # The caller's model is not trained.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_own_data_and_model_of_a_recipe_that_names_them(tmp_path: Path) -> None:
    """The recipe says whose they are, and has no default network for them."""
    chosen = Recipe.from_flat(
        data="thirds:load", batch=16, folds=3, epochs=1, period=None, drop=None
    )
    given: dict[str, Any] = {"dataset": small_dataset(), "model": small_model()}
    assert fit(chosen, tmp_path / "run", **given)["epochs"] == 1
    about = zoo.about(tmp_path / "run" / "network.safetensors")
    assert (about.data, about.model) == ("thirds:load", "torch.nn.modules.container:Sequential")


def test_training_on_all_examples_has_no_validation(tmp_path: Path) -> None:
    chosen = Recipe.from_flat(batch=16, fold="all", epochs=2, period=None, drop=None)
    given: dict[str, Any] = {"dataset": small_dataset(), "model": small_model()}
    out = tmp_path / "run"
    stopped(chosen, out, 1, 1, **given)
    summary = fit(chosen, out, resume=True, **given)
    assert summary["valid_accuracy"] is summary["best_valid_accuracy"] is None
    assert summary["test_accuracy"] > 0.3
    assert summary["images_per_second"] * summary["seconds"] == pytest.approx(2 * (60 // 16) * 16)
    assert summary_of(out) == summary
    assert [line["valid_loss"] for line in read_metrics(out)] == [None, None]
    assert all(line["stairs"] for line in read_metrics(out))
    fit(chosen, tmp_path / "again", **given)
    assert metrics_of(out) == metrics_of(tmp_path / "again")
    with pytest.raises(ValueError, match=r"fold .* no test set"):
        fit(chosen, tmp_path / "x", dataset=small_dataset(test=False), model=small_model())


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 2)],
        [nn.Linear(35, 9), nn.ReLU(), nn.Linear(9, 3)],
        [nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 3), nn.Flatten(0)],
        [nn.Linear(36, 3)],
    ],
    ids=["too few classes", "another size", "one number", "no activation"],
)
def test_models_that_do_not_fit(layers: list[nn.Module], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), *layers)
    with pytest.raises(ValueError, match="model") as caught:
        fit(Recipe.from_flat(batch=16, folds=3), tmp_path, dataset=small_dataset(), model=model)
    assert is_sentence(str(caught.value))


def test_data_that_do_not_suffice(tmp_path: Path) -> None:
    data = small_dataset()
    empty = replace(data, x=data.x[:0], y=data.y[:0])
    for dataset, changes, field in [
        (empty, {}, "folds"),
        (data, {"batch": 41}, "batch"),
        (data, {"folds": 61}, "folds"),
        (data, {"limit": 20}, "batch"),
    ]:
        chosen = Recipe.from_flat(batch=16, folds=3, epochs=1).replace(**changes)
        with pytest.raises(ValueError, match=field):
            fit(chosen, tmp_path / "x", dataset=dataset, model=small_model())
    with pytest.raises(ValueError, match="model must be named for data of your own"):
        fit(Recipe.from_flat(data="ours:data"), tmp_path / "x", dataset=data)
    just = Recipe.from_flat(batch=40, folds=3, epochs=1)
    assert fit(just, tmp_path / "x", dataset=data, model=small_model())["epochs"] == 1


def test_a_second_training_in_another_thread_is_refused(tmp_path: Path) -> None:
    errors: list[str] = []

    def second(state: State) -> None:
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(fit, RECIPE, tmp_path / "second")
            errors.append(str(started.exception()))

    fit(RECIPE, tmp_path / "alone")
    fit(RECIPE, tmp_path / "first", watchers=[At(1, 2, second)])
    assert metrics_of(tmp_path / "first") == metrics_of(tmp_path / "alone")
    (error,) = errors
    assert is_sentence(error)
    assert "thread" in error
    assert not (tmp_path / "second").exists()
    with ThreadPoolExecutor(1) as pool:  # one after the other
        pool.submit(fit, RECIPE, tmp_path / "second").result()
    assert metrics_of(tmp_path / "second") == metrics_of(tmp_path / "alone")


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("", "gpu", "cuda:77", "meta", "cpu:x", "0"):
        with pytest.raises(ValueError, match="device"):
            choose_device(name)


def test_absent_kernels_are_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nonsense", "triton"):
        monkeypatch.setenv("SOFTSTAIR_KERNELS", name)
        with pytest.raises(ValueError, match="auto"):
            fit(RECIPE, tmp_path / "run", device="cpu")
    monkeypatch.delenv("SOFTSTAIR_KERNELS")
    for changes in ({"kernels": "triton"}, {"precision": "tf32"}):
        with pytest.raises(ValueError, match="must be auto"):
            fit(recipe(**changes), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_training_ends_though_its_noise_becomes_very_narrow(tmp_path: Path) -> None:
    """With a progressive power, the std falls below the spacing of float32 before it is 0."""
    narrow = recipe(static_mean=False, power="progressive", batch=8, epochs=2, period=2.0)
    fit(narrow, tmp_path)
    stds = [narrow.schedule(3)(0, step / 20)[1] for step in range(40)]
    assert 0 < stds[-1] < 1e-8
    assert len(lines_of(tmp_path)) == 2
