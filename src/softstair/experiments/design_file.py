"""Read a design from a TOML file; docs/experiments.md shows one."""

import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from softstair._check import shortened
from softstair._errors import SoftstairError
from softstair.experiments.design import DESIGNS, Configuration, Design, check_field
from softstair.train.options import describe
from softstair.train.recipe import FIELDS, Recipe, preset

KEYS: dict[str, type] = {
    "name": str, "preset": str, "folds": list, "recipe": dict, "vary": dict, "without": list
}  # fmt: skip
LARGEST_FILE = 1 << 20
MOST_CONFIGURATIONS = 10_000


def read(path: Path | str) -> Design:
    """Read a design from a TOML file.

    Raises:
        SoftstairError: If the file cannot be read, or describes no design.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)  # a pipe has no length to ask for
        if len(data) > LARGEST_FILE:
            raise SoftstairError("it is too long for a design.")
        return parse(tomllib.loads(data.decode("utf-8")), path.stem)
    except FileNotFoundError:
        raise SoftstairError(
            f"a design must be one of {', '.join(DESIGNS)}, or a TOML file, but {str(path)!r} was "
            "given, and there is no such file.",
            field="design",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = " ".join(str(reason).split()).rstrip(".")[:300]
        raise SoftstairError(
            f"the design in {str(path)!r} cannot be followed ({reason}): see docs/experiments.md.",
            field="design",
        ) from None


def parse(table: Mapping[str, Any], name: str = "design") -> Design:
    """Return the design that the table of a TOML file describes.

    >>> design = parse({"vary": {"forward": ["mode", "random"], "seed": [0, 1]}, "folds": [0]})
    >>> [entry.name for entry in design.configurations]
    ['forward=mode,seed=0', 'forward=mode,seed=1', 'forward=random,seed=0', 'forward=random,seed=1']
    """
    for key, value in table.items():
        if key not in KEYS:
            raise SoftstairError(f"a key must be one of {', '.join(KEYS)}, but {key!r} was given.")
        if not isinstance(value, KEYS[key]):
            kind = KEYS[key].__name__
            raise SoftstairError(f"{key} must be a {kind}, but {shortened(value)} was given.")
    name = table.get("name", name)
    if not re.fullmatch(r"[\w][\w.-]{0,63}", name):
        raise SoftstairError(
            f"name must be of letters, digits, '.', '-' and '_', but {shortened(name)} was given: "
            "give name = in the file."
        )
    base = changed(preset(table.get("preset", "digits")), table.get("recipe", {}))
    folds = tuple(table.get("folds", range(base.folds)))
    without = table.get("without", [])
    if not all(isinstance(entry, Mapping) and entry for entry in without):
        raise SoftstairError("without must be tables, each with a field.")
    configurations, left_out = _configurations(base, table.get("vary", {}), without)
    return Design(name, tuple(configurations), folds, "folds" in table, left_out)


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values in these fields, as TOML has them.

    Epochs scale period and drop, unless these are given too.
    """
    for name in fields:
        check_field(name)
    values = {name: _from_toml(name, value) for name, value in fields.items()}
    if "epochs" in values:
        recipe = recipe.rescaled(values["epochs"])
    return replace(recipe, **values)


def _configurations(
    base: Recipe, vary: Mapping[str, Any], without: Sequence[Mapping[str, Any]]
) -> tuple[list[Configuration], int]:
    """Every combination but for those without, and how many these are."""
    for field, values in vary.items():
        check_field(field)
        if field == "folds":
            raise SoftstairError("folds are given by folds = [0, 1], not in vary.")
        if not isinstance(values, list) or not values:
            raise SoftstairError(
                f"{field} must vary over a list of values, but {shortened(values)} was given."
            )
    if math.prod(map(len, vary.values())) > MOST_CONFIGURATIONS:
        raise SoftstairError(f"a design must have at most {MOST_CONFIGURATIONS:,} configurations.")
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    recipes = [replace(changed(base, values), fold=0) for values in chosen]
    for field, values in vary.items():
        if len({_from_toml(field, value) for value in values}) < len(values):
            raise SoftstairError(f"{field} must vary over different values, but one is repeated.")
    unwanted = [_alternatives(entry, recipes) for entry in without]
    kept: dict[str, Recipe] = {}
    configurations: list[Configuration] = []
    left_out: set[str] = set()
    for recipe in recipes:
        words = ",".join(f"{field}={recipe.cell(field)}" for field in FIELDS if field in vary)
        name = re.sub(r"[^\w.,=+-]", "_", words).encode()[:200].decode(errors="ignore") or "all"
        if any(
            all(getattr(recipe, field) in values for field, values in entry.items())
            for entry in unwanted
        ):
            left_out.add(name)
        # Where nothing moves, interval and power do not matter: the first of them stands for all.
        elif name not in kept or recipe.to_row() != kept[name].to_row():
            kept[name] = recipe
            configurations.append(Configuration(name, recipe))
    return configurations, len(left_out - set(kept))


def _alternatives(entry: Mapping[str, Any], recipes: Sequence[Recipe]) -> dict[str, list[Any]]:
    """The values that an entry of without has for each field: one, or a list of them."""
    wanted = {}
    for field, value in entry.items():
        check_field(field)
        # The value of skip is a list itself.
        is_list = isinstance(value, list)
        several = is_list and (field != "skip" or any(isinstance(entry, list) for entry in value))
        values = [_from_toml(field, entry) for entry in (value if several else [value])]
        there = [getattr(recipe, field) for recipe in recipes]
        absent = [entry for entry in values if entry not in there]
        if absent or not values:
            raise SoftstairError(
                f"{field} in without must be a value that a configuration has, or a list of such, "
                f"but {shortened(absent[0] if absent else values)} was given."
            )
        wanted[field] = values
    return wanted


def _from_toml(field: str, value: Any) -> Any:
    """A value of TOML as a recipe has it; TOML has no word for None."""
    if value == "None" and describe(Recipe)[field].is_optional:
        return None
    return tuple(value) if isinstance(value, list) else value
