"""Files that are refused before the work is done, and never half-written."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["reserved"]


@contextmanager
def reserved(
    path: Path | None, flag: str, endings: tuple[str, ...] = (), follow: bool = True
) -> Iterator[Path | None]:
    """A path beside the given one to write to; it takes the given one's place at the end.

    Whatever goes wrong in between leaves the given path as it was, and nothing beside it. A path
    that the user gave may be a symbolic link, and what it points to is written. Without ``follow``,
    which is for a path that the user did not give, a link is replaced.
    """
    if path is None:
        yield None
        return
    target = Path(os.path.realpath(path)) if follow or not path.is_symlink() else path
    _refuse_unwritable(path, target, flag, endings)
    # Short, whatever the given one is called.
    partial = target.with_name(f".{secrets.token_hex(4)}.part{target.suffix}")
    try:
        partial.touch(exist_ok=False)
    except OSError as error:
        raise _refusal(path, flag, f"cannot be written ({error.strerror})") from None
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _refuse_unwritable(path: Path, target: Path, flag: str, endings: tuple[str, ...]) -> None:
    if endings and target.suffix.lower() not in endings:
        raise _refusal(path, flag, f"does not end in {', '.join(endings)}")
    if target.is_symlink():  # it is replaced, wherever it points to
        return
    if target.is_dir():
        raise _refusal(path, flag, "is a folder")
    if not target.parent.is_dir():
        raise _refusal(path, flag, "lies in a folder that does not exist")
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        raise _refusal(path, flag, "cannot be written over")


def _refusal(path: Path, flag: str, why: str) -> ValueError:
    return ValueError(
        f"{flag} must name a file that can be written, but {str(path)!r} {why}: "
        "choose another path."
    )
