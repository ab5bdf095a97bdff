"""``softstair report``: what came of a grid, as one page that opens offline."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from softstair.cli._files import reserved
from softstair.experiments import report
from softstair.experiments.results import Training

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """Makes one HTML page of what came of a grid: claims, curves, tables, configurations.

    DIR is a folder of run directories, as softstair grid and softstair train make them, a table of
    them in CSV or Parquet, or a folder of such tables, in which a CSV of something else is passed
    over; several are shown together. The page is one file that opens offline, in any browser, and
    asks nobody for anything. Units that are still being trained are shown as far as they have come.
    Exit code 0: written; 2: an error.
    """

    folders: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="DIR...", help_behavior_hint="(one or more)"),
    ] = ()
    """Folders of run directories, or tables."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page to write (.html)."""
    figures: Path | None = None
    """Folder to write the paper's figures to as well, as SVG; made if need be."""
    title: str | None = None
    """What the page is called; by default, it names the data sets."""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError(
                "DIR must be a folder of run directories or a table of them, but none was given."
            )

    def run(self) -> int:
        follow = self.out != Command.out
        with reserved(self.out, "--out", (".html", ".htm"), follow) as page:
            assert page is not None
            trainings, passed_over = _load(self.folders)
            if self.figures is not None:
                _make(self.figures)
            report.write(trainings, page, _claims(trainings), _figures(trainings), self.title)
            size = page.stat().st_size
        if self.figures is not None:
            from softstair.experiments import figures

            figures.draw(trainings, self.figures)
            for sentence in figures.missing(trainings):
                print(sentence)
        for table in passed_over:
            print(f"{str(table)!r} is no table of trainings: it was passed over.")
        units = f"{len(trainings)} unit{'' if len(trainings) == 1 else 's'}"
        print(f"{self.out}: {units}, {size / 1e6:.2f} MB; open it in a browser.")
        return 0


def _make(folder: Path) -> None:
    """The folder, which can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"--figures must be a folder that can be written, but {str(folder)!r} cannot be "
            f"({error.strerror}): give another."
        ) from None


def _load(folders: Sequence[Path]) -> tuple[list[Training], list[Path]]:
    try:
        return report.gather(folders)
    except ModuleNotFoundError as error:
        # A table in Parquet needs a package that the command does without.
        raise ValueError(str(error)) from None


def _claims(trainings: Sequence[Training]) -> Sequence[report.Row]:
    """The paper's claims about these data sets, each with what these trainings say of it."""
    from softstair.experiments.claims import CLAIMS, judged

    data = {one.recipe.data for one in trainings}
    mine = {claim.name for claim in CLAIMS if claim.data in data}
    return [finding for finding in judged(trainings) if finding.name in mine]


def _figures(trainings: Sequence[Training]) -> Mapping[str, str]:
    """The paper's figures of these trainings, as SVG by their names."""
    from softstair.experiments import figures

    return figures.drawings(trainings)
