"""The Lightning callback: the schedule's noise, resumed runs, accumulation, truncation."""

# mypy takes lightning.pytorch, which may be missing, for a variable.
# mypy: disable-error-code="name-defined"

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import softstair as ss
from helpers import annealed
from helpers.annealed import BATCHES, LAYERS, expected, network

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: E402

from softstair.integrations.lightning import AnnealerCallback  # noqa: E402

# Advice that depends on the machine, and a deprecation in torch 2.13 that Lightning 2.6 runs into.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*does not have many workers which may be a bottleneck",
        "GPU available but not used",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    )
]


def loader(size: int = 4, seed: int = 1) -> DataLoader:
    return DataLoader(TensorDataset(*annealed.examples(seed)), size)


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None, optimiser: str = "Adam") -> None:
        super().__init__()
        self.net, self.optimiser = net or network(), optimiser
        self.seen: list[annealed.Noise] = []
        self.validated: list[bool] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(annealed.noise_of(self.net))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.validated.append(torch.equal(self.net(batch[0]), self.net(batch[0])))

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimiser)(self.parameters(), 0.01)


def fit(module, callbacks, path, epochs: int = 3, batches=None, ckpt=None, **options):
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        accelerator="cpu",
        default_root_dir=path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    batches = loader() if batches is None else batches
    trainer.fit(module, batches, loader(seed=2), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(("update", "static_mean"), [("iteration", False), ("epoch", True)])
def test_noise_follows_the_schedule(tmp_path, update, static_mean):
    schedule = ss.Schedule(LAYERS, 1.5, "overlapped", static_mean=static_mean)
    module = Module()
    fit(module, [AnnealerCallback(schedule, update=update)], tmp_path, epochs=4)
    step = 1 if update == "iteration" else BATCHES
    assert module.seen == expected(schedule, [i // step * step for i in range(4 * BATCHES)])
    assert module.validated
    assert all(module.validated)


def test_settings_and_functions_make_schedules(tmp_path):
    by_settings, by_function = Module(), Module()
    schedule = ss.Schedule(LAYERS, 2, interval="same_start")
    fit(by_settings, [AnnealerCallback(period=2, interval="same_start", net="net")], tmp_path)
    fit(by_function, [AnnealerCallback(lambda layer, t: schedule(layer, t))], tmp_path)
    assert by_settings.seen == by_function.seen == expected(schedule, range(3 * BATCHES))


@pytest.mark.parametrize(("freeze", "static_mean"), [(False, True), (True, False)])
def test_a_resumed_run_is_the_same_run(tmp_path, freeze, static_mean):
    """Interrupted after two of four epochs, when the first layer is annealed and truncated."""
    make = lambda: AnnealerCallback(period=1.5, static_mean=static_mean, freeze=freeze)
    whole, half, rest = Module(), Module(), Module(network())
    fit(whole, [make()], tmp_path, epochs=4)
    fit(half, [make()], tmp_path, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    for parameter in rest.parameters():
        nn.init.constant_(parameter, 0.1)
    callback = make()
    fit(rest, [callback], tmp_path, epochs=4, ckpt=tmp_path / "half.ckpt")
    assert half.seen + rest.seen == whole.seen
    assert len(rest.seen) == 2 * BATCHES
    assert callback.annealer.annealed == (0, 1)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_a_second_fit_goes_on_and_a_new_trainer_begins(tmp_path):
    callback, module = AnnealerCallback(period=2), Module()
    trainer = fit(module, [callback], tmp_path, epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(seed=2))
    assert callback.annealer.steps == 2 * BATCHES
    other = Module()
    fit(other, [callback], tmp_path, epochs=1)
    assert callback.annealer.steps == BATCHES
    assert other.seen == module.seen[:BATCHES]


def test_noise_stays_while_gradients_accumulate(tmp_path):
    """Six batches by fours: a window of four and one of two, and an epoch is still one unit."""
    module = Module()
    fit(module, [AnnealerCallback(period=2)], tmp_path, accumulate_grad_batches=4)
    starts = [epoch * BATCHES + 4 * (batch // 4) for epoch in range(3) for batch in range(BATCHES)]
    assert module.seen == expected(ss.Schedule(LAYERS, 2), starts)


def test_accumulation_is_a_larger_batch(tmp_path):
    small, large = (Module(network(False, "expectation"), "SGD") for _ in range(2))
    fit(small, [AnnealerCallback(period=2)], tmp_path, accumulate_grad_batches=2)
    fit(large, [AnnealerCallback(period=2)], tmp_path, batches=loader(8))
    assert small.seen[::2] == small.seen[1::2] == large.seen
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accumulation_that_changes(tmp_path):
    module, callback = Module(), AnnealerCallback(period=2)
    fit(module, [callback, GradientAccumulationScheduler({0: 1, 1: 3})], tmp_path, epochs=2)
    starts = [*range(BATCHES), *(BATCHES + 3 * (batch // 3) for batch in range(BATCHES))]
    assert module.seen == expected(ss.Schedule(LAYERS, 2), starts)
    assert callback.annealer.t == 2.0


@pytest.mark.parametrize(("truncate", "freeze"), [(False, False), (True, False), (True, True)])
def test_truncation(tmp_path, truncate, freeze):
    """Truncated or not, Adam does the same; frozen, an annealed layer stands still."""
    module = Module()
    weights: list[torch.Tensor] = []
    keep = pl.callbacks.LambdaCallback(
        on_train_epoch_end=lambda *_: weights.append(module.net[0].weight.detach().clone())
    )
    fit(module, [AnnealerCallback(period=1, truncate=truncate, freeze=freeze), keep], tmp_path)
    assert module.net[0].weight_stair.annealed is truncate
    assert torch.equal(weights[1], weights[2]) is freeze
    if truncate and not freeze:
        plain = Module()
        fit(plain, [AnnealerCallback(period=1, truncate=False)], tmp_path)
        assert annealed.same_parameters(module, plain)


def test_two_networks_in_one_module(tmp_path):
    module = Module()
    module.student = network()
    with pytest.raises(ValueError, match=r"net must name .*\(net, student\), but None"):
        fit(module, [AnnealerCallback(period=1)], tmp_path)
    callbacks = [AnnealerCallback(period=1, net="net"), AnnealerCallback(period=2, net="student")]
    fit(module, callbacks, tmp_path, epochs=1).save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert sorted(s["schedule"]["period"] for s in states.values() if "schedule" in s) == [1, 2]


def test_errors(tmp_path):
    endless = DataLoader(annealed.Endless(TensorDataset(*annealed.examples())), 4)
    with pytest.raises(ValueError, match="period at least, but None and the settings none"):
        AnnealerCallback()
    with pytest.raises(ValueError, match="the settings period were given"):
        AnnealerCallback(ss.Schedule(LAYERS, 2), period=2)
    with pytest.raises(ValueError, match="interval must be one of"):
        AnnealerCallback(period=2, interval="never")
    with pytest.raises(ValueError, match=r"net must name .* \(net\), but 'nett' was given"):
        fit(Module(), [AnnealerCallback(period=2, net="nett")], tmp_path)
    with pytest.raises(ValueError, match="steps_per_unit must be a number of batches"):
        fit(Module(), [AnnealerCallback(period=2)], tmp_path, batches=endless)
    module = Module()
    callback = AnnealerCallback(period=2, steps_per_unit=5)
    fit(module, [callback], tmp_path, epochs=1, batches=endless)
    assert module.seen == expected(ss.Schedule(LAYERS, 2), range(BATCHES), 5)


def test_softstair_imports_no_framework():
    code = (
        "import sys, softstair.integrations; "
        "sys.exit(bool({'lightning', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_package_is_named(monkeypatch):
    annealed.check_missing(monkeypatch, "lightning", "lightning.pytorch")


def test_example_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = annealed.run_documented("pl.")
    (callback,) = (c for c in trainer.callbacks if isinstance(c, AnnealerCallback))
    assert callback.annealer.t == 3.0
    assert callback.annealer.annealed == (0,)
