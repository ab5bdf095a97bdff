"""``softstair export``: a trained network as ONNX, as QONNX, or as C."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Command", "parse"]


@dataclass(frozen=True)
class Command:
    """Writes a trained network as one that computes with whole numbers alone.

    onnx: a file of standard operators, exact under ONNX Runtime. qonnx: a file for FPGA tools. c: a
    folder of C99 that needs no library, with a Makefile and a program that classifies what it
    reads. The features of every layer and the class are those of the trained network, or of that
    with its last layer in int8; `softstair verify` counts. Exit code 0: written; 2: an error.
    """

    trained: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """A run directory, a packed network, or its name."""
    to: Literal["onnx", "qonnx", "c"] = "onnx"
    """What it becomes."""
    out: Path | None = None
    """File, or folder of c; None: beside the run, network.onnx, network.qonnx or c/."""
    last_layer: Literal["float", "int8"] = "float"
    """The last layer, if it was trained in float, as it is or with weights of 8 bits."""
    data_dir: Path = Path("data")
    """Folder of the data sets; a run's names its classes and shapes."""

    def __post_init__(self) -> None:
        if self.trained is None:
            raise ValueError("RUN must be a run directory or a packed network, but none was given.")

    def run(self) -> int:
        from softstair._files import refuse_link
        from softstair.cli import _deploy_tables
        from softstair.cli._deployed import deployed

        assert self.trained is not None
        found = deployed(self.trained, self.data_dir, self.last_layer)
        out = self.out or _beside(self.trained, "c" if self.to == "c" else f"network.{self.to}")
        _deploy_tables.costs(found.integer)
        if self.to == "c":
            if self.out is None:
                refuse_link(out)
            _refuse_other_files(out)
            from softstair.deploy import c

            try:
                plan = c.write(found.integer, out)
            except OSError as error:
                raise ValueError(
                    f"--out must be a folder that can be written, but {str(out)!r} cannot be "
                    f"({error.strerror}): give another."
                ) from None
            _deploy_tables.say(str(plan))
        else:
            _write_file(self.to, found, out, follow=self.out is not None)
        _deploy_tables.say(f"written: {out}")
        return 0


def _write_file(kind: str, found: object, out: Path, follow: bool) -> None:
    from softstair.cli._deployed import Deployed
    from softstair.cli._files import reserved

    assert isinstance(found, Deployed)
    with reserved(out, "--out", follow=follow) as partial:
        assert partial is not None
        try:
            from softstair.deploy import onnx, qonnx

            module = onnx if kind == "onnx" else qonnx
            module.write(found.integer, partial, classes=found.classes)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from None


def _beside(trained: Path, name: str) -> Path:
    return trained / name if trained.is_dir() else Path(f"{trained.stem}-{name}")


def _refuse_other_files(folder: Path) -> None:
    """A folder that holds something else than an export is left alone."""
    if folder.is_file() or (
        folder.is_dir() and any(folder.iterdir()) and not (folder / "softstair.h").exists()
    ):
        raise ValueError(
            f"--out must be a new or empty folder, or one of softstair export --to c, but "
            f"{str(folder)!r} holds something else: give another."
        )


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe."""
    from softstair.cli._arguments import parse as parse_flags

    return parse_flags(Command, words, prog)
