"""Writes the tables of docs/layers.md from the operator table.

python docs/layers.py
"""

from itertools import groupby
from pathlib import Path

from parts import put

from softstair.convert.ops import OPERATORS, RESHAPES, Effect, Operator
from softstair.deploy.modules import never_decreases

PAGE = Path(__file__).parent / "layers.md"
FORMATS = "C", "ONNX", "QONNX"
HEADS = "layer or function", "`quantise`", "trains", "fused", "freezes", *FORMATS, "remarks"
QUANTISE = {Effect.WEIGHTS: "quantises the weights"}
ACTIVATION_HEADS = "activation", "intN, uintN by name", "other stairs", "a kept one freezes"


def _names(row: Operator) -> list[str]:
    modules = [f"`{module.__name__.strip('_')}`" for module in row.modules]
    is_function = not row.modules or row.effect is Effect.ACTIVATION or row.module_of_call
    if is_function or row.keeps_order or row.name in RESHAPES:
        modules.append(f"`{row.name}()`")
    return modules


def _word(fact: bool) -> str:
    return "yes" if fact else "no"


def _facts(row: Operator) -> tuple[str, ...]:
    """Return the cells after the first."""
    quantise = QUANTISE.get(row.effect, "keeps it")
    if row.effect is Effect.WEIGHTS and row.replacement is None:
        quantise = "quantises the weights by name" if row.grouped else "keeps it in float"
    why = row.why if not row.exports else ""
    remarks = "; ".join(text for text in (why, row.note) if text)
    formats = (_word(row.exports and name not in row.not_in) for name in FORMATS)
    # All that quantise leaves in float trains, too.
    return (quantise, "yes", _word(row.fuses), _word(row.exports), *formats, remarks)


def table() -> str:
    """Return a line for each group of neighbouring rows with the same facts."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    others = [row for row in OPERATORS if row.effect is not Effect.ACTIVATION]
    for facts, rows in groupby(others, _facts):
        names = ", ".join(name for row in rows for name in _names(row))
        lines.append(f"| {names} | {' | '.join(facts)} |")
    return "\n".join(lines)


def activations() -> str:
    """Return a line for the activations with the same facts; their functions have them too."""
    lines = [f"| {' | '.join(ACTIVATION_HEADS)} |", "|---" * len(ACTIVATION_HEADS) + "|"]
    names: dict[tuple[str, ...], list[str]] = {}
    for row in [row for row in OPERATORS if row.effect is Effect.ACTIVATION]:
        (kind,) = row.modules
        kept = "the stair takes its place" if row.name == "relu" else "kept, then a stair"
        other = "float" if row.is_gate else "the stair takes its place"
        facts = (kept, other, "yes" if never_decreases(kind()) else "by a table of 256")
        names.setdefault(facts, []).append(f"`{kind.__name__}`")
    lines += [f"| {', '.join(own)} | {' | '.join(facts)} |" for facts, own in names.items()]
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """The page with its tables as they are now."""
    return put({"table": table(), "activations": activations()}, page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
