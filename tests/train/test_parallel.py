"""Data-parallel training: two processes train what one trains, and survive what it survives."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import branches, plain
from short import RECIPE, is_sentence, lines_of, metrics_of, stopped, without_export
from torch.utils._pytree import tree_leaves
from warm import Warm

from softstair.cli import main
from softstair.cli._args import spelling
from softstair.data import load
from softstair.train import Recipe, checkpoint, fit, parallel, preset, trained_network
from softstair.train.parallel import joined
from softstair.train.settings import choose_device

RANDOM = RECIPE.replace(augment="crop", forward="random", model="own_models:witness")
"""Each process draws random numbers of its own here, and they matter."""
FLOAT = RECIPE.replace(weights="float", features="float", optimiser="sgd", learning_rate=0.1)


def words(recipe: Recipe, out: Path, *more: str) -> list[str]:
    """Return the command that trains by a recipe."""
    names = [*recipe.differences(preset("digits").rescaled(recipe.run.epochs)), "epochs"]
    values = {spelling(name): recipe[name] for name in names}
    flags = [
        (flag if value else f"--no-{flag[2:]}") if isinstance(value, bool) else f"{flag}={value}"
        for flag, value in values.items()
    ]
    return ["train", *flags, "--device", "cpu", "--threads", "1", "--out", str(out), *more]


class Pair:
    """Two processes with the environment that torchrun would give them."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.errors = warm, [folder / "errors0", folder / "errors1"]

    def run(self, words: list[str], environment: Any = (), **settings: Any) -> list[int]:
        """Return both exit codes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for rank, errors in enumerate(self.errors):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            variables = {**ranks, **address, **dict(environment)}
            self.warm.start(words, errors, environment=variables, **settings)
        return self.warm.wait()

    @property
    def messages(self) -> list[str]:
        return [errors.read_text() for errors in self.errors]


@pytest.fixture(scope="module")
def pair(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(warm, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def complete(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody interrupts, with notes of what each process holds."""
    folder = tmp_path_factory.mktemp("complete")
    notes = {"NOTES": str(folder)}
    assert pair.run(words(RANDOM, folder / "run"), environment=notes) == [0, 0], pair.messages
    return folder / "run"


# Results


def test_two_processes_train_as_one_with_the_joint_batch(pair: Pair, tmp_path: Path) -> None:
    recipe = FLOAT.replace(model="own_models:plain")
    assert pair.run(words(recipe, tmp_path / "two")) == [0, 0], pair.messages
    fit(recipe, tmp_path / "one", device="cpu", threads=1)
    data = load("digits").sample(200)
    one, two = (trained_network(tmp_path / name, data, plain()) for name in ("one", "two"))
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.run.seed)
        first = plain().state_dict()
    for name, value in one.state_dict().items():
        assert (value - first[name]).abs().max() > 1e-3
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    for expected, line in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "two"), strict=True):
        assert line == {key: pytest.approx(value, rel=1e-4) for key, value in expected.items()}


@pytest.mark.nightly
def test_both_processes_hold_the_same_network(complete: Path) -> None:
    first, second = ((complete.parent / rank).read_text().split() for rank in "01")
    assert second[-1] == first[-1]
    # Both examine the stairs after each epoch, and rank 0 evaluates besides.
    assert len(set(first)) >= RANDOM.epochs
    assert len(set(second)) >= RANDOM.epochs


@pytest.mark.nightly
def test_start_and_teacher_are_trained_by_both_processes(pair: Pair, tmp_path: Path) -> None:
    recipe = RANDOM.replace(epochs=1, period=None, drop=None, init_from="auto", teacher="auto")
    recipe = recipe.replace(quanta="calibrated")
    out, notes = tmp_path / "run", {"NOTES": str(tmp_path)}
    assert pair.run(words(recipe, out), environment=notes) == [0, 0], pair.messages
    # Rank 0 reads the float run, and so evaluates its network more often.
    first, second = ((tmp_path / rank).read_text().splitlines() for rank in "01")
    assert first[-1] == second[-1]
    remaining = iter(first)
    assert all(digest in remaining for digest in second), "in the same order"
    config = json.loads((out / "config.json").read_text())
    assert len(config["teacher"]) == 64
    assert json.loads((out / "start/config.json").read_text())["processes"] == 2


def test_truncated_layers_train_in_two_processes(pair: Pair, tmp_path: Path) -> None:
    recipe = RECIPE.replace(period=0.4)
    assert pair.run(words(recipe, tmp_path / "run"), narrow=True) == [0, 0], pair.messages
    assert pair.messages[0].count("\n") == 1
    assert "freezes" in pair.messages[0]
    assert pair.messages[1] == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["config"]["processes"] == 2
    first, *_, last = lines_of(tmp_path / "run")
    assert last["annealed"]
    assert last["train_loss"] < first["train_loss"]


@pytest.mark.nightly
def test_parameters_that_one_process_alone_uses(pair: Pair, tmp_path: Path) -> None:
    recipe = FLOAT.replace(model="own_models:branches")
    assert pair.run(words(recipe, tmp_path / "run")) == [0, 0], pair.messages
    saved = checkpoint.load(tmp_path / "run" / "checkpoint")
    assert saved is not None
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.run.seed)
        first = branches().state_dict()
    assert all(not torch.equal(value, first[name]) for name, value in saved["network"].items())


# Interruptions


@pytest.mark.nightly
def test_a_signal_to_one_stops_both(pair: Pair, complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strike = {"STRIKE": f"1 own {int(signal.SIGTERM)} 8"}
    assert pair.run(words(RANDOM, out), environment=strike, every=3) == [143, 143], pair.messages
    assert "torchrun" in pair.messages[0]
    assert pair.messages[1] == ""
    assert not (out / "summary.json").exists()
    assert pair.run(words(RANDOM, out, "--resume"), every=4) == [0, 0], pair.messages
    assert metrics_of(out) == metrics_of(complete)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_of_one_ends_both(rank: int, pair: Pair, complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strike = {"STRIKE": f"{rank} own {int(signal.SIGKILL)} 9"}
    codes = pair.run(words(RANDOM, out), environment=strike, every=2)
    assert codes == ([-9, 2], [2, -9])[rank], pair.messages
    assert pair.messages[1] == ""
    if rank:
        assert "one of the run's 2 processes ended" in pair.messages[0]
        assert is_sentence(without_export(pair.messages[0]))
        return
    assert pair.run(words(RANDOM, out, "--resume")) == [0, 0], pair.messages
    assert metrics_of(out) == metrics_of(complete)


@pytest.mark.nightly
def test_a_signal_to_torchrun(pair: Pair, complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "softstair", *words(RANDOM, out)],
        env={**os.environ, "STRIKE": f"0 launcher {int(signal.SIGTERM)} 8"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    messages = [line for line in done.stderr.splitlines() if line.startswith("softstair")]
    message = without_export("\n".join(messages))
    assert "\n" not in message, done.stderr
    assert "continue with softstair train --resume" in message
    assert pair.run(words(RANDOM, out, "--resume")) == [0, 0], pair.messages
    assert metrics_of(out) == metrics_of(complete)


# Errors: each process reports its own, and both end


@pytest.mark.nightly
def test_errors_end_both_processes(pair: Pair, complete: Path, tmp_path: Path) -> None:
    new, one = tmp_path / "new", tmp_path / "one"
    small = RECIPE.replace(epochs=1)
    stopped(small, one, 0, 2, device="cpu", threads=1)
    commands = {
        "'forty' was given": words(RECIPE, new, "--epochs", "forty"),
        "multiple of the number of processes, 2": words(small.replace(batch=33), new),
        "capture must be auto or never": words(small, new, "--capture", "always"),
        "torchrun started 2": words(small, new, "--every-fold"),
        "torchrun gives each process its own GPU": words(small, new, "--device", "cuda:0"),
        "holds a run already": words(RANDOM, complete),
        "was begun with processes = 1, but 2": words(small, one, "--resume"),
        "batch must be an integer from 2 to": words(small.replace(batch=1024), new),
        "cannot write": words(small, complete / "config.json"),
    }
    for part, command in commands.items():
        assert pair.run(command) == [2, 2], (part, pair.messages)
        assert part in pair.messages[0]
        assert all(is_sentence(message) for message in pair.messages if message), pair.messages
        assert not new.exists()


# A single process


def test_torchrun_with_one_process_is_a_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RANDOM.replace(epochs=2, model="auto")
    assert main(words(recipe, tmp_path / "plain")) == 0
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(words(recipe, tmp_path / "one")) == 0
    assert not torch.distributed.is_initialized()
    saved = [checkpoint.load(tmp_path / name / "checkpoint") for name in ("one", "plain")]
    tensors = [[x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in saved]
    assert len(tensors[0]) > 10
    assert all(map(torch.equal, *tensors))
    assert metrics_of(tmp_path / "one") == metrics_of(tmp_path / "plain")


def test_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")  # without RANK, it may be another program's
    with joined():
        assert (parallel.rank(), parallel.size(), parallel.local_rank()) == (0, 1, None)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="must be integers"), joined():
        pass


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda:1")
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ValueError, match="GPU"):
        choose_device("auto", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 1) == torch.device("cpu")
