"""``softstair verify``: a frozen network beside the trained one, its ONNX file and its C."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from softstair import _check
from softstair._errors import MissingExtraError, SoftstairError, first_line
from softstair.cli._args import flag
from softstair.cli._output import Progress, print_line, print_table
from softstair.cli.export import NetworkFlags
from softstair.deploy import c, comparison, onnx
from softstair.deploy.comparison import CLASS, SCORES, Comparison, Runner
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.measuring import LayerReport, levels_of
from softstair.train.execution import choose_device
from softstair.train.network import Deployed, deployed, examples_of

BACKENDS = ("onnx", "c")
SAMPLE = 100  # examples that are compared before the others
CHUNK = 100


@dataclass
class Found:
    """What was compared so far, of eval(), the frozen network, and the backends."""

    layers: dict[str, LayerReport]
    backends: dict[str, Comparison]
    numbers: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    frozen: list[Tensor] = field(default_factory=list)

    @property
    def mismatches(self) -> int:
        return sum(part.mismatches for part in self.backends.values())

    def add(
        self, source: Deployed, runners: Mapping[str, Runner], x: Tensor, numbers: Tensor
    ) -> None:
        """Compare the results for examples of these numbers."""
        expected = comparison.results_of(source.frozen, x)
        levels = levels_of(source.trained, self.layers, source.to_float(x))
        for name, row in self.layers.items():
            self.layers[name] = row.with_levels(levels[name], expected[name].cpu())
        self.numbers.append(numbers)
        self.trained.append(levels[""].argmax(1))
        self.frozen.append(expected[CLASS].cpu())
        for name, run in runners.items():
            self.backends[name].add_results(expected, run(x), numbers)


@dataclass(frozen=True)
class Command(NetworkFlags):
    """Run a trained network, its frozen network, its ONNX file and its C program on real examples.

    Of ONNX and C, the numbers that differ from the frozen network's are counted: every feature of
    every layer, the scores and the class. These are mismatches. Of the trained network, levels
    that differ are shown, and the accuracy of both: these are facts, since the frozen network is
    the definition.

    A sample of 100 examples is compared first. If a number of it differs, the others are left out.
    The examples are the test set, or the validation fold of the run if there is no test set. A
    backend that cannot run here, because ONNX Runtime or a compiler is missing, is an error: leave
    it out with --backends. A network whose model is your own code needs --model; own data need
    --data in the same way.

    Exit code 0: no number differs; 1: some do; 2: an error.
    """

    backends: str = flag("onnx,c", "Backends to compare with the frozen network, or none.")
    limit: int | None = flag(None, "Use only the first N examples.")
    data: str | None = flag(None, "package.module:function of your own data.")
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def __post_init__(self) -> None:
        if not set(self._backends()) <= set(BACKENDS):
            raise _check.wrong("backends", self.backends, "onnx, c, onnx,c or none")
        if self.limit is not None:
            _check.integer("limit", self.limit, 1)

    def run(self) -> int:
        source = deployed(self.trained, self.model)
        name, x, y = examples_of(source.about, self.data_dir, self.limit, self.data)
        rows = {stair: LayerReport(stair) for stair in source.frozen.stairs}
        found = Found(rows, {backend: Comparison() for backend in self._backends()})
        with tempfile.TemporaryDirectory() as folder:
            runners = {b: _runner(b, source.frozen, Path(folder)) for b in found.backends}
            source.frozen.to(choose_device("auto"))
            _compare(found, source, runners, x)
        for backend in found.backends.values():
            comparison.check_complete(source.frozen, backend)
        done = sum(map(len, found.numbers))
        part = f"a sample of {done} of " if done < len(x) else ""
        _show(found, source.frozen, f"differences on {part}{len(x):,} examples, {name}")
        _show_accuracy(found, y)
        return int(found.mismatches > 0)

    def _backends(self) -> list[str]:
        names = [name.strip() for name in self.backends.split(",")]
        return [] if names == ["none"] else names


def _compare(found: Found, source: Deployed, runners: Mapping[str, Runner], x: Tensor) -> None:
    """Compare a sample, and the rest unless a number of the sample differs."""
    with Progress("verify") as progress:
        done = 0
        for title, numbers in _parts(len(x)).items():
            for at in range(0, len(numbers), CHUNK):
                progress.count(title, at, total=len(numbers))
                chunk = numbers[at : at + CHUNK]
                found.add(source, runners, x[chunk], chunk)
            progress.count(title, len(numbers), total=len(numbers))
            done += len(numbers)
            if done == len(x) or found.mismatches:
                break
            comparing = f"comparing the other {len(x) - done:,}"
            progress.note(f"0 mismatches in a sample of {done} examples; {comparing}.")


def _parts(count: int) -> dict[str, Tensor]:
    """Return the numbers of the examples: a sample, spread over all, and the rest, with titles."""
    if count <= SAMPLE:
        return {"comparing": torch.arange(count)}
    sample = torch.arange(SAMPLE) * count // SAMPLE
    rest = torch.ones(count).index_fill(0, sample, 0).nonzero().flatten()
    return {"comparing a sample": sample, "comparing the rest": rest}


def _runner(backend: str, frozen: FrozenNetwork, folder: Path) -> Runner:
    path = folder / ("c" if backend == "c" else "network.onnx")
    try:
        if backend == "c":
            c.write(frozen, path)
        else:
            onnx.write(frozen, path)
        return comparison.runner(frozen, path)
    except MissingExtraError as error:
        raise SoftstairError(
            f"{first_line(error)}, or leave {backend} out of `backends`."
        ) from None


def _show(found: Found, frozen: FrozenNetwork, title: str) -> None:
    """Print how many numbers of each layer differ: from eval(), and from each backend."""
    compared = {name: row.compared for name, row in found.layers.items()}
    for part in found.backends.values():
        compared |= part.compared
    rows = []
    for layer in [name for name in (*frozen.sizes, SCORES, CLASS) if name in compared]:
        level = found.layers.get(layer)
        wrong = [None if level is None else level.differing]
        wrong += [part.wrong.get(layer) for part in found.backends.values()]
        cells = ["" if number is None else f"{number:,}" for number in wrong]
        rows.append((layer, f"{compared[layer]:,}", *cells))
    print_table(title, ("layer",), ("numbers", "eval()", *found.backends), rows)
    for name, part in found.backends.items():
        print_line(f"{name}: {part}")


def _show_accuracy(found: Found, y: Tensor) -> None:
    """Print how the frozen network differs from the trained one."""
    total = sum(row.compared for row in found.layers.values())
    differing = sum(row.differing for row in found.layers.values())
    print_line(f"eval(): {differing:,} of {total:,} levels differ from the frozen network's")
    trained, frozen = torch.cat(found.trained), torch.cat(found.frozen)
    labels = y[torch.cat(found.numbers)]
    right = [float((classes == labels).double().mean()) for classes in (trained, frozen)]
    changed = int((trained != frozen).sum())
    print_line(
        f"accuracy: {right[0]:.2%} trained, {right[1]:.2%} frozen; {changed:,} of "
        f"{len(labels):,} classes differ"
    )
