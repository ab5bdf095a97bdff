"""What a task takes of a machine of the cluster, and so how many are in flight."""

from collections.abc import Sequence
from typing import Literal

from softstair.train.pool import MAX_RUNS_PER_GPU, cores

__all__ = ["Share"]

Machine = dict[str, float]
"""What it has: CPU, GPU."""


class Share:
    """``cpus`` and ``gpus`` of a task, and the ``device`` that it trains on.

    What was not asked for is found: the device and the share of a GPU by :meth:`settle`, when the
    machines are known; the CPUs by :meth:`learn`, when the first unit says how many threads it has.

    >>> share = Share("auto", threads=None, jobs="auto", cpus=None, gpus=None)
    >>> machines = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 64.0}]
    >>> share.settle(machines)
    >>> share.device, share.cpus, share.gpus, share.at_once(machines)
    ('cuda', 1, 0.25, 16)
    """

    def __init__(
        self,
        device: str,
        threads: int | None,
        jobs: Literal["auto"] | int,
        cpus: float | None,
        gpus: float | None,
    ) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                "device must be auto, cpu or cuda with Ray, which itself says which GPU a unit is "
                f"given, but {device!r} was given."
            )
        if jobs != "auto" and jobs < 1:
            raise ValueError(f"jobs must be auto or from 1, but {jobs!r} was given.")
        if cpus is not None and not 0 < cpus <= 1024:
            raise ValueError(f"cpus must be above 0, and 1024 at most, but {cpus!r} was given.")
        if gpus is not None and not 0 <= gpus <= 1:
            raise ValueError(f"gpus must be from 0 to 1, but {gpus!r} was given.")
        self.device = device
        self.cpus, self.gpus = 1 if cpus is None else cpus, 0.0
        self._threads, self._jobs = threads, jobs
        self._asked_cpus, self._asked_gpus = cpus, gpus

    def cpus_here(self) -> int:
        """The CPUs of a cluster that is started here: the cores, or as many as units at a time."""
        return cores() if self._jobs == "auto" else max(cores(), self._jobs)

    def settle(self, machines: Sequence[Machine]) -> None:
        """Chooses for these machines."""
        best = max(machines, key=lambda one: (one.get("GPU", 0.0), one.get("CPU", 0.0)))
        there, asked = best.get("GPU", 0.0), self._asked_gpus
        if self.device == "cuda" and (not there or asked == 0):
            raise ValueError(
                "device must be one that the cluster has, but 'cuda' was given, and "
                f"{'0 GPUs for each unit' if there else 'it has no GPU'}: give --device cpu."
            )
        self.device = "cuda" if self.device != "cpu" and there and asked != 0 else "cpu"
        if self.device == "cuda":
            cores = best.get("CPU", 0.0) / there
            number = min(MAX_RUNS_PER_GPU, max(1, int(cores // 2)))
            number = number if self._jobs == "auto" else self._jobs
            # Ray counts in steps of 0.0001.
            self.gpus = asked or int(10_000 / number) / 10_000
        self.learn(self._threads or 1, machines)
        if not self._capacity(machines):
            raise ValueError(
                f"a machine of the cluster must have the {self.cpus:g} CPUs and {self.gpus:g} GPUs "
                "that a unit asks for, but none has them: give fewer."
            )

    def learn(self, threads: int, machines: Sequence[Machine]) -> None:
        """So many threads has a unit: as many CPUs it takes, if it can."""
        if self._asked_cpus is not None:
            return
        counts = [one.get("CPU", 0.0) for one in machines if one.get("GPU", 0.0) >= self.gpus]
        self.cpus = 1 if self.device == "cuda" and self._threads is None else threads
        if self.device == "cpu" and self._jobs != "auto":
            self.cpus = min(self.cpus, max(1, int(sum(counts) / self._jobs)))
        self.cpus = min(self.cpus, max(1, int(max(counts))))

    def at_once(self, machines: Sequence[Machine]) -> int:
        """How many tasks are in flight: as many as wait as train, so that none need wait for us.

        Without a GPU ``jobs`` says it.
        """
        if self.device == "cpu" and self._jobs != "auto":
            return self._jobs
        return max(1, 2 * self._capacity(machines))

    def _capacity(self, machines: Sequence[Machine]) -> int:
        number = 0
        for one in machines:
            places = one.get("CPU", 0.0) / self.cpus
            if self.gpus:
                places = min(places, one.get("GPU", 0.0) * int(1 / self.gpus))
            number += int(places)
        return number
