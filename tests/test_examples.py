"""The examples run, and say what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()

    def _run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield _run
    torch.set_num_threads(threads)


def test_each_is_one_page_and_tried_here() -> None:
    pages = sorted(EXAMPLES.glob("*.py"))
    assert [page.name for page in pages] == ["digits.py", "estimators.py", "noise.py"]
    assert all(len(page.read_text().splitlines()) <= 80 for page in pages)


@pytest.mark.nightly
def test_digits_learns(run) -> None:
    said = run("digits.py", "3")
    mean = re.search(r"\n(\d+\.\d+)% ± \d+\.\d+%\n$", said)
    assert mean is not None, said
    assert float(mean[1]) > 90


@pytest.mark.nightly
def test_every_estimator_learns(run) -> None:
    lines = run("estimators.py", "2", "1").splitlines()
    assert len(lines) == 9
    assert all(float(line.split()[-1].rstrip("%")) > 75 for line in lines), lines


@pytest.mark.nightly
def test_noise_of_ones_own_is_what_it_says_and_trains(run) -> None:
    said = run("noise.py")
    mean, std = map(float, re.search(r"mean (\S+), std (\S+) of", said).groups())
    assert abs(mean) < 0.02
    assert abs(std - 1) < 0.02
    assert "annealed: (0, 1, 2)" in said
    assert float(re.search(r"(\d+\.\d)% of the last", said)[1]) > 80
