"""The command of these tests is ``python -m paper``."""

import pytest

from helpers.commands import Run
from paper.__main__ import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, as helpers.commands.Run."""
    return Run(capsys, "python -m paper", main)
