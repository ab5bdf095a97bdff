"""``fit``: a training, from the recipe to the trained network.

:func:`fit` prepares data, network and device; :func:`_train` is the loop over epochs and batches;
:func:`train_on` is what happens with a batch. All else is called from there.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softstair import _check, zoo
from softstair.calibrate import calibrate
from softstair.data import Dataset, Loading, load
from softstair.data.batches import Examples
from softstair.data.dataset import split
from softstair.nn import layer_count
from softstair.train import parallel, records, settings, teacher
from softstair.train.captured import CapturedStep
from softstair.train.execution import use_batch_kernel
from softstair.train.losses import cross_entropy, own_loss
from softstair.train.metrics import chosen_inputs, evaluate, measure
from softstair.train.network import (
    EXAMPLES,
    describe_network,
    make_network,
    model_name,
    save_frozen,
)
from softstair.train.parallel import StopRequest, from_rank_zero
from softstair.train.recipe import Recipe
from softstair.train.records import Role
from softstair.train.run import Run, check_finite, describe
from softstair.train.state import State, check_batch
from softstair.train.teacher import FloatRun

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


def fit(
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
    ...     summary = fit(Recipe.from_flat(limit=200, epochs=1, batch=32), out)
    >>> summary["epochs"], 0 < summary["valid_accuracy"] <= 1
    (1, True)
    """
    with Run.hold(Path(out)) as run:
        # The other processes may not see the run directory.
        begun, summary = from_rank_zero(lambda: run.open(recipe, resume))
        if summary is not None:
            return summary
        place = settings.choose_device(device, parallel.local_rank())
        settings.check_kernels(recipe, place)
        if dataset is None:
            read = lambda: load(recipe.data.name, data_dir, loading)
            dataset = parallel.rank_zero_first(read)  # which writes the features of recordings
        with settings.training_settings(recipe, place):
            torch.manual_seed(recipe.run.seed)
            advice = "lower `batch` in a new run, or free memory and pass `resume`"
            lacking = f"not enough memory for batches of {recipe.run.batch}"
            with settings.memory_errors(f"{lacking}: {advice}."):
                sampled = dataset.sample(recipe.data.limit)
                network = make_network(recipe, sampled, model)
                check_data(recipe, network, sampled)  # before other runs train
                given = {"data_dir": data_dir, "device": device, "threads": threads}
                floats = _float_runs(recipe, run, network, dataset, watchers, model, **given)
                threads = threads or begun.get("threads")
                per_process = recipe.run.batch // parallel.size()
                torch.set_num_threads(threads or settings.choose_threads(network, per_process))
                own = model is not None
                return _train(recipe, run, sampled, network, floats, place, watchers, own, begun)


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
    parts = split(dataset, recipe.data.fold, recipe.data.folds)
    numbers = dataset.numbers(recipe.data.integer_input, recipe.data.centre_input)
    training, valid = (Examples(dataset.x[i], dataset.y[i], *numbers, device) for i in parts)
    _set_first_weights(recipe, network, training, floats, run)
    state = State(recipe, network, len(training), device, own)
    if recipe.optimiser.loss is not None:
        state.own_loss = own_loss(recipe.optimiser.loss, len(dataset.classes))
    if "teacher" in floats:
        state.teacher = teacher.Teacher(floats["teacher"], recipe, dataset, device)
    if parallel.rank() > 0:
        torch.manual_seed((recipe.run.seed + parallel.rank() * SEED_STEP) % 2**63)
    config = describe(recipe, dataset, state, floats, begun)
    described, state.exports = describe_network(state.network, recipe, dataset)
    run.begin(config, described)
    run.resume(state)  # from the newest checkpoint, if there is one
    step = Step(state, training)
    # A scheduler and torchrun both signal every process: the second means nothing.
    with StopRequest(raise_second=parallel.size() == 1) as stop:
        for watcher in watchers:
            watcher.begin(state)
        while state.epoch < recipe.run.epochs:
            state.begin_epoch()  # draws the order of the examples
            while state.step < state.steps:
                step()
                for watcher in watchers:
                    watcher.step(state)
                run.keep(state, stop)  # saves a checkpoint if it is due, or if a signal came
            check_finite(state)  # which waits for the device
            state.lap()
            metrics = measure(state, training, valid, lambda: run.keep(state, stop))
            check_finite(state, metrics["valid_loss"] or 0.0)
            run.log(metrics)
            state.end_epoch(metrics)
            for watcher in watchers:
                watcher.epoch(state, metrics)
            run.keep(state, stop)
        run.save(state)
    summary = _summary(state, dataset, numbers, config)
    kind = type(network)
    label = f"{kind.__module__}:{kind.__qualname__}" if own else model_name(recipe)
    save = lambda: _save_networks(run.path, state, label, dataset, parts[1], numbers, summary)
    summary["frozen"] = from_rank_zero(save)
    run.finish(summary)
    return summary


class Step:
    """Trains on the next batch of the epoch; ``captured`` runs it as a CUDA graph."""

    def __init__(self, state: State, examples: Examples, captured: bool | None = None) -> None:
        self.state, self.examples = state, use_batch_kernel(examples)
        is_captured = state.execution.captured if captured is None else captured
        self.graph = CapturedStep(state, self._train_on) if is_captured else None

    def __call__(self) -> None:
        self.state.begin_step()  # sets the noise of each layer, and the learning rates
        if self.graph is None:
            self._train_on(self.state.batch)
        else:
            self.graph()
        self.state.end_step()

    def _train_on(self, indices: Tensor) -> None:
        train_on(self.state, self.examples, indices)


def train_on(state: State, examples: Examples, indices: Tensor) -> None:
    """Train on the examples at ``indices``; add to the sums ``state.loss`` and ``state.correct``.

    No value is read back from the device: the host does not wait for it, and the operations can be
    captured in a CUDA graph.
    """
    x, y, share = examples.batch(indices, state.recipe.data.augmentation)
    with state.autocast():
        scores = state.forward(x)
        if state.own_loss is None:
            loss = cross_entropy(scores, y, share, state.recipe.optimiser.label_smoothing)
        else:
            loss = state.own_loss(scores, y)
        correct = (scores.argmax(1) == y).sum()
        if state.teacher is not None:
            loss = state.teacher(loss, scores, x)
    state.updates.zero_grad()
    loss.backward()  # DistributedDataParallel averages the gradients here
    loss, correct = parallel.combined(loss, correct)
    with torch.no_grad():
        state.loss += loss
        state.correct += correct
    state.updates.step()


def check_data(recipe: Recipe, network: nn.Module, sampled: Dataset) -> None:
    """Raise SoftstairError if examples that were cut to `limit` have not the folds of a recipe, no
    test set that it needs, or too few examples for a batch; or if its schedule ends too late."""
    if recipe.data.fold == "all" and sampled.test_x is None:
        problem = f"must be a number for {sampled.name}, which has no test set"
        raise _check.invalid("fold", f"{problem}, but 'all' was given")
    check_batch(recipe, len(split(sampled, recipe.data.fold, recipe.data.folds)[0]))
    if not recipe.network.is_float:
        recipe.schedule(layer_count(network))


def _set_first_weights(
    recipe: Recipe,
    network: nn.Module,
    training: Examples,
    floats: Mapping[Role, FloatRun],
    run: Run,
) -> None:
    """Take the weights of a float start, and fit the quanta of features to a few batches."""
    if "start" in floats:
        teacher.start_from(network, floats["start"], recipe)
    is_calibrated = recipe.network.calibrates and not run.has_checkpoint()

    def first_state() -> dict[str, Any]:
        if is_calibrated:
            with settings.matmul_precision("float32"):
                chosen = (recipe.run.batch, recipe.run.seed, recipe.data.augmentation)
                inputs = chosen_inputs(training, *chosen)
                calibrate(network.to(training.x.device), inputs, weights=None, outputs=None)
        return network.cpu().state_dict()

    # All processes begin alike: a user's own model may draw its first weights from another
    # generator than torch's, and rank 0 alone calibrates.
    first = from_rank_zero(first_state)
    if parallel.size() > 1:
        network.load_state_dict(first)


def _summary(
    state: State, dataset: Dataset, numbers: tuple[float, float], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the result of a training; without validation, the accuracies are None."""
    test_accuracy, run = None, state.recipe.run
    if dataset.test_x is not None and dataset.test_y is not None:
        test = Examples(dataset.test_x, dataset.test_y, *numbers, state.device)
        _, test_accuracy = evaluate(state.network, test, forward=state.execution.eval_forward)
    accuracies = [line["valid_accuracy"] for line in state.history]
    return {
        "valid_accuracy": accuracies[-1],
        "best_valid_accuracy": None if accuracies[-1] is None else max(accuracies),
        "test_accuracy": test_accuracy,
        "epochs": run.epochs,
        "images_per_second": run.epochs * state.steps * run.batch / max(state.seconds, 1e-9),
        "seconds": state.seconds,
        "config": config,
    }


def _save_networks(
    path: Path,
    state: State,
    label: str,
    dataset: Dataset,
    valid: Tensor,
    numbers: tuple[float, float],
    summary: dict[str, Any],
) -> str:
    """Write the trained network and its integers; return what freezing said."""
    examples = dataset.x[valid[:EXAMPLES]]
    facts: dict[str, Any] = {"classes": dataset.classes, "mean": numbers[0], "std": numbers[1]}
    facts |= {name: summary[name] for name in ("valid_accuracy", "test_accuracy")}
    facts |= {name: state.recipe[name] for name in ("data", "fold", "folds", "limit")}
    file = zoo.save(state.network, path / records.NETWORK, label, examples.shape[1:], **facts)
    return save_frozen(state.network, zoo.about(file), examples, path / records.FROZEN)


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
            fit(chosen, path, resume=True, watchers=parts, dataset=dataset, **settings)
        if path not in loaded:
            loaded[path] = teacher.load_float_run(role, path, recipe, dataset, model)
        floats[role] = loaded[path]
        if role == "start" and not is_auto[role] and is_auto["teacher"]:
            # It raises before the teacher trains.
            teacher.start_from(copy.deepcopy(network), floats[role], recipe)
    return floats
