"""The callback of Hugging Face's Trainer: noise, resumed runs, accumulation, truncation."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import softstair as ss
from helpers import annealed
from helpers.annealed import BATCHES, LAYERS, expected, network


@pytest.fixture(scope="module")
def AnnealerCallback():
    """The callback; importing Transformers takes seconds, and every worker collects this file."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from softstair.integrations.transformers import AnnealerCallback

    return AnnealerCallback


def data() -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": label} for x, label in zip(*annealed.examples(), strict=True)]


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
        self.seen: list[annealed.Noise] = []

    def forward(self, x, labels):
        if self.training:
            self.seen.append(annealed.noise_of(self.net))
        return super().forward(x, labels)


def power_cut(after: int):
    """A callback that ends the training."""
    from transformers import TrainerCallback

    class PowerCut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == after

    return PowerCut()


def train(model, callbacks, path, epochs: int = 3, resume=None, dataset=None, **options):
    import transformers

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


def test_noise_follows_the_schedule(AnnealerCallback, tmp_path):
    """Evaluation before and during training changes nothing."""
    schedule = ss.Schedule(LAYERS, 1.5, "overlapped", static_mean=False)
    model, callback = Recorder(), AnnealerCallback(schedule)
    train(model, [callback], tmp_path, eval_on_start=True, eval_strategy="epoch")
    assert model.seen == expected(schedule, range(3 * BATCHES))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("steps", "options", "rebuild"),
    [
        (12, {}, False),
        (12, {"static_mean": False}, True),
        (15, {"static_mean": False}, False),
    ],
    ids=["epoch", "epoch, callbacks rebuilt", "in the middle of an epoch"],
)
def test_a_resumed_run_is_the_same_run(AnnealerCallback, tmp_path, steps, options, rebuild):
    """Interrupted when the first layer is annealed and truncated; random noise, shuffled data."""
    make = lambda: AnnealerCallback(period=1.5, **options)
    whole, half, rest = (Recorder(network(forward="random")) for _ in range(3))
    train(whole, [make()], tmp_path / "whole", epochs=4)
    saving = {"save_strategy": "steps", "save_steps": 3}
    train(half, [make(), power_cut(steps)], tmp_path / "run", epochs=4, **saving)
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


@pytest.mark.nightly
def test_checkpoints_made_without_the_callback(AnnealerCallback, tmp_path):
    """The schedule begins where the callback does, and the next checkpoint holds its clock."""
    train(Recorder(), [power_cut(6)], tmp_path, epochs=2, save_strategy="epoch")
    model = Recorder()
    first, last = (tmp_path / f"checkpoint-{steps}" for steps in (6, 12))
    train(
        model, [AnnealerCallback(period=2)], tmp_path, 2, resume=str(first), save_strategy="epoch"
    )
    assert model.seen == expected(ss.Schedule(LAYERS, 2), range(BATCHES))
    state = json.loads((last / "trainer_state.json").read_text())["stateful_callbacks"]
    assert state["AnnealerCallback"]["attributes"]["clock"]["steps"] == BATCHES


@pytest.mark.nightly
def test_training_again_begins_again(AnnealerCallback, tmp_path):
    callback, model, other = AnnealerCallback(period=2), Recorder(), Recorder()
    train(model, [callback], tmp_path, epochs=1)
    train(other, [callback], tmp_path, epochs=1)
    assert callback.annealer.steps == BATCHES
    assert other.seen == model.seen


@pytest.mark.nightly
def test_noise_stays_while_gradients_accumulate(AnnealerCallback, tmp_path):
    """Six batches by fours: a window of four and one of two, and an epoch is still one unit."""
    model, callback = Recorder(), AnnealerCallback(period=2)
    train(model, [callback], tmp_path, gradient_accumulation_steps=4)
    starts = [epoch * BATCHES + 4 * (batch // 4) for epoch in range(3) for batch in range(BATCHES)]
    assert model.seen == expected(ss.Schedule(LAYERS, 2), starts)
    assert callback.annealer.t == 3.0


def test_errors(AnnealerCallback, tmp_path):
    with pytest.raises(ValueError, match=r"must hold one AnnealerCallback, .* but 2 were given"):
        train(Model(network()), [AnnealerCallback(period=p) for p in (1, 2)], tmp_path)
    endless = {"dataset": annealed.Endless(data()), "max_steps": 5}
    with pytest.raises(ValueError, match="steps_per_unit must be a number of batches"):
        train(Model(network()), [AnnealerCallback(period=2)], tmp_path, **endless)
    model, callback = Recorder(), AnnealerCallback(period=2, steps_per_unit=5)
    train(model, [callback], tmp_path, **endless)
    assert model.seen == expected(ss.Schedule(LAYERS, 2), range(5), 5)


def test_missing_package_is_named(AnnealerCallback, monkeypatch):
    annealed.check_missing(monkeypatch, "transformers", "transformers")


# The Trainer pins memory for a GPU that this machine may not have.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_example_of_the_documentation(AnnealerCallback, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = annealed.run_documented("TrainingArguments").callback_handler.callbacks
    (callback,) = (c for c in callbacks if isinstance(c, AnnealerCallback))
    assert callback.annealer.t == 3.0
    assert callback.annealer.annealed == (0,)
