"""The Lightning callback: the schedule's noise, resumed runs, accumulation, truncation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import softstair as ss
from helpers import annealed
from helpers.annealed import BATCHES, LAYERS, expected, network

# Nightly: importing Lightning takes 6 s. The warnings are advice that depends on the machine, and
# a deprecation in torch 2.13 that Lightning 2.6 runs into.
pytestmark = [
    pytest.mark.nightly,
    *(
        pytest.mark.filterwarnings(f"ignore:{message}")
        for message in (
            ".*does not have many workers which may be a bottleneck",
            "GPU available but not used",
            r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        )
    ),
]


def loader(size: int = 4, seed: int = 1) -> DataLoader:
    return DataLoader(TensorDataset(*annealed.examples(seed)), size)


@pytest.fixture(scope="module")
def lightning() -> Any:
    """A module, ``fit`` and the callbacks."""
    pl = pytest.importorskip("lightning.pytorch")
    from softstair.integrations.lightning import AnnealerCallback

    class Module(pl.LightningModule):  # type: ignore[name-defined]
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

    names = {"Module": Module, "fit": fit, "AnnealerCallback": AnnealerCallback}
    return SimpleNamespace(callbacks=pl.callbacks, **names)


@pytest.mark.parametrize(("update", "static_mean"), [("iteration", False), ("epoch", True)])
def test_noise_follows_the_schedule(lightning, tmp_path, update, static_mean):
    schedule = ss.Schedule(LAYERS, 1.5, "overlapped", static_mean=static_mean)
    module = lightning.Module()
    lightning.fit(module, [lightning.AnnealerCallback(schedule, update=update)], tmp_path, epochs=4)
    step = 1 if update == "iteration" else BATCHES
    assert module.seen == expected(schedule, [i // step * step for i in range(4 * BATCHES)])
    assert module.validated
    assert all(module.validated)


def test_settings_and_functions_make_schedules(lightning, tmp_path):
    by_settings, by_function = lightning.Module(), lightning.Module()
    schedule = ss.Schedule(LAYERS, 2, interval="same_start")
    lightning.fit(
        by_settings,
        [lightning.AnnealerCallback(period=2, interval="same_start", net="net")],
        tmp_path,
    )
    lightning.fit(
        by_function, [lightning.AnnealerCallback(lambda layer, t: schedule(layer, t))], tmp_path
    )
    assert by_settings.seen == by_function.seen == expected(schedule, range(3 * BATCHES))


@pytest.mark.parametrize("static_mean", [True, False])
def test_a_resumed_run_is_the_same_run(lightning, tmp_path, static_mean):
    """Interrupted after two of four epochs, when the first layer is annealed and truncated."""
    make = lambda: lightning.AnnealerCallback(period=1.5, static_mean=static_mean)
    whole, half, rest = lightning.Module(), lightning.Module(), lightning.Module(network())
    lightning.fit(whole, [make()], tmp_path, epochs=4)
    lightning.fit(half, [make()], tmp_path, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    for parameter in rest.parameters():
        nn.init.constant_(parameter, 0.1)
    callback = make()
    lightning.fit(rest, [callback], tmp_path, epochs=4, ckpt=tmp_path / "half.ckpt")
    assert half.seen + rest.seen == whole.seen
    assert len(rest.seen) == 2 * BATCHES
    assert callback.annealer.annealed == (0, 1)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_a_second_fit_goes_on_and_a_new_trainer_begins(lightning, tmp_path):
    callback, module = lightning.AnnealerCallback(period=2), lightning.Module()
    trainer = lightning.fit(module, [callback], tmp_path, epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(seed=2))
    assert callback.annealer.steps == 2 * BATCHES
    other = lightning.Module()
    lightning.fit(other, [callback], tmp_path, epochs=1)
    assert callback.annealer.steps == BATCHES
    assert other.seen == module.seen[:BATCHES]


def test_noise_stays_while_gradients_accumulate(lightning, tmp_path):
    """Six batches by fours: a window of four and one of two, and an epoch is still one unit."""
    module = lightning.Module()
    lightning.fit(
        module, [lightning.AnnealerCallback(period=2)], tmp_path, accumulate_grad_batches=4
    )
    starts = [epoch * BATCHES + 4 * (batch // 4) for epoch in range(3) for batch in range(BATCHES)]
    assert module.seen == expected(ss.Schedule(LAYERS, 2), starts)


def test_accumulation_is_a_larger_batch(lightning, tmp_path):
    small, large = (lightning.Module(network(False, "expectation"), "SGD") for _ in range(2))
    lightning.fit(
        small, [lightning.AnnealerCallback(period=2)], tmp_path, accumulate_grad_batches=2
    )
    lightning.fit(large, [lightning.AnnealerCallback(period=2)], tmp_path, batches=loader(8))
    assert small.seen[::2] == small.seen[1::2] == large.seen
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accumulation_that_changes(lightning, tmp_path):
    module, callback = lightning.Module(), lightning.AnnealerCallback(period=2)
    lightning.fit(
        module,
        [callback, lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})],
        tmp_path,
        epochs=2,
    )
    starts = [*range(BATCHES), *(BATCHES + 3 * (batch // 3) for batch in range(BATCHES))]
    assert module.seen == expected(ss.Schedule(LAYERS, 2), starts)
    assert callback.annealer.t == 2.0


@pytest.mark.parametrize("truncate", [False, True])
def test_truncation(lightning, tmp_path, truncate):
    """The option reaches the annealer."""
    module = lightning.Module()
    callback = lightning.AnnealerCallback(period=1, truncate=truncate)
    lightning.fit(module, [callback], tmp_path)
    assert module.net[0].weight_stair.annealed is truncate


def test_two_networks_in_one_module(lightning, tmp_path):
    module = lightning.Module()
    module.student = network()
    with pytest.raises(ValueError, match=r"net must name .*\(net, student\), but None"):
        lightning.fit(module, [lightning.AnnealerCallback(period=1)], tmp_path)
    callbacks = [
        lightning.AnnealerCallback(period=1, net="net"),
        lightning.AnnealerCallback(period=2, net="student"),
    ]
    lightning.fit(module, callbacks, tmp_path, epochs=1).save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert sorted(s["schedule"]["period"] for s in states.values() if "schedule" in s) == [1, 2]


def test_errors(lightning, tmp_path):
    endless = DataLoader(annealed.Endless(TensorDataset(*annealed.examples())), 4)
    with pytest.raises(ValueError, match="period at least, but None and the settings none"):
        lightning.AnnealerCallback()
    with pytest.raises(ValueError, match="the settings period were given"):
        lightning.AnnealerCallback(ss.Schedule(LAYERS, 2), period=2)
    with pytest.raises(ValueError, match="interval must be one of"):
        lightning.AnnealerCallback(period=2, interval="never")
    with pytest.raises(ValueError, match=r"net must name .* \(net\), but 'nett' was given"):
        lightning.fit(
            lightning.Module(), [lightning.AnnealerCallback(period=2, net="nett")], tmp_path
        )
    with pytest.raises(ValueError, match="steps_per_unit must be a number of batches"):
        lightning.fit(
            lightning.Module(), [lightning.AnnealerCallback(period=2)], tmp_path, batches=endless
        )
    module = lightning.Module()
    callback = lightning.AnnealerCallback(period=2, steps_per_unit=5)
    lightning.fit(module, [callback], tmp_path, epochs=1, batches=endless)
    assert module.seen == expected(ss.Schedule(LAYERS, 2), range(BATCHES), 5)


def test_missing_package_is_named(lightning, monkeypatch):
    annealed.check_missing(monkeypatch, "lightning", "lightning.pytorch")


def test_example_of_the_documentation(lightning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = annealed.run_documented("pl.")
    (callback,) = (c for c in trainer.callbacks if isinstance(c, lightning.AnnealerCallback))
    assert callback.annealer.t == 3.0
    assert callback.annealer.annealed == (0,)
