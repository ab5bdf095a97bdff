"""Fixtures: a small grid of two configurations and two folds, trained once for all tests.

Test files name this module in ``pytest_plugins``.
"""

import shutil
from pathlib import Path

import pytest

from helpers.narrow import narrow_entry
from paper import Training, load, read_design
from softstair.models import NETWORKS
from softstair.train import fit

DESIGN = """
folds = [0, 1]
[recipe]
limit = 120
batch = 32
epochs = 2
[vary]
forward = ["random", "mode"]
"""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.toml, and with runs/mine as the engine leaves it."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "mine.toml").write_text(DESIGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "digits", narrow_entry())
        patch.setattr("softstair.train.run.source_commit", lambda: "abc1234")
        for unit in read_design(folder / "mine.toml").units():
            fit(unit.recipe, unit.path(folder / "runs" / "mine"), device="cpu", threads=1)
    return folder


@pytest.fixture
def design(plain_terminal: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The design in the current folder; starting a process fails."""
    monkeypatch.setattr("softstair.train.pool.start_process", None)
    Path("mine.toml").write_text(DESIGN)
    return DESIGN


@pytest.fixture
def done(store: Path, design: str) -> Path:
    """A copy of the runs in the current folder, where all units are done."""
    return Path(shutil.copytree(store / "runs" / "mine", "runs/mine"))


@pytest.fixture
def uninterrupted(store: Path) -> list[Training]:
    """Every unit, in the order of the design."""
    order = [unit.name for unit in read_design(store / "mine.toml").units()]
    trainings = load(store / "runs" / "mine")
    return sorted(trainings, key=lambda training: order.index(training.name))
