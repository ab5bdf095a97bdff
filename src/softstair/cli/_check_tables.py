"""The report of ``softstair check`` as tables."""

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from softstair.cli._console import Console
from softstair.theory import HYPOTHESES, Distances, Examination, Verdict

__all__ = ["show"]

MARKS = {
    "holds": "[green]✓[/]",
    "fails": "[red]✗[/]",
    "exact": "[cyan]=[/]",
    "open": "[yellow]?[/]",
}
REPAIRED = "[yellow](✗)[/]"


def show(report: Examination, on_run: Distances | None = None) -> None:
    """Print the report, and the distances on the network of a run if there are some."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if has_width else 100)
    for part in (_heading, _theorem, _reasons, _synchronisation, _proposition, _distances):
        part(report, console)
    if on_run is not None:
        _on_run(on_run, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table


def _heading(report: Examination, console: Console) -> None:
    schedule = report.schedule
    mean = "static" if schedule.static_mean else "dynamic"
    std = "static" if schedule.static_std else "dynamic"
    console.print(
        f"[bold]{report.noise.name}[/] noise, [bold]{schedule.interval}[/], "
        f"[bold]{schedule.power}[/], {schedule.layers} layers, period {schedule.period:g}\n"
        f"{mean} mean from {schedule.first_mean:.4g}, {std} std from {schedule.std0:.4g} (quanta)\n"
    )


def _theorem(report: Examination, console: Console) -> None:
    table = _table("Theorem 2: the eight hypotheses, layer by layer", "layer")
    for name in HYPOTHESES:
        broken = name.replace("regparam ", "reg-\nparam\n").replace("convergence ", "conv.\n")
        table.add_column(broken, justify="center", overflow="fold")
    table.add_column("rate\nr_ℓ", overflow="fold")
    for layer, group in groupby(report.verdicts, key=lambda verdict: verdict.layer):
        found = {verdict.name: verdict for verdict in group}
        marks = [_mark(found[name]) if name in found else "–" for name in HYPOTHESES]
        table.add_row(str(layer), *marks, _rate(found.values()))
    console.print(table)
    console.print(
        " ✓ holds   ✗ fails, for every rate   (✗) fails as printed, harmlessly   – not asked\n"
        " = not needed: the layer, or its input, equals its target   λ = (T − t)/T → 0",
        style="dim",
    )
    console.print(f"\n[bold]{report.conclusion.text}[/]\n")


def _mark(verdict: Verdict) -> str:
    return REPAIRED if verdict.holds == "fails" and verdict.repair else MARKS[verdict.holds]


def _rate(verdicts: Iterable[Verdict]) -> str:
    """The layer's rate, where one serves all that is asked of it."""
    asked = [verdict for verdict in verdicts if verdict.name.startswith("convergence")]
    if not all(verdict.serves for verdict in asked):
        return "none"
    return next((verdict.rate for verdict in asked if verdict.rate != "any"), "any")


def _reasons(report: Examination, console: Console) -> None:
    table = _table("Why", "hypothesis", "layers", "", "rate", "reason")
    table.columns[0].no_wrap = True
    for name in HYPOTHESES:
        same: dict[tuple[str, str, str], list[int]] = {}
        for verdict in (one for one in report.verdicts if one.name == name):
            reason = verdict.reason + (f"; {verdict.repair}" if verdict.repair else "")
            same.setdefault((_mark(verdict), verdict.rate, reason), []).append(verdict.layer)
        for index, ((mark, rate, reason), layers) in enumerate(same.items()):
            table.add_row("" if index else name, _span(layers), mark, rate, reason)
    console.print(table)


def _span(layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    if last - first + 1 != len(layers):
        return ", ".join(map(str, layers))
    return str(first) if first == last else f"{first}–{last}"


def _synchronisation(report: Examination, console: Console) -> None:
    found = report.synchronisation
    colour = "green" if found.holds else "red"
    verdict = {"strictly": "yes, strictly", "weakly": "yes, but only weakly", "broken": "no"}
    console.print("[bold]Synchronisation[/]: is every layer always as annealed as those after it?")
    console.print(f" [bold {colour}]{verdict[found.order]}[/]: {found.reason}.")
    for other in sorted(found.breaks, key=lambda one: one.start):
        if other != found.first:
            console.print(
                f" Layer {other.later} is ahead of layer {other.earlier} "
                f"from t = {other.start:g} to t = {other.end:g}."
            )
    console.print()


def _proposition(report: Examination, console: Console) -> None:
    table = _table(
        f"Proposition 1: E[σ_ν] against μ ∗ σ, and its derivative ({len(report.stair)} levels)",
        *("mean", "std", "max error", "max derivative", "‖σ‖_∞·|Dμ|(ℝ)", "tight bound"),
    )
    for column in table.columns:
        column.justify = "right"
    for part in report.propositions:
        bounds = (part.largest_derivative, part.bound, part.tight_bound)
        cells = [f"{number:.5g}" for number in bounds]
        table.add_row(f"{part.mean:.4g}", f"{part.std:.4g}", f"{part.error:.1e}", *cells)
    if report.propositions:
        console.print(table)
        console.print(" tight bound: ½(q_{K−1} − q₀)·|Dμ|(ℝ), in absolute units\n", style="dim")
    else:
        console.print("[bold]Proposition 1[/]: the noise has no density, its std being 0.\n")


def _distances(report: Examination, console: Console) -> None:
    real, ties = report.distances, report.distances_at_ties
    last = len(real.times) - 1
    # The even times are the first ones; the last two are just before the end and the end.
    picks = [0, (last - 1) // 4, (last - 1) // 2, 3 * (last - 1) // 4, last - 1]
    heads = [f"t = {real.times[pick]:g}" for pick in picks[:-1]]
    title = f"Distance ‖x_λ̂,ℓ − x_ℓ‖ on random Heaviside networks (at most {real.largest[0]:.3g})"
    table = _table(title, "layer", *heads, "t ↑ T", "t ↑ T, at ties")
    for column in table.columns:
        column.justify = "right"
    for layer, values in enumerate(real.values):
        shown = [_number(values[pick]) for pick in picks]
        table.add_row(str(layer), *shown, _number(ties.values[layer][last - 1]))
    console.print(table)
    console.print(
        " t ↑ T: just before the end, λ = 10⁻⁶; at ties: integer weights, which put\n"
        " pre-activations on the threshold exactly, where convergence iii and iv matter",
        style="dim",
    )


def _on_run(distances: Distances, console: Console) -> None:
    title = "Distance ‖x_λ̂,ℓ − x_ℓ‖ on the trained network, in % of the largest there can be"
    table = _table(title, "layer", *(f"t = {time:g}" for time in distances.times))
    for column in table.columns:
        column.justify = "right"
    for layer, (values, largest) in enumerate(
        zip(distances.values, distances.largest, strict=True)
    ):
        table.add_row(str(layer), *(f"{100 * value / (largest or 1.0):.3g}" for value in values))
    console.print(table)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
