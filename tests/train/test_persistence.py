"""Runs that survive: killed at any moment and resumed, they are the run that nobody disturbed."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from short import (
    At,
    is_sentence,
    metrics_of,
    recipe,
    result,
    stopped,
    strike,
    uninterrupted,
    without_export,
)
from warm import Warm

from softstair.train import Recipe, checkpoint, fit
from softstair.train.parallel import Interrupted, StopRequest
from softstair.train.records import read_json
from softstair.train.state import State


def names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


class Crash(BaseException):
    """Nobody catches it: as abrupt as a process can end from within."""


def crash(state: State) -> None:
    raise Crash


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "parts"


# Within this process, at a certain step

RANDOM = recipe(forward="random")
RECIPES: dict[str, Recipe] = {
    "all": recipe(
        forward="random",
        static_mean=False,
        augment="crop",
        last_layer="stair",
        noise="logistic",
        statistics="fresh",
    ),
    "default": recipe(),
    "all compatible options": recipe(
        augment="crop-flip",
        cutout=3,
        mixup=0.3,
        init_from="auto",
        teacher="auto",
        first_layer="int8",
        optimiser="adamw",
        latent_rate=0.03,
        norm_rate=0.3,
        rate_shape="cosine",
        warm_up=0.5,
        weight_decay=0.1,
        norm_decay=0.0,
        clip_gradient=1.0,
        clip_latent=True,
        label_smoothing=0.1,
        anneal_from="50%",
        period=None,
        forward="random",
        quanta="learned",
    ),
    "sgd, dropping, not truncated": recipe(
        optimiser="sgd", learning_rate=0.05, drop=1.0, weight_decay=1e-4, truncate=False, period=0.4
    ),
    "by the epoch, expectation": recipe(
        update="epoch", interval="overlapped", power="progressive", forward="expectation"
    ),
    "float": recipe(weights="float", features="float"),
    "bfloat16": recipe(precision="bfloat16", limit=45, batch=7),
    "learned quanta": recipe(quanta="learned", weights="int4", features="uint4", clip_latent=True),
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """Metrics and accuracies of a run that nobody disturbs."""
    torch.set_num_threads(1)
    return uninterrupted(tmp_path_factory.mktemp("complete") / "run", RANDOM)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", RECIPES)
def test_stopped_in_the_middle_of_an_epoch(name: str, tmp_path: Path, out: Path) -> None:
    wanted = uninterrupted(tmp_path / "whole", RECIPES[name])
    for (epoch, step), number in [((0, 1), signal.SIGTERM), ((1, 3), signal.SIGINT)]:
        watchers = [At(epoch, step, strike(number))]
        with pytest.raises(Interrupted) as caught:
            fit(RECIPES[name], out, resume=True, watchers=watchers)
        assert caught.value.number == number
        state = checkpoint.load(out / "checkpoint")
        assert state is not None
        assert (state["epoch"], state["step"]) == (epoch, step)
    with pytest.raises(Crash):
        fit(RECIPES[name], out, resume=True, watchers=[At(2, 4, crash)])
    fit(RECIPES[name], out, resume=True)
    assert result(out) == wanted


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("where", [(0, 5), (1, 0), (2, 5), (3, 0)], ids=str)
def test_crashed_at_the_ends_of_epochs(where: tuple[int, int], complete: Any, out: Path) -> None:
    """After the last step, when the evaluation is still to come; and after the whole epoch."""
    with pytest.raises(Crash):
        fit(RANDOM, out, watchers=[At(*where, crash)])
    assert read_json(out, "summary.json") is None
    fit(RANDOM, out, resume=True)
    assert result(out) == complete


def test_stopped_at_every_single_step(tmp_path: Path, out: Path) -> None:
    short = recipe(forward="random", epochs=2, limit=100)
    wanted, stops = uninterrupted(tmp_path / "whole", short), 0
    while read_json(out, "summary.json") is None:
        try:
            anything = At(-1, -1, crash)
            anything.step = strike(signal.SIGTERM)  # type: ignore[method-assign]
            fit(short, out, resume=True, watchers=[anything])
        except Interrupted:
            stops += 1
    assert stops == 2 * (2 + 1)  # and after each epoch
    assert result(out) == wanted


def test_a_second_signal_strikes_at_once_and_costs_a_second_at_most(
    complete: Any, out: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(RANDOM, out, watchers=[At(1, 2, strike(signal.SIGINT, signal.SIGINT))])
    fit(RANDOM, out, resume=True)
    assert result(out) == complete


def test_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in StopRequest.SIGNALS]
    with StopRequest() as stop:
        assert stop.number is None
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        assert stop.number == signal.SIGTERM
    assert [signal.getsignal(number) for number in StopRequest.SIGNALS] == before


def test_in_a_thread_there_are_no_signals_and_training_goes_on(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        summary = pool.submit(fit, recipe(epochs=1), tmp_path / "x").result()
    assert summary["epochs"] == 1


def test_a_resumed_run_leaves_the_callers_threads_alone(tmp_path: Path) -> None:
    stopped(recipe(epochs=1), tmp_path / "x", 0, 4)
    torch.set_num_threads(2)
    fit(recipe(epochs=1), tmp_path / "x", resume=True)
    assert torch.get_num_threads() == 2


def test_metrics_that_were_written_after_the_checkpoint_are_written_again(
    complete: Any, tmp_path: Path, out: Path
) -> None:
    stopped(RANDOM, out, 2, 2)
    for leaving in (b'{"epoch": 0, "half', complete[0] * 2 + b"\xff\x00"):
        copy = shutil.copytree(out, tmp_path / f"copy-{len(leaving)}")
        (copy / "metrics.jsonl").write_bytes(leaving)
        fit(RANDOM, copy, resume=True)
        assert result(copy) == complete


# Killed from outside


def words_for(out: Path, *more: str) -> list[str]:
    # Long enough that a child is still at work when it is struck.
    flags = "--epochs 6 --limit 300 --batch 16 --device cpu".split()
    return ["train", "--resume", "--out", str(out), *flags, *more]


def reference(warm: Warm, tmp_path: Path, *more: str) -> tuple[bytes, list[Any]]:
    out = tmp_path / "whole"
    assert warm.run(words_for(out, *more), tmp_path / "errors") == 0
    return result(out)


def killed(
    warm: Warm, tmp_path: Path, kills: int, wanted: tuple[bytes, list[Any]], *more: str
) -> list[int]:
    """Strikes so many children at random moments, and lets the last one end; their exit codes.

    Should a run come to its end before all the kills, it is looked at and another one is begun.
    """
    draw = random.Random(kills)
    signals = [signal.SIGKILL] * (kills // 2) + [signal.SIGTERM, signal.SIGINT] * (kills // 4)
    draw.shuffle(signals)
    codes: list[int] = []
    positions: set[tuple[int, int, int]] = set()
    errors = tmp_path / "errors"
    run = 0
    while signals:
        out = tmp_path / f"run-{run}"
        begun = tmp_path / f"begun-{len(signals)}-{run}"
        child = warm.start(words_for(out, *more), errors, every=3, begun=str(begun))
        # Most moments of a long run are in its training; those before and after it have their turn.
        deadline = time.monotonic() + (30 if draw.random() < 0.8 else 0)
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.3))
        number = signals.pop()
        # If it has ended meanwhile, its parent has not told us yet, and the id is still its own.
        try:
            os.kill(child, number)
        except ProcessLookupError:
            assert read_json(out, "summary.json") is not None
        (code,) = warm.wait()
        assert "Traceback" not in errors.read_text()
        assert "mistake" not in errors.read_text()
        if read_json(out, "summary.json") is not None:
            assert result(out) == wanted
            run += 1
            if code == 0:
                signals.insert(0, number)
                continue
        assert code in (-number, 128 + number), errors.read_text()
        codes.append(code)
        if (state := checkpoint.load(tmp_path / f"run-{run}" / "checkpoint")) is not None:
            positions.add((run, state["epoch"], state["step"]))
    out = tmp_path / f"run-{run}"
    assert warm.run(words_for(out, *more), errors) == 0, errors.read_text()
    assert result(out) == wanted
    assert names(out) == names(tmp_path / "whole")  # nothing half-written is left
    assert len(list((out / "checkpoint").iterdir())) <= 4
    # The kills fell into the training, not before it.
    assert len(positions) >= kills // 3, positions
    return codes


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_run_killed_many_times_equals_the_uninterrupted_run(
    kills: int, warm: Warm, tmp_path: Path
) -> None:
    more = ("--epochs", str(2 * kills))
    codes = killed(warm, tmp_path, kills, reference(warm, tmp_path, *more), *more)
    assert len(codes) == kills
    assert codes.count(-9) == kills // 2
    assert not (tmp_path / "run-1").exists()


@pytest.mark.parametrize("attempts", [5, pytest.param(30, marks=pytest.mark.nightly)])
def test_killed_while_it_writes(attempts: int, warm: Warm, tmp_path: Path) -> None:
    """At the opening, renaming or removing of a file, one after the other, wherever that is."""
    flags = ["--epochs", "3", "--limit", "100", "--batch", "16"]
    whole, out, errors = tmp_path / "whole", tmp_path / "parts", tmp_path / "errors"
    assert warm.run(["train", "--out", str(whole), *flags], errors, narrow=True) == 0
    draw, code, kills = random.Random(1), -9, 0
    for _ in range(attempts):
        words = ["train", "--resume", "--out", str(out), *flags]
        code = warm.run(words, errors, every=1, at=draw.randrange(1, 60), narrow=True)
        assert code in (0, -9), errors.read_text()
        kills += code == -9
        if read_json(out, "summary.json") is None:
            checkpoint.load(out / "checkpoint")  # whole, or not there
        else:
            assert result(out) == result(whole)
            shutil.rmtree(out)
    assert kills > attempts * 2 // 3
    assert warm.run(["train", "--resume", "--out", str(out), *flags], errors, narrow=True) == 0
    assert result(out) == result(whole)
    assert names(out) == names(whole)


@pytest.mark.nightly
def test_the_real_command_line(tmp_path: Path) -> None:
    """SIGINT, the very command that it names, SIGINT again, and on to the end."""
    out = tmp_path / "my run"  # a name that must be quoted
    flags = ["--epochs", "8", "--limit", "500", "--batch", "16"]
    words = ["train", "--out", str(out), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        before = metrics_of(out).count(b"\n") if out.exists() else 0
        child = subprocess.Popen(
            [sys.executable, "-m", "softstair", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline:
            if (out / "metrics.jsonl").exists() and metrics_of(out).count(b"\n") > before:
                break
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
        assert (child.returncode, stdout) == (130, ""), stderr
        message = without_export(stderr)
        assert len(message.splitlines()) == 1
        assert is_sentence(message)
        assert "SIGINT" in message
        command = shlex.split(stderr[stderr.index("softstair train --resume") :])
        words = command[1:]
    loaded = checkpoint.load(out / "checkpoint")
    assert loaded is not None
    assert 0 < loaded["epoch"] < 8
    # Not in this process, in which the network for digits is a narrow one.
    for given in (words, ["train", "--out", str(tmp_path / "whole"), *flags]):
        line = [sys.executable, "-m", "softstair", *given]
        subprocess.run(line, env=environment, check=True, capture_output=True)
    assert result(out) == result(tmp_path / "whole")
