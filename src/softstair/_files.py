"""Atomic writes."""

import contextlib
import os
import shutil
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
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary path, which ends in ``suffix``, that replaces ``path``, unless the block
    raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part{suffix}")
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
    partial = (target.parent if is_new else target) / f".{os.getpid()}.part"
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


def _move_files(source: Path, target: Path, last: str) -> None:
    """Move all files of a folder to another."""
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    (target / last).unlink(missing_ok=True)
    for path in sorted(files, key=lambda path: path == Path(last)):
        (target / path).parent.mkdir(exist_ok=True)
        os.replace(source / path, target / path)
    _sync_folder(target)


@contextlib.contextmanager
def output_file(path: Path, field: str, endings: tuple[str, ...] = ()) -> Iterator[Path]:
    """Check that a file can be written; yield a temporary path that replaces it atomically.

    Enter it before the work that makes the content. ``field`` is the parameter that ``path`` was
    given as.
    """
    target = check_output(path, field, endings)
    with replacing(target, target.suffix) as partial:
        yield partial


def check_output(path: Path, field: str, endings: tuple[str, ...] = ()) -> Path:
    """Return the file that a path leads to, or raise SoftstairError if it cannot be written."""
    target = Path(os.path.realpath(path))
    problem = ""
    if endings and target.suffix.lower() not in endings:
        problem = f"does not end in {', '.join(endings)}"
    elif target.is_dir():
        problem = "is a folder"
    elif not target.parent.is_dir():
        problem = "is in a folder that does not exist"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        problem = "cannot be written"
    if problem:
        allowed = "must be a file that can be written"
        raise _check.invalid(field, f"{allowed}, but {str(path)!r} {problem}")
    return target


def _sync_folder(folder: Path) -> None:
    # Some systems do not let a folder be opened; there the rename is as durable as they make it.
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
