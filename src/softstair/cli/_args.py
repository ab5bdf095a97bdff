"""Command-line flags from the fields of a frozen dataclass, read by argparse.

A field that is a recipe has a flag for each of its fields, by their flat names.
:func:`parse` reads the words first and asks for the defaults afterwards: those of ``train`` depend
on what was given (``--preset``, ``--resume``).
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from softstair import _check
from softstair._errors import SoftstairError

CommandT = TypeVar("CommandT")

FLAGS = {"drop": "lr-drop-epoch"}
"""Flags that are longer than their fields."""
PARAMETER = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`\s]+))?`")
"""A parameter in a message of the library: `name` or `name=value`."""
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)
TYPES = {int: "an integer", float: "a number", Path: "a path", str: "a name"}


def flag(default: Any, help: str, *, name: str | None = None) -> Any:
    """Declare a field of a command that is a flag, whose annotation says what is accepted.

    The flag is the name of the field, or ``name``.
    """
    return field(default=default, metadata={"help": help, "name": name})


def argument(metavar: str, help: str, default: Any = MISSING) -> Any:
    """Declare a field of a command that is a word; a tuple takes several. Required by default."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


def spelling(name: str) -> str:
    """Return the flag of a field."""
    dashed = name.replace("_", "-")
    return f"--{FLAGS.get(dashed, dashed)}"


def flags_in(message: str) -> str:
    """Return a message of the library with its parameters, in backquotes, as flags.

    >>> flags_in("choose another `data_dir`, or pass `device=cpu`")
    'choose another --data-dir, or pass --device cpu'
    """
    return PARAMETER.sub(
        lambda match: spelling(match[1]) + (f" {match[2]}" if match[2] else ""), message
    )


def words_of(command: Any, *names: str) -> list[str]:
    """Return the flags of a command, or only those of some fields, that differ from the default."""
    words = []
    for each in fields(command):
        value = getattr(command, each.name)
        if value != each.default and (not names or each.name in names):
            words += [spelling(each.name), *([] if value is True else [str(value)])]
    return words


def parse(command: type[CommandT], words: Sequence[str], prog: str) -> CommandT:
    """Return the command that the words describe.

    Flags that are not given have the values in ``command.defaults(given)``, if there is such a
    function, and otherwise the defaults of the fields. ``--help`` prints them and exits.
    """
    options = list(_options(command))
    parser = _parser(options, prog)
    namespace, unknown = parser.parse_known_intermixed_args([*map(_dashed, words)])
    texts = vars(namespace)
    wants_help = texts.pop("help", False)
    if not wants_help:
        _check_words(options, texts, unknown, prog)
    given = {
        option.path: option.value_of(texts[option.key]) for option in options if option.key in texts
    }
    defaults: Any = getattr(command, "defaults", lambda given: None)
    base = defaults({path[-1]: value for path, value in given.items()})
    if wants_help:
        print(_parser(options, prog, inspect.getdoc(command), base).format_help(), end="")
        raise SystemExit(0)
    if base is None:
        return command(**{path[0]: value for path, value in given.items()})
    return _replaced(base, given)


@dataclass(frozen=True)
class _Option:
    """A flag of a command, or a word if it has a metavar; ``path`` leads to its field."""

    path: tuple[str, ...]
    kinds: Sequence[Any]  # the alternatives of its annotation, each word of a Literal by itself
    default: Any
    help: str
    spelling: str
    metavar: str | None

    @property
    def key(self) -> str:
        """Its name in argparse's namespace."""
        return ".".join(self.path)

    @property
    def is_list(self) -> bool:
        return get_origin(self.kinds[0]) is tuple

    @property
    def choices(self) -> list[str]:
        return [kind for kind in self.kinds if isinstance(kind, str)]

    def value_of(self, text: Any) -> Any:
        """Return the value that a text, a list of texts or a Boolean flag stands for."""
        if isinstance(text, bool):
            return text
        if isinstance(text, list):
            return tuple(map(get_args(self.kinds[0])[0], text))
        if text in self.choices:
            return text
        if text == "None" and NoneType in self.kinds:
            return None
        for kind in TYPES:
            if kind in self.kinds:
                try:
                    return kind(text)
                except ValueError:
                    continue
        names = self.choices + [TYPES[kind] for kind in self.kinds if kind in TYPES]
        allowed = f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
        end = _check.ending(text, self.choices)
        raise SoftstairError(
            f"{self.spelling} must be {allowed}, but {_check.shortened(text)} was given{end}"
        )


def _alternatives(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, UnionType, Literal):
        return [each for inner in get_args(kind) for each in _alternatives(inner)]
    return [kind]


def _options(command: type[Any], path: tuple[str, ...] = ()) -> Iterator[_Option]:
    kinds = get_type_hints(command)
    for each in fields(command):
        kind, option = kinds[each.name], each.metadata.get("option")  # of a recipe, or None
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _options(kind, path or (each.name,))
            continue
        name, about, metavar = (
            each.name,
            each.metadata.get("help", ""),
            each.metadata.get("metavar"),
        )
        if option is not None:
            name, about = option.flat or name, option.help
        shown = metavar or spelling(each.metadata.get("name") or name)
        yield _Option((*path, name), _alternatives(kind), each.default, about, shown, metavar)


def _value(command: Any, name: str, *flat: str) -> Any:
    value = getattr(command, name)
    return value[flat[0]] if flat else value


def _dashed(word: str) -> str:
    """Return a word with dashes in its flag: the names of fields have underscores."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _check_words(
    options: Sequence[_Option], texts: Mapping[str, Any], unknown: list[str], prog: str
) -> None:
    """Raise an error if a word is not a flag, or if a required word is missing."""
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        if not word.startswith("-"):
            raise SoftstairError(
                f"unexpected argument {_check.shortened(word)}; see {prog} --help."
            )
        word = word.partition("=")[0]
        flags = [option.spelling for option in options if not option.metavar]
        initials = lambda flag: "--" + "".join(part[0] for part in flag[2:].split("-"))
        meant = [flag for flag in flags if initials(flag) == word]
        hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        hint = hint or _check.suggestion(word, flags, most=1) or f"see {prog} --help."
        raise SoftstairError(f"unknown flag {_check.shortened(word)}; {hint}")
    for option in options:
        required = option.metavar and option.default is MISSING
        if required and option.path[0] not in texts:
            raise SoftstairError(f"{option.metavar} is missing; see {prog} --help.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and exiting."""
        raise SoftstairError(f"{message.removeprefix('argument ')}; see {self.prog} --help.")


def _parser(
    options: Sequence[_Option], prog: str, description: str | None = None, base: Any = None
) -> _Parser:
    """Return a parser that takes every value as text; its help shows the defaults in ``base``."""
    words = [option.metavar + "..." * option.is_list for option in options if option.metavar]
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *words, "[FLAGS]"]),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser._negative_number_matcher = NEGATIVE  # argparse takes -1e-3 for a flag
    parser.add_argument("-h", "--help", action="store_true", help="Show this help.")
    for option in options:
        text = option.help.replace("%", "%%")
        if option.metavar:
            nargs = "*" if option.is_list else "?"
            parser.add_argument(option.key, metavar=option.metavar, nargs=nargs, help=text)
            continue
        default = option.default if base is None else _value(base, *option.path)
        text += "" if default in (None, ()) else f" (default: {default})"
        parser.add_argument(option.spelling, dest=option.key, help=text, **_shape(option))
    return parser


def _shape(option: _Option) -> dict[str, Any]:
    """Return how argparse reads and shows the value of a flag."""
    if option.kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if option.is_list:
        return {"nargs": "+", "action": "extend", "metavar": "VALUE"}
    types = [kind.__name__.upper() for kind in option.kinds if kind in TYPES]
    choices = [f"{{{','.join(option.choices)}}}"] if option.choices else []
    return {"metavar": "|".join(choices + types)}


def _replaced(command: Any, given: Mapping[tuple[str, ...], Any]) -> Any:
    """Return a command with other values of some fields, and of fields of its recipe."""
    changes = {path[0]: value for path, value in given.items() if len(path) == 1}
    for name in {path[0] for path in given if len(path) > 1}:
        values = {path[1]: value for path, value in given.items() if path[0] == name}
        changes[name] = getattr(command, name).replace(**values)
    return replace(command, **changes)
