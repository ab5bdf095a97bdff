"""The command line, for all tests of this folder."""

import pytest

from helpers.commands import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
