"""``softstair check``: the theorem, the order of the layers, and what happens, for one schedule."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from softstair import __version__, noise
from softstair.cli._arguments import given
from softstair.cli._arguments import parse as parse_flags
from softstair.cli._check_run import measure, trained_recipe
from softstair.cli._files import reserved
from softstair.schedule import Interval, Power, Schedule
from softstair.stair import Stair
from softstair.theory import Distances, Examination, examine
from softstair.train.groups import StairName, stair_named
from softstair.train.recipe import fields_with

__all__ = ["Command", "parse"]


@dataclass(frozen=True)
class Command:
    """Does a schedule anneal its layers in order, and what does the theorem say of it?

    Reports Theorem 2 hypothesis by hypothesis, the order of the layers along the way,
    Proposition 1, and the distance between the soft and the hard features of random networks.
    Exit code 0: every layer is always at least as annealed as those after it; 1: it is not;
    2: an error. The defaults are the paper's CIFAR-10 settings.
    """

    noise: Literal["uniform", "triangular", "normal", "logistic"] = "uniform"
    """Family of noise."""
    interval: Interval = "partition"
    """When each layer anneals."""
    power: Power = "homogeneous"
    """How fast it does, within its interval."""
    layers: int = 7
    """Number of quantised layers, 1 to 200."""
    period: float = 50.0
    """Epochs a layer."""
    static_mean: bool = True
    """Keep the mean where it starts, or let it decay to 0."""
    static_std: bool = False
    """Keep the std where it starts, or let it decay to 0."""
    mean0: float | None = None
    """First mean in quanta; None: 0 if static, else -0.5."""
    std0: float | None = None
    """First std in quanta; None: 95% of the noise (all, if bounded) within half a quantum."""
    stair: StairName = "ternary"
    """Stair for Proposition 1; intN and uintN have thresholds half-way between levels."""
    quantum: float = 1.0
    """The stair's quantum."""
    seed: int = 0
    """Seed of the random networks."""
    out: Path | None = None
    """Draw a picture there (.png, .pdf or .svg)."""
    json: Path | None = None
    """Write the whole report there, as JSON."""
    run_directory: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Run directory of softstair train: its recipe stands for the flags that are not given, and
    the distances are measured on its trained network as well."""
    own_code: bool = False
    """Call the model and data functions of the user's own that --run names, if it does."""
    data_dir: Path = Path("data")
    """Folder with the data sets, for --run."""

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 200:
            raise ValueError(f"--layers must lie between 1 and 200, but {self.layers} was given.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must lie between 0 and 2^63 - 1, but {self.seed} was given.")
        self.schedule()
        self.target()

    def schedule(self) -> Schedule:
        """The schedule that the flags describe."""
        family = noise.get(self.noise)
        return Schedule(
            layers=self.layers,
            period=self.period,
            interval=self.interval,
            power=self.power,
            static_mean=self.static_mean,
            static_std=self.static_std,
            mean0=self.mean0,
            std0=family.std_within(0.5) if self.std0 is None else self.std0,
        )

    def target(self) -> Stair:
        """The stair that the flags describe."""
        return stair_named(self.stair, self.quantum)

    def run(self) -> int:
        from softstair.cli import _check_tables

        if self.out is not None and self.json is not None and self.out == self.json:
            raise ValueError(f"--out and --json must differ, but both name {str(self.out)!r}.")
        with ExitStack() as files:
            picture = files.enter_context(reserved(self.out, "--out", (".png", ".pdf", ".svg")))
            text = files.enter_context(reserved(self.json, "--json"))
            report = examine(self.schedule(), self.noise, self.target(), self.seed)
            on_run = None
            if self.run_directory is not None:
                on_run = measure(self.run_directory, self.data_dir, self.schedule(), self.own_code)
            _check_tables.show(report, on_run)
            if picture is not None:
                from softstair.cli import _check_picture

                _check_picture.draw(report, picture)
            if text is not None:
                text.write_text(
                    json.dumps(self._data(report, on_run), indent=2, allow_nan=False) + "\n"
                )
        return 0 if report.synchronisation.holds else 1

    def _data(self, report: Examination, on_run: Distances | None) -> dict[str, object]:
        first = report.synchronisation.first
        propositions = []
        for part in report.propositions:
            figures = asdict(part)
            moments = {name: figures.pop(name) for name in ("mean", "std")}
            propositions.append({**moments, "found": figures})
        return {
            "softstair": __version__,
            "seed": self.seed,
            "schedule": report.schedule.to_json(),
            "noise": report.noise.name,
            "stair": report.stair.to_json(),
            "verdicts": [asdict(verdict) for verdict in report.verdicts],
            "conclusion": asdict(report.conclusion),
            "synchronised": report.synchronisation.holds,
            "first_break": asdict(first) if first else None,
            "synchronisation": asdict(report.synchronisation),
            "propositions": propositions,
            "distances": asdict(report.distances),
            "distances_at_ties": asdict(report.distances_at_ties),
            "distances_on_run": on_run and asdict(on_run),
        }


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe, on top of the recipe of the run that they name."""
    directory = given("--run", words)
    if not directory:
        return parse_flags(Command, words, prog)
    recipe, layers = trained_recipe(Path(directory))
    names = ("noise", *fields_with("schedule"))
    base = Command(layers=layers, **{name: getattr(recipe, name) for name in names})
    if recipe.features != "float":
        base = replace(base, stair=recipe.features, quantum=recipe.feature_quantum)
    return parse_flags(Command, words, prog, default=base)
