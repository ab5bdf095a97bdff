"""The goals of speed on a GPU, beside what `python -m benchmarks.speed` measured there.

    python -m benchmarks.speed --device cuda --json figures.json
    python -m benchmarks.goals figures.json

Prints a line a goal; exits with 1 if one is missed, or was not measured. Parts that were measured
by several commands may be given as several files.
"""

import json
import sys
from itertools import product
from typing import Any

from benchmarks.sentence import tell

RATIOS = {"expectation": 1.25, "mode": 1.6, "random": 1.5, "hard": 1.6}
"""Least images/s of a step with each forward mode, as multiples of the float twin's."""


def goals(figures: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(what, at least, measured) for each; memory is given as the twin's over ours."""
    found: list[tuple[str, float, float | None]] = []
    rows = (figures.get("step") or {}).get("rows", ())
    steps = {row["name"]: row for row in rows}
    if not rows or "compiled" not in rows[0]["treatment"]:
        steps = {}  # a twin that was not compiled is not as fast as can be
    for forward, ratio in RATIOS.items():
        row = steps.get(forward, {})
        found.append((f"step, {forward}: images/s over the float twin's", ratio, row.get("ratio")))
        memory = row.get("memory_ratio")
        found.append(
            (f"step, {forward}: the twin's peak memory over its", 4 / 3, memory and 1 / memory)
        )
    images = (figures.get("partition") or {}).get("images_per_second")
    share = images / rows[0]["images_per_second"] if images and steps else None
    found.append(("partition, 500 epochs: images/s over the float twin's", 2.3, share))
    operators = figures.get("operator") or []
    kinds = sorted({(row["dtype"], row["stair"]) for row in operators}) or [("any", "any")]
    for way, (dtype, stair) in product(("forward", "backward"), kinds):
        mine = [row for row in operators if (row["dtype"], row["stair"]) == (dtype, stair)]
        least = min((row[f"{way}_share"] for row in mine), default=None)
        found.append((f"operator, {dtype}, {stair}, {way}: least share of a copy", 0.8, least))
    return found


def _read(name: str) -> dict[str, Any]:
    with open(name, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError:
            found = None
    if not isinstance(found, dict):
        raise ValueError(
            "figures must be a file that python -m benchmarks.speed --json wrote, but "
            f"{name!r} was given."
        )
    return found


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    figures: dict[str, Any] = {}
    for name in sys.argv[1:]:
        figures |= _read(name)
    lines = goals(figures)
    for what, least, measured in lines:
        shown = "not measured" if measured is None else f"{measured:.2f}"
        verdict = "met" if measured is not None and measured >= least else "MISSED"
        print(f"{what:58} at least {least:.2f}  {shown:>12}  {verdict}")
    return int(any(measured is None or measured < least for _, least, measured in lines))


if __name__ == "__main__":
    tell(main)
