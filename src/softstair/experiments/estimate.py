"""How long a unit takes here, from a short measurement: a few steps, and one evaluation."""

import time
from dataclasses import dataclass, replace

import torch

from softstair.data import Dataset, load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.train.execution import choose_device, choose_threads, training_settings
from softstair.train.metrics import evaluate, refresh_statistics
from softstair.train.network import make_network
from softstair.train.recipe import Recipe
from softstair.train.state import State
from softstair.train.step import CapturedStep, Step

__all__ = ["Estimate", "estimate"]

PATIENCE = 3.0
"""Seconds of steps that are enough."""
FEWEST, MOST = 2, 200
EVALUATED = 500


@dataclass(frozen=True)
class Estimate:
    """What was measured, in seconds.

    step        one step of training, with all its noise
    evaluation  of the validation fold
    unit        a whole unit: its steps and evaluations; truncation makes it faster, others beside
                it on the same machine slower
    """

    step: float
    evaluation: float
    unit: float
    device: str


def estimate(
    recipe: Recipe,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    dataset: Dataset | None = None,
) -> Estimate:
    """Trains a few steps by a recipe, keeps nothing, and multiplies.

    >>> found = estimate(Recipe(limit=200, epochs=10, batch=32), device="cpu")
    >>> 0 < found.step < found.unit
    True
    """
    place = choose_device(device)
    dataset = load(recipe.data, data_dir) if dataset is None else dataset
    dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
    with training_settings(recipe, place):
        torch.manual_seed(recipe.seed)
        network = make_network(recipe, dataset)
        torch.set_num_threads(threads or choose_threads(network, recipe.batch))
        parts = split(dataset, recipe.fold, recipe.folds)
        numbers = *dataset.numbers(recipe.integer_input, recipe.centre_input), place
        training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
        # Compiling takes longer than what is measured, and pays in a whole unit alone.
        state = State(replace(recipe, compile="never"), network, len(training), place)
        step = _step(state, training)
        evaluation = _evaluation(state, valid) + _refreshment(state, training)
    unit = recipe.epochs * (state.steps * step + evaluation)
    return Estimate(step, evaluation, unit, str(place))


def _step(state: State, training: Examples) -> float:
    """Seconds of a step."""
    step = (CapturedStep if state.execution.captured else Step)(state, training)
    state.begin_epoch()
    step()  # what is slow but once
    _wait(state)
    begun, done = time.perf_counter(), 0
    while done < FEWEST or (time.perf_counter() - begun < PATIENCE and done < MOST):
        if state.step >= state.steps:
            state.step, state.order = 0, None
            state.begin_epoch()
        step()
        done += 1
        _wait(state)
    return (time.perf_counter() - begun) / done


def _evaluation(state: State, valid: Examples) -> float:
    """Seconds of an evaluation, from a part of it."""
    few = Examples(valid.x[:EVALUATED], valid.y[:EVALUATED], valid.mean, valid.std, state.device)
    evaluate(state.network, few, forward=state.execution.eval_forward)
    begun = time.perf_counter()
    evaluate(state.network, few, forward=state.execution.eval_forward)
    _wait(state)
    return (time.perf_counter() - begun) * len(valid) / len(few)


def _refreshment(state: State, training: Examples) -> float:
    """Seconds that fresh statistics take before an evaluation, if they are asked for."""
    if state.recipe.statistics != "fresh":
        return 0.0
    begun = time.perf_counter()
    refresh_statistics(state.network, training, state.recipe.batch, state.recipe.seed)
    _wait(state)
    return time.perf_counter() - begun


def _wait(state: State) -> None:
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
