"""``softstair train``: help, sentences, what it prints and where, folds, events, pictures."""

import contextlib
import io
import json
import os
import re
import select
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from softstair import cli
from softstair.cli.train import Command, parse
from softstair.train import PRESETS, Recipe

FLAGS = ["--epochs", "2", "--period", "0.5", "--limit", "150", "--batch", "24"]
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, and an environment that says nothing of colours."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "SOFTSTAIR_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["train", *words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, ""), (words, out, err)
    assert err.count("\n") == 1, err
    assert err.startswith("softstair train: ")
    assert "mistake of its own" not in err
    assert "Traceback" not in err
    assert err.removesuffix("\n").isprintable()
    assert len(err) < 900, err
    return err


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# Help


def described(text: str) -> dict[str, str]:
    """Flag -> what help says of it, by tyro's layout: flags at the left, words after them."""
    plain = re.sub(r"[│╭╮╰╯─]", " ", text)
    parts = re.split(r"(?m)^\s*(?:-h, )?(--[a-z][a-z0-9-]*)", plain)
    return {
        flag: " ".join(words.split()) for flag, words in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_help_has_every_flag_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    told = described(out)
    names = [field.name for field in (*fields(Command), *fields(Recipe)) if field.name != "recipe"]
    assert len(names) > 40
    for name in names:
        words = told[f"--{name.replace('_', '-')}"]
        assert len(re.sub(r"\(default.*?\)", "", words).split()) >= 3, (name, words)
    for word in ("config.json", "metrics.jsonl", "summary.json", "picture.png", "130", "143"):
        assert word in out
    for word in ("partition", "same_start", "expectation", "logistic", "paper-speech", "bfloat16"):
        assert word in out


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("form", ["--preset {}", "--preset={}"])
def test_help_after_a_preset_shows_its_values(
    name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *form.format(name).split(), "--help")
    assert code == 0
    told = described(out)
    for field in ("period", "epochs", "drop", "data", "model", "batch", "weights", "update"):
        value = getattr(PRESETS[name], field)  # type: ignore[index]
        assert re.search(rf"\(default: '?{re.escape(str(value))}'?\)", told[f"--{field}"]), field


def test_help_after_epochs_shows_the_rescaled(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--preset", "paper-cifar10", "--epochs", "100", "--help")
    told = described(out)
    assert "(default: 10.0)" in told["--period"]
    assert "(default: 80.0)" in told["--drop"]


# From words to a recipe


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset paper-cifar10 --epochs 100", {"epochs": 100, "period": 10.0, "drop": 80.0}),
        ("--epochs 100 --preset paper-cifar10", {"epochs": 100, "period": 10.0, "drop": 80.0}),
        ("--preset=paper-cifar10 --epochs=100", {"epochs": 100, "period": 10.0, "drop": 80.0}),
        ("--preset paper-speech --epochs 60 --period 7", {"period": 7.0, "drop": 50.0}),
        ("--preset paper-svhn --drop None", {"drop": None, "period": 50.0, "data": "svhn"}),
        ("--preset paper-cifar10 --augment crop", {"augment": "crop", "data": "cifar10"}),
        ("--no-static-mean --static-std", {"static_mean": False, "static_std": True}),
        ("--learning_rate 0.5 --weight-decay 0.25", {"learning_rate": 0.5, "weight_decay": 0.25}),
        ("--skip a b", {"skip": ("a", "b")}),
        ("--limit 5 --limit 6", {"limit": 6}),
        ("--epochs 20 --epochs 40", {"epochs": 40, "period": Recipe().period}),
        ("", {"data": "digits", "model": "auto", "weights": "ternary"}),
    ],
)
def test_words_make_the_recipe(words: str, expected: dict[str, Any]) -> None:
    recipe = parse(words.split(), "softstair train").recipe
    for name, value in expected.items():
        assert getattr(recipe, name) == value, name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--epochs x", ["--epochs", "whole number", "'x'"]),
        ("--epochs 1.5", ["--epochs", "whole number", "'1.5'"]),
        ("--epochs 0", ["epochs", "from 1", "0"]),
        ("--epochs -3", ["epochs", "from 1", "-3"]),
        ("--epochs 99999999999999999999", ["epochs"]),
        ("--epochs", ["--epochs needs a whole number"]),
        ("--epochs=", ["--epochs", "whole number"]),
        ("--batch 1", ["batch", "from 2", "1"]),
        ("--batch 1e3", ["--batch", "whole number", "'1e3'"]),
        ("--period 0", ["period", "above 0"]),
        ("--period nan", ["period", "nan"]),
        ("--period inf", ["period", "inf"]),
        ("--period x", ["--period", "a number", "'x'"]),
        ("--learning-rate -1", ["learning_rate", "-1"]),
        ("--learning-rate 1e9", ["learning_rate", "1000000000"]),
        ("--momentum 1", ["momentum", "from 0 to ", "1.0"]),
        ("--noise gauss", ["--noise", "uniform, triangular, normal, logistic", "'gauss'"]),
        ("--forward soft", ["--forward", "expectation, mode, random, hard", "'soft'"]),
        ("--interval same-start", ["--interval", "same_start", "'same-start'"]),
        ("--weights int9", ["--weights", "int4", "'int9'"]),
        ("--weight-quantum 0", ["weight_quantum", "0.0"]),
        ("--fold 5", ["fold", "less than folds, 5", "5"]),
        ("--folds 1", ["folds", "from 2", "1"]),
        ("--seed -1", ["seed", "-1"]),
        ("--limit 0", ["limit", "from 1"]),
        ("--limit 3", ["folds", "3"]),
        ("--limit 40", ["batch", "32", "64"]),
        ("--std0 -1", ["std0", "at least 0"]),
        ("--freeze --no-truncate", ["freeze", "truncate"]),
        ("--preset paper", ["preset", "paper-cifar10", "'paper'"]),
        ("--preset", ["preset", "paper-cifar10"]),
        ("--prest digits", ["'--prest'", "--preset"]),
        ("--static-mean 7", ["'7'"]),
        ("digits", ["'digits'"]),
        ("--device toaster", ["device", "'toaster'"]),
        ("--device cuda:99", ["device", "'cuda:99'"]),
        ("--device meta", ["device", "'meta'"]),
        ("--model nothing", ["model", "vgg8, dscnn, digits", "'nothing'"]),
        ("--model no.such:thing", ["no.such"]),
        ("--model vgg8", ["vgg8", "32"]),
        ("--data nothing", ["data", "digits, cifar10", "'nothing'"]),
        ("--data cifar10", ["cifar", "softstair data fetch cifar10"]),
        ("--preset paper-speech", ["speech", "softstair data fetch speech"]),
        ("--data-dir nowhere --data svhn", ["nowhere", "svhn"]),
        ("--resume", ["--resume", "--out"]),
        ("--every-fold --fold 2", ["--every-fold", "--fold 2"]),
        ("--skip *", ["quantise"]),
        ("--out", ["--out"]),
    ],
)
def test_every_error_is_a_sentence(
    words: str, told: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    err = refused(capsys, *words.split())
    assert all(word in err for word in told), err
    # Nor does a typing error leave anything that stands in the way.
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert left == []


# What is printed, and where


def test_quiet_where_nobody_watches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, *FLAGS, "--seed", "3", "--out", "x")
    assert code == 0
    assert ESCAPE not in out + err
    assert "\r" not in out + err
    assert all(line.startswith("softstair train: warning: ") for line in err.splitlines())
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert f"{summary['valid_accuracy']:.2%}" in out
    assert f"{summary['best_valid_accuracy']:.2%}" in out
    assert "none" in out  # no test set
    assert "x/picture.png" in out
    for words in ("validation accuracy", "noise of layer 0", "noise of layer 1", "examples/s"):
        assert words in out
    assert "epoch 1/2" not in out


def test_the_picture_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from matplotlib.image import imread

    for name, more in {"x": [], "y": ["--weights", "float", "--features", "float"]}.items():
        assert run(capsys, *FLAGS, *more, "--out", name)[0] == 0
        file = tmp_path / name / "picture.png"
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pixels = imread(file)
        assert pixels.shape[0] > 400
        assert pixels.shape[1] > 600
        assert pixels[..., :3].std() > 0.05
        assert not list((tmp_path / name).glob(".*"))


def test_the_next_free_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in (1, 2):
        assert run(capsys, *FLAGS, "--epochs", "1")[0] == 0
        assert (tmp_path / "runs" / f"digits-{number}" / "summary.json").exists()


@pytest.mark.parametrize("name", ["b[/c]", "[bold] :cat:", "ünï %s {x}", "-x"])
def test_names_of_directories_are_printed_as_they_are(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "--epochs", "1", *FLAGS[2:], f"--out={name}/run")
    assert (code, "mistake" in err) == (0, False), err
    assert f"run: {name}/run" in out
    assert f"picture: {name}/run/picture.png" in out
    assert (tmp_path / name / "run" / "summary.json").exists()


def test_warnings_go_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FLAGS, "--period", "9", "--feature-quantum", "1e4", "--out", "x")
    assert code == 0
    assert "warning" not in out
    told = re.findall(r"inputs of (\S+) lie at one level", err)
    assert told
    assert len(told) == len(set(told))


class Terminal:
    """A pseudo-terminal in place of stdout, and everything that was written to it."""

    def __init__(self, columns: int) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.stream = io.TextIOWrapper(os.fdopen(slave, "wb", 0), "utf-8", write_through=True)
        self.written = bytearray()
        self._done = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while not self._done.is_set() or select.select([self.master], [], [], 0)[0]:
            if select.select([self.master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.written += os.read(self.master, 65536)

    def close(self) -> str:
        self._done.set()
        self._reader.join()
        self.stream.close()
        os.close(self.master)
        return self.written.decode()


@pytest.mark.skipif(os.name != "posix", reason="no pseudo-terminals")
@pytest.mark.parametrize("columns", [80, 140])
def test_progress_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks the process's own terminal otherwise
    terminal = Terminal(columns)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        code = cli.main(["train", "--epochs", "6", "--limit", "400", "--batch", "16", "--out", "x"])
    shown = terminal.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert code == 0
    assert ESCAPE in shown
    for words in ("epoch 1/6", "epoch 6/6", "/s"):
        assert words in plain, words
    assert re.search(r"[·▁▂▃▄▅▆▇█]{2,} [0-3]/[23]", plain)  # which layers are
    for line in lines(Path("x")):
        assert f"loss {line['train_loss']:.3f}" in plain
    assert re.search(r"\d+\.\d\d%", plain)
    assert re.search(r"\d+:\d\d:\d\d|-:--:--", plain)  # what is left
    assert "…" not in plain  # nothing that is told is cut off
    assert "\x1b[?25h" in shown  # the cursor is given back


def test_progress_of_a_float_and_of_a_static_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for more, word in ((["--weights", "float", "--features", "float"], "float"),
                       (["--static-std"], "noisy layers"), (["--std0", "0"], "noise")):  # fmt: skip
        terminal = Terminal(120)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal.stream)
            code = cli.main(["train", *FLAGS, *more, f"--out={'-'.join(more)}"])
        assert (code, word in terminal.close()) == (0, True)


# Folds


@pytest.mark.nightly
def test_every_fold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, *FLAGS, "--folds", "3", "--every-fold", "--out", "x")
    assert code == 0
    summaries = [
        json.loads((tmp_path / "x" / f"fold-{fold}" / "summary.json").read_text())
        for fold in range(3)
    ]
    scores = torch.tensor([one["valid_accuracy"] for one in summaries], dtype=torch.float64)
    assert f"{float(scores.mean()):.2%} ± {float(scores.std()):.2%}" in out
    assert [one["config"]["recipe"]["fold"] for one in summaries] == [0, 1, 2]
    assert (tmp_path / "x" / "picture.png").exists()
    assert (
        len({(tmp_path / "x" / f"fold-{i}" / "metrics.jsonl").read_bytes() for i in range(3)}) == 3
    )
    # One fold of them, by itself, is the same.
    assert run(capsys, *FLAGS, "--folds", "3", "--fold", "1", "--out", "y")[0] == 0
    alone = (tmp_path / "y" / "metrics.jsonl").read_bytes()
    assert alone == (tmp_path / "x" / "fold-1" / "metrics.jsonl").read_bytes()
    # Begun again: refused; resumed: nothing is trained, and the same is told.
    assert "--resume" in refused(capsys, *FLAGS, "--folds", "3", "--every-fold", "--out", "x")
    (tmp_path / "x" / "fold-2" / "summary.json").unlink()
    code, again, _ = run(capsys, "--resume", "--every-fold", "--out", "x")
    assert code == 0
    assert f"{float(scores.mean()):.2%} ± {float(scores.std()):.2%}" in again
    assert "was begun with seed = 0" in refused(
        capsys, "--resume", "--every-fold", "--seed", "4", "--out", "x"
    )
    # Folds of two versions of the data are not trained side by side.
    (tmp_path / "x" / "fold-2" / "summary.json").unlink()
    config = tmp_path / "x" / "fold-0" / "config.json"
    config.write_text(config.read_text().replace("scikit-learn digits", "other digits"))
    said = refused(capsys, "--resume", "--every-fold", "--out", "x")
    assert "with the data 'other digits', but 'data' holds 'scikit-learn digits'" in said


# Resuming


def test_resume_takes_the_runs_own_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*FLAGS, "--seed", "7", "--noise", "normal", "--skip", "features.4"]
    assert run(capsys, *words, "--out", "x")[0] == 0
    before = (tmp_path / "x" / "metrics.jsonl").read_bytes()
    (tmp_path / "x" / "summary.json").unlink()
    assert run(capsys, "--resume", "--out", "x")[0] == 0
    assert run(capsys, "--resume", "--out=x", "--seed", "7")[0] == 0
    assert run(capsys, *words, "--resume", "--out", "x")[0] == 0
    assert (tmp_path / "x" / "metrics.jsonl").read_bytes() == before
    others = {"seed": "--seed 8", "epochs": "--epochs 9", "data": "--preset paper-svhn"}
    for name, other in (others | {"truncate": "--no-truncate"}).items():
        err = refused(capsys, "--resume", *other.split(), "--out", "x")
        assert f"was begun with {name} = " in err


def test_resume_with_a_preset_is_begun_or_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "digits", "--epochs", "1", "--limit", "150", "--resume", "--out", "x"]
    assert run(capsys, *words)[0] == 0
    assert run(capsys, *words)[0] == 0


def test_damaged_runs_are_told_of_before_anything_is_parsed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, *FLAGS, "--out", "x")[0] == 0
    for content in (b"", b"{", b"[]", b'{"recipe": 5}', b'{"recipe": {"period": 1}}', b"\xff" * 9):
        (tmp_path / "x" / "config.json").write_bytes(content)
        assert "config.json" in refused(capsys, "--resume", "--out", "x")


# TensorBoard


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_events_are_the_metrics_also_after_a_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--epochs", "3", *FLAGS[2:], "--tensorboard", "--out", "x"]
    with monkeypatch.context() as patch:
        from softstair.train.run import Run

        log, calls = Run.log, [0]

        def crash(self: Run, metrics: dict[str, Any]) -> None:
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt  # after two epochs, of which no checkpoint tells
            log(self, metrics)

        patch.setattr(Run, "log", crash)
        assert run(capsys, *words)[0] == 130
    assert run(capsys, *words, "--resume")[0] == 0
    found = events(tmp_path / "x" / "events")
    measured = lines(tmp_path / "x")
    tags = found.Tags()["scalars"]
    for name in ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "learning_rate"):
        scalars = found.Scalars(name)
        assert [one.step for one in scalars] == [0, 1, 2], name
        assert [one.value for one in scalars] == pytest.approx([line[name] for line in measured])
    for layer in range(len(measured[0]["noise"])):
        stds = [one.value for one in found.Scalars(f"noise/{layer}/std")]
        assert stds == pytest.approx([line["noise"][layer][1] for line in measured])
    assert any(tag.startswith("dead/") for tag in tags)
    assert any(tag.startswith("fullest_level/") for tag in tags)


def test_without_the_package_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    err = refused(capsys, *FLAGS, "--tensorboard", "--out", "x")
    assert "pip install 'softstair[tensorboard]'" in err


def test_no_events_unless_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, *FLAGS, "--out", "x")[0] == 0
    assert not (tmp_path / "x" / "events").exists()


def test_a_reader_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`softstair train | head -1`: the run is whole all the same."""

    class Gone(io.StringIO):
        spare: int

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return self.spare

    gone = Gone()
    gone.spare = os.dup(2)
    monkeypatch.setattr(sys, "stdout", gone)
    code = cli.main(["train", *FLAGS, "--out", "x"])
    os.close(gone.spare)
    assert code == 141
    assert (tmp_path / "x" / "summary.json").exists()


def test_the_command_to_go_on_with_has_all_that_the_run_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from softstair.train.interrupt import Interrupted

    def stop(*_: object) -> None:
        raise Interrupted(15)

    monkeypatch.setattr("softstair.train.loop.run_epochs", stop)
    more = ["--data-dir", "my data", "--device", "cpu", "--tensorboard"]
    code, out, err = run(capsys, *FLAGS, *more, "--out", "my run")
    assert (code, out, err.count("\n")) == (143, "", 1)
    words = shlex.split(err[err.index("softstair train --resume") :])
    command = parse(words[2:], "softstair train")
    assert (command.resume, command.tensorboard, command.device) == (True, True, "cpu")
    assert (command.out, command.data_dir) == (Path("my run"), Path("my data"))
    assert command.recipe.limit == 150
    code, _, err = run(capsys, *FLAGS, "--every-fold", "--together", "1", "--out", "all")
    assert code == 143
    assert {"--every-fold", "all"} <= set(shlex.split(err[err.index("softstair train --resume") :]))
