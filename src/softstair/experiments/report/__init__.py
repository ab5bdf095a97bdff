"""The report: one HTML page that opens offline and asks nobody for anything.

What it says is HTML made here, the tables and the claims too, so that it can be read without
scripts; its own script draws the curves, sorts the tables and filters both. All of it, and all
the data, is in the one file; its policy forbids every request, and every script but that one.
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
from softstair.experiments.report import story, tables
from softstair.experiments.report.embed import data_of, harmless
from softstair.experiments.report.story import VERDICTS, Row
from softstair.experiments.report.study import arranged
from softstair.experiments.report.words import text, unbroken
from softstair.experiments.results import Training

__all__ = ["VERDICTS", "Row", "page", "write"]

SCRIPTS = ("draw.js", "shown.js", "chart.js", "tables.js", "script.js")


def write(
    trainings: Sequence[Training],
    file: Path | str,
    claims: Sequence[Row] = (),
    figures: Mapping[str, str] | None = None,
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> None:
    """Writes the page, all of it or nothing; see :func:`page`."""
    file = Path(file)
    whole = page(trainings, file.parent, claims, figures, title, made)
    with replacing(file) as partial:
        # As bytes, for the policy has the digest of the script as it is.
        partial.write_bytes(whole.encode())


def page(
    trainings: Sequence[Training],
    folder: Path,
    claims: Sequence[Row] = (),
    figures: Mapping[str, str] | None = None,
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> str:
    """The page, as HTML.

    folder    where it will lie: the paths of the run directories start there
    claims    the paper's, each with a verdict
    figures   drawings in SVG, by their captions
    title     None: one that names the data sets
    made      when; None: now
    """
    lines = arranged(trainings)
    named = title or story.title_of(lines)
    style = _own("style.css")
    script = '"use strict";\n{\n' + "".join(map(_own, SCRIPTS)) + "}\n"
    return Template(_own("page.html")).substitute(
        policy=_policy(script, style),
        version=text(__version__),
        title=text(named),
        heading=unbroken(named),
        facts=story.facts(lines, made or datetime.datetime.now(datetime.UTC)),
        claims=story.claims_of(claims),
        figures=story.pictures(figures or {}),
        configurations=tables.configurations(lines),
        runs=tables.runs(lines),
        links=_links(claims, figures),
        style=style,
        data=harmless(data_of(lines, folder)),
        script=script,
    )


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _links(claims: Sequence[Row], figures: Mapping[str, str] | None) -> str:
    there = {
        "claims": bool(claims),
        "curves": True,
        "figures": bool(figures),
        "configurations": True,
        "runs": True,
    }
    return "\n".join(
        f'<a href="#{name}">{name}</a>' for name, is_there in there.items() if is_there
    )


def _policy(script: str, style: str) -> str:
    """Nothing from anywhere, no script but ours, no style but ours, no picture but those inside."""
    digest = lambda whole: base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
