"""One training from end to end: data, network, run directory, loop, summary."""

import contextlib
import copy
import platform
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import softstair
from softstair.data import Dataset, Loading, load
from softstair.data.examples import Examples
from softstair.data.folds import split
from softstair.models import build, default_for
from softstair.report import report
from softstair.train import checkpoint, loop
from softstair.train.evaluate import evaluate
from softstair.train.loop import Watch
from softstair.train.recipe import Recipe
from softstair.train.run import Run, RunError, recipe_of
from softstair.train.state import State, stair_network

__all__ = ["device_named", "make_network", "threads_for", "train", "trained_network"]

SMALL = 1 << 25
"""Products in a forward pass of linear layers."""


def train(
    recipe: Recipe,
    out: Path | str,
    data_dir: Path | str = "data",
    device: str = "auto",
    resume: bool = False,
    watchers: Sequence[Watch] = (),
    threads: int | None = None,
    loading: Loading | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Trains by a recipe in a run directory; returns the summary. SIGINT and SIGTERM raise
    :class:`Interrupted <softstair.train.Interrupted>` once everything is kept.

    ``resume`` goes on with the run that is there, if there is one; without it, a run that is there
    is refused. ``threads`` is for the CPU; None leaves the choice to :func:`threads_for`, and a run
    that goes on keeps those it was begun with. ``dataset`` and ``model`` stand in for what the
    recipe names, for those who have them at hand; to resume, give the same ones again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     summary = train(Recipe(limit=200, epochs=1, batch=32), out)
    >>> summary["epochs"], 0 < summary["valid_accuracy"] <= 1
    (1, True)
    """
    with Run.hold(Path(out)) as run:
        begun = run.recipe
        if begun is not None and not resume:
            raise RunError(
                f"the run directory {str(out)!r} holds a run already: go on with it by --resume, "
                "or give another --out."
            )
        if begun is not None:
            refuse_other_recipe(recipe, begun, Path(out))
        if begun is not None and (summary := run.summary) is not None:
            return summary
        place = device_named(device)
        dataset = load(recipe.data, data_dir, loading) if dataset is None else dataset
        dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
        with _own_settings(recipe, place):
            torch.manual_seed(recipe.seed)
            with _memory(recipe):
                network = make_network(recipe, dataset, model)
                torch.set_num_threads(threads or threads_for(network, recipe.batch))
                return _train(recipe, run, dataset, network, place, Watchers(watchers))


@contextlib.contextmanager
def _own_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Random numbers, threads and CPU kernels of our own; the caller's are given back untouched."""
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            if recipe.precision == "bfloat16" and device.type == "cpu" and not _has_bfloat16():
                # oneDNN would find out at the first product, and switch itself off with a warning;
                # what had been computed until then would differ in its last bits.
                torch._C._set_mkldnn_enabled(False)
            yield
        finally:
            torch.set_num_threads(threads)
            torch._C._set_mkldnn_enabled(onednn)


@contextlib.contextmanager
def _memory(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("not enough memory", "allocate memory")  # the CPU's allocator raises no other kind
        gone = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not gone and not any(word in str(error) for word in words):
            raise
        raise RunError(
            f"there is not enough memory for batches of {recipe.batch}: lower --batch in a new "
            "run, or make room and go on with --resume."
        ) from None


def _has_bfloat16() -> bool:
    """Whether oneDNN is there and multiplies bfloat16 on this CPU."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _train(
    recipe: Recipe,
    run: Run,
    dataset: Dataset,
    network: nn.Module,
    device: torch.device,
    watch: Watch,
) -> dict[str, Any]:
    parts = split(dataset, recipe.fold, recipe.folds)
    numbers = dataset.mean, dataset.std, device
    training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
    state = State(recipe, network, len(training), device)
    config = describe(recipe, dataset, device)
    run.begin(config, _table(state.network))
    run.resume(state)
    loop.train(state, training, valid, run, watch)
    test_accuracy = None
    if dataset.test_x is not None and dataset.test_y is not None:
        test = Examples(dataset.test_x, dataset.test_y, *numbers)
        test_accuracy = evaluate(state.network, test)[1]
    accuracies = [line["valid_accuracy"] for line in state.history]
    images = recipe.epochs * state.steps * recipe.batch
    summary = {
        "valid_accuracy": accuracies[-1],
        "best_valid_accuracy": max(accuracies),
        "test_accuracy": test_accuracy,
        "epochs": recipe.epochs,
        "images_per_second": images / max(state.seconds, 1e-9),
        "seconds": state.seconds,
        "config": config,
    }
    run.finish(summary)
    return summary


def _table(network: nn.Module) -> str:
    """What became of every layer."""
    try:
        return str(report(network))
    except ValueError:
        return f"{network}\n\nin float: nothing was quantised"


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


def trained_network(
    path: Path | str, dataset: Dataset, model: nn.Module | None = None, own_code: bool = False
) -> nn.Module:
    """The network of a run directory as its newest checkpoint has it, in ``eval()``.

    A run whose model is a function of the user's own is not believed which one: give what it
    returns as ``model``, or allow by ``own_code`` that the function is imported and called.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     _ = train(Recipe(limit=200, epochs=1, batch=32), out)
    ...     network = trained_network(out, load("digits"))
    >>> network(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    recipe = recipe_of(Path(path))
    state = None if recipe is None else checkpoint.load(Path(path) / "checkpoint")
    if recipe is None or state is None:
        folds = ", but folds: name one, such as fold-0" if (Path(path) / "fold-0").is_dir() else ""
        raise RunError(
            f"{str(path)!r} holds no trained network{folds or ': train one with --out there'}."
        )
    if model is None and ":" in recipe.model and not own_code:
        raise RunError(
            f"the run in {str(path)!r} was begun with the model {recipe.model!r}, which is code of "
            "its own, and is not called because a file says so: give model=, or own_code=True if "
            "you trust it."
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


def refuse_other_recipe(given: Recipe, begun: Recipe, out: Path) -> None:
    """A run goes on as it was begun."""
    for name in begun.differences(given):
        raise RunError(
            f"the run in {str(out)!r} was begun with {name} = {getattr(begun, name)!r}, but "
            f"{getattr(given, name)!r} was given: leave it out to resume, or give another --out."
        )


def threads_for(network: nn.Module, batch: int) -> int:
    """How many threads a network trains fastest with on a CPU.

    The operations of a small one are over before a second thread is awake, and where something else
    runs beside, the threads wait for one another: one thread, then. Otherwise as torch has it.

    >>> threads_for(nn.Linear(64, 10), batch=64)
    1
    """
    convolutions = any(isinstance(one, nn.Conv1d | nn.Conv2d) for one in network.modules())
    products = batch * sum(one.numel() for one in network.parameters())
    return 1 if not convolutions and products < SMALL else torch.get_num_threads()


def device_named(name: str) -> torch.device:
    """A device that is there; auto: a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that is there, but {name!r} was given, and torch sees no CUDA "
            "device: give --device cpu."
        )
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"device must be auto, cpu, cuda or cuda:N, and be there, but {name!r} was given."
        ) from None
    return device


def describe(recipe: Recipe, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """config.json: everything needed to repeat a run."""
    digest = zlib.crc32(repr((dataset.classes, dataset.mean, dataset.std)).encode())
    for part in (dataset.x, dataset.y, dataset.groups, dataset.test_x, dataset.test_y):
        digest = zlib.crc32(b"" if part is None else part.cpu().numpy().tobytes(), digest)
    data = {"name": dataset.name, "examples": len(dataset), "crc32": f"{digest:08x}"}
    versions = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    return {
        "recipe": recipe.to_json(),
        "data": data,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "versions": {**versions, "python": platform.python_version()},
    }


class Watchers:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watch]) -> None:
        self.all = watchers

    def begin(self, state: State) -> None:
        for one in self.all:
            one.begin(state)

    def step(self, state: State) -> None:
        for one in self.all:
            one.step(state)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        for one in self.all:
            one.epoch(state, metrics)
