"""Docstrings for the API site: an extension of griffe, named in ``mkdocs.yml``."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) +\S.*)*", re.M)
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=`)")


class Docstrings(griffe.Extension):
    """Shows examples as code, and names that have a role of Sphinx without it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = ROLE.sub("", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(_fenced, text)


def _fenced(example: re.Match[str]) -> str:
    indent = example["indent"]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"
