"""How the fields of a recipe are declared, with help, range and role, and how they are checked."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from softstair import _check

ValueT = TypeVar("ValueT")

COUNT, POSITIVE = (0, 10**6), (1e-30, 1e30)
RATE, SHARE, TIME = (0.0, 1e6), (0.0, 1.0), (0.0, 1e9)
"""Ranges of numbers; times are in epochs."""

Fact = Literal[
    "architecture",  # decides which network is built
    "schedule",  # is a parameter of the noise schedule
    "scales_with_epochs",  # is a time in epochs, which Recipe.rescaled scales
    "changes_result",  # another value gives another trained network
    "own_code",  # may name a function of the user's own
]


@dataclass(frozen=True)
class Option:
    """What is known of a field: its declaration, and from ``kind`` on what its annotation says."""

    help: str
    facts: frozenset[str]
    within: tuple[Any, Any] = (None, None)  # the least and the greatest number
    flat: str = ""  # its name on the command line and in files
    kind: type = str  # bool, int, float, str or tuple
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # which a number may be instead
    is_optional: bool = False
    is_open: bool = False  # whether it may be a text of another form

    def check(self, value: Any) -> Any:
        """Return the value as the field stores it, or raise SoftstairError."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        if self.choices and not (self.is_open and isinstance(value, str) and ":" in value):
            return _check.choice(self.flat, value, self.choices)
        if self.is_open and isinstance(value, str) and not self.choices:
            return value  # its group checks the form
        if self.kind is bool:
            return _check.boolean(self.flat, value)
        if self.words and self.kind is int and type(value) is not int:
            raise _check.wrong(self.flat, value, f"{', '.join(self.words)} or an integer")
        if self.kind is int:
            return _check.integer(self.flat, value, *self.within)
        if self.kind is float:
            return _check.number(self.flat, value, *self.within)
        if self.kind is tuple and isinstance(value, tuple | list):
            value = tuple(value)
        texts, allowed = (value, "names of modules") if self.kind is tuple else ((value,), "a name")
        if isinstance(texts, tuple) and all(isinstance(text, str) and text for text in texts):
            return value
        raise _check.wrong(self.flat, value, allowed)


def option(
    default: ValueT, help: str, *facts: Fact, changes_result: bool = True, **limits: Any
) -> ValueT:
    """Declare a field of a group: its default, help text, facts, and attributes of `Option`.

    ``flat`` is its name outside the group, where that is not its own.
    """
    known = Option(help, frozenset((*facts, *["changes_result"] * changes_result)), **limits)
    return dataclasses.field(default=default, metadata={"option": known})


_DESCRIPTIONS: dict[type, dict[str, Option]] = {}


def describe(group: type) -> Mapping[str, Option]:
    """Return the options of a group by the names of its fields, in order."""
    if group not in _DESCRIPTIONS:
        types = get_type_hints(group)
        described = {each.name: _describe(each, types[each.name]) for each in fields(group)}
        _DESCRIPTIONS[group] = described
    return _DESCRIPTIONS[group]


def check_values(group: Any) -> None:
    """Check and normalise the values of a group that is being built.

    Raises:
        SoftstairError: If a value is not allowed.
    """
    for name, known in describe(type(group)).items():
        object.__setattr__(group, name, known.check(getattr(group, name)))


def _describe(field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    alternatives = get_args(annotation) if is_union else (annotation,)
    kinds = [get_origin(kind) or kind for kind in alternatives if kind is not NoneType]
    names = tuple(name for kind in alternatives for name in get_args(kind) if Literal in kinds)
    are_choices = kinds[0] is Literal
    return replace(
        field.metadata["option"],
        flat=field.metadata["option"].flat or field.name,
        kind=str if are_choices else kinds[0],
        choices=names if are_choices else (),
        words=() if are_choices else names,
        is_optional=NoneType in alternatives,
        is_open=str in kinds[1:],
    )
