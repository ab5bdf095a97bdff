"""What came of a training: a table, and the course of accuracy and noise in a few characters."""

import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from softstair.cli._console import Console
from softstair.train.records import metrics_of

__all__ = ["conclusion", "show"]

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a curve: with its name and its range it fits into 80 columns."""


def show(runs: list[Path], summaries: list[dict[str, Any]], picture: Path) -> None:
    """Prints the table of some folds, their mean and spread, and where everything lies."""
    console = Console(markup=False)
    console.print(_table(summaries))
    console.print(_courses(runs))
    console.print(conclusion(summaries), soft_wrap=True)
    console.print(f"picture: {picture}", soft_wrap=True)
    more = f" to {runs[-1].name}" if len(runs) > 1 else ""
    console.print(f"run{'s' if more else ''}: {runs[0]}{more}", soft_wrap=True)


def _table(summaries: list[dict[str, Any]]) -> Table:
    table = Table(title="accuracy of the network without noise")
    for name in ("fold", "validation", "best epoch's", "test", "examples/s", "seconds"):
        table.add_column(name, justify="right")
    for one in summaries:
        test = one["test_accuracy"]
        table.add_row(
            str(one["config"]["recipe"]["fold"]),
            f"{one['valid_accuracy']:.2%}",
            f"{one['best_valid_accuracy']:.2%}",
            "none" if test is None else f"{test:.2%}",
            f"{one['images_per_second']:,.0f}",
            f"{one['seconds']:.1f}",
        )
    return table


def conclusion(summaries: list[dict[str, Any]]) -> str:
    """What came of it, in one line."""
    recipe = summaries[0]["config"]["recipe"]
    kind = "float" if recipe["weights"] == recipe["features"] == "float" else recipe["weights"]
    epochs = "1 epoch" if recipe["epochs"] == 1 else f"{recipe['epochs']} epochs"
    network = f"{kind} network"
    if (recipe["weights"] == "float") != (recipe["features"] == "float"):
        network = f"network of {recipe['weights']} weights and {recipe['features']} features"
    what = f"{network} on {summaries[0]['config']['data']['name']}, {epochs}"
    scores = [one["valid_accuracy"] for one in summaries]
    if len(scores) == 1:
        return f"{what}: {scores[0]:.2%} validation accuracy"
    mean, spread = statistics.mean(scores), statistics.stdev(scores)
    of = f"mean and std of {len(scores)} folds"
    return f"{what}: {mean:.2%} ± {spread:.2%} validation accuracy ({of})"


def _courses(runs: list[Path]) -> str:
    lines = metrics_of(runs[-1])
    scores = [line["valid_accuracy"] for line in lines]
    span = f"{min(scores):.1%} to {max(scores):.1%}"
    courses = [f"validation accuracy  {_spark(scores, min(scores))}  {span}"]
    for layer in range(len(lines[0].get("noise", ()))):
        std = [line["noise"][layer][1] for line in lines]
        courses.append(f"noise of layer {layer:<5} {_spark(std)}  {max(std):.2g} to {min(std):.2g}")
    return "\n".join(courses)


def _spark(values: list[float], bottom: float = 0.0) -> str:
    """A curve from the bottom to its highest value, in at most so many characters; · is 0."""
    count = min(len(values), WIDTH)
    chosen = [values[i * len(values) // count] for i in range(count)]
    height = max(values) - bottom or 1.0
    bar = lambda value: BARS[min(7, int(8 * (value - bottom) / height))]
    return "".join(bar(value) if value > 0 else "·" for value in chosen)
