"""The network that a recipe names: as it begins, and as a run has trained it."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from softstair.convert import quantise, report
from softstair.data import Dataset
from softstair.models import build, default_for, last_layer
from softstair.train import checkpoint
from softstair.train.recipe import Recipe
from softstair.train.run import RunError, load_checkpoint, read, recipe_of

__all__ = ["make_network", "stair_network", "table", "trained_network"]


def make_network(recipe: Recipe, dataset: Dataset, model: nn.Module | None = None) -> nn.Module:
    """The network that a recipe trains, in its first state."""
    shape, classes = tuple(dataset.x.shape[1:]), len(dataset.classes)
    example = torch.zeros(2, *shape)
    if model is None:
        if recipe.model == "auto" and ":" in recipe.data:
            raise ValueError(
                f"model must be named for data of your own, {recipe.data!r}, but auto was given."
            )
        name = default_for(recipe.data) if recipe.model == "auto" else recipe.model
        model = build(name, classes, shape)
    _refuse_unfit(model, example, classes)
    return stair_network(model, recipe, example)


def stair_network(model: nn.Module, recipe: Recipe, example: Tensor | None = None) -> nn.Module:
    """The network that a recipe makes of a float model: its stair network, or the model itself."""
    if recipe.is_float:
        return copy.deepcopy(model)
    skip = recipe.skip
    if recipe.last_layer == "float":
        skip = (*skip, last_layer(model, example))
    return quantise(
        model,
        weights=recipe.stair("weights"),
        features=recipe.stair("features"),
        noise=recipe.noise,
        forward=recipe.forward,
        skip=skip,
        example_inputs=example,
    )


def trained_network(
    path: Path | str, dataset: Dataset, model: nn.Module | None = None, own_code: bool = False
) -> nn.Module:
    """The network of a run directory as its newest checkpoint has it, in ``eval()``.

    A run whose model is a function of the user's own is not believed which one: give what it
    returns as ``model``, or allow by ``own_code`` that the function is imported and called.

    >>> import tempfile
    >>> from softstair.data import load
    >>> from softstair.train import train
    >>> with tempfile.TemporaryDirectory() as out:
    ...     _ = train(Recipe(limit=200, epochs=1, batch=32), out)
    ...     network = trained_network(out, load("digits"))
    >>> network(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    recipe = recipe_of(Path(path))
    if recipe is not None and model is None and ":" in recipe.model and not own_code:
        raise RunError(
            f"the run in {str(path)!r} was begun with the model {recipe.model!r}, which is code of "
            "its own, and is not called because a file says so: give model=, or own_code=True if "
            "you trust it."
        )
    config = read(Path(path), "config.json")
    state = None if config is None else load_checkpoint(Path(path), config)
    if recipe is None or state is None:
        folds = ", but folds: name one, such as fold-0" if (Path(path) / "fold-0").is_dir() else ""
        raise RunError(
            f"{str(path)!r} holds no trained network{folds or ': train one with --out there'}."
        )
    with torch.random.fork_rng([]):
        network = make_network(recipe, dataset, model)
    if not checkpoint.is_like(state.get("network"), network.state_dict()):
        raise RunError(
            f"the network in {str(path)!r} has other names, shapes or types than the model that "
            "its recipe, or the call, names: give the model that was trained."
        )
    network.load_state_dict(state["network"])
    return network.eval()


def table(network: nn.Module) -> str:
    """What became of every layer."""
    try:
        return str(report(network))
    except ValueError:
        return f"{network}\n\nin float: nothing was quantised"


@torch.no_grad()
def _refuse_unfit(model: nn.Module, example: Tensor, classes: int) -> None:
    """Refuses a model that does not make scores of examples; it is left as it was."""
    trial = copy.deepcopy(model).to(example.device)
    wanted = f"scores of shape (2, {classes}) of examples of shape {tuple(example.shape)}"
    for training in (False, True):
        try:
            with torch.random.fork_rng([]):
                scores = trial.train(training)(example)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"model must make {wanted}, but it raised {type(error).__name__} ({reason})."
            ) from None
        if not isinstance(scores, Tensor) or scores.shape != (2, classes):
            given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"model must make {wanted}, but it made {given}.")
