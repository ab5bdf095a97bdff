"""Atomic writes."""

import contextlib
import errno
import os
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from softstair import _check


@contextlib.contextmanager
def _errors_of(path: Path, partial: Path) -> Iterator[None]:
    """Let errors of the system name the path, where they name no file or a temporary one."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if name is not None and not Path(str(name)).is_relative_to(partial):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path``, unless the block raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _errors_of(path, partial):
        partial.touch()
        try:
            yield partial
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing_folder(folder: Path, last: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder``, unless the block raises.

    If ``folder`` exists, it keeps its other files, and those of the same name are replaced. The
    file ``last`` is then removed first and put back last: without it, a folder whose process was
    killed in between is not taken for a complete one.
    """
    target = Path(os.path.realpath(folder))
    is_new = not target.exists()
    partial = _partial(target.parent if is_new else target, target)
    with _errors_of(folder, partial):
        partial.mkdir(parents=True)
        try:
            yield partial
            if is_new:
                os.replace(partial, target)
            else:
                _move_files(partial, target, last)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _partial(place: Path, target: Path, suffix: str = "") -> Path:
    """Return a new temporary path; remove what killed processes left there for the same target."""
    # Short, since the name of the target may be as long as the system allows. A process of another
    # machine, whose folder this may be too, is not known here.
    start = f".{zlib.crc32(os.fsencode(platform.node() + target.name)):08x}"
    for left in place.glob(f"{start}.*-*.part*"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(left.name.split(".")[2].partition("-")[0]), 0)  # whether it runs
            except ProcessLookupError:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return place / f"{start}.{os.getpid()}-{secrets.token_hex(2)}.part{suffix}"


def _move_files(source: Path, target: Path, last: str) -> None:
    """Move all files of a folder to another, after checking that each can be moved."""
    entries = [path.relative_to(source) for path in sorted(source.rglob("*"))]
    for path in entries:
        if (source / path).is_dir():
            (target / path).mkdir(exist_ok=True)
            if not os.access(target / path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target / path))
        elif (target / path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target / path))
    files = [path for path in entries if (source / path).is_file()]
    (target / last).unlink(missing_ok=True)
    for path in sorted(files, key=lambda path: path == Path(last)):
        os.replace(source / path, target / path)
    _sync_folder(target)


@contextlib.contextmanager
def output_file(path: Path, field: str, endings: tuple[str, ...] = ()) -> Iterator[Path]:
    """Check that a file can be written; yield a temporary path that replaces it atomically.

    Enter it before the work that makes the content. ``field`` is the parameter that ``path`` was
    given as.
    """
    target, partial = begin_output(path, field, endings)
    try:
        with _errors_of(path, partial):
            yield partial
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def begin_output(path: Path, field: str, endings: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Return the file to write and a new empty file beside it; raise if this is not possible."""
    target = Path(os.path.realpath(path))
    partial = _partial(target.parent, target, target.suffix)
    problem = _problem_with(target, endings)
    if not problem:
        try:
            partial.touch(exist_ok=False)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
    if problem:
        allowed = "must be a file that can be written"
        raise _check.invalid(field, f"{allowed}, but {str(path)!r} {problem}")
    return target, partial


def _problem_with(target: Path, endings: tuple[str, ...]) -> str:
    if endings and target.suffix.lower() not in endings:
        return f"does not end in {', '.join(endings)}"
    if target.is_dir():
        return "is a folder"
    if not target.parent.is_dir():
        return "is in a folder that does not exist"
    writable = not target.exists() or (target.is_file() and os.access(target, os.W_OK))
    return "" if writable else "cannot be overwritten"


def _sync_folder(folder: Path) -> None:
    # Some systems do not let a folder be opened; there the rename is as durable as they make it.
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
