"""``softstair verify``: a frozen network beside the trained one, and in other runtimes; GGUF."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from softstair import _check
from softstair._errors import SoftstairError, first_line
from softstair.cli._args import flag
from softstair.cli._output import Progress, print_line, print_table
from softstair.cli.export import NetworkFlags
from softstair.deploy import (
    RUNTIMES,
    Comparison,
    FrozenNetwork,
    comparison,
    gguf,
    processes,
    runtimes,
)
from softstair.deploy.comparison import CLASS
from softstair.deploy.loaders import Running
from softstair.deploy.measuring import LayerReport, levels_of
from softstair.train.network import Deployed, deployed, examples_of, language_network
from softstair.train.settings import choose_device

SAMPLE = 100  # examples that are compared before the others
CHUNK = 100
LETTERS = 512  # of a text that a .gguf file is compared on


@dataclass
class Found:
    """What was compared so far, of eval(), the frozen network, and the runtimes."""

    layers: dict[str, LayerReport]
    runtimes: dict[str, Comparison]
    numbers: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    frozen: list[Tensor] = field(default_factory=list)

    @property
    def mismatches(self) -> int:
        return sum(part.mismatches for part in self.runtimes.values())

    def add(
        self, source: Deployed, started: Mapping[str, Running], x: Tensor, numbers: Tensor
    ) -> None:
        """Compare the results for examples of these numbers."""
        expected = comparison.results_of(source.frozen, x)
        levels = levels_of(source.trained, self.layers, source.to_float(x))
        for name, row in self.layers.items():
            self.layers[name] = row.with_levels(levels[name], expected[name].cpu())
        self.numbers.append(numbers)
        self.trained.append(levels[""].argmax(1))
        self.frozen.append(expected[CLASS].cpu())
        for name, running in started.items():
            self.runtimes[name].add_results(expected, running.results(x), numbers)


@dataclass(frozen=True)
class Command(NetworkFlags):
    """Run a trained network, and its frozen network in other runtimes, on real examples.

    Of each runtime, the numbers that differ from the frozen network's are counted: every feature of
    every layer that it shows, the scores and the class. These are differences. Of the trained
    network, levels that differ are shown, and the accuracy of both: these are facts, since the
    frozen network is the definition. Milliseconds are the least of an example, in one thread.

    A sample of 100 examples is compared first. If a number of it differs, the others are left out.
    The examples are the test set, or the validation fold of the run if there is no test set. A
    runtime that is not installed is an error, unless all of them are asked for. A network whose
    model is your own code needs --model; own data need --data in the same way.

    A file for llama.cpp is compared with the network that it stands for: softstair verify
    model.gguf --against RUN, where RUN may be a folder of Hugging Face. Weights and fields are
    compared one by one, and what llama.cpp computes of it and of its twin in float32.

    Exit code 0: no number differs; 1: some do; 2: an error.
    """

    against: Path | None = flag(None, "Of a .gguf file: the trained network, as for export.")
    text: Path | None = flag(
        None, "Of a .gguf file: a text to compare on (default: the network writes one)."
    )
    runtimes: str = flag(
        "c,onnxruntime",
        f"Runtimes to compare with the frozen network: some of {', '.join(RUNTIMES)}; all that are "
        "installed; or none.",
    )
    limit: int | None = flag(None, "Use only the first N examples.")
    data: str | None = flag(None, "package.module:function of your own data.")
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def __post_init__(self) -> None:
        if not set(self._named()) <= set(RUNTIMES):
            raise _check.wrong("runtimes", self.runtimes, f"{','.join(RUNTIMES)}, all or none")
        if self.limit is not None:
            _check.integer("limit", self.limit, 1)

    def run(self) -> int:
        if self.trained.suffix == ".gguf":
            return self._run_gguf()
        absent = {name: how for name in self._named() if (how := processes.absent(name))}
        if absent and self.runtimes != "all":
            raise SoftstairError("; ".join(f"{name}: {how}" for name, how in absent.items()) + ".")
        source = deployed(self.trained, self.model)
        name, x, y = examples_of(source.about, self.data_dir, self.limit, self.data)
        rows = {stair: LayerReport(stair) for stair in source.frozen.stairs}
        there = [runtime for runtime in self._named() if runtime not in absent]
        with tempfile.TemporaryDirectory() as folder:
            started = {}
            for each in there:
                try:
                    started[each] = _start(each, source.frozen, Path(folder))
                except SoftstairError as error:  # such as of a network that a format cannot express
                    if self.runtimes != "all":
                        raise
                    absent[each] = first_line(error)
            found = Found(rows, {each: Comparison() for each in started})
            source.frozen.to(choose_device("auto"))
            _compare(found, source, started, x)
            for each, compared in found.runtimes.items():
                comparison.check_complete(source.frozen, compared, each)
                compared.milliseconds = started[each].milliseconds(x[:1])
        done = sum(map(len, found.numbers))
        part = f"a sample of {done} of " if done < len(x) else ""
        _show(found, f"differences on {part}{len(x):,} examples, {name}", absent)
        _show_accuracy(found, y)
        return int(found.mismatches > 0)

    def _run_gguf(self) -> int:
        if self.against is None:
            raise SoftstairError("pass `against`, the network that the file stands for.")
        text = None if self.text is None else self.text.read_text(encoding="utf-8")[:LETTERS]
        found = gguf.verify(language_network(self.against, self.model), self.trained, text)
        print_line(str(found))
        return int(not all(found.passes))

    def _named(self) -> list[str]:
        names = [name.strip() for name in self.runtimes.split(",")]
        return {"none": [], "all": [*RUNTIMES]}.get(",".join(names), names)


def _compare(found: Found, source: Deployed, started: Mapping[str, Running], x: Tensor) -> None:
    """Compare a sample, and the rest unless a number of the sample differs."""
    with Progress("verify") as progress:
        done = 0
        for title, numbers in _parts(len(x)).items():
            for at in range(0, len(numbers), CHUNK):
                progress.count(title, at, total=len(numbers))
                chunk = numbers[at : at + CHUNK]
                found.add(source, started, x[chunk], chunk)
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


def _start(name: str, frozen: FrozenNetwork, folder: Path) -> Running:
    return comparison.runner(frozen, runtimes.write(name, frozen, folder), runtime=name)


def _show(found: Found, title: str, absent: Mapping[str, str]) -> None:
    """Print a row for each runtime, the first number that differs, and what is not installed."""
    rows = [
        (
            name,
            f"{sum(part.compared.values()):,}",
            f"{part.mismatches:,}",
            f"{part.milliseconds:.3f}",
        )
        for name, part in found.runtimes.items()
    ]
    if rows:
        print_table(title, ("runtime",), ("numbers", "differences", "ms"), rows)
    else:
        print_line(title)
    for name, part in found.runtimes.items():
        if part.mismatches:
            print_line(f"{name}: {part}")
    for name, how in absent.items():
        print_line(f"{name}: left out, {how}")


def _show_accuracy(found: Found, y: Tensor) -> None:
    """Print how the frozen network differs from the trained one."""
    total = sum(row.compared for row in found.layers.values())
    differing = sum(row.differing for row in found.layers.values())
    print_line(f"eval(): {differing:,} of {total:,} levels differ from the frozen network's")
    for row in found.layers.values():
        if row.differing:
            print_line(f"  {row}")
    trained, frozen = torch.cat(found.trained), torch.cat(found.frozen)
    labels = y[torch.cat(found.numbers)]
    right = [float((classes == labels).double().mean()) for classes in (trained, frozen)]
    changed = int((trained != frozen).sum())
    print_line(
        f"accuracy: {right[0]:.2%} trained, {right[1]:.2%} frozen; {changed:,} of "
        f"{len(labels):,} classes differ"
    )
