"""The report: one HTML file that opens offline and makes no requests.

Text, tables and claims are HTML, so the page can be read without scripts. Its script draws the
curves, sorts the tables and filters both. The page's content security policy forbids every request
and every script but its own.
"""

import base64
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from softstair import __version__
from softstair._files import replacing
from softstair.experiments.report import sections
from softstair.experiments.report.lines import arranged, gather, in_words, values_of
from softstair.experiments.report.payload import data_of, escaped
from softstair.experiments.report.sections import VERDICTS, Row
from softstair.experiments.results import Training

__all__ = ["VERDICTS", "Row", "gather", "page", "write"]


def write(
    trainings: Sequence[Training],
    file: Path | str,
    claims: Sequence[Row] = (),
    figures: Mapping[str, str] | None = None,
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> None:
    """Write the page atomically; see :func:`page`."""
    file = Path(file)
    text = page(trainings, file.parent, claims, figures, title, made)
    with replacing(file) as partial:
        # As bytes: the policy has the digest of the script, line endings included.
        partial.write_bytes(text.encode())


def page(
    trainings: Sequence[Training],
    folder: Path,
    claims: Sequence[Row] = (),
    figures: Mapping[str, str] | None = None,
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        folder: Where the page will lie; links to run directories are relative to it.
        claims: The paper's claims, each with a verdict.
        figures: Drawings in SVG, by their captions.
        title: Title of the page; None names the data sets.
        made: Time to show; None is now.
    """
    lines = arranged(trainings)
    if title is None:
        data = [in_words("data", value) for value in values_of(lines, "data")]
        title = f"Additive noise annealing on {sections.listed(data)}"
    style, script = _resource("report.css"), _resource("report.js")
    absent = {"claims": not claims, "figures": not figures}
    names = ("claims", "curves", "figures", "configurations", "runs")
    links = [f'<a href="#{name}">{name}</a>' for name in names if not absent.get(name)]
    return Template(_resource("report.html")).substitute(
        policy=(
            f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        version=sections.text(__version__),
        title=sections.text(title),
        heading=sections.unbroken(title),
        links="\n".join(links),
        facts=sections.facts(lines, made or datetime.datetime.now(datetime.UTC)),
        claims=sections.claims_section(claims),
        figures=sections.figures_section(figures or {}),
        configurations=sections.configurations_table(lines),
        runs=sections.runs_table(lines),
        style=style,
        data=escaped(data_of(lines, folder)),
        script=script,
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
