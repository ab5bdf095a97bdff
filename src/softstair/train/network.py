"""The network of a recipe: as it starts, as a run has trained it, and in integers.

A trained network comes from a run, a file or the zoo.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _check, _plugins, noise as noises, zoo
from softstair._errors import SoftstairError, first_line, import_extra
from softstair.convert import QuantiseOptions, quantise
from softstair.convert.conversion import copy_of
from softstair.convert.options import matches, parse, parse_layers
from softstair.data import Dataset, load
from softstair.data.dataset import held_out
from softstair.deploy.freezing import freeze
from softstair.deploy.frozen import FrozenNetwork, load_frozen
from softstair.deploy.nodes import Arithmetic, ExportError, Rounding
from softstair.deploy.summary import report
from softstair.models import build, default_for, first_layer, last_layer
from softstair.nn import StairLayer, StairModule
from softstair.ste import Estimator
from softstair.train import checkpoint
from softstair.train.recipe import Recipe
from softstair.train.records import FROZEN, NETWORK, RunError, recipe_of
from softstair.train.state import State

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
        if recipe.network.model == "auto" and ":" in recipe.data.name:
            problem = "must be named for data of your own"
            problem = f"{problem}, {recipe.data.name!r}, but auto was given"
            raise _check.invalid("model", problem)
        model = build(model_name(recipe), classes, shape)
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", str(model))
        given = {"classes": classes, "shape": shape}
        model = _plugins.call_function(model, name, "model", nn.Module, **given)
    _check_model(model, example, classes)
    return stair_network(model, recipe, example, own_code)


def model_name(recipe: Recipe) -> str:
    """Return the name of the model, which depends on the data if it is auto."""
    name = recipe.network.model
    return default_for(recipe.data.name) if name == "auto" else name


def stair_network(
    model: nn.Module, recipe: Recipe, example: Tensor | None = None, own_code: bool = False
) -> nn.Module:
    """Return the network that a recipe makes of a float model; a copy of it for a float recipe.

    Noise of the user's own is called with ``own_code``; else it is uniform, as good in ``eval()``.
    """
    if recipe.network.is_float:
        return copy_of(model, "model")
    noise: Any = recipe.noise.name
    if ":" in noise:
        kinds: Any = (noises.Noise, Estimator)
        noise = _plugins.call(noise, "noise", kinds) if own_code else "uniform"
        if isinstance(noise, Estimator) and recipe.is_annealed:
            problem = "must be True, and static_mean, with an estimator, which is not annealed"
            raise _check.invalid("static_std", problem)
    weights: Any = recipe.network.stair("weights")
    if (first := recipe.network.stair("first_layer")) != weights:
        weights = {first_layer(model, example): first, "*": weights}
    features, skip, named = recipe.network.stair("features"), recipe.network.skip, set[str]()
    if recipe.network.bits is not None:
        weights, features = parse_layers(recipe.network.bits), None
        named = set(weights) - {"*"}
    last = last_layer(model, example)
    if recipe.network.last_layer == "float" and not any(
        matches(pattern, last) for pattern in named
    ):
        skip = (*skip, last)
    return quantise(
        model,
        weights=weights,
        features=features,
        noise=noise,
        forward=recipe.noise.forward,
        skip=skip,
        example_inputs=example,
        quanta="learned" if recipe.network.quanta == "learned" else "fixed",
        options=QuantiseOptions(
            sums=None if recipe.network.sums == "none" else recipe.network.sums,
            shortcuts=None if recipe.network.shortcuts == "same" else recipe.network.shortcuts,
            gradient_margin=recipe.noise.gradient_margin,
        ),
    )


def levels_of(recipe: Recipe) -> str:
    """Return the names of the stairs of a recipe in short.

    >>> levels_of(Recipe.from_flat(weights="int4", features="uint4", first_layer="int8"))
    'int4, first layer int8'
    """
    options = recipe.network
    is_usual = parse(options.weights).features == options.features
    text = options.weights if is_usual else f"{options.weights}/{options.features}"
    others = {"first layer": options.first_layer, "shortcuts": options.shortcuts}
    parts = [f"{name} {stair}" for name, stair in others.items() if stair != "same"]
    return ", ".join([options.bits or text, *parts])


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
    >>> from softstair.train import fit
    >>> with tempfile.TemporaryDirectory() as out:
    ...     _ = fit(Recipe.from_flat(limit=200, epochs=1, batch=32), out)
    ...     network = trained_network(out, load("digits"))
    >>> network(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    path = Path(path)
    recipe = recipe_of(path)
    if recipe is not None and model is None and ":" in recipe.network.model and not own_code:
        raise RunError(
            f"the model of the run in {str(path)!r} is your own code or somebody else's, "
            f"{recipe.network.model!r}: pass `model`, or `own_code=True` if you trust it.",
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
    if recipe.network.is_float:
        return f"{network}\n\nin float: nothing was quantised", None
    shape = tuple(dataset.x.shape[1:])
    read = input_of(*dataset.numbers(recipe.data.integer_input, recipe.data.centre_input), shape)
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
    if (
        state.annealer is None
        or recipe.noise.noise_schedule is not None
        or ":" in recipe.noise.name
    ):
        return warnings
    schedule = recipe.schedule(state.annealer.layers)
    warnings += [state.execution.not_fused] if state.execution.not_fused else []
    last = recipe.run.epochs - (1 if recipe.noise.update == "epoch" else 1 / state.steps)
    late = [i for i in range(schedule.layers) if schedule(i, last)[1] > 0]
    if late and not schedule.static_std:
        layers = f"layer {late[0]}" if len(late) == 1 else f"layers {late[0]} to {late[-1]}"
        warnings.append(
            f"{layers} will still have noise in the last step, at epoch {last:g}, since "
            f"{schedule.layers} layers anneal until {schedule.end:g}: lower `period`"
        )
    if recipe.noise.anneal_from and schedule.is_static:
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


EXAMPLES = 300
"""Validation examples that freezing compares at the end of a training."""


@dataclass(frozen=True)
class Deployed:
    """A frozen network, and the trained one that it was made of."""

    frozen: FrozenNetwork
    trained: nn.Module
    about: zoo.About

    def to_float(self, x: Tensor) -> Tensor:
        """Return what the trained network takes for integers ``x``."""
        return (x.float() - self.about.mean) / self.about.std


def deployed(run: Path | str, model: str | None = None) -> Deployed:
    """Load a trained network, and its frozen form: that of the run, or made now.

    Args:
        run: A finished run, a file of :func:`softstair.zoo.save`, or the name of a network of the
            zoo.
        model: ``package.module:function`` that returns the float network, if it is code of your
            own. What a file names is not called: it may come from anybody.

    Raises:
        SoftstairError: If there is no such network, or if it does not fit the model.
        ExportError: If the network cannot be frozen.
    """
    if is_frozen(run):
        allowed = "a run, network.safetensors or a name of the zoo, since eval() is compared"
        raise _check.invalid("trained", f"must be {allowed}, but {str(run)!r} was given")
    file = file_of(run)
    trained, about = zoo.load(file, model), zoo.about(file)
    saved = Path(run) / FROZEN
    frozen = load_frozen(saved) if saved.is_file() else frozen_of(trained, about)
    return Deployed(frozen, trained, about)


def frozen_network(
    run: Path | str,
    model: str | None = None,
    rounding: Rounding | None = None,
    arithmetic: Arithmetic | None = None,
) -> FrozenNetwork:
    """Load a frozen network: its file, that of a run, or made now of a trained network.

    Args:
        run: As for :func:`deployed`, or a file of :meth:`FrozenNetwork.save`.
        model: As for :func:`deployed`; a file of a frozen network needs none.
        rounding: Freeze the trained network of a run again with this rounding.
        arithmetic: The same, with this arithmetic.
    """
    file = Path(run) / FROZEN if Path(run).is_dir() else Path(run)
    given: dict[str, Any] = {"rounding": rounding, "arithmetic": arithmetic}
    given = {name: value for name, value in given.items() if value is not None}
    if is_frozen(file) and (not given or file == Path(run)):
        if given:
            problem = f"must be left out: {str(run)!r} is frozen already"
            raise _check.invalid(next(iter(given)), problem)
        return load_frozen(file)
    network = file_of(run)
    return frozen_of(zoo.load(network, model), zoo.about(network), **given)


def language_network(run: Path | str, model: str | None = None) -> nn.Module:
    """Load a trained network for text: a folder of Hugging Face, or as :func:`deployed`."""
    if not (Path(run) / "config.json").is_file() or (Path(run) / NETWORK).is_file():
        return zoo.load(file_of(run), model)
    transformers: Any = import_extra("transformers", "transformers")
    net: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(run, local_files_only=True)
    return net


def is_frozen(file: Path | str) -> bool:
    """Whether a file is that of a frozen network."""
    safetensors = import_extra("safetensors")
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            return "frozen" in json.loads((opened.metadata() or {}).get("softstair", "{}"))
    except (OSError, ValueError, safetensors.SafetensorError):
        return False


def file_of(run: Path | str) -> Path:
    """Return the file of a finished run, of a network in the zoo, or the file itself."""
    run = Path(run)
    if not run.is_dir():
        return zoo.path_of(run)
    if (file := run / NETWORK).is_file():
        return file
    inner = min([*run.glob(f"*/{NETWORK}"), *run.glob(f"*/*/{NETWORK}")], default=None)
    if inner is not None:
        raise RunError(f"{str(run)!r} holds several runs: give one, such as {str(inner.parent)!r}.")
    advice = "; continue it with `resume`" if (run / "config.json").exists() else ""
    raise RunError(f"{str(run)!r} holds no finished run: it has no {NETWORK}{advice}.")


def examples_of(
    about: zoo.About,
    data_dir: Path | str = "data",
    limit: int | None = None,
    data: str | None = None,
) -> tuple[str, Tensor, Tensor]:
    """Return the test set, or the validation fold if there is none: name, examples, labels.

    ``data`` is the data set, which must be named if it is code: a file may come from anybody.
    """
    name = data or about.data
    if data is None and (":" in name or not name):
        problem = f"is of data of its maker, {name!r}" if name else "names no data"
        raise SoftstairError(f"the network {problem}: pass `data`.", field="data")
    dataset = load(name, data_dir)
    if about.fold == "all" and dataset.test_x is None:
        return f"all examples of {dataset.name}", dataset.x[:limit], dataset.y[:limit]
    name, x, y = held_out(dataset, about.fold, about.folds, about.limit)
    return name, x[:limit], y[:limit]


def frozen_of(
    net: nn.Module,
    about: zoo.About,
    examples: Tensor | None = None,
    rounding: Rounding = "once",
    arithmetic: Arithmetic = "fine",
) -> FrozenNetwork:
    """Freeze a trained network with the input and the classes that its file names.

    Raises:
        ExportError: If the network is float, or if it has no integer form.
    """
    if not any(isinstance(module, StairModule) for module in net.modules()):
        raise ExportError("the network is float: nothing in it is quantised.")
    read = input_of(about.mean, about.std, about.shape)
    known: dict[str, Any] = {"rounding": rounding, "arithmetic": arithmetic}
    known["classes"] = about.classes
    return freeze(net, about.shape, examples=examples, **read, **known)


def input_of(mean: float, std: float, shape: Sequence[int]) -> dict[str, Any]:
    """Return `zero` and `scale` of bytes, or `mean` and `std` where the zero is no byte.

    >>> input_of(8.0, 4.0, (1, 8, 8)), input_of(127.5, 51.0, (1, 8, 8))
    ({'zero': 8, 'scale': 4.0}, {'mean': (0.5,), 'std': (0.2,)})
    """
    if mean.is_integer() and 0 <= mean <= 255:
        return {"zero": int(mean), "scale": std}
    return {"mean": (mean / 255,) * shape[0], "std": (std / 255,) * shape[0]}


def save_frozen(net: nn.Module, about: zoo.About, examples: Tensor, file: Path) -> str:
    """Freeze the network of a run and write it; return what freezing changed, or why it failed."""
    try:
        with torch.random.fork_rng([]):
            frozen = frozen_of(net, about, examples if len(examples) else None)
    except SoftstairError as error:
        return f"not frozen: {first_line(error)}"
    except Exception as error:  # a model of the user's own may raise anything
        return f"not frozen: it raised {type(error).__name__} ({first_line(error)})"
    frozen.save(file)
    return f"frozen: {frozen.report}"
