"""Each flag of ``softstair train`` changes the run, is refused, or is named as without effect."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Run
from softstair.cli._args import _Option, _options
from softstair.cli.train import Command
from softstair.train import PRESETS, checkpoint

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits", "blank_picture")

SHORT = "--limit 200 --batch 32 --epochs 2".split()
OPTIONS = {option.path[-1]: option for option in _options(Command)}
GIVEN: dict[str, str] = {
    "data": "cifar10", "model": "vgg8", "limit": "100 100000", "cutout": "2", "erase": "0.5",
    "mixup": "0.5", "cutmix": "0.5", "time_mask": "2", "coefficient_mask": "2",
    "weight_quantum": "0.5", "feature_quantum": "0.5", "skip": "features.4", "bits": "int4",
    "init_from": "auto", "teacher": "auto", "teacher_weight": "0.5", "temperature": "2",
    "fold": "1 all", "folds": "3 1000000", "seed": "1", "learning_rate": "0.01",
    "latent_rate": "0.01", "quantum_rate": "0.1", "norm_rate": "2", "first_rate": "2",
    "last_rate": "2", "warm_up": "1", "momentum": "0.5", "weight_decay": "0.1",
    "norm_decay": "0.1", "clip_gradient": "0.1", "label_smoothing": "0.2 1",
    "loss": "torch.nn:MultiMarginLoss", "drop": "1 None", "drop_factor": "0.5", "batch": "16",
    "epochs": "3", "mean0": "0.2", "std0": "0.2", "gradient_margin": "0 1", "period": "0.1",
    "noise_schedule": "absent:schedule", "anneal_from": "0", "out": "other", "data_dir": "other",
    "device": "cuda:99", "threads": "2", "jobs": "1",
}  # fmt: skip
"""Values of the flags that list none."""
SAME_NUMBERS = {"--kernels reference": "plain torch gives the numbers of the other kernels"}
IDLE = (
    "--integer-input --no-centre-input --thresholds floor --sums none --forward hard --no-truncate "
    "--optimiser adamw --momentum 0.5 --first-rate 2 --capture always --precision fast "
    "--lr-drop-epoch 1 --gradient-margin 0"
).split()


def values(option: _Option) -> list[list[str]]:
    """Return what a flag is tried with: all that it lists, and what this file gives."""
    name, flag = option.path[-1], option.spelling
    default = getattr(PRESETS["digits"], name, option.default)
    if option.kinds == [bool]:
        more = ["--jobs", "1"] if name == "every_fold" else []
        return [[f"--no-{flag[2:]}" if default else flag, *more]]
    words = [*option.choices[:4], *option.choices[-2:], *GIVEN.get(name, "").split()]
    return [[flag, word] for word in words if word != str(default)]


def outcome(out: Path) -> dict[str, Any]:
    """Return all that a run has written but its times, names and recipe."""
    made: dict[str, Any] = {
        "files": sorted({path.name.rpartition(".")[2] for path in out.rglob("*")})
    }
    for run in (file.parent for file in out.rglob("config.json")):
        config = json.loads((run / "config.json").read_text())
        state = checkpoint.load(run / "checkpoint")
        assert state is not None
        weights = {name: str(value) for name, value in state["network"].items()}
        facts = {name: config[name] for name in ("device", "threads", "step", "data")}
        made[str(run.relative_to(out))] = facts, (run / "metrics.jsonl").read_text(), weights
    return made


def is_seen(words: list[str], run: Run) -> bool:
    """Return whether a training with a flag differs, is refused, or names the flag."""
    code, _, err = run("train", *SHORT, "--out", "with", *words)
    if code == 2:
        assert "internal error" not in err
        return True
    assert code == 0
    if words[0] == "--out":
        return Path("other", "summary.json").exists()
    flag = f"--{words[0].removeprefix('--').removeprefix('no-')}"
    if flag in err or f"{flag[2:]};" in err:
        return True
    run("train", *SHORT, "--out", "without")
    return outcome(Path("with")) != outcome(Path("without"))


def test_this_file_tries_each_flag() -> None:
    assert {name for name in GIVEN if name not in OPTIONS} == set()
    untried = [option.spelling for option in OPTIONS.values() if not values(option)]
    assert not untried, "give a value that changes a short training of the digits"


def test_flags_without_an_effect_are_named_and_have_none(run: Run) -> None:
    _, _, error = run("train", *SHORT, "--out", "with", *IDLE, "--seed", "1")
    line = next(line for line in error.splitlines() if "without effect" in line)
    named = set(re.findall(r"--[a-z-]+", line))
    assert named == {word.replace("--no-", "--") for word in IDLE if word.startswith("--")}
    _, _, error = run("train", *SHORT, "--out", "without", "--seed", "1", "--data-dir", "x")
    assert "without effect" not in error
    assert "--data-dir has no effect" in error
    assert outcome(Path("with")) == outcome(Path("without"))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch.compile, and of weights without a sign
def test_a_flag_does_something_or_is_named(
    name: str, run: Run, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = []
    for words in values(OPTIONS[name]):
        monkeypatch.chdir(tmp_path_factory.mktemp("flag"))
        if not is_seen(words, run) and " ".join(words) not in SAME_NUMBERS:
            silent.append(" ".join(words))
    assert silent == []
