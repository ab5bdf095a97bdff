"""The network of a recipe: as it starts, as a run has trained it, and what to expect of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _check, _plugins, noise as noises
from softstair._errors import SoftstairError, first_line
from softstair.convert import QuantiseOptions, quantise
from softstair.convert.bits import parse, parse_layers
from softstair.convert.conversion import copy_of
from softstair.convert.options import matches
from softstair.data import Dataset
from softstair.deploy.summary import report
from softstair.models import build, default_for, first_layer, last_layer
from softstair.nn import StairLayer
from softstair.ste import Estimator
from softstair.train import checkpoint
from softstair.train.recipe import Recipe
from softstair.train.records import RunError, recipe_of
from softstair.train.state import State
from softstair.train.trained import input_of

NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def make_network(
    recipe: Recipe,
    dataset: Dataset,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    own_code: bool = True,
) -> nn.Module:
    """Return the untrained network of a recipe, made from ``model`` if it is given."""
    shape, classes = tuple(dataset.x.shape[1:]), len(dataset.classes)
    example = torch.zeros(2, *shape)
    if model is None:
        if recipe.model == "auto" and ":" in recipe.data:
            problem = f"must be named for data of your own, {recipe.data!r}, but auto was given"
            raise _check.invalid("model", problem)
        name = default_for(recipe.data) if recipe.model == "auto" else recipe.model
        model = build(name, classes, shape)
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", str(model))
        given = {"classes": classes, "shape": shape}
        model = _plugins.call_function(model, name, "model", nn.Module, **given)
    _check_model(model, example, classes)
    return stair_network(model, recipe, example, own_code)


def stair_network(
    model: nn.Module, recipe: Recipe, example: Tensor | None = None, own_code: bool = False
) -> nn.Module:
    """Return the network that a recipe makes of a float model; a copy of it for a float recipe.

    Noise of the user's own is called with ``own_code``; else it is uniform, as good in ``eval()``.
    """
    if recipe.is_float:
        return copy_of(model, "model")
    noise: Any = recipe.noise
    if ":" in noise:
        kinds: Any = (noises.Noise, Estimator)
        noise = _plugins.call(noise, "noise", kinds) if own_code else "uniform"
        if isinstance(noise, Estimator) and recipe.is_annealed:
            problem = "must be True, and static_mean, with an estimator, which is not annealed"
            raise _check.invalid("static_std", problem)
    weights: Any = recipe.stair("weights")
    if (first := recipe.stair("first_layer")) != weights:
        weights = {first_layer(model, example): first, "*": weights}
    features, skip, named = recipe.stair("features"), recipe.skip, set[str]()
    if recipe.bits is not None:
        weights, features = parse_layers(recipe.bits), None
        named = set(weights) - {"*"}
    last = last_layer(model, example)
    if recipe.last_layer == "float" and not any(matches(pattern, last) for pattern in named):
        skip = (*skip, last)
    return quantise(
        model,
        weights=weights,
        features=features,
        noise=noise,
        forward=recipe.forward,
        skip=skip,
        example_inputs=example,
        quanta="learned" if recipe.quanta == "learned" else "fixed",
        options=QuantiseOptions(
            sums=None if recipe.sums == "none" else recipe.sums,
            shortcuts=None if recipe.shortcuts == "same" else recipe.shortcuts,
            gradient_margin=recipe.gradient_margin,
        ),
    )


def levels_of(recipe: Recipe) -> str:
    """Return the names of the stairs of a recipe in short.

    >>> levels_of(Recipe(weights="int4", features="uint4", first_layer="int8"))
    'int4, first layer int8'
    """
    is_usual = parse(recipe.weights).features == recipe.features
    text = recipe.weights if is_usual else f"{recipe.weights}/{recipe.features}"
    others = {"first layer": recipe.first_layer, "shortcuts": recipe.shortcuts}
    parts = [f"{name} {stair}" for name, stair in others.items() if stair != "same"]
    return ", ".join([recipe.bits or text, *parts])


def trained_network(
    path: Path | str,
    dataset: Dataset,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    own_code: bool = False,
) -> nn.Module:
    """Return the network of a run directory in ``eval()``, from its newest checkpoint.

    Args:
        path: The run directory.
        dataset: The data set that it was trained on.
        model: The float network, if the run was trained with one of your own, or the function that
            returns it (called as ``package.module:function`` is, with ``classes`` and ``shape``).
        own_code: Import and call the functions that the run names as its model and noise. A run
            directory may come from anybody, so this is off by default; without it, own noise is
            replaced by uniform noise, of which there is none in ``eval()``.

    Raises:
        RunError: If there is no trained network, or if it does not fit the model.

    >>> import tempfile
    >>> from softstair.data import load
    >>> from softstair.train import train
    >>> with tempfile.TemporaryDirectory() as out:
    ...     _ = train(Recipe(limit=200, epochs=1, batch=32), out)
    ...     network = trained_network(out, load("digits"))
    >>> network(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    path = Path(path)
    recipe = recipe_of(path)
    if recipe is not None and model is None and ":" in recipe.model and not own_code:
        raise RunError(
            f"the model of the run in {str(path)!r} is your own code or somebody else's, "
            f"{recipe.model!r}: pass `model`, or `own_code=True` if you trust it.",
            field="model",
        )
    state = checkpoint.load(path / "checkpoint")
    if recipe is None or state is None:
        hint = ", but folds: name one, such as fold-0" if (path / "fold-0").is_dir() else ""
        raise RunError(f"{str(path)!r} holds no trained network{hint}.")
    with torch.random.fork_rng([]):
        network = make_network(recipe, dataset, model, own_code)
    try:
        if not checkpoint.is_like(state.get("network"), network.state_dict()):
            raise RuntimeError
        network.load_state_dict(state["network"])
    except RuntimeError:
        raise RunError(
            f"the parameters in {str(path)!r} have other names, shapes, types or stairs than those "
            "of the model: pass the model that was trained.",
            field="model",
        ) from None
    return network.eval()


def describe_network(
    network: nn.Module, recipe: Recipe, dataset: Dataset
) -> tuple[str, str | None]:
    """Return the report of a network, and one sentence: what exports; of a float network, none."""
    if recipe.is_float:
        return f"{network}\n\nin float: nothing was quantised", None
    shape = tuple(dataset.x.shape[1:])
    read = input_of(*dataset.numbers(recipe.integer_input, recipe.centre_input), shape)
    try:
        described = report(network, shape, **read)
    except SoftstairError as error:  # such as of a network that takes batches of one size
        described = replace(report(network), conclusion=f"does not freeze: {error}")
    return str(described), described.conclusion


@torch.no_grad()
def _check_model(model: nn.Module, example: Tensor, classes: int) -> None:
    """Raise SoftstairError if a model does not return scores; it is left unchanged."""
    trial = copy_of(model, "model").to(example.device)
    wanted = f"scores of shape (2, {classes}) for examples of shape {tuple(example.shape)}"
    for training in (False, True):
        try:
            with torch.random.fork_rng([]):
                scores = trial.train(training)(example)
        except Exception as error:
            problem = f"raised {type(error).__name__} ({first_line(error)})"
        else:
            if isinstance(scores, Tensor) and scores.shape == (2, classes):
                continue
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            problem = f"returned {shape}"
        raise _check.invalid("model", f"must return {wanted}, but it {problem}")


def advice(state: State) -> list[str]:
    """Return warnings about what a recipe will not achieve with this network."""
    recipe = state.recipe
    warnings: list[str] = []
    if state.annealer is None or recipe.noise_schedule is not None or ":" in recipe.noise:
        return warnings
    schedule = recipe.schedule(state.annealer.layers)
    warnings += [state.execution.not_fused] if state.execution.not_fused else []
    last = recipe.epochs - (1 if recipe.update == "epoch" else 1 / state.steps)
    late = [i for i in range(schedule.layers) if schedule(i, last)[1] > 0]
    if late and not schedule.static_std:
        layers = f"layer {late[0]}" if len(late) == 1 else f"layers {late[0]} to {late[-1]}"
        warnings.append(
            f"{layers} will still have noise in the last step, at epoch {last:g}, since "
            f"{schedule.layers} layers anneal until {schedule.end:g}: lower `period`"
        )
    if recipe.anneal_from and schedule.is_static:
        warnings.append(
            "the noise will not anneal, since both its mean and its std are static: turn off "
            "`static_std`, or leave out `anneal_from`"
        )
    if not any(isinstance(module, NORMALISATIONS) for module in state.network.modules()):
        warnings.append(
            "the network has no normalisation, so few sums lie near the thresholds of the stairs: "
            "put a batch normalisation before each activation"
        )
    is_latent = any(isinstance(module, StairLayer) for module in state.network.modules())
    if is_latent and not (schedule.static_mean or schedule.static_std):
        # The std falls as λ², the mean as λ: weights that stay are outside the noise for λ < 0.62.
        warnings.append(
            "the noise narrows faster than its mean moves, and weights that it leaves get no "
            "gradient: pass `static_std` or `static_mean`"
        )
    return warnings
