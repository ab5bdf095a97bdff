"""Which data sets are in a folder, judged by names and sizes of files; no file is read.

``softstair data fetch`` compares digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from softstair.data.fetch import file_size, partial_path, problem_with
from softstair.data.sources import CIFAR10, SPEECH, SPEECH_TEST, SPEECH_V001, SVHN, Download

__all__ = ["LAYOUTS", "DataStatus", "Layout", "survey"]

Piece = Download | str
"""An unpacked download, or the path of a file of which only the name is known."""


@dataclass(frozen=True)
class Layout:
    """A set of files that a data set can be read from; training does not need ``test``."""

    name: str
    where: str
    pieces: tuple[Piece, ...]
    test: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class DataStatus:
    """What a folder has of one data set in one layout."""

    name: str
    state: str  # built in, complete, no test set, incomplete, partial (a download), or no
    where: str = ""  # the layout, if any of its files is there
    problem: str = ""  # what is missing or wrong
    files: int = 0
    size: int = 0  # bytes of all files


_CIFAR10_PICKLES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_FEATURES = ("features_v001", "testset_v002", "background")

LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", (CIFAR10,)),
    Layout(
        "cifar10",
        "cifar-10-batches-py",
        tuple(f"cifar-10-batches-py/{name}" for name in _CIFAR10_PICKLES),
    ),
    Layout("svhn", "svhn/*.mat", SVHN[:1], SVHN[1:]),
    Layout("svhn", "svhn/*.npz", ("svhn/train_32x32.npz",), ("svhn/test_32x32.npz",)),
    Layout("speech", "speech_commands_v0.02", (SPEECH,), (SPEECH_TEST,)),
    Layout("speech", "speech_commands_v0.01", (SPEECH_V001,), (SPEECH_TEST,)),
    Layout("speech", "gsc", tuple(f"gsc/{name}.npz" for name in _FEATURES)),
)


def survey(root: Path | str = "data") -> list[DataStatus]:
    """Return a status for each layout that is there, or with state "no", and partial downloads.

    >>> [(row.name, row.state) for row in survey("nowhere")]
    [('digits', 'built in'), ('cifar10', 'no'), ('svhn', 'no'), ('speech', 'no')]
    """
    root = Path(root)
    rows = [DataStatus("digits", "built in", "scikit-learn")]
    for name in dict.fromkeys(layout.name for layout in LAYOUTS):
        layouts = [layout for layout in LAYOUTS if layout.name == name]
        present = [
            _status(layout, root)
            for layout in layouts
            if any((root / _path(piece)).exists() for piece in layout.pieces)
        ]
        rows += [*(present or [DataStatus(name, "no")]), *_partial(name, layouts, root)]
    return rows


def _path(piece: Piece) -> str:
    return piece if isinstance(piece, str) else piece.target


def _status(layout: Layout, root: Path) -> DataStatus:
    problems = [text for piece in layout.pieces if (text := _problem(piece, root))]
    test_problems = [text for piece in layout.test if (text := _problem(piece, root))]
    state = "incomplete" if problems else "no test set" if test_problems else "complete"
    paths = {root / _path(piece) for piece in (*layout.pieces, *layout.test)}
    every = [inner for path in paths for inner in (path.rglob("*") if path.is_dir() else [path])]
    sizes = [path.stat().st_size for path in every if path.is_file()]
    problem = next(iter([*problems, *test_problems]), "")
    return DataStatus(layout.name, state, layout.where, problem, len(sizes), sum(sizes))


def _problem(piece: Piece, root: Path) -> str:
    path = root / _path(piece)
    if not path.exists():
        return f"lacks {path.name}"
    if isinstance(piece, Download):
        return problem_with(piece, path)
    return "" if path.is_file() and path.stat().st_size else f"{path.name} is empty"


def _partial(name: str, layouts: Sequence[Layout], root: Path) -> Iterator[DataStatus]:
    pieces = [piece for layout in layouts for piece in (*layout.pieces, *layout.test)]
    for download in dict.fromkeys(piece for piece in pieces if isinstance(piece, Download)):
        if size := file_size(partial_path(download, root)):
            progress = f"{size:,} of {download.size:,} bytes of {download.file} are downloaded"
            yield DataStatus(name, "partial", "", progress, 0, size)
