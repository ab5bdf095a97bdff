"""``python -m paper report``: the results of a grid as one HTML page."""

from dataclasses import dataclass
from pathlib import Path

from paper import report
from paper.claims import judged
from paper.figures import figures
from softstair._files import output_file
from softstair.cli._args import argument, flag
from softstair.cli._output import plural


@dataclass(frozen=True)
class Command:
    """Write one HTML page about a grid: claims, curves, tables, configurations.

    Each DIR is a folder of run directories (of python -m paper grid or of softstair train), a table
    of them (.csv or .parquet), or a folder of such tables; other CSV files in it are skipped. The
    page is one file that works offline in any browser. Units that are still training are included
    with the epochs they have.

    Exit code 0: written; 2: an error.
    """

    folders: tuple[Path, ...] = argument("DIR", "Folders of run directories, or tables.")
    out: Path = flag(Path("report.html"), "Page to write (.html).")
    figures: Path | None = flag(None, "Folder to write the figures to, a page each.")
    title: str | None = flag(None, "Title of the page (default: names the data sets).")

    def run(self) -> int:
        with output_file(self.out, "out", (".html", ".htm")) as page:
            trainings, skipped = report.gather(self.folders)
            if self.figures is not None:
                self.figures.mkdir(parents=True, exist_ok=True)
            data = {training.recipe.data.name for training in trainings}
            findings = [finding for finding in judged(trainings) if finding.data in data]
            report.write(trainings, page, findings, self.title)
            size = page.stat().st_size
            if self.figures is not None:
                for name, draw in figures(trainings).items():
                    draw().write_html(self.figures / f"{name}.html", include_plotlyjs="directory")
        for path in skipped:
            print(f"{str(path)!r} is not a table of trainings; skipped.")
        units = plural(len(trainings), "unit")
        print(f"{self.out}: {units}, {size / 1e6:.2f} MB; open it in a browser.")
        return 0
