"""Run directories: the files of a training, written so that a killed run can be resumed.

::

    config.json     recipe, versions and data of the run
    network.txt     what became of every layer of the model
    metrics.jsonl   one line per epoch; the same bytes however often the run was interrupted
    checkpoint/     the state of the training, see checkpoint.py
    network.safetensors  the trained network, see softstair.zoo
    frozen.safetensors   its integers, see softstair.freeze, where it can be frozen
    summary.json    the result, once the run is complete
    start, teacher  runs that were trained first, if the recipe asks for them
    lock            held by the process that trains
"""

import contextlib
import errno
import functools
import json
import math
import os
import platform
import re
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import softstair
from softstair import _check
from softstair._errors import import_extra
from softstair._files import write
from softstair.data import Dataset
from softstair.train import checkpoint
from softstair.train.parallel import Interrupted, StopRequest, agree, from_rank_zero, rank, size
from softstair.train.recipe import Recipe
from softstair.train.records import (
    AGAIN,
    FLOAT_RUNS,
    Role,
    RunError,
    check_same_recipe,
    read_json,
    recipe_of,
    summary_of,
)
from softstair.train.state import State
from softstair.train.teacher import FloatRun

MIN_PAUSE = 1.0
"""Seconds between two checkpoints."""
MAX_SHARE = 0.05
"""Of the time that may be spent on checkpoints."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Run:
    """A locked run directory; see :meth:`hold`. Of several processes, rank 0 has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved: tuple[int, int] | None = None
        self._saved_at, self._cost = time.monotonic(), 0.0

    @classmethod
    @contextlib.contextmanager
    def hold(cls, path: Path) -> Iterator["Run"]:
        """Create and lock the directory. The lock ends with the process, even if it is killed."""
        with _locked(path) if rank() == 0 else contextlib.nullcontext():
            try:
                yield cls(path)
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                raise RunError(
                    f"cannot write {str(path)!r} ({error.strerror}): free some space, and continue "
                    f"from the last checkpoint with {AGAIN}."
                ) from None

    @property
    def config(self) -> dict[str, Any] | None:
        """The content of config.json, or None."""
        return read_json(self.path, "config.json")

    def has_checkpoint(self) -> bool:
        return from_rank_zero(lambda: checkpoint.exists(self.path / "checkpoint"))

    def open(self, recipe: Recipe, resume: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return config.json and the summary of the run that is there, of this recipe."""
        begun, processes = recipe_of(self.path), size()
        summary = None if begun is None else summary_of(self.path)
        if begun is not None:
            if not resume:
                problem = "holds a run already: continue it with `resume`, or give another `out`."
                raise RunError(f"{str(self.path)!r} {problem}", field="out")
            check_same_recipe(recipe, begun, self.path)
        else:
            self._refuse_other_files()
        if summary is None and (recipe.run.batch % processes or recipe.run.batch < 2 * processes):
            allowed = (
                f"a multiple of the number of processes, {processes}, and two examples for each"
            )
            raise _check.invalid("batch", f"must be {allowed}, but {recipe.run.batch} was given")
        return self.config or {}, summary

    def begin(self, config: dict[str, Any], network: str) -> None:
        """Write config.json and network.txt, or raise RunError if they are of another run."""
        if rank() != 0:
            return
        if (begun := self.config) is not None:
            _check_same_run(begun, config, self.path)
        else:
            write(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        if not (self.path / "network.txt").exists():
            write(self.path / "network.txt", network + "\n")

    def _refuse_other_files(self) -> None:
        """Raise RunError if the directory of a new run holds files that it may not have written."""
        # A process that was killed while it wrote config.json leaves a part of it.
        own = re.compile(r"lock|start|teacher|\.config.*\.part")
        names = sorted(path.name for path in self.path.iterdir() if not own.fullmatch(path.name))
        if names:
            hint = "continue with `every_fold`" if "fold-0" in names else "empty it"
            raise RunError(
                f"out must be new or empty, but {str(self.path)!r} holds {names[0]!r}: {hint}, or "
                "give another `out`.",
                field="out",
            )

    def resume(self, state: State) -> None:
        """Load the newest checkpoint, if there is one, and rewrite metrics.jsonl to match it."""
        saved = from_rank_zero(lambda: checkpoint.load(self.path / "checkpoint"))
        if saved is not None:
            checkpoint.load_state_dict(state, saved)
            self._saved = (state.epoch, state.step)
        if rank() == 0:
            for partial in self.path.glob(".*.json*.part"):  # of a process that was killed
                partial.unlink()
            write(self.path / "metrics.jsonl", "".join(map(_line, state.history)))

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if rank() == 0:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(_line(metrics))

    def keep(self, state: State, stop: StopRequest) -> None:
        """Save a checkpoint if it is due; save and raise Interrupted if a signal came.

        Rank 0 decides when it is due, and a signal to any process stops all of them.
        """
        elapsed = time.monotonic() - self._saved_at
        due = rank() == 0 and elapsed >= max(MIN_PAUSE, self._cost / MAX_SHARE)
        number, due = agree(stop.number, due)
        if number is not None or due:
            self.save(state)
        if number is not None:
            raise Interrupted(number)

    def save(self, state: State) -> None:
        """Save a checkpoint, unless the newest is of this step."""
        if self._saved == (state.epoch, state.step):
            return
        start = time.monotonic()
        check_finite(state)
        saved = checkpoint.state_dict(state)
        if rank() == 0:
            checkpoint.save(self.path / "checkpoint", saved)
        self._saved, self._saved_at = (state.epoch, state.step), time.monotonic()
        self._cost = self._saved_at - start

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        if rank() == 0:
            text = json.dumps(summary, indent=2, allow_nan=False)
            write(self.path / "summary.json", text + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    filelock = import_extra("filelock")
    lock = filelock.FileLock(path / "lock", timeout=1.0)  # a grid's status takes it for a moment
    try:
        # Runs that are refused at this moment remove their folder again.
        for left in reversed(range(1000)):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                break
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise
    except filelock.Timeout:
        problem = f"{str(path)!r} is in use by another process: wait, or give another `out`."
        raise RunError(problem, field="out") from None
    except OSError as error:
        problem = f"cannot write {str(path)!r} ({error.strerror}): give another `out`."
        raise RunError(problem, field="out") from None
    try:
        yield
    finally:
        # A run that was refused before it began leaves no files.
        if not any((path / name).exists() for name in ("config.json", *FLOAT_RUNS)):
            (path / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in missing:
                    folder.rmdir()
        lock.release()


def check_finite(state: State, valid_loss: float = 0.0) -> None:
    """Raise RunError if a loss or a weight is NaN or infinite."""
    problem = None
    if not math.isfinite(loss := state.mean_loss()):
        problem = f"the training loss became {loss}"
    elif not math.isfinite(valid_loss):
        problem = f"the validation loss became {valid_loss}"
    elif not state.is_finite():
        problem = "the weights became nan or infinite"
    if problem is not None:
        raise RunError(
            f"{problem} in epoch {state.epoch + 1}, which was not saved: lower `learning_rate` "
            "or `latent_rate`, or check the data and the model.",
            field="learning_rate",
        )


def _check_same_run(begun: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Raise RunError if a run was begun otherwise than by the same recipe on the same data, kind of
    device, threads, number of processes and float runs."""
    kind = lambda config: {**config, "device": str(config.get("device")).partition(":")[0]}
    before, now = kind(begun), kind(config)
    for name in ("data", "device", "processes", "threads"):
        if before.get(name) != now[name]:
            raise RunError(
                f"the run in {str(path)!r} was begun with {name} = {before.get(name)}, but "
                f"{now[name]} was given: continue it as it was begun, or give another `out`.",
                field=name,
            )
    for role, field in FLOAT_RUNS.items():
        # Not known while they train.
        if role in begun and role in config and begun[role] != config[role]:
            raise RunError(
                f"the run in {str(path)!r} was begun with another network in `{field}`: restore "
                "that float run, or give another `out`.",
                field=field,
            )


def _line(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def describe(
    recipe: Recipe,
    dataset: Dataset,
    state: State,
    floats: Mapping[Role, FloatRun],
    begun: dict[str, Any],
) -> dict[str, Any]:
    """Return config.json: everything that is needed to repeat a run, ``begun`` or new."""
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
    device = state.device
    is_gpu = device.type == "cuda"
    return {
        **begun,  # a run that has a checkpoint does not read its start again
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
        "processes": size(),
        "step": state.execution.to_json(),
        **{str(role): float_run.digest for role, float_run in floats.items()},
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
