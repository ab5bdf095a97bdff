"""Features of the recordings, computed once and kept in a file beside them."""

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softstair.data.dataset import DataError
from softstair.data.formats import arrays
from softstair.data.speech import audio as recordings
from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES

__all__ = ["Sources", "features", "path"]

Bytes = NDArray[np.uint8]

# To be counted up whenever the same recordings would give other features.
VERSION: Final = 1


class Sources(NamedTuple):
    """What features are made of: clips, ``cuts`` from each noise and of zeros, and a test set."""

    clips: list[Path]
    noise: list[Path]
    cuts: int
    test: list[Path]

    def sizes(self) -> dict[str, int]:
        """How many examples each array has; one that would have none is not kept."""
        silence = self.cuts * (len(self.noise) + 1)
        return {"clips": len(self.clips), "silence": silence, "test": len(self.test)}


def path(root: Path, digest: str) -> Path:
    """Where the features lie of recordings with that digest of their names, sizes and times."""
    return root / f"speech-features-v{VERSION}-{digest}.npz"


def features(
    path: Path, sources: Sources, progress: Callable[[int, int], None] | None = None
) -> dict[str, Bytes]:
    """(N, 49, 10) of each of ``Sources.sizes``: those kept at ``path``, or computed and kept there.

    What is kept is used only if it is whole, by its checksums and its shapes; if it is not, it is
    computed again and replaced. Where nothing can be written, a warning says so.
    """
    sizes = sources.sizes()
    shapes = {name: ("u1", (n, FRAMES, COEFFICIENTS)) for name, n in sizes.items() if n}
    try:
        found = arrays.read(path, shapes, "remove it")
    except DataError:
        found = _compute(sources, sizes, progress)
        _write(path, {name: found[name] for name in shapes})
    empty = np.empty((0, FRAMES, COEFFICIENTS), dtype=np.uint8)
    return {name: found.get(name, empty) for name in sizes}


def _compute(
    sources: Sources, sizes: dict[str, int], progress: Callable[[int, int], None] | None
) -> dict[str, Bytes]:
    done, total = 0, sum(sizes.values())

    def step(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    audio = {
        # Noise first: there is little of it, and what is wrong with it is known at once.
        "silence": recordings.silences(sources.noise, sources.cuts),
        "test": recordings.clips(sources.test),
        "clips": recordings.clips(sources.clips),
    }
    return {name: recordings.features(audio[name], sizes[name], step) for name in audio}


def _write(path: Path, found: dict[str, Bytes]) -> None:
    """All or nothing: others see the whole file or none, even if this process is stopped."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("xb") as stream:
                np.savez(stream, **found)  # type: ignore[arg-type]
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} cannot be written ({error.strerror}), so that the features of the "
            "recordings are computed anew each time: give a --data-dir that can be written to.",
            stacklevel=2,
        )
