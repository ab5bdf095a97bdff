"""Fields that declare their own help text, range and role, and check themselves."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from softstair import _check
from softstair._errors import SoftstairError

__all__ = ["Fact", "Option", "Options", "describe", "names_with", "option"]

ValueT = TypeVar("ValueT")

Fact = Literal[
    "changes_result", "architecture", "paper_axis", "in_tables", "schedule", "scales_with_epochs"
]


@dataclass(frozen=True)
class Option:
    """What is known of a field besides its type and default.

    Attributes:
        help: What the field does, in plain words.
        low: Smallest allowed number.
        high: Largest allowed number.
        changes_result: Another value gives another trained network.
        architecture: The field decides which network is built.
        paper_axis: A degree of freedom of the paper's design of experiments.
        in_tables: Every table of results has a column for it, and the report a filter.
        schedule: A parameter of the noise schedule.
        scales_with_epochs: A time in epochs, which :meth:`Recipe.rescaled` stretches.
        older_value: The value in files written before the field existed; ``...`` if all have it.
    """

    help: str
    low: Any = None
    high: Any = None
    changes_result: bool = True
    architecture: bool = False
    paper_axis: bool = False
    in_tables: bool = False
    schedule: bool = False
    scales_with_epochs: bool = False
    older_value: Any = ...


def option(default: ValueT, help: str, **facts: Any) -> ValueT:
    """Declare a field of an options group: its default, help text and the facts of `Option`."""
    field: Any = dataclasses.field(default=default, metadata={"option": Option(help, **facts)})
    return cast(ValueT, field)


@dataclass(frozen=True)
class Options:
    """A group of options. Checks the type and range of every field when it is built.

    Raises:
        SoftstairError: If a value is not allowed; ``field`` names it.
    """

    def __post_init__(self) -> None:
        for name, known in describe(type(self)).items():
            value = known.checked(getattr(self, name))
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Raise SoftstairError if fields of the group contradict each other."""


@dataclass(frozen=True)
class Description:
    """A field of an options group: its name, its type, and its `Option`."""

    name: str
    option: Option
    kind: type
    choices: tuple[str, ...]
    is_optional: bool

    def checked(self, value: Any) -> Any:
        """Return the value as the field stores it, or raise SoftstairError."""
        name, low, high = self.name, self.option.low, self.option.high
        if value is None and self.is_optional:
            return None
        if self.choices:
            return _check.choice(name, value, self.choices)
        if self.kind is bool:
            return _check.boolean(name, value)
        if self.kind is int:
            return _check.integer(name, value, low, high)
        if self.kind is float:
            return _check.number(name, value, low, high)
        if self.kind is tuple:
            names = tuple(value) if isinstance(value, tuple | list) else (None,)
            allowed = "names of modules"
        else:
            names, allowed = (value or None,), "a name"
        if all(isinstance(entry, str) for entry in names):
            return names if self.kind is tuple else value
        raise SoftstairError(
            f"{name} must be {allowed}, but {_check.shortened(value)} was given.", field=name
        )

    def to_text(self, value: Any) -> str:
        """Return the value as a cell of a table: true, 9.0, None, ``fc1,fc2`` or none."""
        if self.kind is tuple:
            return ",".join(value) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)

    def from_text(self, cell: Any) -> Any:
        """Return the value that a cell means; the cell may be text or have its own type already.

        Raises:
            SoftstairError: If the field cannot have that value.
        """
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
            pass  # the check below names the field
        return self.checked(value)


def names_with(fact: Fact, options: type[Options]) -> tuple[str, ...]:
    """Return the names of the fields of a group of which a fact of `Option` is true, in order."""
    return tuple(name for name, field in describe(options).items() if getattr(field.option, fact))


_DESCRIPTIONS: dict[type[Options], dict[str, Description]] = {}


def describe(options: type[Options]) -> Mapping[str, Description]:
    """Return the description of every field by name, in order."""
    if options not in _DESCRIPTIONS:
        annotations = get_type_hints(options)
        _DESCRIPTIONS[options] = {
            field.name: _described(field, annotations[field.name]) for field in fields(options)
        }
    return _DESCRIPTIONS[options]


def _described(field: "dataclasses.Field[Any]", annotation: Any) -> Description:
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    alternatives = get_args(annotation) if is_union else (annotation,)
    choices = [
        name
        for alternative in alternatives
        if get_origin(alternative) is Literal
        for name in get_args(alternative)
    ]
    plain = [get_origin(kind) or kind for kind in alternatives if kind is not NoneType]
    return Description(
        field.name,
        field.metadata["option"],
        str if choices else plain[0],
        tuple(choices),
        NoneType in alternatives,
    )
