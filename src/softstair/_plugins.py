"""A user's own function, named on the command line as ``package.module:function``."""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["call"]

ResultT = TypeVar("ResultT")


def call(name: str, role: str, returns: type[ResultT], **offered: Any) -> ResultT:
    """Calls the function (or class) of that name with those of the keywords that it takes.

    ``role`` is what it is for, model or data, and ``returns`` what it must return. Its module may
    lie in the current directory, as under ``python -m``.

    >>> call("fractions:Fraction", "data", object, numerator=3)
    Fraction(3, 1)
    """
    kind = {"model": "torch.nn.Module", "data": "softstair.data.Dataset"}[role]
    path, _, attribute = name.partition(":")
    if path.endswith(".py"):
        raise ValueError(
            f"{role} must be package.module:function, but {name!r} was given: write "
            f"{path[:-3].replace('/', '.')}:{attribute}."
        )
    if not all(part.isidentifier() for part in [*path.split("."), attribute]):
        raise ValueError(
            f"{role} must be package.module:function, names with dots between them and one colon, "
            f"but {name!r} was given."
        )
    with _current_directory_importable():
        module = _import(path, role)
        try:
            make = getattr(module, attribute)
        except AttributeError:
            # Which file it is tells a user whose module has the name of somebody else's.
            place = getattr(module, "__file__", None) or "built into Python"
            raise ValueError(
                f"module {path!r} ({place}) must have {attribute!r}, which {role}={name!r} asks "
                "for, but it has not."
            ) from None
        if (isinstance(make, returns) and not isinstance(make, type)) or not callable(make):
            raise ValueError(
                f"{role} {name!r} must be a function that returns a {kind}, but it is an object "
                f"of type {type(make).__name__}."
            )
        try:
            made = make(**_taken(make, offered))
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{role} {name!r} must return a {kind}, but it raised {_named(error)}."
            ) from error
    if not isinstance(made, returns):
        raise ValueError(
            f"{role} {name!r} must return a {kind}, but it returned an object of type "
            f"{type(made).__name__}."
        )
    return made


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    """As under ``python -m``, but only while a user's module is imported and called: a file there
    that has the name of somebody else's module must not be found in its stead later on."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        # Only our own entry: what the user's module did to the path is the user's affair.
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _import(path: str, role: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(missing + "."):
            raise ValueError(f"module {path!r} could not be imported: {_named(error)}.") from error
        raise ValueError(
            f"{role} must be in a module that can be imported, but there is no {missing!r} in the "
            f"current directory or among what is installed, for {path!r}."
        ) from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"module {path!r} could not be imported: {_named(error)}.") from error


def _taken(make: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """What of the offer a function takes by keyword."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in parameters.items() if parameter.kind in by_keyword}
    return {name: value for name, value in offered.items() if name in named}


def _named(error: BaseException) -> str:
    """An exception in one line: its kind, the first line of what it says, and where it arose."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    said = f"{type(error).__name__} ({text})" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # The last line of the user's own that it passed, not that of a library behind it.
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    own = [frame for frame in own if os.path.abspath(frame.filename) != os.path.abspath(__file__)]
    own = [frame for frame in own if not frame.filename.startswith("<")]
    return f"{said} at {own[-1].filename}:{own[-1].lineno}" if own else said
