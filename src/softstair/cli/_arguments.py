"""Flags from a frozen dataclass, by tyro; its boxes of complaints become one sentence."""

import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

from softstair.train.options import Options, describe

__all__ = ["given", "parse"]

CommandT = TypeVar("CommandT")

LEGIBLE = 20
"""So many flags can be named in one sentence."""
KINDS = {int: "a whole number", float: "a number", bool: "True or False"}

_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.struct_rule
def _options(
    kind: tyro.constructors.StructTypeInfo,
) -> tyro.constructors.StructConstructorSpec | None:
    """The flags of a group of options, which has its help texts with its fields."""
    if not (isinstance(kind.type, type) and issubclass(kind.type, Options)):
        return None
    hints = get_type_hints(kind.type)
    default = kind.default if isinstance(kind.default, Options) else kind.type()
    flags = [
        tyro.constructors.StructFieldSpec(
            name=name, type=hints[name], default=getattr(default, name), helptext=option.help
        )
        for name, option in describe(kind.type).items()
    ]
    return tyro.constructors.StructConstructorSpec(instantiate=kind.type, fields=tuple(flags))


def parse(
    command: type[CommandT], words: Sequence[str], prog: str, default: CommandT | None = None
) -> CommandT:
    """The command that the words describe; a ValueError of one sentence where they do not.

    ``default`` has what the words leave out; None: the fields' own defaults. ``--help`` prints and
    raises SystemExit(0), as tyro does.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _REGISTRY:
            if default is None:
                return tyro.cli(command, prog=prog, args=list(words))
            return tyro.cli(command, prog=prog, args=list(words), default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
    names = [name for name in _kinds(command) if name not in _positional(command)]
    flags = ["--" + name.replace("_", "-") for name in names]
    sentence = _sentence(_unboxed(complaint.getvalue()), list(words), command, flags)
    raise ValueError(f"{sentence}: see {prog} --help.")


def _unboxed(text: str) -> str:
    """The complaint alone: what stands between the title of tyro's box and its first rule.

    tyro draws ╭─ title ─╮ where the terminal can show it, else the title over a line of dashes.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip().strip("│").strip() for line in text.splitlines()]
    framed = any(line.startswith("╭") for line in lines)
    inside = [line for line in lines if not line.startswith(("╭", "╰"))]
    blocks: list[list[str]] = [[]]
    for line in inside:
        if len(line) > 9 and set(line) <= {"─", "-"}:
            blocks.append([])
        else:
            blocks[-1].append(line)
    complaint = blocks[0 if framed or len(blocks) == 1 else 1]
    return " ".join(" ".join(complaint).split()).rstrip(".")


def _sentence(text: str, words: list[str], command: type[Any], flags: list[str]) -> str:
    if found := re.match(r"Unrecognized (?:options|arguments)[^:]*: (.+)", text):
        word = found.group(1).split(", ")[0].split(" ")[0]
        if len(flags) > LEGIBLE:
            return _nearest(word, flags)
        after = "".join(f"after {name}, " for name in _positional(command).values())
        return f"{after}the flags are {', '.join(flags)}, but {word!r} was given"
    if found := re.match(r"invalid choice '(.*)' for argument '([^']+)'.*?\((.*)\)", text):
        word, flag, allowed = found.groups()
        choices = ", ".join(_in_order(re.findall(r"'([^']*)'", allowed), _long(flag), command))
        return f"{_long(flag)} must be one of {choices}, but {word!r} was given"
    if found := re.match(r"Missing value for argument '([^']+)'", text):
        return f"{_long(found.group(1))} needs {_kind(found.group(1), command)}, but none was given"
    if found := re.match(r"Error parsing [^-]\S*: (.+)", text):
        # What the dataclass itself refuses, in its own words.
        return found.group(1)
    if found := re.match(r"Error parsing (\S+): ", text):
        flag = _long(found.group(1))
        word = given(flag, words) or ""
        return f"{flag} must be {_kind(flag, command)}, but {word!r} was given"
    return text or "the flags could not be read"


def _nearest(word: str, flags: list[str]) -> str:
    """The flags that may have been meant, by their spelling or by their initials."""
    initials = lambda flag: "--" + "".join(part[0] for part in flag.strip("-").split("-"))
    meant = [flag for flag in flags if initials(flag) == word]
    meant = meant or difflib.get_close_matches(word.replace("_", "-"), flags, n=2, cutoff=0.6)
    hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
    return f"unknown flag {word!r}{hint}"


def _long(flag: str) -> str:
    return flag.split("/")[-1].strip()


def _kinds(command: type[Any]) -> dict[str, Any]:
    """The annotation of every flag by its name, those of dataclasses within the command too."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(command).items():
        inner = is_dataclass(kind) and isinstance(kind, type)
        kinds |= _kinds(kind) if inner else {name: kind}
    return kinds


def _positional(command: type[Any]) -> dict[str, str]:
    """Fields that are no flags but words of their own, and what a reader calls them."""
    found = {}
    for name, kind in get_type_hints(command, include_extras=True).items():
        marks = getattr(kind, "__metadata__", ())
        if tyro.conf.Positional in marks:
            called = [one.metavar for one in marks if getattr(one, "metavar", None)]
            found[name] = called[0].rstrip(".") if called else name.upper()
    return found


def _in_order(choices: list[str], flag: str, command: type[Any]) -> list[str]:
    """The choices of a flag in the order in which its annotation has them, where it has."""
    kind = _kinds(command).get(flag.removeprefix("--").replace("-", "_"))
    order = [one for inner in get_args(kind) for one in get_args(inner) or (inner,)]
    return sorted(choices, key=lambda one: order.index(one) if one in order else -1)


def _kind(flag: str, command: type[Any]) -> str:
    """What a flag takes, in words."""
    kind = _kinds(command).get(_long(flag).removeprefix("--").replace("-", "_"))
    alternatives = getattr(kind, "__args__", (kind,))
    named = [KINDS[one] for one in alternatives if one in KINDS]
    return named[0] if named else "a value"


def given(flag: str, words: Sequence[str]) -> str | None:
    """What the words give for a flag, the last time they name it; None if they do not."""
    found = None
    for word, after in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else after
    return found
