"""A design of the user's own, from a TOML file.

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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from softstair.experiments.design import FIELDS, Configuration, Design, refuse_unknown, value_of
from softstair.train.presets import preset
from softstair.train.recipe import Recipe

__all__ = ["changed", "parse", "read"]

KEYS = ("name", "preset", "folds", "recipe", "vary", "without")
LARGEST = 1 << 20
MOST = 10_000
"""Configurations of one design; more are a mistake."""


def read(path: Path) -> Design:
    """The design that a file describes; what is wrong with it is said in one sentence."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)  # a pipe has no length to ask for
        if len(data) > LARGEST:
            raise ValueError("it is too long for a design")
        return parse(tomllib.loads(data.decode("utf-8")), path.stem)
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
    found = _configurations(base, _table(table, "vary"), without)
    return Design(name, tuple(found), tuple(folds))


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A recipe with other values in these fields; epochs stretch period and drop, unless these are
    given too."""
    for name in fields:
        refuse_unknown(name)
        if name == "fold":
            raise ValueError("folds are chosen by folds = [0, 1] or --folds, but fold was given")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if "epochs" in given:
        recipe = recipe.rescaled(given["epochs"])
    return replace(recipe, **given)


def _configurations(
    base: Recipe, vary: Mapping[str, Any], without: list[Mapping[str, Any]]
) -> Iterator[Configuration]:
    for field, values in vary.items():
        refuse_unknown(field)
        if field in ("fold", "folds"):
            raise ValueError(f"folds are given by folds = [0, 1], but {field} was given in vary")
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{field} must vary over a list of values, but {str(values)[:80]!r} was given"
            )
    if math.prod(map(len, vary.values())) > MOST:
        raise ValueError(f"a design must have at most {MOST:,} configurations, but has more")
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    recipes = [replace(changed(base, one), fold=0) for one in chosen]
    for field, value in ((field, value) for one in without for field, value in one.items()):
        there = [getattr(recipe, field) for recipe in recipes]
        if _plain(value) not in there:
            raise ValueError(
                f"{field} in without must be a value that a configuration has, but "
                f"{str(value)[:80]!r} was given"
            )
    seen: dict[str, Recipe] = {}
    for recipe in recipes:
        if any(_has_all(recipe, one) for one in without):
            continue
        words = [f"{field}={value_of(recipe, field)}" for field in FIELDS if field in vary]
        name = _file_name(",".join(words)) or "all"
        # Where nothing moves, interval and power do not matter: the first of them stands for all.
        if name in seen and _is_same(recipe, seen[name]):
            continue
        seen[name] = recipe
        yield Configuration(name, recipe)


def _has_all(recipe: Recipe, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(recipe, field) == _plain(value) for field, value in wanted.items())


def _is_same(one: Recipe, other: Recipe) -> bool:
    differ = one.differences(other)
    return bool(differ) and all(value_of(one, name) == value_of(other, name) for name in differ)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
