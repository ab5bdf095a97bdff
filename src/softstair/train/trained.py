"""A trained network, of a run, a file or the zoo, and its integers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _check, zoo
from softstair._errors import SoftstairError, first_line, import_extra
from softstair.data import load
from softstair.data.dataset import held_out
from softstair.deploy.freezing import freeze
from softstair.deploy.frozen import FrozenNetwork, load_frozen
from softstair.deploy.nodes import ExportError, Rounding
from softstair.nn import StairModule
from softstair.train.records import FROZEN, NETWORK, RunError

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
    run: Path | str, model: str | None = None, rounding: Rounding | None = None
) -> FrozenNetwork:
    """Load a frozen network: its file, that of a run, or made now of a trained network.

    Args:
        run: As for :func:`deployed`, or a file of :meth:`FrozenNetwork.save`.
        model: As for :func:`deployed`; a file of a frozen network needs none.
        rounding: Freeze the trained network of a run again with this rounding.
    """
    file = Path(run) / FROZEN if Path(run).is_dir() else Path(run)
    if is_frozen(file) and (rounding is None or file == Path(run)):
        if rounding is not None:
            problem = f"must be left out: {str(run)!r} is frozen already"
            raise _check.invalid("rounding", problem)
        return load_frozen(file)
    network = file_of(run)
    return frozen_of(zoo.load(network, model), zoo.about(network), rounding=rounding or "once")


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
) -> FrozenNetwork:
    """Freeze a trained network with the input and the classes that its file names.

    Raises:
        ExportError: If the network is float, or if it has no integer form.
    """
    if not any(isinstance(module, StairModule) for module in net.modules()):
        raise ExportError("the network is float: nothing in it is quantised.")
    read = input_of(about.mean, about.std, about.shape)
    known: dict[str, Any] = {"classes": about.classes, "rounding": rounding}
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
