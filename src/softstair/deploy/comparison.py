"""Comparison of a frozen network with what was written of it, number by number."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from softstair import _check
from softstair._errors import SoftstairError
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.loaders import Running
from softstair.deploy.runtimes import FILES, RUNTIMES, reading, start, write

SCORES, CLASS = "scores", "class"
CHUNK = 100
"""Examples that run at a time."""


@dataclass
class Comparison:
    """Counts of the numbers that differ between a frozen network and another way to run it.

    Attributes:
        compared: How many numbers were compared, by node; ``"scores"`` and ``"class"`` are the
            results of the network, ``"scores_0"`` and so on those of several outputs.
        wrong: How many of them differ, by node.
        first: The first that differs, as (node, example, index, expected, actual).
        milliseconds: The least time of an example, in one thread; None if it was not measured.
    """

    compared: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    first: tuple[str, int, tuple[int, ...], int, int] | None = None
    milliseconds: float | None = None

    @property
    def mismatches(self) -> int:
        """How many numbers differ in all."""
        return sum(self.wrong.values())

    def add(self, name: str, expected: Tensor, actual: Tensor, numbers: Tensor) -> None:
        """Compare the results of a node for the examples of these numbers, (N,)."""
        if expected.shape != actual.shape:
            raise SoftstairError(
                f"{name} must give shape {tuple(expected.shape)}, but it gave "
                f"{tuple(actual.shape)}."
            )
        differ = expected != actual
        count = int(differ.sum())
        self.compared[name] = self.compared.get(name, 0) + expected.numel()
        self.wrong[name] = self.wrong.get(name, 0) + count
        if count and self.first is None:
            place = tuple(differ.nonzero()[0].tolist())
            values = (int(expected[place]), int(actual[place]))
            self.first = (name, int(numbers[place[0]]), place[1:], *values)

    def add_results(
        self, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], numbers: Tensor
    ) -> None:
        """Compare the results of all nodes that both have; floats are left out."""
        for name, values in actual.items():
            if name in expected and not values.is_floating_point():
                self.add(name, expected[name].cpu().long(), values.long(), numbers)

    def __str__(self) -> str:
        total = sum(self.compared.values())
        if self.first is None:
            return f"0 mismatches of {total:,} numbers"
        name, example, place, expected, actual = self.first
        at = f" at {place}" if place else ""
        return (
            f"{self.mismatches:,} mismatches of {total:,} numbers; the first in {name}, example "
            f"{example}{at}: {actual} and not {expected}"
        )


def verify(
    frozen: FrozenNetwork,
    path: Path | str | None,
    x: Tensor,
    *,
    threads: int = 1,
    runtime: str | None = None,
    timed: bool = True,
) -> Comparison:
    """Run what was written of a frozen network, and compare every number with its own.

    >>> import softstair as ss
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, "ternary", skip="3")
    >>> frozen = ss.freeze(net, (1, 2, 2), zero=128, scale=64.0)
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = ss.deploy.export(frozen, f"{folder}/network.onnx", to="onnx")
    ...     print(ss.deploy.verify(frozen, exported.path, x).mismatches)
    0

    Args:
        frozen: The network, on the CPU or a GPU.
        path: A folder of C, which is compiled, or a file; None writes it for ``runtime``, in a
            temporary folder.
        x: Integers of the network's type, such as (N, C, H, W) uint8.
        threads: Threads of C, 1 or 2.
        runtime: One of ``softstair.deploy.RUNTIMES``; by default the first that reads the file.
        timed: Whether to measure the time of an example.

    Raises:
        SoftstairError: If nothing that can run is there, if it was written of another network, or
            if ``x`` does not fit.
        MissingExtraError: If the runtime is not installed.
    """
    if runtime is not None or path is None:
        _check.choice("runtime", runtime, RUNTIMES)
    frozen.input.check(x)
    if not len(x):
        raise _check.invalid("x", "must hold at least one example, but it is empty")
    with tempfile.TemporaryDirectory() as folder:
        file = write(runtime or "", frozen, Path(folder)) if path is None else Path(path)
        running, found = runner(frozen, file, threads, runtime), Comparison()
        for numbers in torch.arange(len(x)).split(CHUNK):
            part = x[numbers]
            found.add_results(results_of(frozen, part), running.results(part), numbers)
        if timed:
            found.milliseconds = running.milliseconds(x[:1])
    check_complete(frozen, found, runtime)
    return found


def results_of(frozen: FrozenNetwork, x: Tensor) -> dict[str, Tensor]:
    """Return the results of all nodes, the scores, and the class of a network with classes."""
    results = frozen.features(x.to(next(iter(frozen.buffers())).device))
    for output, head in frozen.heads.items():
        results[SCORES + output] = results[head.name]
        if frozen.outputs == "classes":
            results[CLASS + output] = head.classes(results[head.name])
    return results


def check_complete(frozen: FrozenNetwork, found: Comparison, runtime: str | None = None) -> None:
    """Raise SoftstairError unless a network's scores were compared, and its stairs if they show."""
    shows = runtime not in FILES or FILES[runtime].shows_stairs
    scores = {SCORES + output for output in frozen.heads}
    if missing := {*(frozen.stairs if shows else ()), *scores} - {*found.compared}:
        raise SoftstairError(f"it gave no results of {', '.join(sorted(missing))}.")


def runner(
    frozen: FrozenNetwork, path: Path, threads: int = 1, runtime: str | None = None
) -> Running:
    """Return what runs a folder of C or a file, by default in the first runtime that reads it."""
    name = runtime or reading(path)
    if name is None or not path.exists():
        suffixes = {kind.suffix for kind in FILES.values()}
        allowed = f"a folder of C or a file {', '.join(sorted(suffixes))}"
        raise _check.invalid("path", f"must be {allowed}, but {str(path)!r} was given")
    return start(name, frozen, path, threads)
