"""A user's own function, named as ``package.module:function``."""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from softstair import _check
from softstair._errors import SoftstairError, first_line

KINDS = {
    "model": "torch.nn.Module",
    "data": "softstair.data.Dataset",
    "noise": "softstair.Noise or softstair.ste.Estimator",
    "noise_schedule": "function (layer, t) -> (mean, std)",
    "loss": "function (scores, labels) -> loss",
}
"""What the object of each role is."""

ResultT = TypeVar("ResultT")
Returns = type[ResultT] | tuple[type[ResultT], ...]


def call(name: str, role: str, returns: Returns[ResultT], **offered: Any) -> ResultT:
    """Call a function or class with those of the offered keywords that it takes.

    ``role`` is the parameter that names it, one of KINDS; ``returns`` is the type of its result,
    object for a function. Its module may be in the current directory, as under ``python -m``.

    >>> from numbers import Number
    >>> call("fractions:Fraction", "data", Number, numerator=3)
    Fraction(3, 1)
    """
    path, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*path.split("."), attribute]):
        raise _check.wrong(role, name, "package.module:function")
    with _current_directory_importable():
        module = _import(path, role)
        if not hasattr(module, attribute):
            # The file tells a user whose module has the name of another one.
            file = getattr(module, "__file__", None) or "built into Python"
            raise SoftstairError(
                f"module {path!r} ({file}) must have {attribute!r}, which {role}={name!r} asks "
                "for, but it has not.",
                field=role,
            )
        return call_function(getattr(module, attribute), name, role, returns, **offered)


def call_function(
    make: object, name: str, role: str, returns: Returns[ResultT], **offered: Any
) -> ResultT:
    """Call a function as :func:`call` does; ``name`` is what errors call it."""
    kind = KINDS[role]
    is_made = returns is not object and isinstance(make, returns) and not isinstance(make, type)
    if is_made or not callable(make):
        raise SoftstairError(
            f"{role} {name!r} must be a function that returns a {kind}, but it is an object of "
            f"type {type(make).__name__}.",
            field=role,
        )
    try:
        result = make(**_accepted(make, offered))
    except (Exception, SystemExit) as error:
        raise SoftstairError(
            f"{role} {name!r} must return a {kind}, but it raised {_described(error)}.", field=role
        ) from error
    if not isinstance(result, returns) or (returns is object and not callable(result)):
        raise SoftstairError(
            f"{role} {name!r} must return a {kind}, but it returned an object of type "
            f"{type(result).__name__}.",
            field=role,
        )
    return result


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Put the current directory first on the path, only while a user's module is used."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's module may have changed the path
            sys.path.remove(directory)


def _import(path: str, role: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise SoftstairError(
            f"{role} must be in a module that can be imported, but importing {path!r} raised "
            f"{_described(error)}.",
            field=role,
        ) from error


def _accepted(make: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Return the offered keywords that a function takes."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in parameters.items() if parameter.kind in by_keyword}
    return {name: value for name, value in offered.items() if name in named}


def _described(error: BaseException) -> str:
    """Return an exception's type, first line, and the last line of the user's code it passed."""
    described = type(error).__name__
    if str(error).strip():
        described += f" ({first_line(error)})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"site-packages", "importlib"} & {*Path(frame.filename).parts}
        and not frame.filename.startswith("<")
        and os.path.abspath(frame.filename) != os.path.abspath(__file__)
    ]
    return f"{described} at {frames[-1].filename}:{frames[-1].lineno}" if frames else described
