"""Does a grid on Ray survive? Its workers and its driver are struck, and it must not matter.

    python -m benchmarks.ray_survives
    python -m benchmarks.ray_survives --units 10 --kills 1 --folder runs/survival

Units on the digits are trained by the engine of Ray with two workers. Workers are killed with
SIGKILL midway, the driver is interrupted with SIGINT and started again, then killed with SIGKILL
and started again. Whoever trains marks in the grid's folder each run that it completes: every unit
must be completed once, and the table be that of the local engine, but for the clock.
Prints a short table; exits with 1 if something was lost, done twice, or came out otherwise.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any

from paper import grid, ray_engine, results, tables
from paper.design import Configuration, Design, Unit
from softstair.train import Interrupted, Recipe

ROOT = Path(__file__).parents[1]
MARKING = """
import os
from softstair.data import load
from softstair.train import Run

finish = Run.finish

def marked(run, summary):
    handle = os.open(run.path.parent.parent / "completed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{run.path.parent.name}/{run.path.name} {os.getpid()}\\n".encode())
    os.close(handle)
    finish(run, summary)

Run.finish = marked

def digits():
    return load("digits")
"""
"""A user's own data, whose module marks each run that a process completes."""
CLOCK = ("seconds", "images_per_second")
PATIENCE = 600.0


def units(number: int, epochs: int = 12) -> list[Unit]:
    """So many units of a second or two: noise × forward × interval on five folds."""
    base = Recipe.from_flat(data="marking:digits", model="digits", limit=400, batch=32).rescaled(
        epochs
    )
    choices = product(("uniform", "normal"), ("mode", "random"), ("partition", "same_end"))
    found = [
        Configuration(
            f"{noise}-{forward}-{interval}",
            base.replace(noise=noise, forward=forward, interval=interval, period=epochs / 4),
        )
        for noise, forward, interval in choices
    ]
    return list(islice(Design("survival", tuple(found), (0, 1, 2, 3, 4)).units(), number))


def drive(folder: Path, number: int, address: str | None) -> int:
    """The driver, in a process of its own: prints what it hears."""

    def tell(unit: Unit, news: dict[str, Any]) -> None:
        print(json.dumps({"unit": unit.name, **news}), flush=True)

    try:
        return ray_engine.run(
            units(number), folder, tell, device="cpu", threads=1, jobs=2, address=address
        )
    except Interrupted as stop:
        return 128 + stop.number


class Driver:
    """A driver's process, and what it prints."""

    def __init__(self, folder: Path, number: int, address: str | None = None) -> None:
        words = [sys.executable, "-m", "benchmarks.ray_survives", "--drive"]
        words += ["--folder", str(folder), "--units", str(number)] + (
            ["--address", address] if address else []
        )
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def hear(self) -> dict[str, Any] | None:
        """What it says next; None at its end."""
        line = self._lines.get(timeout=PATIENCE)
        return None if line is None else json.loads(line)

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote on stderr."""
        assert self.process.stderr is not None
        with self.process:  # which closes its pipes
            return self.process.wait(PATIENCE), self.process.stderr.read()


def survive(
    folder: Path, number: int, kills: int, strikes: list[int], address: str | None = None
) -> dict[str, Any]:
    """Trains units in a folder while workers are killed and the driver is struck by these signals,
    one after another, at even distances; what was counted meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "marking.py").write_text(MARKING)
    kill_at = {number * (one + 1) // (kills + 2) for one in range(kills)}
    strike_at = [number * (one + 1) // (len(strikes) + 1) for one in range(len(strikes))]
    counted: dict[str, Any] = {"kills": 0, "restarts": 0, "resumed": 0, "codes": [], "errors": ""}
    done: set[str] = set()
    while True:
        driver, processes = Driver(folder, number, address), {}
        struck = 0
        while (news := driver.hear()) is not None:
            unit, said = news["unit"], news["kind"]
            if said == "begin":
                processes[unit] = news["process"]
                counted["resumed"] += news["done"] > 0
            elif said == "done":
                done.add(unit)
                processes.pop(unit, None)
            elif said == "epoch" and 2 * news["epoch"] >= news["epochs"] and not struck:
                if strike_at and len(done) >= strike_at[0]:
                    struck = strikes[len(strikes) - len(strike_at)]
                    strike_at.pop(0)
                    driver.process.send_signal(struck)
                elif any(len(done) >= one for one in kill_at) and unit in processes:
                    kill_at.discard(min(kill_at))
                    os.kill(processes.pop(unit), signal.SIGKILL)
                    counted["kills"] += 1
            elif said == "failed":
                counted["errors"] += f"{unit}: {news['why']}\n"
        code, errors = driver.end()
        counted["codes"].append(code)
        counted["errors"] += errors
        if not struck:
            break
        counted["restarts"] += 1
    marks = (folder / "completed").read_text().split("\n")[:-1]
    counted["completions"] = Counter(mark.split()[0] for mark in marks)
    return counted


def table(folder: Path) -> list[dict[str, Any]]:
    """What came of a grid, but for the clock."""
    rows = tables.rows(results.load(folder))
    return [{name: row[name] for name in row if name not in CLOCK} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--kills", type=int, default=3, help="workers that are killed")
    parser.add_argument("--folder", type=Path, help="where the runs stay; default: nowhere")
    parser.add_argument("--address", help="of a Ray cluster; default: one of its own")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        return drive(given.folder, given.units, given.address)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        strikes = [signal.SIGINT, signal.SIGKILL]
        counted = survive(folder / "ray", given.units, given.kills, strikes, given.address)
        os.chdir(folder)
        grid.run(units(given.units), folder / "local", lambda *_: None, device="cpu", threads=1)
        is_equal = table(folder / "ray") == table(folder / "local")
    times = counted["completions"]
    rows = {
        "units": given.units,
        "workers killed": counted["kills"],
        "drivers struck and started again": counted["restarts"],
        "exit codes of the drivers": counted["codes"],
        "units that went on from a checkpoint": counted["resumed"],
        "units completed": len(times),
        "completed more than once": sum(times[name] > 1 for name in times),
        "the table of the local engine": "equal" if is_equal else "NOT EQUAL",
        "said on stderr": counted["errors"].strip() or "nothing",
    }
    for what, value in rows.items():
        print(f"{what:40} {value}")
    once = len(times) == given.units and set(times.values()) == {1}
    struck = counted["kills"] == given.kills and counted["restarts"] == len(strikes)
    return int(not (once and is_equal and struck and counted["codes"][-1] == 0))


if __name__ == "__main__":
    sys.exit(main())
