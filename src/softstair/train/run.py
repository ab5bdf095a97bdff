"""A run directory: what was asked for, what came of it, and where to go on from.

::

    config.json     the recipe, the versions and the data it was begun with
    network.txt     what became of every layer of the model
    metrics.jsonl   a line an epoch; the same to the last byte however often the run was interrupted
    checkpoint/     the state of the training, see checkpoint.py
    summary.json    when it is done
    lock            held by the process that trains
"""

import contextlib
import errno
import json
import math
import re
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import softstair
from softstair._errors import SoftstairError, import_extra
from softstair._files import refuse_link, write
from softstair.data import version
from softstair.train import checkpoint
from softstair.train.interrupt import Interrupted, StopRequest
from softstair.train.parallel import ALONE, Team
from softstair.train.recipe import FIELDS, Recipe
from softstair.train.state import State, is_history

__all__ = [
    "Run",
    "RunError",
    "data_version_of",
    "load_checkpoint",
    "metrics_of",
    "recipe_of",
    "refuse_other_data",
    "summary_of",
]

LARGEST_CONFIG = 1 << 20
MOST_THREADS = 1024
LONGEST_VERSION = 200
AGAIN = "--resume (of a grid, the same command)"
"""What goes on with a run."""


class RunError(SoftstairError):
    """A run that cannot begin or go on, in one sentence."""


class Run:
    """A run directory that this process holds; see :meth:`hold`. Of a team the first one holds it,
    reads and writes; the others hear what it read."""

    team: Team = ALONE

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config: dict[str, Any] = {}
        self._saved: tuple[int, int] | None = None
        self._saved_at, self._cost = time.monotonic(), 0.0

    @classmethod
    @contextlib.contextmanager
    def hold(cls, path: Path, team: Team = ALONE) -> Iterator["Run"]:
        """The directory, made if need be, for this process alone; a killed one lets go of it."""
        with contextlib.ExitStack() as held:
            with team.agreed():
                if team.is_first:
                    held.enter_context(_locked(path))
            with _disk(path):
                run = cls(path)
                run.team = team
                yield run

    @property
    def config(self) -> dict[str, Any] | None:
        """What the run was begun with; None if it was not begun."""
        return read(self.path, "config.json")

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that the run was begun with."""
        return recipe_of(self.path)

    @property
    def threads(self) -> int | None:
        """The threads that the run was begun with; None if it was not begun, or does not say."""
        said = (self.config or {}).get("threads")
        return said if type(said) is int and 1 <= said <= MOST_THREADS else None

    @property
    def summary(self) -> dict[str, Any] | None:
        """What came of the run; None if it is not done."""
        return summary_of(self.path)

    def begin(self, config: dict[str, Any], network: str) -> None:
        """Writes config.json, and the table of the network; refuses a directory that holds
        something else than a run, and a run of other data, on another kind of device or in another
        number of processes."""
        self._config = config
        first = self.team.share(lambda: self._begin(config, network))
        with self.team.agreed():
            if config["data"] != first["data"]:
                raise RunError(
                    f"every process must read the same data, but there are {first['data']} and "
                    f"{config['data']}: give all machines the same --data-dir."
                )

    def _begin(self, config: dict[str, Any], network: str) -> dict[str, Any]:
        if (begun := self.config) is not None:
            if not _is_same_data(begun.get("data"), config["data"]):
                raise RunError(
                    f"the run in {str(self.path)!r} was begun with other data, "
                    f"{begun.get('data')}, than {config['data']}: restore them, or give another "
                    "--out."
                )
            was, now = (str(one.get("device")).partition(":")[0] for one in (begun, config))
            if was != now:
                raise RunError(
                    f"the run in {str(self.path)!r} was begun on {was}, and would not be the same "
                    f"on {now}: give --device {was}, or another --out."
                )
            many = begun.get("processes", 1)  # runs of older versions do not say it
            if many != config["processes"]:
                how = "without torchrun" if many == 1 else f"with torchrun in {many} processes"
                raise RunError(
                    f"the run in {str(self.path)!r} was begun {how}, and would not be the same in "
                    f"{config['processes']}: go on with it as it was begun, or give another --out."
                )
            if not (self.path / "network.txt").exists():
                write(self.path / "network.txt", network + "\n")
            return config
        names = [one.name for one in self.path.iterdir() if one.name != "lock"]
        # A process that was killed while it wrote config.json leaves a part of it.
        if "fold-0" in names:
            raise RunError(
                f"{str(self.path)!r} holds the folds of --every-fold: give that flag again to go "
                "on with them, or another --out."
            )
        strange = sorted(name for name in names if not re.fullmatch(r"\.config.*\.part", name))
        if strange:
            raise RunError(
                f"--out must be new or empty, but {str(self.path)!r} holds {strange[0]!r}: give "
                "another --out."
            )
        write(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        write(self.path / "network.txt", network + "\n")
        return config

    def resume(self, state: State) -> None:
        """Takes the state to the newest checkpoint, if there is one, and the metrics with it; what
        was measured after it will be measured again."""
        loaded = self.team.share(lambda: load_checkpoint(self.path, self._config))
        if loaded is not None:
            with self.team.agreed():
                state.load_state_dict(loaded)
            self._saved = (state.epoch, state.step)
        if self.team.is_first:
            write(self.path / "metrics.jsonl", "".join(map(_line, state.history)))

    def log(self, metrics: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if not self.team.is_first:
            return
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(_line(metrics))

    def keep(self, state: State, stop: StopRequest) -> None:
        """Saves a checkpoint if it is time to, or if somebody asked to stop; then it stops.

        Time to: saving takes a twentieth of the time at most, and is not done twice a second. Of a
        team, the first one's clock decides, and whoever was asked to stop stops all.
        """
        waited = time.monotonic() - self._saved_at
        due = self.team.is_first and waited >= max(1.0, 20 * self._cost)
        number, due = self.team.agree(stop.number, due)
        if number is not None or due:
            self.save(state)
        if number is not None:
            raise Interrupted(number)

    def save(self, state: State) -> None:
        """Saves a checkpoint, unless the newest is of this very step."""
        if self._saved == (state.epoch, state.step):
            return
        begun = time.monotonic()
        refuse_nonfinite(state)
        kept = state.state_dict()
        if self.team.is_first:
            origin = {name: self._config.get(name) for name in ("recipe", "data")}
            checkpoint.save(self.path / "checkpoint", {**kept, "origin": origin})
        self._saved = (state.epoch, state.step)
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - begun

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is done: writes summary.json."""
        if self.team.is_first:
            text = json.dumps(summary, indent=2, allow_nan=False)
            write(self.path / "summary.json", text + "\n")


def recipe_of(path: Path) -> Recipe | None:
    """The recipe that a run directory was begun with; None if it holds no run."""
    config = read(path, "config.json")
    if config is None:
        return None
    recipe = config.get("recipe")
    try:
        return Recipe.from_json(recipe)
    except ValueError as error:
        _refuse_another_version(path, recipe, config.get("versions"), error)
        raise RunError(
            f"{str(path / 'config.json')!r} holds no recipe that can be followed "
            f"({str(error).rstrip('.')[:200]}): restore it, or give another --out."
        ) from None


def data_version_of(path: Path) -> str | None:
    """The version of its data set that a run directory records; None if it records none."""
    data = (read(path, "config.json") or {}).get("data")
    recorded = data.get("version") if isinstance(data, dict) else None
    if not isinstance(recorded, str) or not 0 < len(recorded) <= LONGEST_VERSION:
        return None
    return recorded if recorded.isprintable() else None


def refuse_other_data(paths: Iterable[Path], names: Container[str], data_dir: Path | str) -> None:
    """Raises RunError if a run in one of these directories, of one of these data sets, was begun
    with another version of it than lies in ``data_dir``."""
    for path in paths:
        try:
            recipe, recorded = recipe_of(path), data_version_of(path)
        except RunError:
            continue  # a run that cannot be read is reported where it is needed
        if recipe is None or recorded is None or recipe.data not in names:
            continue
        present = version(recipe.data, data_dir)
        if present is not None and present != recorded:
            raise RunError(
                f"the run in {str(path)!r} was begun with the data {recorded!r}, but "
                f"{str(data_dir)!r} holds {present!r}: give the --data-dir that it was begun with, "
                "or another --out."
            )


def _is_same_data(begun: Any, now: dict[str, Any]) -> bool:
    """Whether a run was begun with these data; older runs do not record their version."""
    if isinstance(begun, dict) and "version" not in begun:
        now = {name: value for name, value in now.items() if name != "version"}
    return bool(begun == now)


def _refuse_another_version(path: Path, recipe: Any, versions: Any, error: ValueError) -> None:
    """Refuses a recipe that has most of our fields, but others besides, or that names another
    version and is none of ours."""
    known = set(FIELDS)
    given = set(recipe) if isinstance(recipe, dict) else set()
    said = versions.get("softstair") if isinstance(versions, dict) else None
    version = said if isinstance(said, str) and len(said) < 40 else None
    if len(given & known) < len(known) / 2:
        return
    if given != known:
        lacks = [f"no {name}" for name in sorted(known - given)]
        others = [f"{name[:40]!r}" for name in sorted(given - known)]
        why = f"its recipe has {', '.join([*lacks, *others][:3])}"
    elif version not in (None, softstair.__version__):
        why = str(error).rstrip(".")[:200]
    else:
        return
    which = f"{version!r}: " if version else ""
    raise RunError(
        f"the run in {str(path)!r} was made by another version of softstair ({which}{why}): read "
        "it with that version, or give another --out."
    )


def load_checkpoint(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest checkpoint of a run directory, or None if there is none.

    Args:
        path: The run directory.
        config: The ``recipe`` and ``data`` that the checkpoint must have been trained with, as in
            config.json.

    Raises:
        CheckpointError: If it was trained with another recipe or other data; it names what
            differs. A checkpoint of an older version, which does not say, raises a warning.
    """
    state = checkpoint.load(path / "checkpoint")
    if state is None:
        return None
    origin = state.pop("origin", None)
    folder = str(path / "checkpoint")
    if origin is None:
        warnings.warn(
            f"the checkpoint in {folder!r} was saved by an older version of softstair and does not "
            "say with which recipe and data it was trained; this was not checked.",
            stacklevel=2,
        )
        return state
    try:
        saved, given = (Recipe.from_json(one["recipe"]) for one in (origin, config))
        different = {
            name: (getattr(saved, name), getattr(given, name))
            for name in given.training_differences(saved)
        }
        if origin["data"] != config["data"]:
            different["data set"] = (origin["data"], config["data"])
    except (LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise checkpoint.CheckpointError(
            f"the checkpoint in {folder!r} does not say with which recipe and data it was trained "
            f"({reason}): restore it, or train in a new run directory."
        ) from None
    if different:
        values = [f"{name} {was!r} instead of {now!r}" for name, (was, now) in different.items()]
        raise checkpoint.CheckpointError(
            f"the checkpoint in {folder!r} belongs to another training "
            f"({', '.join(values)[:400]}): restore the checkpoint of this run, or train in a new "
            "run directory."
        )
    return state


def summary_of(path: Path) -> dict[str, Any] | None:
    """What came of a run; None if it is not done."""
    summary = read(path, "summary.json")
    if summary is None:
        return None
    names = ("valid_accuracy", "best_valid_accuracy", "images_per_second", "seconds", "epochs")
    good = all(_is_number(summary.get(name)) for name in names)
    test = summary.get("test_accuracy", False)
    good = good and (test is None or _is_number(test))
    try:
        config = summary["config"]
        good = good and Recipe.from_json(config["recipe"]) is not None
        good = good and isinstance(config["data"]["name"], str)
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise RunError(
            f"{str(path / 'summary.json')!r} was edited, and is no summary any more: delete it, "
            f"and {AGAIN} writes it anew from the checkpoint."
        )
    return summary


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, an epoch each."""
    try:
        summary = read(path, "summary.json")  # first: it is written last
        text = (path / "metrics.jsonl").read_text(encoding="utf-8")
        if summary is None:
            text = text[: text.rfind("\n") + 1]  # somebody may be writing the last line
        lines = [json.loads(line) for line in text.splitlines()]
        done = len(lines) if summary is None else summary.get("epochs")
        if not lines or not is_history(lines) or len(lines) != done:
            raise ValueError("its lines are not those of one epoch after the other")
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"{str(path / 'metrics.jsonl')!r} is damaged or was edited ({reason}): delete "
            f"summary.json beside it, and {AGAIN} writes both anew from the checkpoint."
        ) from None
    if summary is not None:
        _refuse_contradiction(path, lines, summary)
    return lines


def _refuse_contradiction(path: Path, lines: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Refuses a summary of other epochs than those that were measured."""
    each = [line["valid_accuracy"] for line in lines]
    for name, value in {"valid_accuracy": each[-1], "best_valid_accuracy": max(each)}.items():
        if summary.get(name) != value:
            raise RunError(
                f"summary.json and metrics.jsonl in {str(path)!r} contradict each other ({name} is "
                f"{str(summary.get(name))[:40]} and {value}): delete summary.json, and {AGAIN} "
                "writes both anew from the checkpoint."
            )


def read(path: Path, name: str) -> dict[str, Any] | None:
    """A JSON file of a run directory; None if it is not there."""
    file = path / name
    try:
        if file.stat().st_size > LARGEST_CONFIG:
            raise ValueError("it is too long")
        data = json.loads(file.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"{str(file)!r} is damaged or was edited ({reason}): restore it, or give another --out."
        ) from None
    return data


def refuse_nonfinite(state: State, valid_loss: float = 0.0) -> None:
    """Refuses to go on with numbers that are none any more; the checkpoint before stays."""
    with state.team.agreed():
        for name, loss in (("training", state.mean_loss()), ("validation", valid_loss)):
            if not math.isfinite(loss):
                raise _lost(f"the {name} loss became {loss}", state)
        if not state.is_finite():
            raise _lost("the weights became nan or infinite", state)


def _lost(what: str, state: State) -> RunError:
    return RunError(
        f"{what} in epoch {state.epoch + 1}, and nothing since the last checkpoint was kept: train "
        "anew with a lower --learning-rate, or look at the data and the model."
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The directory is made, and held by a lock."""
    filelock = import_extra("filelock")
    try:
        missing = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for name in ("lock", "checkpoint"):
            refuse_link(path / name)
        # softstair grid --status holds it for a moment when it looks.
        lock = filelock.FileLock(path / "lock", timeout=1.0)
        lock.acquire()
    except filelock.Timeout:
        raise RunError(
            f"the run directory {str(path)!r} is in use by another process: wait for it, or give "
            "another --out."
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise RunError(
            f"--out must be a directory, but {str(path)!r} is a file, or lies in one: give another "
            "--out."
        ) from None
    except OSError as error:
        raise RunError(
            f"--out must be a directory that can be written, but {str(path)!r} cannot be "
            f"({error.strerror}): give another --out."
        ) from None
    try:
        yield
    finally:
        # Whatever was refused before the run began leaves no trace.
        if not (path / "config.json").exists():
            (path / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in missing:
                    folder.rmdir()
        lock.release()


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """What the disk says, in a sentence that says what is still there."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise RunError(
            f"the run directory {str(path)!r} can no longer be written ({error.strerror}); the "
            f"last checkpoint, if there is one, is whole: make room, and go on with {AGAIN}."
        ) from None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _line(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"
