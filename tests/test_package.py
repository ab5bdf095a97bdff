"""What the package says about itself: its version and what changed in it."""

import re
import tomllib
from pathlib import Path

import softstair

ROOT = Path(__file__).parents[1]


def test_the_version_of_the_package_is_read_from_its_source() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in settings["project"]
    assert "version" in settings["project"]["dynamic"]
    source = (ROOT / settings["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [softstair.__version__]


def test_the_changelog_has_a_section_for_the_version_and_one_for_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", softstair.__version__]
