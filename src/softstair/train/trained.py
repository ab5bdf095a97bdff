"""A trained network, of a run, a packed file or the zoo, in integers."""

import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from softstair import _check, zoo
from softstair._errors import SoftstairError
from softstair.data import Dataset, load
from softstair.data.folds import held_out
from softstair.deploy import ExportError, IntegerNetwork, integerise, quantise_last_layer
from softstair.models import build
from softstair.nn import StairModule
from softstair.train import packed
from softstair.train.loop import describe
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe
from softstair.train.records import RunError, read_json, recipe_of, summary_of

LastLayer = Literal["float", "int8"]


@dataclass(frozen=True)
class Own:
    """What a user names of her own, see :func:`deployed`."""

    model: str | None = None
    data: str | None = None
    zero: int | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Trained:
    """A trained network and its input.

    The recipe of a packed file is what the file keeps of it, and its data set is read when it is
    needed.
    """

    source: Path
    recipe: Recipe
    network: nn.Module
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: float
    std: float
    dataset: Dataset | None


@dataclass(frozen=True)
class Deployed(Trained):
    """A trained network and its integer network.

    ``integer`` equals ``network``: ``trained``, or a copy with its last layer in INT8.
    """

    trained: nn.Module
    integer: IntegerNetwork

    def examples(
        self, data_dir: Path | str = "data", limit: int | None = None
    ) -> tuple[str, Tensor]:
        """Return the test set, or the validation fold if there is none, and its name."""
        recipe, dataset = self.recipe, self.dataset
        if dataset is None:
            _check_code(self.source, recipe, Own())
            dataset = load(recipe.data, data_dir)
        name, x, _ = held_out(dataset, recipe.fold, recipe.folds, recipe.limit)
        return name, x[:limit]


def deployed(
    run: Path | str,
    data_dir: Path | str = "data",
    last_layer: LastLayer = "float",
    model: str | None = None,
    data: str | None = None,
    zero: int | None = None,
    scale: float | None = None,
) -> Deployed:
    """Load a trained network and convert it to integers.

    Args:
        run: A finished run, a packed file, the name of a network of the zoo, or a file to which
            ``torch.save`` wrote the ``state_dict`` of a network of :func:`softstair.quantise`.
        data_dir: Folder of the data sets.
        last_layer: Whether a last layer that was trained in float stays so, or becomes INT8.
        model: ``package.module:function``. For a run with a model of your own: the float network.
            For a file of ``torch.save``: the quantised network, whose state the file holds.
        data: The data set, for a file of ``torch.save``; for a run, if it names code of your own.
        zero: For a file of ``torch.save``: the byte that is 0 for the network; by default the mean
            of the data.
        scale: For a file of ``torch.save``: the network was trained on ``(byte.float() - zero) /
            scale``; by default the std of the data.

    Code that a run names is called only if ``model`` or ``data`` names it: a run may come from
    anybody. Files are read without running code.

    Raises:
        RunError: If there is no such network, or if it does not fit the model.
        ExportError: If the network is not exact in integers.
    """
    run = Path(run)
    own = Own(model, data, zero, scale)
    is_saved = run.is_file() and (model is not None or zipfile.is_zipfile(run))
    load_from = _saved if is_saved else trained_run if run.is_dir() else _packed
    source = load_from(run, data_dir, own)
    trained, mean = source.network, source.mean
    if not any(isinstance(module, StairModule) for module in trained.modules()):
        raise ExportError(f"the network of {str(run)!r} is float: nothing in it is quantised.")
    if not mean.is_integer():
        advice = "pass `zero` and `scale`" if is_saved else "train it with `integer_input`"
        raise ExportError(
            f"the zero of the input of {str(run)!r} is at byte {mean:g}, not at an integer, so "
            f"neither its padding nor its first layer is exact: {advice}."
        )
    given = (source.shape, int(mean), source.std)
    network = trained if last_layer == "float" else quantise_last_layer(trained, *given)
    facts = {**vars(source), "network": network}
    return Deployed(**facts, trained=trained, integer=integerise(network, *given))


def trained_run(run: Path, data_dir: Path | str, own: Own) -> Trained:
    """Return the network of a finished run, float or quantised; code of ``own`` alone is called."""
    recipe = recipe_of(run)
    if recipe is None:
        inner = min([*run.glob("*/config.json"), *run.glob("*/*/config.json")], default=None)
        example = f", such as {str(inner.parent)!r}" if inner else ""
        raise RunError(f"{str(run)!r} holds no run: give a run directory{example}.")
    if summary_of(run) is None:
        raise RunError(
            f"the run in {str(run)!r} is not finished: finish it with softstair train `resume`."
        )
    _refuse(run, own, "zero", "scale")
    _check_code(run, recipe, own)
    dataset = load(own.data or recipe.data, data_dir)
    if own.data:
        facts = describe(recipe, dataset, torch.device("cpu"))["data"]
        if facts != (read_json(run, "config.json") or {}).get("data"):
            raise RunError(f"the run in {str(run)!r} was trained on other data.", field="data")
    shape = tuple(dataset.x.shape[1:])
    given = None if own.model is None else build(own.model, len(dataset.classes), shape)
    network = trained_network(run, dataset, given)
    numbers = dataset.numbers(recipe.integer_input, recipe.centre_input)
    return Trained(run, recipe, network, shape, dataset.classes, *numbers, dataset)


def _packed(run: Path, data_dir: Path | str, own: Own) -> Trained:
    file = run
    if not run.is_file():
        try:
            file = zoo.path_of(str(run))
        except SoftstairError as error:
            name = _check.shortened(str(run))
            raise RunError(
                f"{name} must be an existing run directory, packed network or file of torch.save, "
                f"or the name of a network in the zoo, but {error}"
            ) from None
    about, network = packed.about(file), packed.packed_network(file)
    try:
        recipe = packed.packed_recipe(about, "fold", "folds", "limit")
    except (KeyError, ValueError) as error:
        raise packed.damaged(file, error) from None
    is_own = ":" in recipe.data
    _refuse(run, own, "model", "zero", "scale", *([] if is_own else ["data"]))
    dataset = load(own.data, data_dir) if own.data else None
    shape, classes = tuple(about["shape"]), tuple(about["classes"])
    return Trained(run, recipe, network, shape, classes, about["mean"], about["std"], dataset)


def _saved(file: Path, data_dir: Path | str, own: Own) -> Trained:
    """Return the network whose state a file of ``torch.save`` holds."""
    if own.model is None or own.data is None:
        raise RunError(
            f"{str(file)!r} holds the state of a network, not the network: pass `model`, your "
            "package.module:function that returns the quantised network, and `data`."
        )
    dataset = load(own.data, data_dir)
    shape = tuple(dataset.x.shape[1:])
    with torch.random.fork_rng([]):
        network = build(own.model, len(dataset.classes), shape)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for a file from anybody
        raise RunError(
            f"{str(file)!r} must be a state_dict that torch.save wrote, but it cannot be read "
            f"without running code ({type(error).__name__})."
        ) from None
    # A checkpoint of an own loop has the state of the network among others.
    states = [state, *(state.values() if isinstance(state, dict) else ())]
    names = {name for name, _ in network.named_parameters()}
    matching = (part for part in states if isinstance(part, dict) and names <= set(part))
    try:
        network.load_state_dict(next(matching, {}))
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
        raise RunError(
            f"{str(file)!r} does not fit {own.model}: {reason} `model` must return the quantised "
            "network, with the stairs and `sums` that it was trained with.",
            field="model",
        ) from None
    mean = dataset.mean if own.zero is None else float(own.zero)
    std = dataset.std if own.scale is None else own.scale
    recipe = Recipe(data=own.data, model=own.model)
    return Trained(file, recipe, network.eval(), shape, dataset.classes, mean, std, dataset)


def _refuse(run: Path, own: Own, *names: str) -> None:
    """Raise RunError for parameters that a run or packed file records itself."""
    for name in names:
        if getattr(own, name) is not None:
            raise RunError(f"{str(run)!r} records its own {name}: leave out `{name}`.", field=name)


def _check_code(run: Path, recipe: Recipe, own: Own) -> None:
    """Raise RunError if a run names code that the caller does not: it may come from anybody."""
    functions = {name: getattr(recipe, name) for name in ("model", "data")}
    functions = {name: function for name, function in functions.items() if ":" in function}
    if missing := [name for name in functions if not getattr(own, name)]:
        names = " and ".join(functions[name] for name in missing)
        flags = " and ".join(f"`{name}={functions[name]}`" for name in missing)
        raise RunError(
            f"the run in {str(run)!r} names {names}, your own code or somebody else's: pass "
            f"{flags} if you trust it.",
            field=missing[0],
        )
