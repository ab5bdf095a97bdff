"""What a recipe will not achieve with this network, said before the first step."""

import torch
from torch import nn

from softstair import kernels
from softstair import noise as noises
from softstair.train.recipe import Recipe
from softstair.train.state import State

__all__ = ["advice"]

FEW = 3
"""Levels of a stair whose gaps have done no harm."""
FAINT = 0.1
"""A slope, as a share of that at a threshold, by which weights hardly move."""
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def advice(state: State) -> list[str]:
    """Sentences about a training that is about to begin; none, if all is well."""
    recipe = state.recipe
    if state.annealer is None:
        return []
    schedule = recipe.schedule(state.annealer.layers)
    said = []
    late = [i for i in range(schedule.layers) if schedule(i, recipe.epochs)[1] > 0]
    if late and not schedule.static_std:
        which = f"layer {late[0]}" if len(late) == 1 else f"layers {late[0]} to {late[-1]}"
        said.append(
            f"the noise of {which} will not be gone after the last epoch, {recipe.epochs}, since "
            f"{schedule.layers} layers anneal over {schedule.end:g}: lower --period"
        )
    if schedule.static_std:
        said += _gaps(recipe, schedule.std0)
    if not any(isinstance(module, NORMALISATIONS) for module in state.network.modules()):
        said.append(
            "the network has no normalisation, without which few sums fall where the stairs have "
            "their steps: put a batch normalisation before each activation"
        )
    if not schedule.static_mean and not schedule.static_std and recipe.weights != "float":
        # The std as λ² and the mean as λ: weights that stay are out of the noise from λ = 0.62 on.
        said.append(
            "the noise narrows faster than its mean moves, and weights that drop out of it have no "
            "gradient to follow it by: give --static-std or --static-mean"
        )
    if not schedule.static_mean and recipe.optimiser == "adam":
        said += _too_slow(state, abs(schedule.first_mean) * recipe.weight_quantum)
    return said


def _gaps(recipe: Recipe, std0: float) -> list[str]:
    """Weights move where the noise reaches; half-way between two thresholds they may stay."""
    stair = recipe.stair("weights")
    if stair is None or len(stair.levels) <= FEW or std0 == 0:
        return []
    middle = len(stair.thresholds) // 2
    low, high = stair.thresholds[middle - 1 : middle + 1]
    # Next to the middle: where two uniform ones meet, rounding decides what is there.
    at = torch.tensor([low, low + 0.49 * (high - low)], dtype=torch.float64)
    noise, std = noises.get(recipe.noise), std0 * recipe.weight_quantum
    on, between = kernels.slope(at, stair, noise, 0.0, std).tolist()
    if between >= FAINT * on:
        return []
    return [
        f"static {recipe.noise} noise of std {std0:.3g} hardly reaches half-way between "
        f"thresholds, where weights of {len(stair.levels)} levels then stay: raise --std0"
    ]


def _too_slow(state: State, distance: float) -> list[str]:
    """Adam moves a weight by about its learning rate a step; a dynamic mean moves by half a quantum
    within a period, and the weights must follow it."""
    recipe = state.recipe
    within = min(recipe.period, recipe.epochs) * state.steps * recipe.learning_rate
    if recipe.weights == "float" or within >= distance:
        return []
    return [
        f"the mean of the noise moves by {distance:g} within a period, but weights move by about "
        f"{within:.2g}, which is {recipe.learning_rate:g} a step: raise --period, --epochs or "
        "--learning-rate"
    ]
