"""Pieces of HTML: what comes from outside passes through :func:`text`.

>>> element("td", text("<b>"), {"class": "name", "title": 'a "b"', "hidden": None})
'<td class="name" title="a &quot;b&quot;">&lt;b&gt;</td>'
"""

import html
import re
from collections.abc import Iterable, Mapping

from softstair.experiments.report.embed import clean
from softstair.experiments.statistics import Mean

__all__ = ["duration", "element", "listed", "percent", "text", "unbroken"]

HYPHENATED = re.compile(r"\b[A-Za-z]{1,9}-\d{1,4}\b")


def element(name: str, inside: str | Iterable[str], attributes: Mapping[str, object] = {}) -> str:
    """An element; what is inside is HTML already, and an attribute of None is left out."""
    given = [f' {key}="{text(str(one))}"' for key, one in attributes.items() if one is not None]
    inner = inside if isinstance(inside, str) else "".join(inside)
    return f"<{name}{''.join(given)}>{inner}</{name}>"


def text(words: str) -> str:
    """Words as HTML."""
    return html.escape(clean(words))


def unbroken(words: str) -> str:
    """Words as HTML in which a name such as CIFAR-10 stays on one line.

    >>> unbroken("on CIFAR-10 & SVHN")
    'on <span class="whole">CIFAR-10</span> &amp; SVHN'
    """
    return HYPHENATED.sub(lambda found: element("span", found[0], {"class": "whole"}), text(words))


def percent(of: Mean | float) -> str:
    """An accuracy in per cent; of several folds with half of its 95 % interval, or its range.

    >>> percent(Mean(0.8571, 0.8529, 0.8613, 0.852, 0.862, folds=5)), percent(0.5)
    ('85.71 ± 0.42', '50.00')
    """
    return of.in_hundredths(digits=2) if isinstance(of, Mean) else f"{100 * of:.2f}"


def duration(seconds: float) -> str:
    """A time that can be read at a glance.

    >>> duration(7.31), duration(125), duration(7500)
    ('7.3 s', '2 min 05 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def listed(words: Iterable[object]) -> str:
    """Words with commas, and the last after an "and".

    >>> listed(["CIFAR-10", "SVHN", "digits"])
    'CIFAR-10, SVHN and digits'
    """
    known = [str(word) for word in words]
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)
