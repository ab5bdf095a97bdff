"""``softstair grid``: train a design, resumable, on this machine or on a cluster."""

import contextlib
import json
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from softstair.cli._arguments import given
from softstair.cli._arguments import parse as parse_flags
from softstair.cli._files import reserved
from softstair.cli.train import refuse_no_number, refuse_threads
from softstair.experiments.design import DESIGNS, Design, Unit, conditions, named
from softstair.experiments.design_file import changed, read
from softstair.train.interrupt import Interrupted

__all__ = ["Command", "parse"]

PYTHON = {"None": None, "True": True, "False": False}
MOST_FOLDS = 10_000
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE...")]


@dataclass(frozen=True)
class Command:
    """Trains every unit of a design: each of its configurations on each of its folds.

    A unit is a run directory, DIR/<configuration>/fold-<k>, as `softstair train` makes it. The same
    command given again goes on: units that are done are not trained again, others go on from their
    checkpoint. Exit code 0: all units are done; 2: an error, or some failed; 130, 143: stopped, and
    kept.
    """

    design: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DESIGN")] = ""
    """paper-cifar10, paper-svhn, paper-speech, or a TOML file with a design of your own."""
    out: Path | None = None
    """Folder of the run directories; None: runs/ and the design's name."""
    where: Words = ()
    """Only configurations with one of these values, as in interval=partition,same_end."""
    set: Words = ()
    """Another value for a field of every recipe, as in precision=float32."""
    epochs: int | None = None
    """Over so many epochs; period and drop of the recipes follow in proportion."""
    folds: str | None = None
    """Which folds, counting from 0, as in 0,3 or 0-2; None: those of the design."""
    engine: Literal["local", "ray"] = "local"
    """This machine alone, or a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster, host:port, or auto for the one that this machine is in; None: one is
    started here for the time being."""
    together: int | Literal["auto"] = "auto"
    """Units that share a GPU, or this machine's cores; auto: as many as measure fastest."""
    data_dir: Path = Path("data")
    """Folder of the data sets."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    threads: int | None = None
    """Threads of each unit on a CPU; None: as many as suit its network."""
    dry_run: bool = False
    """Train nothing: show the design, the number of units, how many of them are done, and an
    estimate of the time that is left."""
    json: bool = False
    """With --dry-run or --status: print every configuration as JSON, and nothing else."""
    status: bool = False
    """Train nothing: show how far each configuration is; on a terminal, until all are done."""
    table: Path | None = None
    """Write a table of every epoch of the units asked for there, as CSV or Parquet by its ending;
    None: table.csv in the folder of the run directories, of all units that the folder holds."""

    def __post_init__(self) -> None:
        if not self.design:
            raise ValueError(
                f"DESIGN must be one of {', '.join(DESIGNS)}, or a TOML file, but none was given."
            )
        if self.json and not (self.dry_run or self.status):
            raise ValueError(
                "--json goes with --dry-run or --status, but neither of them was given."
            )
        if self.dry_run and self.status:
            raise ValueError("--dry-run and --status exclude each other, but both were given.")
        if self.address is not None and self.engine != "ray":
            raise ValueError(
                f"--address goes with --engine ray, but {self.address!r} was given without it."
            )
        refuse_threads(self.threads)
        if self.table is not None and self.table.suffix not in (".csv", ".parquet"):
            raise ValueError(
                f"--table must end in .csv or .parquet, but {str(self.table)!r} was given."
            )

    def run(self) -> int:
        from softstair.train.parallel import torchrun_ranks

        if (processes := torchrun_ranks()[1]) > 1:
            raise ValueError(
                f"a grid is run by one process, which starts others, but torchrun has started "
                f"{processes}: start it without torchrun."
            )
        asked = self.asked()
        folder = self.out or Path("runs") / asked.name
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"--out must be a folder for run directories, but {str(folder)!r} is a file: give "
                "another --out."
            )
        if self.dry_run:
            return self._show(asked, folder)
        if self.status:
            from softstair.cli import _grid_status

            return _grid_status.show(asked, folder, self.json)
        return self._train(asked, folder)

    def asked(self) -> Design:
        """The design that the flags describe."""
        file = self.design.endswith(".toml") or "/" in self.design
        found = read(Path(self.design)) if file else named(self.design)
        found = found.where(conditions(self.where, "where"))
        if self.epochs is not None:
            found = found.rescaled(self.epochs)
        values = {name: _value(words) for name, words in _settings(self.set).items()}
        if self.epochs is not None and "epochs" in values:
            raise ValueError(
                "--epochs and --set epochs exclude each other, but both were given: --epochs takes "
                "period and drop along."
            )
        for name in values:
            if name in found.varied():
                raise ValueError(
                    f"--set must name a field that is the same in all of {found.name}, but {name} "
                    "differs: choose some of them with --where."
                )
        made = [replace(one, recipe=changed(one.recipe, values)) for one in found.configurations]
        count = made[0].recipe.folds
        folds = found.folds
        if self.folds is not None:
            folds = _folds(self.folds, count)
        elif not found.names_folds:
            if count > MOST_FOLDS:
                raise ValueError(
                    f"--set folds must be at most {MOST_FOLDS:,} where all are trained, but "
                    f"{count} was given: choose some with --folds."
                )
            folds = tuple(range(count))
        elif max(folds) >= count:
            raise ValueError(
                f"--set folds must be more than {max(folds)}, which is a fold of {found.name}, but "
                f"{count} was given: choose others with --folds."
            )
        return replace(found, configurations=tuple(made), folds=folds)

    def _show(self, asked: Design, folder: Path) -> int:
        if self.json:
            print(json.dumps(asked.to_json(), indent=1))
            return 0
        from softstair.cli import _grid_tables
        from softstair.experiments.estimate import estimate
        from softstair.experiments.grid import statuses

        # What was begun with another recipe is refused here as it would be there.
        found = statuses(asked, folder)
        _grid_tables.design(asked)
        _grid_tables.progress(found, folder)
        if all(place.is_done for place in found):
            return 0
        first = asked.configurations[0].recipe
        try:
            measured = estimate(first, str(self.data_dir), self.device, self.threads)
        except ValueError as error:
            _grid_tables.say(f"no estimate of the time: {error}")
            return 0
        _grid_tables.estimate(asked, measured, found)
        return 0

    def _train(self, asked: Design, folder: Path) -> int:
        if (folder / "config.json").exists():
            raise ValueError(
                f"--out must be a folder for run directories, but {str(folder)!r} is one itself: "
                "give another --out."
            )
        if self.table is not None and self.table.suffix == ".parquet":
            _refuse_no_parquet()
        with reserved(self.table, "--table") as table:
            return self._train_all(asked, folder, table)

    def _train_all(self, asked: Design, folder: Path, table: Path | None) -> int:
        from softstair.cli import _grid_progress, _grid_tables
        from softstair.experiments import results

        units = list(asked.units())
        try:
            with _grid_progress.Progress(units, folder) as progress:
                failed = self._engine(units, folder, progress.told)
        except (Interrupted, KeyboardInterrupt) as stop:
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            if table is None:
                # Nobody has come to the end of an epoch, or the disk is full: the runs are kept.
                with contextlib.suppress(ValueError, OSError):
                    results.write(results.readable(folder), folder / "table.csv")
            raise SystemExit(self._farewell(number)) from None
        if failed:
            raise ValueError(
                f"{failed} of {len(units)} units failed, as told above: once that is mended, give "
                "the same command again."
            )
        found = results.collect(folder, [unit.path(folder) for unit in units])
        if table is None:
            # Other commands may have trained other parts of a design there.
            results.write(results.readable(folder), folder / "table.csv")
        else:
            results.write(found, table)
        _grid_tables.outcome(found)
        _grid_tables.say(f"table: {self.table or folder / 'table.csv'}\nruns: {folder}")
        return 0

    def _engine(self, units: list[Unit], folder: Path, tell: Any) -> int:
        settings: dict[str, Any] = {"data_dir": str(self.data_dir), "device": self.device}
        settings |= {"threads": self.threads, "jobs": self.together}
        if self.engine == "ray":
            from softstair.experiments import ray_engine

            try:
                return ray_engine.run(units, folder, tell, address=self.address, **settings)
            except ModuleNotFoundError as error:
                raise ValueError(str(error)) from None
        from softstair.experiments import grid

        return grid.run(units, folder, tell, **settings)

    def _farewell(self, number: int) -> int:
        stop = signal.Signals(number).name
        again = shlex.join(["softstair", *sys.argv[1:]]) if sys.argv[1:2] == ["grid"] else ""
        how = f"go on with {again}" if again else "give the same command again to go on"
        print(f"softstair grid: stopped by {stop}, and kept: {how}", file=sys.stderr)
        return 128 + number


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe."""
    refuse_no_number(given("--together", words))
    for flag in ("--where", "--set"):
        words = _once(flag, words)
        if words[-1:] == [flag]:
            raise ValueError(f"{flag} needs one FIELD=VALUE or more, but none was given.")
    return parse_flags(Command, words, prog)


def _once(flag: str, words: Sequence[str]) -> list[str]:
    """The words with all that follows the flag behind its first: given twice, it means both.

    >>> _once("--set", ["x", "--set", "a=1", "--json", "--set", "b=2", "c=3"])
    ['x', '--json', '--set', 'a=1', 'b=2', 'c=3']
    """
    others: list[str] = []
    mine: list[str] = []
    taking = others
    for word in words:
        name, equals, value = word.partition("=")
        if name == flag:
            taking = mine
            mine += [value] if equals else []
        elif word.startswith("--"):
            taking = others
            others.append(word)
        else:
            taking.append(word)
    return [*others, flag, *mine] if flag in {word.partition("=")[0] for word in words} else others


def _refuse_no_parquet() -> None:
    from softstair._errors import import_extra

    try:
        import_extra("pyarrow.parquet", "tables")
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None


def _settings(words: Sequence[str]) -> dict[str, str]:
    return {name: ",".join(values) for name, values in conditions(words, "set").items()}


def _value(words: str) -> Any:
    """A value as Python or TOML has it, and otherwise a word."""
    if words in PYTHON:
        return PYTHON[words]
    try:
        return tomllib.loads(f"value = {words}")["value"]
    except tomllib.TOMLDecodeError:
        return words


def _folds(words: str, count: int) -> tuple[int, ...]:
    """The folds that are named, one by one or from one to another.

    >>> _folds("4,0-2", count=5)
    (4, 0, 1, 2)
    """
    folds: list[int] = []
    for part in words.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or (found and found[2] and last >= count):
            raise ValueError(
                f"--folds must be whole numbers from 0 to {count - 1}, as in 0,1 or 0-1, but "
                f"{words!r} was given."
            )
        folds += range(first, last + 1)
    return tuple(folds)
