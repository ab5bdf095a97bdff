"""Which data sets lie in a folder, in which of the layouts that can be read: names and sizes only.

Nothing is read but folders; ``softstair data fetch`` verifies what it brought by its digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from softstair.data.fetch import file_size, partial_path, problem_with
from softstair.data.sources import (
    CIFAR10,
    SPEECH,
    SPEECH_TEST,
    SPEECH_V001,
    SVHN,
    Download,
)

__all__ = ["LAYOUTS", "Layout", "Row", "survey"]

Piece = Download | str
"""What a download becomes, or the path of a file of which nothing else is known."""


@dataclass(frozen=True)
class Layout:
    """One way in which a data set may lie in a folder."""

    name: str
    where: str
    pieces: tuple[Piece, ...]
    test: tuple[Piece, ...] = ()
    """The test set, where it is a thing of its own; training can do without."""


@dataclass(frozen=True)
class Row:
    """What there is of a data set in one layout, or, with no ``where``, that there is none."""

    name: str
    state: str
    where: str = ""
    wrong: str = ""
    files: int = 0
    size: int = 0


LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", (CIFAR10,)),
    Layout(
        "cifar10",
        "cifar-10-batches-py",
        tuple(
            f"cifar-10-batches-py/{name}"
            for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
        ),
    ),
    Layout("svhn", "svhn/*.mat", SVHN[:1], SVHN[1:]),
    Layout("svhn", "svhn/*.npz", ("svhn/train_32x32.npz",), ("svhn/test_32x32.npz",)),
    Layout("speech", "speech_commands_v0.02", (SPEECH,), (SPEECH_TEST,)),
    Layout("speech", "speech_commands_v0.01", (SPEECH_V001,), (SPEECH_TEST,)),
    Layout(
        "speech",
        "gsc",
        ("gsc/features_v001.npz", "gsc/testset_v002.npz", "gsc/background.npz"),
    ),
)


def survey(root: Path, layouts: Sequence[Layout] = LAYOUTS) -> list[Row]:
    """A row for each layout that is there, or one that says no; partial downloads after them.

    >>> [(row.name, row.state) for row in survey(Path("nowhere"))]
    [('digits', 'built in'), ('cifar10', 'no'), ('svhn', 'no'), ('speech', 'no')]
    """
    rows = [Row("digits", "built in", "scikit-learn")]
    for name in dict.fromkeys(layout.name for layout in layouts):
        mine = [layout for layout in layouts if layout.name == name]
        found = [_row(layout, root) for layout in mine if _begun(layout, root)]
        rows += [*(found or [Row(name, "no")]), *_partial(name, mine, root)]
    return rows


def _path(piece: Piece) -> str:
    return piece if isinstance(piece, str) else piece.target


def _begun(layout: Layout, root: Path) -> bool:
    return any((root / _path(piece)).exists() for piece in layout.pieces)


def _row(layout: Layout, root: Path) -> Row:
    wrong = [text for piece in layout.pieces if (text := _lack(piece, root))]
    test = [text for piece in layout.test if (text := _lack(piece, root))]
    state = "incomplete" if wrong else "no test set" if test else "complete"
    pieces = {_path(piece): None for piece in (*layout.pieces, *layout.test)}
    files, size = _measure([root / path for path in pieces])
    return Row(layout.name, state, layout.where, next(iter([*wrong, *test]), ""), files, size)


def _lack(piece: Piece, root: Path) -> str:
    path = root / _path(piece)
    if not path.exists():
        return f"lacks {path.name}"
    if isinstance(piece, Download):
        return problem_with(piece, path)
    return "" if path.is_file() and path.stat().st_size else f"has nothing in {path.name}"


def _measure(paths: Sequence[Path]) -> tuple[int, int]:
    """Number and bytes of the files at some paths, those within folders too."""
    files = [
        one
        for path in paths
        for one in (path.rglob("*") if path.is_dir() else (path,))
        if one.is_file()
    ]
    return len(files), sum(one.stat().st_size for one in files)


def _partial(name: str, layouts: Sequence[Layout], root: Path) -> Iterator[Row]:
    items = [piece for one in layouts for piece in (*one.pieces, *one.test)]
    for item in dict.fromkeys(piece for piece in items if isinstance(piece, Download)):
        if have := file_size(partial_path(item, root)):
            share = f"{have:,} of {item.size:,} bytes of {item.file}"
            yield Row(name, "partial", "", f"{share} have come", 0, have)
