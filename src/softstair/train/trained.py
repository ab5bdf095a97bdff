"""A trained network, of a run, a file or the zoo, and its integers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import zoo
from softstair._errors import SoftstairError, first_line
from softstair._frozen import nodes
from softstair._frozen.freezing import freeze
from softstair._frozen.network import FrozenNetwork
from softstair._frozen.nodes import Rounding
from softstair.data import load
from softstair.data.folds import held_out
from softstair.deploy import ExportError, IntegerNetwork, integerise, quantise_last_layer
from softstair.nn import StairModule
from softstair.train.records import NETWORK, RunError

LastLayer = Literal["float", "int8"]
EXAMPLES = 300
"""Validation examples that freezing compares at the end of a training."""


@dataclass(frozen=True)
class Deployed:
    """A trained network and its integer network.

    ``integer`` equals ``network``: ``trained``, or a copy with its last layer in INT8.
    """

    about: zoo.About
    trained: nn.Module
    network: nn.Module
    integer: IntegerNetwork

    def examples(
        self, data_dir: Path | str = "data", limit: int | None = None, data: str | None = None
    ) -> tuple[str, Tensor]:
        """Return the test set, or the validation fold if there is none, and its name.

        ``data`` is the data set, which must be named if it is code: a file may come from anybody.
        """
        name = data or self.about.data
        if data is None and (":" in name or not name):
            problem = f"is of data of its maker, {name!r}" if name else "names no data"
            raise SoftstairError(f"the network {problem}: pass `data`.", field="data")
        known, dataset = self.about, load(name, data_dir)
        if known.fold == "all" and dataset.test_x is None:
            return f"all examples of {dataset.name}", dataset.x[:limit]
        name, x, _ = held_out(dataset, known.fold, known.folds, known.limit)
        return name, x[:limit]


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


def deployed(
    run: Path | str, last_layer: LastLayer = "float", model: str | None = None
) -> Deployed:
    """Load a trained network and convert it to integers.

    Args:
        run: A finished run, a file of :func:`softstair.zoo.save`, or the name of a network of the
            zoo.
        last_layer: Whether a last layer that was trained in float stays so, or becomes INT8.
        model: ``package.module:function`` that returns the float network, if it is code of your
            own. What a file names is not called: it may come from anybody.

    Raises:
        SoftstairError: If there is no such network, or if it does not fit the model.
        ExportError: If the network is not exact in integers.
    """
    file = file_of(run)
    trained, about = zoo.load(file, model), zoo.about(file)
    if not any(isinstance(module, StairModule) for module in trained.modules()):
        raise ExportError(f"the network of {str(run)!r} is float: nothing in it is quantised.")
    if not about.mean.is_integer():
        raise ExportError(
            f"the zero of the input of {str(run)!r} is at {about.mean:g}, not at an integer, so "
            "neither its padding nor its first layer is exact: train it with `integer_input`."
        )
    given = (about.shape, int(about.mean), about.std)
    network = trained if last_layer == "float" else quantise_last_layer(trained, *given)
    return Deployed(about, trained, network, integerise(network, *given))


def frozen_of(
    net: nn.Module,
    about: zoo.About,
    examples: Tensor | None = None,
    rounding: Rounding = "once",
) -> FrozenNetwork:
    """Freeze a trained network with the input and the classes that its file names.

    Raises:
        ExportError: If the network is float, or if it has no integer form.
    """
    if not any(isinstance(module, StairModule) for module in net.modules()):
        raise nodes.ExportError("the network is float: nothing in it is quantised.")
    known: dict[str, Any] = {"classes": about.classes, "rounding": rounding}
    return freeze(net, about.shape, examples=examples, **_input(about), **known)


def _input(about: zoo.About) -> dict[str, Any]:
    """Return `zero` and `scale` of bytes, or `mean` and `std` where the zero is no byte."""
    if about.mean.is_integer() and 0 <= about.mean <= 255:
        return {"zero": int(about.mean), "scale": about.std}
    channels = about.shape[0]
    return {"mean": (about.mean / 255,) * channels, "std": (about.std / 255,) * channels}


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
