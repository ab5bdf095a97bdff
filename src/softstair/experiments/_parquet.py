"""A table as Parquet, each column of the kind of its values: whole numbers, numbers, truths, words.

What a setting that may have no value has not, is null there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softstair._errors import import_extra
from softstair._files import replacing

__all__ = ["read", "write"]

LARGEST = 1 << 63
WORDS = {int: "a whole number of 64 bits", float: "a number", bool: "true or false"}


def write(table: Sequence[Mapping[str, Any]], kinds: Mapping[str, type], path: Path) -> None:
    """Writes rows that have the same columns, of these kinds."""
    arrow, parquet = import_extra("pyarrow", "tables"), import_extra("pyarrow.parquet", "tables")
    types = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_(), str: arrow.string()}
    columns = {
        name: arrow.array(
            [_value(name, row[name], kinds[name]) for row in table], types[kinds[name]]
        )
        for name in table[0]
    }
    with replacing(path) as partial:
        parquet.write_table(arrow.table(columns), partial)


def read(path: Path, optional: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of the columns, and the rows. Where an optional setting is null, it is the word
    None; but not in a column of words, as older versions wrote it: there null is an empty cell."""
    table = import_extra("pyarrow.parquet", "tables").read_table(path)
    names = table.column_names
    empty = [
        name
        for name in names
        if name in optional and "string" not in str(table.schema.field(name).type)
    ]
    rows = table.to_pylist()
    for row in rows:
        row |= {name: "None" for name in empty if row[name] is None}
    return names, rows


def _value(name: str, value: str | float | None, kind: type) -> Any:
    """A cell as its column has it, from the number or the words for it."""
    if value is None or (kind is not str and value == "None"):
        return None
    try:
        found = {"true": True, "false": False}[str(value)] if kind is bool else kind(value)
        if kind is int and not -LARGEST <= found < LARGEST:
            raise ValueError("it is too large")
        return found
    except (LookupError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be {WORDS[kind]} in a table, but {str(value)[:80]!r} was given."
        ) from None
