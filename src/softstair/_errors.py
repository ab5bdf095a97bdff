"""The exceptions that softstair raises on purpose, and their first line."""

import importlib
from types import ModuleType

import torch


class SoftstairError(ValueError):
    """Base class of errors that a caller can correct: a wrong argument, file or environment.

    Messages name parameters in backquotes, as in ``pass another `out```. The command shows them as
    flags (``--out``). ``field`` is the parameter that the message is about.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class MissingExtraError(ModuleNotFoundError):
    """An optional package is not installed; the message says which extra to install."""


def import_extra(name: str, extra: str = "cli") -> ModuleType:
    """Import a module; if it is not installed, say which extra of softstair installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"this needs the package {package}, which is not installed: run pip install "
            f"'.[{extra}]' in the clone of softstair.",
            name=package,
        ) from None


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an exception's message without its full stop, or its type's name.

    >>> first_line(ValueError("too long.\\nDetails follow."))
    'too long'
    >>> first_line(KeyboardInterrupt())
    'KeyboardInterrupt'
    """
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ")[:limit] if text else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator failed; on a CPU only the message says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error) for text in ("not enough memory", "allocate memory"))
