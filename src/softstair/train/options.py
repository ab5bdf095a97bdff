"""Fields of dataclasses that declare their help text, range and role, and check themselves."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from softstair import _check
from softstair._errors import SoftstairError

__all__ = ["Fact", "Option", "Options", "describe", "names_with", "option"]

ValueT = TypeVar("ValueT")

Fact = Literal[
    "architecture",  # decides which network is built
    "paper_axis",  # is a degree of freedom of the paper's experiments
    "in_tables",  # every table of results has a column for it, and the report a filter
    "schedule",  # is a parameter of the noise schedule
    "scales_with_epochs",  # is a time in epochs, which Recipe.rescaled scales
    "changes_result",  # another value gives another trained network
]


@dataclass(frozen=True)
class Option:
    """What is known of a field.

    Attributes:
        help: What the field does.
        facts: What is true of it, see `Fact`.
        low, high: Range of a number.
        older_value: Its value in files written before it existed; ``...`` if all files have it.
        name, kind, choices, is_optional: From the field itself: ``kind`` is bool, int, float, str
            or tuple; ``choices`` are those of a Literal; an optional field may be None.
    """

    help: str
    facts: frozenset[str]
    low: Any = None
    high: Any = None
    older_value: Any = ...
    name: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    is_optional: bool = False

    def check(self, value: Any) -> Any:
        """Return the value as the field stores it, or raise SoftstairError."""
        if value is None and self.is_optional:
            return None
        if self.choices:
            return _check.choice(self.name, value, self.choices)
        if self.kind is bool:
            return _check.boolean(self.name, value)
        if self.kind is int:
            return _check.integer(self.name, value, self.low, self.high)
        if self.kind is float:
            return _check.number(self.name, value, self.low, self.high)
        if self.kind is tuple and isinstance(value, tuple | list):
            value = tuple(value)
        texts, allowed = (value, "names of modules") if self.kind is tuple else ((value,), "a name")
        if isinstance(texts, tuple) and all(isinstance(text, str) and text for text in texts):
            return value
        raise SoftstairError(
            f"{self.name} must be {allowed}, but {_check.shortened(value)} was given.",
            field=self.name,
        )

    def to_text(self, value: Any) -> str:
        """Return the value as a cell of a table: true, 9.0, None, ``fc1,fc2`` or none."""
        if self.kind is tuple:
            return ",".join(value) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)

    def from_text(self, cell: Any) -> Any:
        """Return the value of a cell, which is text or has the type of the field."""
        value = cell
        try:
            if self.is_optional and cell == "None":
                value = None
            elif self.kind is bool and isinstance(cell, str):
                value = {"true": True, "false": False}[cell.lower()]
            elif self.kind is tuple and isinstance(cell, str):
                value = () if cell == "none" else tuple(cell.split(","))
            elif self.kind in (int, float):
                number = self.kind(cell)
                value = cell if isinstance(cell, float) and number != cell else number
        except (LookupError, TypeError, ValueError, OverflowError):
            pass  # the check names the field
        return self.check(value)


def option(
    default: ValueT, help: str, *facts: Fact, changes_result: bool = True, **limits: Any
) -> ValueT:
    """Declare a field of a group: its default, help text, facts, and attributes of `Option`."""
    known = frozenset(facts) | ({"changes_result"} if changes_result else set())
    field: Any = dataclasses.field(
        default=default, metadata={"option": Option(help, known, **limits)}
    )
    return cast(ValueT, field)


@dataclass(frozen=True)
class Options:
    """A group of options, whose values are checked when it is built.

    Raises:
        SoftstairError: If a value is not allowed, or if two contradict each other.
    """

    def __post_init__(self) -> None:
        for name, known in describe(type(self)).items():
            object.__setattr__(self, name, known.check(getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        """Raise SoftstairError if fields of the group contradict each other."""


_DESCRIPTIONS: dict[type[Options], dict[str, Option]] = {}


def describe(options: type[Options]) -> Mapping[str, Option]:
    """Return the options of a group by name, in order."""
    if options not in _DESCRIPTIONS:
        annotations = get_type_hints(options)
        _DESCRIPTIONS[options] = {
            field.name: _described(field, annotations[field.name]) for field in fields(options)
        }
    return _DESCRIPTIONS[options]


def names_with(fact: Fact, options: type[Options]) -> tuple[str, ...]:
    """Return the names of the options of a group of which a fact is true, in order."""
    return tuple(name for name, known in describe(options).items() if fact in known.facts)


def _described(field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    alternatives = get_args(annotation) if is_union else (annotation,)
    kinds = [get_origin(kind) or kind for kind in alternatives if kind is not NoneType]
    choices = [name for kind in alternatives for name in get_args(kind) if kinds[0] is Literal]
    return replace(
        field.metadata["option"],
        name=field.name,
        kind=str if choices else kinds[0],
        choices=tuple(choices),
        is_optional=NoneType in alternatives,
    )
