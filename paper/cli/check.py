"""``python -m paper check``: what the theory says about one schedule."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from paper.theory import HYPOTHESES, Distances, Examination, Verdict, examine
from paper.theory.examine import draw
from paper.theory.on_run import distances_on_run, trained_recipe
from softstair import Schedule, Stair, __version__, noise
from softstair._check import integer
from softstair._errors import SoftstairError
from softstair._files import output_file
from softstair.cli._args import flag
from softstair.cli._output import Console, table
from softstair.convert.options import StairName, name_of, parse_layers, stair_named, stairs_of
from softstair.schedule import Interval, Power
from softstair.train.recipe import fields_with

MARKS = {
    "holds": "[green]✓[/]",
    "fails": "[red]✗[/]",
    "exact": "[cyan]=[/]",
    "open": "[yellow]?[/]",
}
REPAIRED = "[yellow](✗)[/]"


@dataclass(frozen=True)
class Command:
    """Check whether a schedule anneals its layers in order, and what Theorem 2 says about it.

    Reports each hypothesis of Theorem 2, the order in which the layers anneal, Proposition 1, and
    the distance between soft and hard features of random networks. The defaults are the paper's
    settings for CIFAR-10.

    Exit code 0: every layer is always at least as annealed as the layers after it; 1: it is not;
    2: an error.
    """

    noise: Literal["uniform", "triangular", "normal", "logistic"] = flag("uniform", "Noise family.")
    interval: Interval = flag("partition", "When each layer anneals.")
    power: Power = flag("homogeneous", "How fast each layer anneals within its interval.")
    layers: int = flag(7, "Number of quantised layers, from 1 to 200.")
    period: float = flag(50.0, "Epochs per layer.")
    anneal_from: float = flag(0.0, "Epoch at which annealing begins.")
    static_mean: bool = flag(True, "Keep the mean constant instead of decaying it to 0.")
    static_std: bool = flag(False, "Keep the std constant instead of decaying it to 0.")
    mean0: float | None = flag(
        None, "Initial mean in quanta (default: 0 with a static mean, otherwise -0.5)."
    )
    std0: float | None = flag(
        None,
        "Initial std in quanta (default: 95% of the noise, or all of it if it is bounded, lies "
        "within half a quantum).",
    )
    stair: StairName = flag(
        "ternary", "Stair of Proposition 1; the thresholds of intN and uintN are midpoints."
    )
    quantum: float = flag(1.0, "Quantum of the stair.")
    seed: int = flag(0, "Seed of the random networks.")
    out: Path | None = flag(None, "Draw a picture to this file (.png, .pdf or .svg).")
    json: Path | None = flag(None, "Write the report to this file, as JSON.")
    run_directory: Path | None = flag(
        None,
        "Run directory of softstair train: take the schedule from its recipe unless flags are "
        "given, and measure the distances on its trained network too.",
        name="run",
    )
    trust_code: bool = flag(False, "Allow the run in --run to call your own model and data code.")
    data_dir: Path = flag(Path("data"), "Folder with the data sets, for --run.")

    def __post_init__(self) -> None:
        integer("layers", self.layers, 1, 200)
        integer("seed", self.seed, 0, 2**63 - 1)
        self.schedule()
        self.target()

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "Command":
        """Return the settings of the run that is named, if there is one."""
        if (run := given.get("run_directory")) is None:
            return cls()
        recipe, layers = trained_recipe(run)
        names = ("noise", *fields_with("schedule"))
        schedule = recipe.schedule(layers)
        values = {name: recipe[name] for name in names}
        values |= {"period": schedule.period, "anneal_from": schedule.start}
        stair: Any = recipe.network.stair("features")
        if recipe.network.bits is not None:
            stair = stairs_of(parse_layers(recipe.network.bits))[1].get("*")
        if stair is not None:
            values |= {"stair": name_of(stair), "quantum": stair.quantum}
        return cls(layers=layers, **values)

    def schedule(self) -> Schedule:
        """Return the schedule that the flags describe."""
        std0 = noise.get(self.noise).std_within(0.5) if self.std0 is None else self.std0
        names = ("layers", "period", "interval", "power", "static_mean", "static_std", "mean0")
        values = {name: getattr(self, name) for name in names}
        return Schedule(std0=std0, start=self.anneal_from, **values)

    def target(self) -> Stair:
        """Return the stair that the flags describe."""
        return stair_named(self.stair, self.quantum)

    def run(self) -> int:
        if self.out is not None and self.out == self.json:
            raise SoftstairError(f"`out` and `json` must differ, but both are {str(self.out)!r}.")
        with ExitStack() as files:
            reserve = lambda path, *rest: path and files.enter_context(output_file(path, *rest))
            picture = reserve(self.out, "out", (".png", ".pdf", ".svg"))
            text = reserve(self.json, "json")
            report = examine(self.schedule(), self.noise, self.target(), self.seed)
            on_run = None
            if self.run_directory is not None:
                on_run = distances_on_run(
                    self.run_directory, self.schedule(), self.data_dir, self.trust_code
                )
            show(report, on_run)
            if picture is not None:
                draw(report, picture)
            if text is not None:
                data = {"softstair": __version__, "seed": self.seed, **report.to_json()}
                data["distances_on_run"] = on_run and asdict(on_run)
                text.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
        return 0 if report.synchronisation.holds else 1


def show(report: Examination, on_run: Distances | None = None) -> None:
    """Print the report, and the distances on the network of a run if there are some."""
    console = Console(markup=True)
    for part in (_heading, _theorem, _reasons, _synchronisation, _proposition, _distances):
        part(report, console)
    if on_run is not None:
        _on_run(on_run, console)


def _heading(report: Examination, console: Console) -> None:
    schedule = report.schedule
    mean = "static" if schedule.static_mean else "dynamic"
    std = "static" if schedule.static_std else "dynamic"
    console.print(
        f"[bold]{report.noise.name}[/] noise, [bold]{schedule.interval}[/], "
        f"[bold]{schedule.power}[/], {schedule.layers} layers, period {schedule.period:g}"
        f"{f' from {schedule.start:g} on' if schedule.start else ''}\n"
        f"{mean} mean from {schedule.first_mean:.4g}, {std} std from {schedule.std0:.4g} (quanta)\n"
    )


def _theorem(report: Examination, console: Console) -> None:
    title = "Theorem 2: the eight hypotheses, layer by layer"
    columns = [
        name.replace("regparam ", "reg-\nparam\n").replace("convergence ", "conv.\n")
        for name in HYPOTHESES
    ]
    rows = []
    for layer, group in groupby(report.verdicts, key=lambda verdict: verdict.layer):
        verdicts = {verdict.name: verdict for verdict in group}
        marks = [_mark(verdicts[name]) if name in verdicts else "–" for name in HYPOTHESES]
        rows.append((layer, *marks, _rate(verdicts.values())))
    shown = table(title, ["layer", *columns, "rate\nr_ℓ"], (), rows, boxed=False)
    for column in shown.columns[1:-1]:
        column.justify = "center"
    console.print(shown)
    console.print(
        " ✓ holds   ✗ fails, for every rate   (✗) fails as printed, harmlessly   – does not apply\n"
        " = not needed: the layer, or its input, equals its target   λ = (T − t)/T → 0",
        style="dim",
    )
    console.print(f"\n[bold]{report.conclusion.text}[/]\n")


def _mark(verdict: Verdict) -> str:
    return REPAIRED if verdict.holds == "fails" and verdict.repair else MARKS[verdict.holds]


def _rate(verdicts: Iterable[Verdict]) -> str:
    """Return the layer's rate if it satisfies each hypothesis about convergence."""
    convergence = [verdict for verdict in verdicts if verdict.name.startswith("convergence")]
    if not all(verdict.serves for verdict in convergence):
        return "none"
    return next((verdict.rate for verdict in convergence if verdict.rate != "any"), "any")


def _reasons(report: Examination, console: Console) -> None:
    rows = []
    for name in HYPOTHESES:
        layers: dict[tuple[str, str, str], list[int]] = {}
        for verdict in report.verdicts:
            if verdict.name == name:
                reason = verdict.reason + (f"; {verdict.repair}" if verdict.repair else "")
                layers.setdefault((_mark(verdict), verdict.rate, reason), []).append(verdict.layer)
        for index, ((mark, rate, reason), numbers) in enumerate(layers.items()):
            rows.append(("" if index else name, _span(numbers), mark, rate, reason))
    shown = table("Why", ["hypothesis", "layers", "", "rate", "reason"], (), rows, boxed=False)
    shown.columns[0].no_wrap = True
    console.print(shown)


def _span(layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    if last - first + 1 != len(layers):
        return ", ".join(map(str, layers))
    return str(first) if first == last else f"{first}–{last}"


def _synchronisation(report: Examination, console: Console) -> None:
    order = report.synchronisation
    colour = "green" if order.holds else "red"
    verdict = {"strictly": "yes, strictly", "weakly": "yes, but only weakly", "broken": "no"}
    console.print("[bold]Synchronisation[/]: is every layer always as annealed as those after it?")
    console.print(f" [bold {colour}]{verdict[order.order]}[/]: {order.reason}.")
    for pair in order.breaks[1:]:
        console.print(
            f" Layer {pair.later} is ahead of layer {pair.earlier} "
            f"from t = {pair.start:g} to t = {pair.end:g}."
        )
    console.print()


def _proposition(report: Examination, console: Console) -> None:
    if not report.propositions:
        console.print("[bold]Proposition 1[/]: the noise has no density, its std being 0.\n")
        return
    title = f"Proposition 1: E[σ_ν] against μ ∗ σ, and its derivative ({len(report.stair)} levels)"
    names = ("mean", "std", "max error", "max derivative", "‖σ‖_∞·|Dμ|(ℝ)", "tight bound")
    rows = (
        (
            f"{part.mean:.4g}",
            f"{part.std:.4g}",
            f"{part.error:.1e}",
            *(f"{n:.5g}" for n in (part.largest_derivative, part.bound, part.tight_bound)),
        )
        for part in report.propositions
    )
    console.print(table(title, (), names, rows, boxed=False))
    console.print(" tight bound: ½(q_{K−1} − q₀)·|Dμ|(ℝ), in absolute units\n", style="dim")


def _distances(report: Examination, console: Console) -> None:
    real, ties = report.distances, report.distances_at_ties
    last = len(real.times) - 1
    # The first times are evenly spaced; the last two are just before the end and the end.
    chosen = [0, (last - 1) // 4, (last - 1) // 2, 3 * (last - 1) // 4, last - 1]
    times = [f"t = {real.times[index]:g}" for index in chosen[:-1]]
    title = f"Distance ‖x_λ̂,ℓ − x_ℓ‖ on random Heaviside networks (at most {real.largest[0]:.3g})"
    rows = []
    for layer, values in enumerate(real.values):
        cells = [values[index] for index in chosen] + [ties.values[layer][last - 1]]
        rows.append((layer, *map(_number, cells)))
    names = ("layer", *times, "t ↑ T", "t ↑ T, at ties")
    console.print(table(title, (), names, rows, boxed=False))
    console.print(
        " t ↑ T: just before the end, λ = 10⁻⁶; at ties: integer weights, which put\n"
        " pre-activations on the threshold exactly, where convergence iii and iv matter",
        style="dim",
    )


def _on_run(distances: Distances, console: Console) -> None:
    title = "Distance ‖x_λ̂,ℓ − x_ℓ‖ on the trained network, in % of the largest possible distance"
    times = [f"t = {time:g}" for time in distances.times]
    rows = (
        (layer, *(f"{100 * value / (largest or 1.0):.3g}" for value in values))
        for layer, (values, largest) in enumerate(
            zip(distances.values, distances.largest, strict=True)
        )
    )
    console.print(table(title, (), ["layer", *times], rows, boxed=False))


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
