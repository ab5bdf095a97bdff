"""``softstair verify``: is what is deployed what was trained? Counted, layer by layer."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

__all__ = ["WAYS", "Command", "parse"]

WAYS = ("onnx", "c")
TRAINED = "trained"


@dataclass(frozen=True)
class Command:
    """Runs a trained network, its integer network, its ONNX file and its C program on real
    examples, and counts the numbers that differ: every feature of every layer, and the class.

    The examples are the test set's, or those of the run's validation fold where there is none. What
    cannot be run here, for want of ONNX Runtime or a compiler, is an error unless --ways leaves it
    out. With --last-layer int8 the reference is the trained network with its last layer in int8,
    and how many of its classes are not those of the trained network is told, but is no mismatch.
    Exit code 0: no number differs; 1: some do; 2: an error.
    """

    trained: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """A run directory, a packed network, or its name."""
    ways: str = "onnx,c"
    """What is compared besides the integer network: onnx, c, both separated by a comma, or none."""
    last_layer: Literal["float", "int8"] = "float"
    """The last layer, if it was trained in float, as it is or with weights of 8 bits."""
    limit: int | None = None
    """Take so many examples alone; None: all."""
    data_dir: Path = Path("data")
    """Folder of the data sets."""

    def __post_init__(self) -> None:
        if self.trained is None:
            raise ValueError("RUN must be a run directory or a packed network, but none was given.")
        unknown = [way for way in self._ways() if way not in WAYS]
        if unknown:
            raise ValueError(
                f"--ways must be onnx, c, onnx,c or none, but {self.ways!r} was given."
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be 1 or more, but {self.limit} was given.")

    def run(self) -> int:
        from softstair.cli import _deploy_tables
        from softstair.cli._deployed import deployed, examples
        from softstair.deploy import verify
        from softstair.deploy.comparison import CLASS, trained_runner

        assert self.trained is not None
        found = deployed(self.trained, self.data_dir, self.last_layer)
        name, x = examples(self.trained, found.recipe, self.data_dir, self.limit)
        with tempfile.TemporaryDirectory() as folder, _deploy_tables.counting(len(x)) as tell:
            others = {way: _runner(way)(found.integer, Path(folder)) for way in self._ways()}
            if found.network is not found.trained:
                others[TRAINED] = trained_runner(found.trained, found.integer)
            compared = verify(found.network, found.integer, x, others, on_progress=tell)
        changed = compared.pop(TRAINED, None)
        _deploy_tables.comparisons(compared, len(x), name, self.last_layer)
        if changed is not None:
            _deploy_tables.say(
                f"{changed.wrong[CLASS]:,} of {len(x):,} classes differ from the trained "
                "network's, whose last layer is float"
            )
        return int(any(one.mismatches for one in compared.values()))

    def _ways(self) -> list[str]:
        words = [word.strip() for word in self.ways.split(",")]
        return [] if words == ["none"] else words


def _runner(way: str) -> Callable[..., Any]:
    from softstair.deploy import c_runner, onnx_runner

    make = {"onnx": onnx_runner, "c": c_runner}[way]

    def made(*arguments: Any) -> Any:
        try:
            return make(*arguments)
        except ModuleNotFoundError as error:
            raise ValueError(f"{str(error).rstrip('.')}, or leave {way} out of --ways.") from None

    return made


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe."""
    from softstair.cli._arguments import parse as parse_flags

    return parse_flags(Command, words, prog)
