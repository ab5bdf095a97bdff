"""Writes the tables of docs/speed.md from results/speed-h200*.json.

python docs/speed.py
"""

import json
from pathlib import Path
from typing import Any

from parts import put

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
NETWORKS = {
    "float compiled": "float, compiled and captured",
    "float": "float, captured",
    "naive": "naive ternary, eager",
}
STAIRS = {
    "heaviside": "heaviside",
    "ternary": "ternary",
    "int4": "INT4, quantum ¼",
    "int4@0.07": "INT4, quantum 0.07",
}
NOISES = ("uniform", "triangular", "normal", "logistic")
FORWARDS = ("expectation", "mode", "random", "hard")
SPEEDS = ("images/s", "speed / float twin", "peak memory / float twin")
GOAL = 0.8

Rows = list[dict[str, Any]]


def steps(rows: Rows) -> str:
    """A row for each network that was trained."""
    heads = ("network", "precision", "ms", *SPEEDS)
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for number, row in enumerate(rows):
        name = NETWORKS.get(row["name"], row["name"]) + ("" if number else " (the float twin)")
        precision = "FP8" if "FP8" in row["treatment"] else "bfloat16"
        cells = [name, precision, f"{1e3 * row['times']['median']:.2f}", *_speeds(row)]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def resnet20(fast: Rows, float8: Rows) -> str:
    """A row for the float twin and each forward mode, as fast has them and with float8."""
    heads = ("network", *SPEEDS, *(f"{head}, FP8" for head in SPEEDS))
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for number, (row, other) in enumerate(zip(fast, float8, strict=True)):
        if row["name"] in FORWARDS or not number:
            cells = [row["name"] if number else "float twin", *_speeds(row), *_speeds(other)]
            table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def _speeds(row: dict[str, Any]) -> list[str]:
    images = f"{row['images_per_second']:,.0f}"
    return [images, f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}"]


def phases(partition: dict[str, Any], twin: dict[str, Any]) -> str:
    """A row for each phase of the schedule, and one for the whole."""
    heads = ("layers annealed", "epochs", "ms per step", "images/s")
    heads += ("speed / static noise", "speed / float twin")
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines = [
        (len(phase["annealed"]), phase["epochs"], f"{1e3 * phase['times']['median']:.2f}",
         partition["batch"] / phase["times"]["median"], phase["speed_up"])
        for phase in partition["phases"]
    ]  # fmt: skip
    whole = (partition["images_per_second"], partition["speed_up"])
    lines.append(("all phases, with captures", partition["epochs"], "", *whole))
    for name, epochs, milliseconds, images, speed in lines:
        ratio = images / twin["images_per_second"]
        cells = f"{epochs} | {milliseconds} | {images:,.0f} | {speed:.2f} | {ratio:.2f}"
        table.append(f"| {name} | {cells} |")
    return "\n".join(table)


def operator(rows: Rows) -> str:
    """A row for each noise: the lowest share of a copy, forward and backward, for each stair."""
    table = [f"| | {' | '.join(STAIRS.values())} |", "|---" * (len(STAIRS) + 1) + "|"]
    for noise in NOISES:
        cells = []
        for stair in STAIRS:
            mine = [row for row in rows if (row["noise"], row["stair"]) == (noise, stair)]
            lowest = [min(row[f"{way}_share"] for row in mine) for way in ("forward", "backward")]
            cells.append(" / ".join(f"{share:.2f}" for share in lowest))
        table.append(f"| {noise} | {' | '.join(cells)} |")
    return "\n".join(table)


def narrowest(rows: Rows) -> str:
    """A sentence: how many reach the goal, and which one is the lowest."""
    least = min(rows, key=lambda row: min(row["forward_share"], row["backward_share"]))
    share = min(least["forward_share"], least["backward_share"])
    reached = sum(min(row["forward_share"], row["backward_share"]) >= GOAL for row in rows)
    combination = f"{least['noise']} noise, {least['how']}, {STAIRS[least['stair']]}"
    return (
        f"{reached} of {len(rows)} combinations reach the goal. The lowest is {combination}, in "
        f"{least['dtype']}: {share:.3f}."
    )


def rewritten(page: str) -> str:
    """The page with its tables as they are now."""
    measured, rows = _read("speed-h200"), _read("speed-h200-operator")["operator"]
    networks = measured["step"]["rows"]
    fast, float8 = (
        _read(f"speed-h200-resnet20{precision}")["step"]["rows"] for precision in ("", "-float8")
    )
    parts = {
        "steps": steps(networks),
        "ResNet-20": resnet20(fast, float8),
        "phases": phases(measured["partition"], networks[0]),
        "operator": operator(rows),
        "narrowest": narrowest(rows),
    }
    return put(parts, page)


def _read(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


if __name__ == "__main__":
    path = DOCS / "speed.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
