"""A stopwatch: contestants in turns, so that a clock that slows down slows them all."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from softstair.bench.effort import Effort

__all__ = ["Times", "race", "synchronise"]

MOST_CALLS = 1000
"""In a sample on a CPU, however short a call is."""


@dataclass(frozen=True)
class Times:
    """Seconds of a call, one number a sample.

    >>> Times((0.3, 0.1, 0.2)).median
    0.2
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def most(self) -> float:
        return max(self.samples)

    def to_json(self) -> dict[str, Any]:
        """Plain data, in seconds."""
        return {
            "median": self.median,
            "least": self.least,
            "most": self.most,
            "samples": list(self.samples),
        }


def race(
    contestants: Mapping[str, Callable[[], object]],
    device: torch.device,
    effort: Effort,
    before: Callable[[str], None] | None = None,
    each: int = 1,
) -> dict[str, Times]:
    """The seconds of a call of each, sampled in turns: A B A B ….

    ``before`` is told whose sample comes next, and is not timed. A call counts as ``each`` of them:
    a graph may hold several.

    >>> effort = Effort(repeats=3, calls=1, seconds=0.0, elements=1)
    >>> slow, fast = (lambda: time.sleep(0.01)), (lambda: None)
    >>> found = race({"slow": slow, "fast": fast}, torch.device("cpu"), effort)
    >>> found["slow"].median > found["fast"].median
    True
    """
    calls = {}
    for name, run in contestants.items():
        if before is not None:
            before(name)
        run()  # what is slow but once is not what is measured
        calls[name] = _calls(run, device, effort)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(effort.repeats):
        for name, run in contestants.items():
            if before is not None:
                before(name)
            samples[name].append(_sample(run, calls[name], device) / (calls[name] * each))
    return {name: Times(tuple(seconds)) for name, seconds in samples.items()}


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls(run: Callable[[], object], device: torch.device, effort: Effort) -> int:
    if device.type == "cuda":
        return effort.calls
    once = max(_sample(run, 1, device), 1e-9)
    return min(max(1, round(effort.seconds / once)), MOST_CALLS)


def _sample(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """The seconds of so many calls, the last of them done."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start
    synchronise(device)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(calls):
        run()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3
