"""``softstair sensitivity``: what each layer of a trained network alone costs at fewer bits."""

import json
from dataclasses import dataclass
from pathlib import Path

from softstair._files import write
from softstair.cli._args import argument, flag
from softstair.cli._progress import Progress
from softstair.cli._table import print_line, print_table
from softstair.experiments import figures, panels
from softstair.train.sensitivity import WIDTHS, layer_sensitivity

PICTURE = "sensitivity.svg"
DARKEST = 10.0
"""Cells that lose at least so many points have the darkest colour of the picture."""


@dataclass(frozen=True)
class Command:
    """Measure what each layer alone costs at fewer bits, all others as trained, without training.

    The table has the points of accuracy that are lost and the loss that is added, on the validation
    fold (of a run with --fold all, on training examples). The same is written to RUN, as
    sensitivity.json and as a picture, sensitivity.svg.

    With --size, bits are proposed for each layer, as `softstair train --bits` takes them. Costs are
    measured one layer at a time, so the proposal is then measured as a whole.

    Exit code 0: measured; 2: an error.
    """

    trained: Path = argument("RUN", "Run directory, of a float or a quantised network.")
    widths: str = flag(",".join(WIDTHS), "Bits to measure; int4/float: of weights alone.")
    size: int | None = flag(None, "Propose bits with at most so many bytes of weights.")
    limit: int | None = flag(2000, "Use at most N examples (None: all).")
    model: str | None = flag(None, "package.module:function of your own model.")
    data: str | None = flag(None, "package.module:function of your own data.")
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def run(self) -> int:
        widths = self.widths.split(",")
        with Progress("sensitivity") as progress:
            show = lambda done, total: progress.count("measuring", done, total)
            given = (self.trained, widths, self.size, self.limit, self.data_dir, show)
            trained, *costs = layer_sensitivity(*given, model=self.model, data=self.data)
        text = json.dumps([cost._asdict() for cost in (trained, *costs)], indent=1)
        write(self.trained / "sensitivity.json", text)
        proposal = costs.pop() if self.size is not None else None
        rows = [costs[start : start + len(widths)] for start in range(0, len(costs), len(widths))]
        lost = lambda cost: 100 * (trained.accuracy - cost.accuracy)
        added = lambda cost: round(cost.loss - trained.loss, 3) + 0.0  # -0.0 becomes 0.0
        cell = lambda cost: f"{lost(cost):.2f} {added(cost):+.3f}"
        cells = [(row[0].name, *map(cell, row)) for row in rows]
        print_table("points of accuracy lost, and loss added", ("layer",), widths, cells)
        self._draw([row[0].name for row in rows], widths, [list(map(lost, row)) for row in rows])
        for cost in (trained, *([proposal] if proposal else [])):
            title = "as trained" if cost is trained else f'--bits "{cost.bits}"'
            scores = f"accuracy {cost.accuracy:.2%} of {cost.examples:,} examples"
            print_line(f"{title}: {scores}, loss {cost.loss:.3f}, {cost.bytes:,} bytes of weights")
        if proposal is None:
            print_line("--size BYTES proposes bits for each layer")
        print_line(f"picture: {self.trained / PICTURE}")
        return 0

    def _draw(self, names: list[str], widths: list[str], lost: list[list[float]]) -> None:
        figure = panels.blank(max(5.5, 3 + 0.7 * len(widths)), 1 + 0.3 * len(names))
        axes = figure.subplots()
        axes.imshow(lost, cmap="Reds", vmin=0, vmax=DARKEST, aspect="auto")
        for y, points in enumerate(lost):
            for x, value in enumerate(points):
                colour = "white" if value > DARKEST / 2 else panels.INK
                text = f"{round(value, 1) + 0.0:.1f}"
                axes.text(x, y, text, ha="center", va="center", color=colour)
        axes.set_xticks(range(len(widths)), widths)
        axes.set_yticks(range(len(names)), names)
        panels.title(figure, "points of accuracy lost by one layer at fewer bits")
        write(self.trained / PICTURE, figures.rendered(figure))
