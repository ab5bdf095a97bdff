"""`benchmarks/goals.py`: the goals of speed beside what was measured, or a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = [str(ROOT / "results" / f"speed-h200{part}.json") for part in ("", "-operator")]


def goals(*files: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "goals.py"), *files]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_was_measured_meets_every_goal() -> None:
    done = goals(*RESULTS)
    assert done.returncode == 0, done.stdout
    assert "MISSED" not in done.stdout
    assert "operator, bfloat16, int4@0.07, forward" in done.stdout


def test_a_goal_that_is_missed_or_not_measured_counts(tmp_path: Path) -> None:
    figures = json.loads(Path(RESULTS[1]).read_text(encoding="utf-8"))
    figures["operator"][0]["forward_share"] = 0.79
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(figures), encoding="utf-8")
    done = goals(RESULTS[0], str(slow))
    assert done.returncode == 1
    assert done.stdout.count("MISSED") == 1
    assert "not measured" in goals(RESULTS[1]).stdout


@pytest.mark.parametrize("text", ["[1]", "no JSON", None])
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "figures.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    done = goals(str(path))
    assert done.returncode == 2
    assert "figures.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
