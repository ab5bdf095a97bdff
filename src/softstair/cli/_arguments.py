"""Flags from a frozen dataclass, by tyro; its boxes of complaints become one sentence."""

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import tyro

__all__ = ["parse"]

CommandT = TypeVar("CommandT")

KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def parse(command: type[CommandT], words: Sequence[str], prog: str) -> CommandT:
    """The command that the words describe; a ValueError of one sentence where they do not.

    ``--help`` prints and raises SystemExit(0), as tyro does.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(command, prog=prog, args=list(words))
    except SystemExit as stop:
        if not stop.code:
            raise
    flags = ["--" + field.name.replace("_", "-") for field in fields(command)]  # type: ignore[arg-type]
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
        given = found.group(1).split(", ")[0].split(" ")[0]
        return f"the flags are {', '.join(flags)}, but {given!r} was given"
    if found := re.match(r"invalid choice '(.*)' for argument '([^']+)'.*?\((.*)\)", text):
        given, flag, allowed = found.groups()
        choices = ", ".join(re.findall(r"'([^']*)'", allowed))
        return f"{_long(flag)} must be one of {choices}, but {given!r} was given"
    if found := re.match(r"Missing value for argument '([^']+)'", text):
        return f"{_long(found.group(1))} needs {_kind(found.group(1), command)}, but none was given"
    if found := re.match(r"Error parsing [^-]\S*: (.+)", text):
        # What the dataclass itself refuses, in its own words.
        return found.group(1)
    if found := re.match(r"Error parsing (\S+): ", text):
        flag = _long(found.group(1))
        given = _given(flag, words)
        return f"{flag} must be {_kind(flag, command)}, but {given!r} was given"
    return text or "the flags could not be read"


def _long(flag: str) -> str:
    return flag.split("/")[-1].strip()


def _kind(flag: str, command: type[Any]) -> str:
    """What a flag takes, in words."""
    name = _long(flag).removeprefix("--").replace("-", "_")
    kind = next((field.type for field in fields(command) if field.name == name), None)
    alternatives = getattr(kind, "__args__", (kind,))
    named = [KINDS[one] for one in alternatives if one in KINDS]
    return named[0] if named else "a value"


def _given(flag: str, words: list[str]) -> str:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.replace("_", "-") == flag:
            return after
        if word.replace("_", "-").startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""
