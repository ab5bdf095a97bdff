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
        if path.stat().st_size > LARGEST:
            raise ValueError("it is too long for a design")
        return parse(tomllib.loads(path.read_text(encoding="utf-8")), path.stem)
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
            f"name must be of letters, digits, '.', '-' and '_', but {name[:80]!r} was given"
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
    return Design(name, tuple(itertools.islice(found, MOST + 1)), tuple(folds))


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A recipe with other values in these fields; epochs stretch period and drop, unless these are
    given too."""
    for name in fields:
        refuse_unknown(name)
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
        if field == "fold":
            raise ValueError("folds are given by folds = [0, 1], but fold was given in vary")
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{field} must vary over a list of values, but {str(values)[:80]!r} was given"
            )
    for number, values in enumerate(itertools.product(*vary.values())):
        if number >= MOST:
            raise ValueError(f"a design must have at most {MOST:,} configurations, but has more")
        chosen = dict(zip(vary, values, strict=True))
        recipe = replace(changed(base, chosen), fold=0)
        if any(_has_all(recipe, one) for one in without):
            continue
        words = [f"{field}={value_of(recipe, field)}" for field in FIELDS if field in chosen]
        yield Configuration(_file_name(",".join(words)) or "all", recipe)


def _has_all(recipe: Recipe, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(recipe, field) == value for field, value in wanted.items())


def _file_name(words: str) -> str:
    """The words as the name of a directory; what is no letter there becomes an underscore."""
    return re.sub(r"[^\w.,=+-]", "_", words)[:200]


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _typed(table, key, dict, {})


def _typed(table: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind):
        words = {str: "a text", list: "a list", dict: "a table"}[kind]
        raise ValueError(f"{key} must be {words}, but {str(value)[:80]!r} was given")
    return value
