"""The engine of one machine: processes that share its GPU, or the cores of its CPU."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from softstair.experiments.design import Unit
from softstair.experiments.engines import Tell, refuse_mixed_data, unfinished
from softstair.experiments.engines.pace import Pace
from softstair.train.execution import choose_device
from softstair.train.interrupt import StopRequest
from softstair.train.pool import ProcessPool, Task, cores, worker_count
from softstair.train.progress import Event

__all__ = ["run"]


def run(
    units: Iterable[Unit],
    folder: Path,
    on_event: Tell,
    *,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    jobs: Literal["auto"] | int = "auto",
) -> int:
    """Train the units that are not complete, in parallel; return how many failed.

    With ``jobs="auto"``, it begins with one unit on a GPU, and with as many as there are cores on a
    CPU, and adds one after the other as long as that makes all of them faster together; see
    :class:`softstair.experiments.engines.pace.Pace`.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    is_cpu = choose_device(device).type == "cpu"
    pace = _pace(jobs, device, is_cpu, len(left))

    def count(known: int | None) -> int:
        if jobs == "auto" and is_cpu:
            pace.begin(worker_count("auto", device, len(left), known or threads))
        return pace()

    def report(unit: Unit, event: Event) -> None:
        pace.hear(unit.name, event)
        on_event(unit, event)

    settings = {"data_dir": data_dir, "device": device, "resume": True, "threads": threads}
    tasks = (Task(unit.name, unit.recipe, unit.path(folder), key=unit) for unit in left)
    with StopRequest() as stop, ProcessPool(tasks, report, count, settings) as pool:
        return pool.run(stop)


def _pace(jobs: Literal["auto"] | int, device: str, is_cpu: bool, units: int) -> Pace:
    if jobs != "auto":
        return Pace(first=min(jobs, units), most=min(jobs, units))
    if is_cpu:
        return Pace(first=1, most=min(cores(), units))
    return Pace(first=1, most=worker_count("auto", "cuda", units))
