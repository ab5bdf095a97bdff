"""``python -m paper grid``: train a design of many runs, on this machine or on a cluster."""

import contextlib
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from paper import grid, ray_engine, results, tables
from paper.cli._status import Elsewhere, show_status
from paper.design import DESIGNS, Design, Unit, changed, read_design
from paper.grid import OnEvent, Timer
from paper.mean import FEWEST
from paper.results import STATES
from paper.rows import cell_of
from paper.studies import best_of, repetitions_of
from paper.tables import DATA_VERSION, UNKNOWN, Fold, Training
from softstair import _check
from softstair._errors import SoftstairError, import_extra
from softstair._files import check_output
from softstair.cli._args import argument, flag
from softstair.cli._output import Progress, Stoppable, plural, print_line, print_table, same_command
from softstair.cli.train import MAX_FOLDS, check_workers
from softstair.train.parallel import torchrun_ranks
from softstair.train.progress import Event

PROGRAM = "python -m paper"
MAX_LISTED = 40
"""Configurations that a dry run lists one by one."""


@dataclass(frozen=True)
class Command:
    """Train every unit of a design: each of its configurations on each of its folds.

    A unit is a run directory, DIR/<configuration>/fold-<k>, as softstair train writes it. Give the
    same command again to continue: finished units are not trained again, others continue from
    their checkpoint. On another machine, give the tables of what is done with --done.

    Exit code 0: all units are done; 1: the time of --minutes is over, and units are left; 2: an
    error, or some units failed; 130 or 143: stopped by a signal, and saved.
    """

    design: str = argument("DESIGN", f"{', '.join(DESIGNS)}, or a TOML file with your own design.")
    out: Path | None = flag(None, "Folder of the run directories (default: runs/DESIGN).")
    where: tuple[str, ...] = flag(
        (),
        "Train only configurations with these FIELD=VALUE, as in interval=partition,same_end.",
    )
    set: tuple[str, ...] = flag((), "Change FIELD=VALUE of every recipe, as in precision=float32.")
    bits: tuple[str, ...] = flag(
        (),
        "Train every configuration with each of these bits, as in int4 ternary stem=int8,*=int4.",
    )
    epochs: int | None = flag(None, "Number of epochs; period and drop scale in proportion.")
    folds: str | None = flag(
        None,
        "Folds, counted from 0, as in 0,3 or 0-2; all: train on every example, validate on none "
        "(default: those of the design).",
    )
    engine: Literal["local", "ray"] = flag("local", "Train on this machine or on a Ray cluster.")
    address: str | None = flag(
        None,
        "Address of the Ray cluster, host:port, or auto for the one of this machine (default: "
        "start one here).",
    )
    jobs: int | Literal["auto"] = flag(
        "auto", "Units to train in parallel on a GPU or on this machine (auto: measured)."
    )
    done: tuple[Path, ...] = flag(
        (), "Tables of units that are done elsewhere, or folders of tables or runs; not trained."
    )
    minutes: float | None = flag(
        None, "Stop after this many minutes, and begin no unit that would take longer."
    )
    partial: bool = flag(
        False, "With --minutes: also begin units that cannot finish, and keep their checkpoints."
    )
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")
    device: str = flag("auto", "cpu, cuda or cuda:N (auto: a GPU if there is one).")
    threads: int | None = flag(
        None, "CPU threads of each unit (default: by its network; on a GPU, units share the cores)."
    )
    dry_run: bool = flag(
        False, "Train nothing; show the design and how many of its units are done and begun."
    )
    json: bool = flag(False, "With --dry-run or --status: print JSON.")
    status: bool = flag(
        False, "Train nothing; show the progress. On a terminal, update it while units train."
    )
    table: Path | None = flag(
        None,
        "Write a table of every epoch of these units that are done (.csv, .csv.gz or .parquet; "
        "default: table.csv in the folder, of all units there).",
    )

    def __post_init__(self) -> None:
        if self.json and not (self.dry_run or self.status):
            raise SoftstairError("--json needs --dry-run or --status.")
        if self.dry_run and self.status:
            raise SoftstairError("--dry-run and --status exclude each other.")
        if self.address is not None and self.engine != "ray":
            raise SoftstairError(f"--address {self.address!r} needs --engine ray.")
        if self.partial and self.minutes is None:
            raise SoftstairError("--partial needs --minutes.")
        if self.minutes is not None:
            _check.number("minutes", self.minutes, above=0)
            if self.engine != "local":
                raise SoftstairError("--minutes needs --engine local.")
        check_workers(self.jobs, self.threads)
        if self.table is not None:
            tables.check_table(self.table)

    def run(self) -> int:
        if (processes := torchrun_ranks()[1]) > 1:
            raise SoftstairError(
                f"a grid runs in one process, but torchrun started {processes}: leave out torchrun."
            )
        design = self.chosen()
        folder = self.out or Path("runs") / design.name
        is_run = (folder / "config.json").exists() and not (self.dry_run or self.status)
        if folder.is_file() or is_run:
            raise SoftstairError(
                f"--out must be a folder for run directories, but {str(folder)!r} is a "
                f"{'run directory' if is_run else 'file'}: give another --out."
            )
        elsewhere = results.done_elsewhere(design, self.done, self.data_dir)
        if self.done and not elsewhere:
            paths = ", ".join(map(str, self.done))
            print(
                f"python -m paper grid: no unit of {design.name} is done in {paths}",
                file=sys.stderr,
            )
        if self.dry_run:
            return self._dry_run(design, folder, elsewhere)
        if self.status:
            return show_status(design, folder, elsewhere, self.json)
        table = None
        if self.table is not None:
            if self.table.suffix == ".parquet":
                import_extra("pyarrow.parquet", "tables")
            table = check_output(self.table, "table")
            tables.check_table(table)  # the file that a link points to
        return self._train(design, folder, elsewhere, table)

    def chosen(self) -> Design:
        """Return the part of the design that the flags choose, with their changes."""
        design = read_design(self.design).where(conditions(self.where, "--where"))
        design = design.with_bits(self.bits) if self.bits else design
        if self.epochs is not None:
            design = design.rescaled(self.epochs)
        settings = conditions(self.set, "--set")
        if self.bits and "bits" in settings:
            raise SoftstairError("--bits and --set bits exclude each other.")
        values = {name: _value(",".join(words)) for name, words in settings.items()}
        if self.epochs is not None and "epochs" in values:
            raise SoftstairError(
                "--epochs and --set epochs exclude each other; --epochs scales period and drop too."
            )
        if varied := [name for name in values if name in design.varied()]:
            raise SoftstairError(
                f"--set {varied[0]} needs a field with one value in all of {design.name}: choose "
                "configurations with --where."
            )
        try:
            configurations = tuple(
                replace(configuration, recipe=changed(configuration.recipe, values))
                for configuration in design.configurations
            )
        except SoftstairError as error:
            if error.field not in values or not str(error).startswith(f"{error.field} "):
                raise
            raise SoftstairError(f"--set {error}") from None
        folds = self._folds(design, configurations[0].recipe.data.folds)
        return replace(design, configurations=configurations, folds=folds)

    def _folds(self, design: Design, count: int) -> tuple[Fold, ...]:
        """Return the folds to train, of ``count``."""
        if self.folds is not None:
            return _numbers(self.folds, count)
        if design.names_folds:
            return design.folds
        if count > MAX_FOLDS:
            raise SoftstairError(
                f"--set folds must be at most {MAX_FOLDS:,} to train all, but {count} was given: "
                "choose some with --folds."
            )
        return tuple(range(count))

    def _dry_run(self, design: Design, folder: Path, elsewhere: Elsewhere) -> int:
        if self.json:
            print(json.dumps(design.to_json(), indent=1))
            return 0
        units = results.statuses(design, folder, elsewhere)  # raises if a recipe differs
        _show_design(design)
        counts = results.summarise(units)
        words = [f"{counts[state]} {state}" for state in STATES[:-1] if counts[state]]
        if words:
            waiting = counts["waiting"] or "none"
            print_line(f"of these {', '.join(words)}, {waiting} waiting; runs: {folder}")
        return 0

    def _train(self, design: Design, folder: Path, elsewhere: Elsewhere, table: Path | None) -> int:
        every = list(design.units())
        units = [unit for unit in every if unit.name not in elsewhere]
        left = list(grid.unfinished(units, folder))
        due, began = 0.0, False

        def save() -> list[Path]:
            """Write the table, and return its files."""
            if table is None:  # units of other commands in the same folder are part of its table
                found, path = results.readable(folder), folder / "table.csv"
                return tables.write_parts(found, path, sys.maxsize) if found else []
            found = results.finished(every, folder, elsewhere)
            return tables.write_parts(found, table) if found else []

        def try_save() -> None:
            # The disk may be full, or a run damaged: the runs are saved in any case.
            with contextlib.suppress(ValueError, OSError):
                save()

        def again() -> str:
            """Write the table, and return the command that continues."""
            try_save()
            return same_command("grid", program=PROGRAM)

        def on_event(unit: Unit, event: Event) -> None:
            nonlocal due, began
            progress.show(unit.name, event)
            began = True
            if event["kind"] == "done" and table is not None and (now := monotonic()) >= due:
                try_save()
                due = monotonic() + 20 * (monotonic() - now)  # at most a twentieth of the time

        failed = 0
        progress = Progress(
            "grid", finished=len(every) - len(left), total=len(every), program=PROGRAM
        )
        with Stoppable("grid", again, program=PROGRAM) as stop, progress:
            failed = self._run_engine(units, folder, elsewhere, on_event)
        if stop.exit_code:
            raise SystemExit(stop.exit_code)
        left = list(grid.unfinished(units, folder))
        if failed:
            try_save()
            raise SoftstairError(
                f"{failed} of {len(every)} units failed; when that is corrected, give the same "
                "command again."
            )
        if left:
            done = f"{len(every) - len(left)} of {len(every)} units are done"
            if began:
                progress.note(f"stopped by --minutes, {done}; continue with {again()}")
            else:
                try_save()
                progress.note(
                    f"{done}, and no other can finish in {self.minutes:g} minutes: give more "
                    "--minutes, or --partial."
                )
            return 1
        paths = save()
        _show_outcome(results.finished(every, folder, elsewhere))
        files = [self.table or folder / "table.csv", *paths[1:]] if paths else []
        print_line("\n".join([*(f"table: {path}" for path in files), f"runs: {folder}"]))
        return 0

    def _run_engine(
        self, units: list[Unit], folder: Path, elsewhere: Elsewhere, on_event: OnEvent
    ) -> int:
        """Train the units; return how many failed."""
        settings: dict[str, Any] = {"data_dir": str(self.data_dir), "device": self.device}
        settings |= {"threads": self.threads, "jobs": self.jobs}
        if self.engine == "ray":
            return ray_engine.run(units, folder, on_event, address=self.address, **settings)
        timer = Timer()
        if self.minutes is not None:
            known = results.finished(units, folder, {}) + list(elsewhere.values())
            timer = Timer(monotonic() + 60 * self.minutes, known, self.partial)
        return grid.run(units, folder, on_event, timer=timer, **settings)


def conditions(words: Sequence[str], flag: str) -> dict[str, list[str]]:
    """Return the values of each field from words such as field=value,value."""
    wanted: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if not values or not re.fullmatch(r"[\w-]+", name):
            raise SoftstairError(
                f"{flag} must be given as field=value,value, but {word!r} was given."
            )
        wanted.setdefault(name.replace("-", "_"), []).extend(values.split(","))
    return wanted


def _value(text: str) -> Any:
    """Return a value as TOML writes it, and otherwise the text."""
    text = text.lower() if text in ("True", "False") else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _numbers(text: str, count: int) -> tuple[Fold, ...]:
    """Return the folds that a text such as 4,0-2 or all names."""
    if text == "all":
        return ("all",)
    folds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or (match and match[2] and last >= count):
            allowed = f"integers from 0 to {count - 1}, as in 0,1 or 0-1, or all"
            raise _check.wrong("folds", text, allowed)
        folds += range(first, last + 1)
    return tuple(folds)


def _show_design(design: Design) -> None:
    """Print what varies, over which values, and the number of units."""
    recipes = [configuration.recipe for configuration in design.configurations]
    if varied := design.varied():
        values = lambda name: ", ".join(dict.fromkeys(cell_of(recipe, name) for recipe in recipes))
        rows = ((name, values(name)) for name in varied)
        print_table(design.name, ("degree of freedom", "values"), (), rows, unlimited=True)
    if len(recipes) <= MAX_LISTED:
        print_line("\n".join(configuration.name for configuration in design.configurations))
    epochs = ", ".join(str(epochs) for epochs in sorted({recipe.run.epochs for recipe in recipes}))
    print_line(
        f"{plural(len(recipes), 'configuration')} × {plural(len(design.folds), 'fold')} = "
        f"{len(design)} units of {epochs} epochs"
    )


def _show_outcome(trainings: Sequence[Training]) -> None:
    """Print the accuracy of every configuration, each data version by itself, and the best."""
    lines = repetitions_of(trainings)
    versions = list(dict.fromkeys(training.data_version for training in trainings))
    several = len(versions) > 1
    names = [
        f"{line.name} ({line.settings[DATA_VERSION]})" if several else line.name for line in lines
    ]
    title = "accuracy of the network without noise"
    most = max(len(line.trainings) for line in lines)
    if most > 1:
        title += f", mean and {'95 % interval' if most >= FEWEST else 'range'} over folds and seeds"
    shown = lambda mean: "none" if mean is None else mean.in_percent()
    rows = []
    for name, line in zip(names, lines, strict=True):
        seconds = line.mean("seconds")
        means = line.mean("valid_accuracy"), line.mean("test_accuracy")
        rows.append(
            (name, len(line.trainings), *map(shown, means), f"{seconds and seconds.value:.1f}")
        )
    heads = ("runs", "validation", "test", "seconds a unit")
    print_table(title, ("configuration",), heads, rows, unlimited=True)
    if len(lines) > 1:
        for line, mean in best_of(lines):
            part = "test" if line.trainings[0].fold == "all" else "validation"
            print_line(f"best: {names[lines.index(line)]}, {part} {mean.in_percent()}")
    if versions != [UNKNOWN]:
        print_line(f"data: {'; '.join(versions)}")
