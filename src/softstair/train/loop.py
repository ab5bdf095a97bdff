"""The loop: one for CPU and GPU, for every data set, network and recipe."""

from typing import Any, Protocol

from softstair.data.batches import Examples
from softstair.train.captured import CapturedStep
from softstair.train.metrics import evaluate, refresh_statistics, stair_health
from softstair.train.run import Run, refuse_nonfinite
from softstair.train.state import State
from softstair.train.step import Step

__all__ = ["Watch", "train"]

EXAMINED = 64
"""So many validation examples are enough to see how the stairs are occupied."""


class Watch(Protocol):
    """Somebody who looks on: a progress bar, TensorBoard."""

    def begin(self, state: State) -> None:
        """Training begins, or goes on from a checkpoint."""

    def step(self, state: State) -> None:
        """A step is done; no synchronisation, please."""

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        """An epoch is done, and this is its line of metrics."""


def train(state: State, train: Examples, valid: Examples, run: Run, watch: Watch) -> None:
    """Trains from where the state stands to the last epoch; SIGINT or SIGTERM stops it, kept."""
    recipe = state.recipe
    step = (CapturedStep if state.execution.captured else Step)(state, train)
    with state.team.stop_request() as stop:
        watch.begin(state)
        while state.epoch < recipe.epochs:
            state.begin_epoch()
            while state.step < state.steps:
                step()
                watch.step(state)
                run.keep(state, stop)
            refuse_nonfinite(state)
            state.clock()
            metrics = measure(state, train, valid, lambda: run.keep(state, stop))
            refuse_nonfinite(state, metrics["valid_loss"])
            run.log(metrics)
            state.end_epoch(metrics)
            watch.epoch(state, metrics)
            run.keep(state, stop)
        run.save(state)


def measure(state: State, train: Examples, valid: Examples, between: Any) -> dict[str, Any]:
    """The line of metrics of the epoch that the state has just come to the end of."""
    recipe = state.recipe
    if recipe.statistics == "fresh":
        how = (recipe.batch, recipe.seed, recipe.augment)
        refresh_statistics(state.network, train, *how, between, state.team)
    valid_loss, valid_accuracy = evaluate(
        state.network, valid, between, state.team, state.execution.eval_forward
    )
    metrics: dict[str, Any] = {
        "epoch": state.epoch,
        "learning_rate": state.learning_rate,
        "train_loss": state.mean_loss(),
        "train_accuracy": state.accuracy(),
        "valid_loss": valid_loss,
        "valid_accuracy": valid_accuracy,
    }
    if state.annealer is not None:
        x, _ = next(valid.chunks(EXAMINED))
        metrics["noise"] = [list(noise or ()) for noise in state.annealer.noise]
        metrics["annealed"] = list(state.annealer.annealed)
        stairs = stair_health(state.network, x)
        metrics["stairs"] = [stair.to_json() for stair in stairs]
        messages = [stair.warning(fading=not recipe.static_std) for stair in stairs]
        metrics["warnings"] = [message for message in messages if message]
    return metrics
