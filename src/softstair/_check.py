"""Checks of arguments: each returns the value, or raises ValueError that names the parameter."""

import difflib
import json
import sys
from collections.abc import Collection, Mapping, Set
from typing import Any

from softstair._errors import SoftstairError


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``.

    >>> integer("bits", 4, 1, 16)
    4
    >>> integer("bits", 4.5, 1, 16)
    Traceback (most recent call last):
    softstair._errors.SoftstairError: bits must be an integer from 1 to 16, but 4.5 was given.
    """
    if isinstance(value, int) and not isinstance(value, bool) and _within(value, low, high):
        return value
    raise wrong(name, value, "an integer" + _range(low, high))


def number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
) -> float:
    """Return ``value`` as a float if it is finite, from ``low`` to ``high`` and above ``above``.

    >>> number("std", 1, low=0)
    1.0
    >>> number("period", 0, above=0)
    Traceback (most recent call last):
    softstair._errors.SoftstairError: period must be a number above 0, but 0 was given.
    """
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
        and _within(value, low, high)
        and (above is None or value > above)
    ):
        return float(value)
    allowed = f" above {above:g}" if above is not None else _range(low, high)
    raise wrong(name, value, f"a number{allowed}" if allowed else "a finite number")


def boolean(name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False."""
    if isinstance(value, bool):
        return value
    raise wrong(name, value, "True or False")


def choice(name: str, value: Any, options: Collection[str]) -> str:
    """Return ``value`` if it is one of ``options``.

    >>> choice("update", "step", ("iteration", "epoch"))
    Traceback (most recent call last):
    softstair._errors.SoftstairError: update must be iteration or epoch, but 'step' was given.

    A value that is like an option adds ``did you mean 'epoch'?``.
    """
    if isinstance(value, str) and value in options:
        return value
    names = list(options)
    allowed = " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"
    raise wrong(name, value, allowed, names)


def invalid(name: str, problem: str) -> SoftstairError:
    """Return the error that a parameter has a problem."""
    stop = "" if problem.endswith("?") else "."
    return SoftstairError(f"{name} {problem}{stop}", field=name)


def wrong(name: str, value: Any, allowed: str, options: Collection[str] = ()) -> SoftstairError:
    """Return the error that a parameter must be something else, with the options that are like it.

    >>> print(wrong("noise", "unifrom", "the name of a family", ("uniform", "normal")))
    noise must be the name of a family, but 'unifrom' was given; did you mean 'uniform'?
    """
    problem = f"must be {allowed}, but {shortened(value)} was given{ending(value, options)}"
    return SoftstairError(f"{name} {problem}", field=name)


def shortened(value: object, limit: int = 80) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def suggestion(word: object, names: Collection[str], most: int = 3) -> str:
    """Return a question with at most so many names that are like a word; empty if none is.

    >>> suggestion("konv1", ["conv1", "bn1", "fc"])
    "did you mean 'conv1'?"
    """
    close = difflib.get_close_matches(str(word), names, most)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def ending(word: object, names: Collection[str]) -> str:
    """Return the end of a message about a word: a full stop, or a question with similar names."""
    question = suggestion(word, names)
    return f"; {question}" if question else "."


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    if low is not None:
        return f" of at least {_plain(low)}"
    return f" of at most {_plain(high)}" if high is not None else ""


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def json_fields(data: Any, required: Set[str], known: Set[str]) -> Mapping[str, Any]:
    """Return the fields of ``to_json``, from its data or its text."""
    try:
        fields = json.loads(data) if isinstance(data, str) else data
    except json.JSONDecodeError as error:
        raise invalid("data", f"must be JSON, but the text is not: {error}") from None
    if isinstance(fields, Mapping) and required <= set(fields) <= known:
        return fields
    names = f"{' and '.join(sorted(required))} and nothing but {', '.join(sorted(known))}"
    raise invalid("data", f"must hold {names}, but {shortened(fields)} was given")
