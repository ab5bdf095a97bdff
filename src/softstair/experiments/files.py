"""A design of the user's own, from a TOML file.

The word None is the value of a field that may have none, such as drop; in without, a list of values
means each of them.

::

    name = "quanta"             # what the grid is called; else the file's name
    preset = "digits"           # what the recipes begin with; digits unless given
    folds = [0, 1]              # all of the recipe's folds unless given

    [recipe]                    # fields of the recipe that all configurations share
    epochs = 20                 # stretches period and drop, as the flag does

    [vary]                      # every combination of these
    forward = ["mode", "random"]
    interval = ["partition", "same_end"]

    [[without]]                 # but for those that have all of these
    forward = "random"
    interval = "same_end"
"""

import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from softstair.experiments.design import (
    DESIGNS,
    FIELDS,
    OPTIONAL,
    Configuration,
    Design,
    refuse_unknown,
    value_of,
)
from softstair.train.recipe import Recipe, preset

__all__ = ["changed", "parse", "read"]

KEYS = ("name", "preset", "folds", "recipe", "vary", "without")
LARGEST = 1 << 20
MOST = 10_000
"""Configurations of one design; more are a mistake."""


def read(path: Path | str) -> Design:
    """The design that a file describes; what is wrong with it is said in one sentence."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)  # a pipe has no length to ask for
        if len(data) > LARGEST:
            raise ValueError("it is too long for a design")
        return parse(tomllib.loads(data.decode("utf-8")), path.stem)
    except FileNotFoundError:
        raise ValueError(
            f"a design must be one of {', '.join(DESIGNS)}, or a TOML file, but {str(path)!r} was "
            "given, and there is no such file."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = " ".join(str(reason).split()).rstrip(".")[:300]
        raise ValueError(
            f"the design in {str(path)!r} cannot be followed ({reason}): see docs/experiments.md."
        ) from None


def parse(table: Mapping[str, Any], name: str = "design") -> Design:
    """The design that a table describes.

    >>> design = parse({"vary": {"forward": ["mode", "random"], "seed": [0, 1]}, "folds": [0]})
    >>> [one.name for one in design.configurations]
    ['forward=mode,seed=0', 'forward=mode,seed=1', 'forward=random,seed=0', 'forward=random,seed=1']
    """
    for key in table:
        if key not in KEYS:
            raise ValueError(f"a key must be one of {', '.join(KEYS)}, but {key!r} was given")
    name = _typed(table, "name", str, name)
    if not re.fullmatch(r"[\w][\w.-]{0,63}", name):
        raise ValueError(
            f"name must be of letters, digits, '.', '-' and '_', but {name[:80]!r} was given: give "
            "name = in the file"
        )
    base = changed(preset(_typed(table, "preset", str, "digits")), _table(table, "recipe"))
    folds = _typed(table, "folds", list, list(range(base.folds)))
    without = _typed(table, "without", list, [])
    for one in without:
        if not isinstance(one, Mapping) or not one:
            raise ValueError("without must be tables, each with a field, but another was given")
        for field in one:
            refuse_unknown(field)
    found, left_out = _configurations(base, _table(table, "vary"), without)
    return Design(name, tuple(found), tuple(folds), "folds" in table, left_out)


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A recipe with other values in these fields; epochs stretch period and drop, unless these are
    given too."""
    for name in fields:
        refuse_unknown(name)
    given = {name: _plain(name, value) for name, value in fields.items()}
    if "epochs" in given:
        recipe = recipe.rescaled(given["epochs"])
    return replace(recipe, **given)


def _configurations(
    base: Recipe, vary: Mapping[str, Any], without: list[Mapping[str, Any]]
) -> tuple[list[Configuration], int]:
    """Every combination but for those without, and how many these are."""
    for field, values in vary.items():
        refuse_unknown(field)
        if field == "folds":
            raise ValueError("folds are given by folds = [0, 1], but folds was given in vary")
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{field} must vary over a list of values, but {str(values)[:80]!r} was given"
            )
    if math.prod(map(len, vary.values())) > MOST:
        raise ValueError(f"a design must have at most {MOST:,} configurations, but has more")
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    recipes = [replace(changed(base, one), fold=0) for one in chosen]
    for field, values in vary.items():
        _refuse_twice(field, values)
    unwanted = [{field: _values(field, value) for field, value in one.items()} for one in without]
    for field, values in (item for one in unwanted for item in one.items()):
        _refuse_absent(field, values, recipes)
    found: list[Configuration] = []
    seen: dict[str, Recipe] = {}
    left_out: set[str] = set()
    for recipe in recipes:
        words = [f"{field}={value_of(recipe, field)}" for field in FIELDS if field in vary]
        name = _file_name(",".join(words)) or "all"
        if any(_has_all(recipe, one) for one in unwanted):
            left_out.add(name)
        # Where nothing moves, interval and power do not matter: the first of them stands for all.
        elif name not in seen or not _is_same(recipe, seen[name]):
            seen[name] = recipe
            found.append(Configuration(name, recipe))
    return found, len(left_out - set(seen))


def _refuse_twice(field: str, values: list[Any]) -> None:
    seen = set()
    for value in (_plain(field, one) for one in values):
        if value in seen:
            raise ValueError(
                f"{field} must vary over different values, but {str(value)[:80]!r} is listed twice"
            )
        seen.add(value)


def _refuse_absent(field: str, values: list[Any], recipes: list[Recipe]) -> None:
    """Refuses what without says of a field where no recipe has it."""
    there = [getattr(recipe, field) for recipe in recipes]
    absent = [value for value in values if value not in there]
    if absent or not values:
        given = str(absent[0] if absent else values)[:80]
        raise ValueError(
            f"{field} in without must be a value that a configuration has, or a list of such, but "
            f"{given!r} was given"
        )


def _has_all(recipe: Recipe, wanted: Mapping[str, list[Any]]) -> bool:
    return all(getattr(recipe, field) in values for field, values in wanted.items())


def _is_same(one: Recipe, other: Recipe) -> bool:
    differ = one.differences(other)
    return bool(differ) and all(value_of(one, name) == value_of(other, name) for name in differ)


def _plain(field: str, value: Any) -> Any:
    """A value of TOML as a recipe has it; for None it has no word of its own."""
    if value == "None" and field in OPTIONAL:
        return None
    return tuple(value) if isinstance(value, list) else value


def _values(field: str, value: Any) -> list[Any]:
    """What without says of a field: one value, or a list of them; that of skip is a list itself."""
    several = isinstance(value, list) and (field != "skip" or any(type(x) is list for x in value))
    return [_plain(field, one) for one in value] if several else [_plain(field, value)]


def _file_name(words: str) -> str:
    """The words as the name of a directory; what is no letter there becomes an underscore."""
    name = re.sub(r"[^\w.,=+-]", "_", words).encode()[:200]
    return name.decode(errors="ignore")


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _typed(table, key, dict, {})


def _typed(table: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind):
        words = {str: "a text", list: "a list", dict: "a table"}[kind]
        raise ValueError(f"{key} must be {words}, but {str(value)[:80]!r} was given")
    return value
