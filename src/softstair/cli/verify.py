"""``softstair verify``: compare what is deployed with what was trained, number by number."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from softstair import _check
from softstair._errors import MissingExtraError, SoftstairError, first_line
from softstair.cli._args import flag
from softstair.cli._progress import Progress
from softstair.cli._table import print_line, print_table
from softstair.cli.export import NetworkFlags
from softstair.deploy import Comparison, IntegerNetwork, c_runner, onnx_runner, verify
from softstair.deploy.comparison import CLASS, Runner, trained_runner
from softstair.train.trained import LastLayer, deployed

BACKENDS = ("onnx", "c")
SAMPLE = 100  # examples that are compared before the others
TRAINED = "trained"


@dataclass(frozen=True)
class Command(NetworkFlags):
    """Run a trained network, its integer network, its ONNX file and its C program on real examples,
    and count the numbers that differ: every feature of every layer, and the class.

    A sample of 100 examples is compared first. If a number of it differs, the others are left out.
    The examples are the test set, or the validation fold of the run if there is no test set. A
    backend that cannot run here, because ONNX Runtime or a compiler is missing, is an error: leave
    it out with --backends. With --last-layer int8 the reference is the trained network with its
    last layer in INT8; how many classes differ from the trained network's is shown, but these are
    no mismatches. --model is as for `softstair export`; own data need --data in the same way.

    Exit code 0: no number differs; 1: some do; 2: an error.
    """

    backends: str = flag("onnx,c", "Backends to compare besides the integer network, or none.")
    last_layer: LastLayer = flag(
        "float", "Run a last layer that was trained in float as it is, or with INT8 weights."
    )
    limit: int | None = flag(None, "Use only the first N examples.")
    data: str | None = flag(None, "package.module:function of your own data.")
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def __post_init__(self) -> None:
        if not set(self._backends()) <= set(BACKENDS):
            raise _check.wrong("backends", self.backends, "onnx, c, onnx,c or none")
        if self.limit is not None:
            _check.integer("limit", self.limit, 1)

    def run(self) -> int:
        source = deployed(self.trained, self.last_layer, self.model)
        name, x = source.examples(self.data_dir, self.limit, self.data)
        with tempfile.TemporaryDirectory() as folder, Progress("verify") as progress:
            others = {
                name: _runner(name, source.integer, Path(folder)) for name in self._backends()
            }
            if source.network is not source.trained:
                others[TRAINED] = trained_runner(source.trained, source.integer)
            compare = partial(verify, source.network, source.integer, x, others)
            compared, done = dict[str, Comparison](), 0
            for title, examples in _parts(len(x)).items():
                show = partial(progress.count, title, total=len(examples))
                show(0)
                compared = compare(on_progress=show, examples=examples, earlier=compared)
                done += len(examples)
                if done == len(x) or _mismatches(compared):
                    break
                comparing = f"comparing the other {len(x) - done:,}"
                progress.note(f"0 mismatches in a sample of {done} examples; {comparing}.")
        changed = compared.pop(TRAINED, None)
        caption = None if self.last_layer == "float" else f"the last layer in {self.last_layer}"
        part = f"a sample of {done} of " if done < len(x) else ""
        _show(compared, f"mismatches on {part}{len(x):,} examples, {name}", caption)
        if changed is not None:
            print_line(
                f"{changed.wrong[CLASS]:,} of {changed.compared[CLASS]:,} classes differ from the "
                "trained network's, whose last layer is float"
            )
        return int(_mismatches(compared) > 0)

    def _backends(self) -> list[str]:
        names = [name.strip() for name in self.backends.split(",")]
        return [] if names == ["none"] else names


def _parts(count: int) -> dict[str, Tensor]:
    """Return the numbers of the examples: a sample, spread over all, and the rest, with titles."""
    if count <= SAMPLE:
        return {"comparing": torch.arange(count)}
    sample = torch.arange(SAMPLE) * count // SAMPLE
    rest = torch.ones(count).index_fill(0, sample, 0).nonzero().flatten()
    return {"comparing a sample": sample, "comparing the rest": rest}


def _mismatches(compared: Mapping[str, Comparison]) -> int:
    return sum(part.mismatches for name, part in compared.items() if name != TRAINED)


def _runner(backend: str, network: IntegerNetwork, folder: Path) -> Runner:
    try:
        return (onnx_runner if backend == "onnx" else c_runner)(network, folder)
    except MissingExtraError as error:
        raise SoftstairError(
            f"{first_line(error)}, or leave {backend} out of `backends`."
        ) from None


def _show(compared: Mapping[str, Comparison], title: str, caption: str | None) -> None:
    """Print how many numbers of each layer differ, a column for each backend."""
    rows = []
    for layer, count in next(iter(compared.values())).compared.items():
        wrong = [comparison.wrong.get(layer) for comparison in compared.values()]
        cells = ["" if number is None else f"{number:,}" for number in wrong]
        rows.append((layer, f"{count:,}", *cells))
    print_table(title, ("layer",), ("numbers", *compared), rows, caption=caption)
    for name, comparison in compared.items():
        print_line(f"{name}: {comparison}")
