"""Recipes as rows of a table, whose cells are text."""

from collections.abc import Mapping
from typing import Any

from softstair.train import Recipe
from softstair.train.recipe import OPTIONS


def to_text(name: str, value: Any) -> str:
    """Return the value of a field as text: true, 9.0, None, ``fc1,fc2`` or none."""
    if OPTIONS[name].kind is tuple:
        return ",".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_text(name: str, cell: Any) -> Any:
    """Return the value of a field in a cell, which is text or has the type of the field."""
    known, value = OPTIONS[name], cell
    try:
        if known.is_optional and cell == "None":
            value = None
        elif known.kind is bool and isinstance(cell, str):
            value = {"true": True, "false": False}[cell.lower()]
        elif known.kind is tuple and isinstance(cell, str):
            value = () if cell == "none" else tuple(cell.split(","))
        elif known.kind in (int, float):
            number = known.kind(cell)
            value = cell if isinstance(cell, float) and number != cell else number
    except (LookupError, TypeError, ValueError, OverflowError):
        pass  # the check names the field
    return known.check(value)


def cell_of(recipe: Recipe, name: str) -> str:
    """Return a field of a recipe as text, as tables and conditions have it.

    Interval and power of noise that is not annealed have no effect, and are ``none``.

    >>> cell_of(Recipe.from_flat(static_std=True), "interval"), cell_of(Recipe(), "static_std")
    ('none', 'false')
    """
    if name in ("interval", "power") and not recipe.is_annealed:
        return "none"
    return to_text(name, recipe[name])


def to_row(recipe: Recipe) -> dict[str, str]:
    """Return every field of a recipe as text, for a row of a table."""
    return {name: cell_of(recipe, name) for name in OPTIONS}


def from_row(row: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a row of a table, whose other columns are ignored.

    A field without a column, or with an empty cell, has its default. Cells are text or have the
    type of their field.

    >>> from_row({"epochs": "50", "static_std": "TRUE", "interval": "none"}).noise.interval
    'partition'
    """
    cells = {name: row[name] for name in OPTIONS if row.get(name) not in ("", None)}
    annealing = {name: cells.pop(name) for name in ("interval", "power") if name in cells}
    recipe = Recipe.from_flat(**{name: from_text(name, cell) for name, cell in cells.items()})
    if not recipe.is_annealed:
        annealing = {name: cell for name, cell in annealing.items() if cell != "none"}
    return recipe.replace(**annealing)
