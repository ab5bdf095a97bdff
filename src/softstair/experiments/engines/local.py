"""The engine of one machine: processes that share its GPU, or the cores of its CPU."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from softstair.experiments.design import Unit
from softstair.experiments.engines import Tell, refuse_mixed_data, unfinished
from softstair.experiments.engines.pace import Pace
from softstair.train.execution import choose_device
from softstair.train.news import News
from softstair.train.together import MOST_ON_A_GPU, at_once, cores, train_together

__all__ = ["run"]

AGAIN = "give the same command again"


def run(
    units: Iterable[Unit],
    folder: Path,
    tell: Tell,
    *,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    together: Literal["auto"] | int = "auto",
) -> int:
    """Trains the units that are not done, so many at a time; returns how many failed.

    ``together="auto"`` begins with one unit on a GPU, and on a CPU with as many as there are cores
    for, and tries whether one more makes all of them faster together; see
    :class:`softstair.experiments.engines.pace.Pace`.
    """
    left = {unit.path(folder): unit for unit in unfinished(units, folder)}
    if not left:
        return 0
    refuse_mixed_data(left.values(), folder, data_dir)
    pace = _pace(together, device, len(left), threads)

    def hear(path: Path, news: News) -> None:
        pace.hear(path, news)
        tell(left[path], news)

    def limit(threads: int) -> int:
        if together == "auto":
            pace.begin(at_once("auto", device, len(left), threads) if _is_cpu(device) else 1)
        return pace()

    return train_together(
        ((unit.recipe, path) for path, unit in left.items()),
        pace,
        hear,
        limit,
        name=lambda recipe, path: path,
        again=AGAIN,
        alike=False,
        data_dir=data_dir,
        device=device,
        resume=True,
        threads=threads,
        tensorboard=False,
    )


def _pace(together: Literal["auto"] | int, device: str, units: int, threads: int | None) -> Pace:
    if together != "auto":
        number = min(together, units)
        return Pace(first=number, most=number)
    if _is_cpu(device):
        return Pace(at_once("auto", device, units, threads or 1), most=min(cores(), units))
    return Pace(first=1, most=min(units, MOST_ON_A_GPU, max(1, cores() // 2)))


def _is_cpu(device: str) -> bool:
    return choose_device(device).type == "cpu"
