"""What the package says about itself: its version and what changed in it."""

import re
from pathlib import Path

import softstair

ROOT = Path(__file__).parents[1]


def test_the_changelog_has_a_section_for_the_version_and_one_for_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", softstair.__version__]
