"""The callback of Hugging Face's Trainer: noise, resumed runs, accumulation, truncation."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import softstair as ss

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from softstair.integrations.transformers import AnnealerCallback  # noqa: E402
from softstair.nn import stair_modules  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"
BATCHES = 6
LAYERS = 2


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * BATCHES, 5, generator=generator)
    labels = torch.randint(3, (len(x),), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def network(norm: bool = True, forward: str = "mode") -> nn.Module:
    torch.manual_seed(0)
    normal = nn.BatchNorm1d if norm else nn.Identity
    model = nn.Sequential(
        *(nn.Linear(5, 16), normal(16), nn.ReLU(), nn.Linear(16, 16), normal(16), nn.ReLU()),
        nn.Linear(16, 3),
    )
    return ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="6", forward=forward)


class Model(nn.Module):
    """A plain module that returns what the Trainer wants."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recorder(Model):
    """Notes the noise that every training batch met."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or network())
        self.seen: list[list[tuple[float, float]]] = []

    def forward(self, x, labels):
        if self.training:
            self.seen.append(held(self.net))
        return super().forward(x, labels)


class StopAfter(transformers.TrainerCallback):
    """The power cut."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.steps


def held(net: nn.Module) -> list[tuple[float, float]]:
    """The (mean, std) in the buffers of each layer, the same in all its stairs."""
    noise: list[set[tuple[float, float]]] = [set() for _ in range(LAYERS)]
    for _, stair in stair_modules(net):
        noise[stair.layer].add((stair.mean.item(), stair.std.item()))
    return [pair for (pair,) in noise]


def expected(schedule, times) -> list[list[tuple[float, float]]]:
    """The schedule at these times, in float32 as the buffers are."""
    single = lambda value: torch.tensor(value).item()
    return [[tuple(map(single, schedule(layer, t))) for layer in range(LAYERS)] for t in times]


def train(model, callbacks, path, epochs: int = 3, resume=None, dataset=None, **options):
    settings = {
        "output_dir": str(path),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**{**settings, **options}),
        train_dataset=data() if dataset is None else dataset,
        eval_dataset=data(),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(("update", "static_mean"), [("iteration", False), ("epoch", True)])
def test_noise_follows_the_schedule(tmp_path, update, static_mean):
    """Evaluation before and during training changes nothing."""
    schedule = ss.Schedule(LAYERS, 1.5, "overlapped", static_mean=static_mean)
    model, callback = Recorder(), AnnealerCallback(schedule, update=update)
    train(model, [callback], tmp_path, epochs=4, eval_on_start=True, eval_strategy="epoch")
    times = [i / BATCHES if update == "iteration" else i // BATCHES for i in range(4 * BATCHES)]
    assert model.seen == expected(schedule, times)


def test_settings_and_functions_make_schedules(tmp_path):
    by_settings, by_function = Recorder(), Recorder()
    schedule = ss.Schedule(LAYERS, 2, interval="same_start")
    train(by_settings, [AnnealerCallback(period=2, interval="same_start", net="net")], tmp_path)
    train(by_function, [AnnealerCallback(lambda layer, t: schedule(layer, t))], tmp_path)
    times = [i / BATCHES for i in range(3 * BATCHES)]
    assert by_settings.seen == by_function.seen == expected(schedule, times)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("steps", "options", "rebuild"),
    [
        (12, {"freeze": False}, False),
        (12, {"freeze": True, "static_mean": False}, True),
        (15, {"freeze": False, "static_mean": False}, False),
    ],
    ids=["epoch", "epoch, callbacks rebuilt", "in the middle of an epoch"],
)
def test_a_resumed_run_is_the_same_run(tmp_path, steps, options, rebuild):
    """Interrupted when the first layer is annealed and truncated; random noise, shuffled data."""
    make = lambda: AnnealerCallback(period=1.5, **options)
    whole, half, rest = (Recorder(network(forward="random")) for _ in range(3))
    train(whole, [make()], tmp_path / "whole", epochs=4)
    saving = {"save_strategy": "steps", "save_steps": 3}
    train(half, [make(), StopAfter(steps)], tmp_path / "run", epochs=4, **saving)
    for parameter in rest.parameters():
        nn.init.constant_(parameter, 0.1)
    trainer = train(
        rest,
        [make()],
        tmp_path / "run",
        epochs=4,
        resume=str(tmp_path / "run" / f"checkpoint-{steps}"),
        restore_callback_states_from_checkpoint=rebuild,
    )
    assert half.seen + rest.seen == whole.seen
    assert len(half.seen) == steps
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, AnnealerCallback))
    assert callback.annealer.annealed == (0, 1)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_checkpoints_made_without_the_callback(tmp_path):
    """The schedule begins where the callback does, and the next checkpoint holds its clock."""
    train(Recorder(), [StopAfter(6)], tmp_path, epochs=2, save_strategy="epoch")
    model = Recorder()
    first, last = (tmp_path / f"checkpoint-{steps}" for steps in (6, 12))
    train(
        model, [AnnealerCallback(period=2)], tmp_path, 2, resume=str(first), save_strategy="epoch"
    )
    assert model.seen == expected(ss.Schedule(LAYERS, 2), [i / BATCHES for i in range(BATCHES)])
    state = json.loads((last / "trainer_state.json").read_text())["stateful_callbacks"]
    assert state["AnnealerCallback"]["attributes"]["clock"]["steps"] == BATCHES


def test_training_again_begins_again(tmp_path):
    callback, model, other = AnnealerCallback(period=2), Recorder(), Recorder()
    train(model, [callback], tmp_path, epochs=1)
    train(other, [callback], tmp_path, epochs=1)
    assert callback.annealer.steps == BATCHES
    assert other.seen == model.seen


def test_noise_stays_while_gradients_accumulate(tmp_path):
    """Six batches by fours: a window of four and one of two, and an epoch is still one unit."""
    model, callback = Recorder(), AnnealerCallback(period=2)
    train(model, [callback], tmp_path, gradient_accumulation_steps=4)
    starts = [epoch * BATCHES + 4 * (batch // 4) for epoch in range(3) for batch in range(BATCHES)]
    schedule = ss.Schedule(LAYERS, 2)
    assert model.seen == expected(schedule, [start / BATCHES for start in starts])
    assert callback.annealer.t == 3.0


def test_accumulation_is_a_larger_batch(tmp_path):
    small, large = (Recorder(network(False, "expectation")) for _ in range(2))
    options = {"optim": "sgd", "max_grad_norm": 0.0}
    callbacks = [AnnealerCallback(period=2)]
    train(small, callbacks, tmp_path, gradient_accumulation_steps=2, **options)
    train(large, callbacks, tmp_path, per_device_train_batch_size=8, **options)
    assert small.seen[::2] == small.seen[1::2] == large.seen
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("whole", [False, True], ids=["net inside", "model quantised whole"])
def test_truncation(tmp_path, whole):
    """Truncated or not, AdamW does the same, where the network returns logits or a dictionary."""
    nets = []
    for truncate in (False, True):
        torch.manual_seed(0)
        model = Model(network())
        if whole:
            chain = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
            ternary = ss.Stair.ternary()
            model = ss.quantise(Model(chain), ternary, ternary, skip="net.2")
        callback = AnnealerCallback(period=1, truncate=truncate)
        train(model, [callback], tmp_path)
        assert model.net[0].weight_stair.annealed is truncate
        assert callback.annealer.net is (model if whole else model.net)
        nets.append(model)
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


def test_frozen_layers_stand_still(tmp_path):
    model = Model(network())
    weights = [model.net[0].weight.detach().clone()]

    class Keep(transformers.TrainerCallback):
        def on_epoch_end(self, *_, **kwargs):
            weights.append(model.net[0].weight.detach().clone())

    train(model, [AnnealerCallback(period=1, freeze=True), Keep()], tmp_path)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(data())


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="period at least, but None and the settings none"):
        AnnealerCallback()
    with pytest.raises(ValueError, match=r"must hold one AnnealerCallback, .* but 2 were given"):
        train(Model(network()), [AnnealerCallback(period=p) for p in (1, 2)], tmp_path)
    with pytest.raises(ValueError, match="steps_per_unit must be a number of batches"):
        train(
            Model(network()), [AnnealerCallback(period=2)], tmp_path, dataset=Endless(), max_steps=7
        )
    model, callback = Recorder(), AnnealerCallback(period=2, steps_per_unit=5)
    train(model, [callback], tmp_path, dataset=Endless(), max_steps=5)
    assert model.seen == expected(ss.Schedule(LAYERS, 2), [i / 5 for i in range(5)])


def test_missing_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "softstair.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'softstair\[transformers\]'"):
        importlib.import_module("softstair.integrations.transformers")


# The Trainer pins memory for a GPU that this machine may not have.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_example_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (code,) = (block for block in blocks if "TrainingArguments" in block)
    names: dict[str, object] = {}
    exec(code, names)
    callbacks = names["trainer"].callback_handler.callbacks
    (callback,) = (c for c in callbacks if isinstance(c, AnnealerCallback))
    assert callback.annealer.t == 3.0
    assert callback.annealer.annealed == (0,)
