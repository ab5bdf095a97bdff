"""``train``: data, network, run directory, the loop over epochs, and the summary."""

import copy
import functools
import os
import platform
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import softstair
from softstair import _check, kernels, zoo
from softstair.calibrate import calibrate
from softstair.data import Dataset, Loading, load
from softstair.data.batches import Examples
from softstair.data.dataset import split
from softstair.nn import layer_count
from softstair.train import execution, parallel, records, teacher
from softstair.train.metrics import chosen_inputs, evaluate, refresh_statistics, stair_health
from softstair.train.network import (
    EXAMPLES,
    describe_network,
    make_network,
    model_name,
    save_frozen,
)
from softstair.train.parallel import StopRequest, from_rank_zero
from softstair.train.recipe import Recipe
from softstair.train.records import Role, RunError
from softstair.train.run import Run, check_finite
from softstair.train.state import State, check_batch
from softstair.train.step import CapturedStep, Step, own_loss
from softstair.train.teacher import FloatRun

EXAMINED = 64
"""Examples that show how the levels of the stairs are occupied."""
SEED_STEP = 1_000_003
"""Between the seeds of two processes: more than seeds that are compared differ."""


class Watcher(Protocol):
    """Follows a training: such as a progress bar.

    A watcher may have a method ``part(name)``. It returns the watcher of a float run that is
    trained first, ``start`` or ``teacher``.
    """

    def begin(self, state: State) -> None:
        """Called before the first step of a new or resumed run."""

    def step(self, state: State) -> None:
        """Called after each step; it must not wait for the device."""

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        """Called after each epoch with its line of metrics.jsonl."""


def train(
    recipe: Recipe,
    out: Path | str,
    data_dir: Path | str = "data",
    device: str = "auto",
    resume: bool = False,
    watchers: Sequence[Watcher] = (),
    threads: int | None = None,
    loading: Loading | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Train by a recipe in a run directory.

    Inside :func:`softstair.train.parallel.joined`, each process that torchrun started calls it.

    Args:
        recipe: What to train.
        out: Run directory; created if it does not exist.
        data_dir: Folder of the data sets.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"`` for a GPU if there is one.
        resume: Continue the run in ``out``, if there is one, with the same arguments on the same
            kind of device.
        watchers: Objects that are called after each step and epoch.
        threads: CPU threads of torch; None chooses them by the size of the network, or takes those
            of the run to resume.
        loading: Called with (done, total) while features of recordings are computed.
        dataset: Data to use instead of what the recipe names.
        model: Model to use instead of what the recipe names; it is copied.

    Returns:
        The content of ``summary.json``.

    Raises:
        RunError: If the run directory holds a run and ``resume`` is False, or another run.
        SoftstairError: If another thread of this process is training.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint is saved.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     summary = train(Recipe.from_flat(limit=200, epochs=1, batch=32), out)
    >>> summary["epochs"], 0 < summary["valid_accuracy"] <= 1
    (1, True)
    """
    with Run.hold(Path(out)) as run:
        # The other processes may not see the run directory.
        begun, summary = from_rank_zero(lambda: _open(run, recipe, resume))
        if summary is not None:
            return summary
        place = execution.choose_device(device, parallel.local_rank())
        execution.check_kernels(recipe, place)
        if dataset is None and parallel.rank() == 0:
            dataset = load(recipe.data.name, data_dir, loading)
        from_rank_zero(lambda: None)  # the others then read the features that rank 0 has written
        if dataset is None:
            dataset = load(recipe.data.name, data_dir, loading)
        backend = nullcontext() if recipe.run.kernels == "auto" else kernels.use(recipe.run.kernels)
        with execution.training_settings(recipe, place), backend:
            torch.manual_seed(recipe.run.seed)
            advice = "lower `batch` in a new run, or free memory and pass `resume`"
            lacking = f"not enough memory for batches of {recipe.run.batch}"
            with execution.memory_errors(f"{lacking}: {advice}."):
                sampled = dataset.sample(recipe.data.limit)
                network = make_network(recipe, sampled, model)
                # What follows raises before other runs train.
                check_data(recipe, sampled)
                if not recipe.network.is_float:
                    recipe.schedule(layer_count(network))
                given = {"data_dir": data_dir, "device": device, "threads": threads}
                floats = _float_runs(recipe, run, network, dataset, watchers, model, **given)
                threads = threads or begun.get("threads")
                per_process = recipe.run.batch // parallel.size()
                torch.set_num_threads(threads or execution.choose_threads(network, per_process))
                own = model is not None
                return _train(recipe, run, sampled, network, floats, place, watchers, own, begun)


def check_data(recipe: Recipe, sampled: Dataset) -> None:
    """Raise SoftstairError if examples that were cut to `limit` have not the folds of a recipe, no
    test set that it needs, or too few examples for a batch."""
    if recipe.data.fold == "all" and sampled.test_x is None:
        problem = f"must be a number for {sampled.name}, which has no test set"
        raise _check.invalid("fold", f"{problem}, but 'all' was given")
    check_batch(recipe, len(split(sampled, recipe.data.fold, recipe.data.folds)[0]))


def _open(run: Run, recipe: Recipe, resume: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return config.json and the summary of the run that is there."""
    begun, processes = records.recipe_of(run.path), parallel.size()
    summary = None if begun is None else records.summary_of(run.path)
    if begun is not None:
        if not resume:
            problem = "holds a run already: continue it with `resume`, or give another `out`."
            raise RunError(f"{str(run.path)!r} {problem}", field="out")
        records.check_same_recipe(recipe, begun, run.path)
    else:
        run.refuse_other_files()
    if summary is None and (recipe.run.batch % processes or recipe.run.batch < 2 * processes):
        allowed = f"a multiple of the number of processes, {processes}, and two examples for each"
        raise _check.invalid("batch", f"must be {allowed}, but {recipe.run.batch} was given")
    return run.config or {}, summary


def _float_runs(
    recipe: Recipe,
    run: Run,
    network: nn.Module,
    dataset: Dataset,
    watchers: Sequence[Watcher],
    model: nn.Module | None,
    **settings: Any,
) -> dict[Role, FloatRun]:
    """Return the float runs that a run needs; those that are ``auto`` are trained first.

    The start is needed only until there is a checkpoint.
    """
    shape, floats, loaded = tuple(dataset.x.shape[1:]), {}, dict[Path, FloatRun]()
    fields = records.FLOAT_RUNS.items()
    is_auto = {role: recipe[field] == teacher.AUTO for role, field in fields}
    # Those that are given come first: an error is then found before anything is written.
    for role, path in sorted(
        teacher.float_runs(recipe, run.path, shape).items(), key=lambda entry: is_auto[entry[0]]
    ):
        if role == "start" and run.has_checkpoint():
            continue
        if is_auto[role]:
            chosen = teacher.auto_recipe(recipe, role, shape)
            settings["model"] = model if chosen.network.model == recipe.network.model else None
            parts = [watcher.part(role) for watcher in watchers if hasattr(watcher, "part")]
            train(chosen, path, resume=True, watchers=parts, dataset=dataset, **settings)
        if path not in loaded:
            loaded[path] = teacher.load_float_run(role, path, recipe, dataset, model)
        floats[role] = loaded[path]
        if role == "start" and not is_auto[role] and is_auto["teacher"]:
            # It raises before the teacher trains.
            teacher.start_from(copy.deepcopy(network), floats[role], recipe)
    return floats


def _train(
    recipe: Recipe,
    run: Run,
    dataset: Dataset,
    network: nn.Module,
    floats: Mapping[Role, FloatRun],
    device: torch.device,
    watchers: Sequence[Watcher],
    own: bool,
    begun: dict[str, Any],
) -> dict[str, Any]:
    """Train the network and return its summary; ``begun`` is config.json of a run to resume."""
    if "start" in floats:
        teacher.start_from(network, floats["start"], recipe)
    numbers = (*dataset.numbers(recipe.data.integer_input, recipe.data.centre_input), device)
    parts = split(dataset, recipe.data.fold, recipe.data.folds)
    training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
    is_calibrated = recipe.network.calibrates and not run.has_checkpoint()

    def first_state() -> dict[str, Any]:
        if is_calibrated:
            settings = (recipe.run.batch, recipe.run.seed, recipe.data.augmentation)
            with execution.matmul_precision("float32"):
                inputs = chosen_inputs(training, *settings)
                calibrate(network.to(device), inputs, weights=None, outputs=None)
        return network.cpu().state_dict()

    # All processes begin alike: a user's own model may draw its first weights from another
    # generator than torch's, and rank 0 alone calibrates.
    first = from_rank_zero(first_state)
    if parallel.size() > 1:
        network.load_state_dict(first)
    state = State(recipe, network, len(training), device, own)
    if recipe.optimiser.loss is not None:
        state.own_loss = own_loss(recipe.optimiser.loss, len(dataset.classes))
    if "teacher" in floats:
        state.teacher = teacher.Teacher(floats["teacher"], recipe, dataset, device)
    if parallel.rank() > 0:
        torch.manual_seed((recipe.run.seed + parallel.rank() * SEED_STEP) % 2**63)
    digests = {str(role): float_run.digest for role, float_run in floats.items()}
    config: dict[str, Any] = {
        **begun,  # a run that has a checkpoint does not read its start again
        **describe(recipe, dataset, device),
        "processes": parallel.size(),
        "step": state.execution.to_json(),
        **digests,
    }
    described, state.exports = describe_network(state.network, recipe, dataset)
    run.begin(config, described)
    run.resume(state)
    run_epochs(state, training, valid, run, watchers)
    test_accuracy = None
    if dataset.test_x is not None and dataset.test_y is not None:
        test = Examples(dataset.test_x, dataset.test_y, *numbers)
        _, test_accuracy = evaluate(state.network, test, forward=state.execution.eval_forward)
    accuracies = [line["valid_accuracy"] for line in state.history]  # None without validation
    seconds = state.seconds
    examples = recipe.run.epochs * state.steps * recipe.run.batch
    summary = {
        "valid_accuracy": accuracies[-1],
        "best_valid_accuracy": max(accuracies) if len(valid) else None,
        "test_accuracy": test_accuracy,
        "epochs": recipe.run.epochs,
        "images_per_second": examples / max(seconds, 1e-9),
        "seconds": seconds,
        "config": config,
    }
    facts = {name: summary[name] for name in ("valid_accuracy", "test_accuracy")}
    facts |= {name: config["recipe"][name] for name in ("data", "fold", "folds", "limit")}
    facts |= {"classes": dataset.classes, "mean": numbers[0], "std": numbers[1]}
    label = model_name(recipe)
    if own:
        label = f"{type(network).__module__}:{type(network).__qualname__}"
    written = (run.path, state.network, dataset.x[parts[1][:EXAMPLES]], label)
    summary["frozen"] = from_rank_zero(lambda: _save_networks(*written, **facts))
    run.finish(summary)
    return summary


def _save_networks(
    path: Path, network: nn.Module, examples: Tensor, label: str, **facts: Any
) -> str:
    """Write the trained network and its integers; return what freezing said."""
    file = zoo.save(network, path / records.NETWORK, label, examples.shape[1:], **facts)
    return save_frozen(network, zoo.about(file), examples, path / records.FROZEN)


def run_epochs(
    state: State, training: Examples, valid: Examples, run: Run, watchers: Sequence[Watcher]
) -> None:
    """Train from the position of ``state`` to the last epoch; a signal saves and stops it."""
    step = (CapturedStep if state.execution.captured else Step)(state, training)
    # A scheduler and torchrun both signal every process: the second means nothing.
    with StopRequest(raise_second=parallel.size() == 1) as stop:
        for watcher in watchers:
            watcher.begin(state)
        while state.epoch < state.recipe.run.epochs:
            state.begin_epoch()
            while state.step < state.steps:
                step()
                for watcher in watchers:
                    watcher.step(state)
                run.keep(state, stop)
            check_finite(state)
            state.lap()
            metrics = measure(state, training, valid, lambda: run.keep(state, stop))
            check_finite(state, metrics["valid_loss"] or 0.0)
            run.log(metrics)
            state.end_epoch(metrics)
            for watcher in watchers:
                watcher.epoch(state, metrics)
            run.keep(state, stop)
        run.save(state)


def measure(
    state: State, training: Examples, valid: Examples, between: Callable[[], None]
) -> dict[str, Any]:
    """Return the metrics of the epoch that has just ended; ``between`` is called during it."""
    recipe = state.recipe
    if recipe.run.statistics == "fresh":
        settings = (recipe.run.batch, recipe.run.seed, recipe.data.augmentation)
        refresh_statistics(state.network, training, *settings, between)
    valid_loss = valid_accuracy = None
    if len(valid):
        forward = state.execution.eval_forward
        valid_loss, valid_accuracy = evaluate(state.network, valid, between, forward)
    metrics: dict[str, Any] = {
        "epoch": state.epoch,
        "learning_rate": state.learning_rate,
        "train_loss": state.mean_loss(),
        "train_accuracy": state.accuracy(),
        "valid_loss": valid_loss,
        "valid_accuracy": valid_accuracy,
    }
    if state.annealer is not None:
        x, _ = next((valid if len(valid) else training).chunks(EXAMINED))
        stairs = stair_health(state.network, x, state.latent_bounds)
        messages = [stair.warning(fading=not recipe.noise.static_std) for stair in stairs]
        metrics["noise"] = [list(noise or ()) for noise in state.annealer.noise]
        metrics["annealed"] = list(state.annealer.annealed)
        metrics["stairs"] = [stair.to_json() for stair in stairs]
        metrics["warnings"] = [message for message in messages if message]
    return metrics


def describe(recipe: Recipe, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """Return config.json: everything that is needed to repeat a run."""
    facts: tuple[Any, ...] = (dataset.classes, dataset.mean, dataset.std)
    if recipe.data.centre_input and dataset.centred is not None:
        facts += dataset.centred
    checksum = zlib.crc32(repr(facts).encode())
    for part in (dataset.x, dataset.y, dataset.groups, dataset.test_x, dataset.test_y):
        if part is not None:
            checksum = zlib.crc32(part.cpu().contiguous().numpy().data, checksum)
    data = {"name": dataset.name, "examples": len(dataset), "crc32": f"{checksum:08x}"}
    if dataset.version is not None:
        data["version"] = dataset.version
    is_gpu = device.type == "cuda"
    return {
        "recipe": recipe.to_flat(),
        "data": data,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "softstair": softstair.__version__,
            **({} if (commit := source_commit()) is None else {"commit": commit}),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


@functools.cache
def source_commit() -> str | None:
    """Return the commit of softstair: SOFTSTAIR_COMMIT, or that of the repository it runs from."""
    folder = Path(softstair.__file__).parents[2]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    commit = os.environ.get("SOFTSTAIR_COMMIT", "")
    if not commit and (folder / ".git").exists():
        with suppress(OSError):  # git is not installed
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Tables have no long texts and no control characters.
    return "".join(filter(str.isprintable, commit))[:100] or None
