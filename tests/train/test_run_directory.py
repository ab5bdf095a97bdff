"""Run directories: what is refused, in what words, and that nothing good is ever lost."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from short import RECIPE, files, is_sentence, metrics_of, put, recipe, summary_of, uninterrupted
from torch import Tensor, nn
from warm import Warm

from softstair import cli
from softstair.data import Dataset
from softstair.data.digits import load as load_digits
from softstair.train import Recipe, Run, RunError, checkpoint, records, train, trained_network
from softstair.train.checkpoint import CheckpointError
from softstair.train.interrupt import Interrupted
from softstair.train.records import read_json, recipe_of
from softstair.train.state import State

FLAGS = ["--epochs", "1", "--limit", "200", "--batch", "32"]


class Stop:
    """A watcher that asks the run to stop in the middle of its second epoch."""

    def begin(self, state: State) -> None:
        pass

    def step(self, state: State) -> None:
        if (state.epoch, state.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    torch.set_num_threads(1)
    return uninterrupted(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped half-way; not to be written to."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Interrupted):
        train(RECIPE, out, watchers=[Stop()])
    return out


@pytest.fixture
def out(half: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(half, tmp_path / "run")


def ends_well(out: Path, whole: tuple[bytes, list[Any]]) -> None:
    summary = train(RECIPE, out, resume=True)
    assert (metrics_of(out), summary_of(summary)) == whole


def refused(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    code = cli.main(["train", *words])
    stdout, stderr = capsys.readouterr()
    assert (code, stdout) == (2, ""), (stdout, stderr)
    assert stderr.count("\n") == 1
    assert is_sentence(stderr), stderr
    return stderr


# Which directories


def test_a_run_is_not_begun_twice(
    out: Path, whole: tuple[bytes, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(out)
    with pytest.raises(RunError, match="holds a run already"):
        train(RECIPE, out)
    assert "--resume" in refused(*FLAGS, "--out", str(out), capsys=capsys)
    assert files(out) == before
    ends_well(out, whole)


def test_a_finished_run_returns_its_summary_and_trains_no_more(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = train(RECIPE, out, resume=True)
    before = files(out)

    def no(*_: object) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr("softstair.train.loop.run_epochs", no)
    assert train(RECIPE, out, resume=True) == summary
    assert files(out) == before
    with pytest.raises(RunError, match="holds a run already"):
        train(RECIPE, out)


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    summary = train(recipe(epochs=1), tmp_path / "deep" / "er" / "x", resume=True)
    assert summary["epochs"] == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("below", ["file", "file/x", "file/x/y"])
def test_a_file_is_no_directory(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    for more in ([], ["--resume"], ["--every-fold"], ["--every-fold", "--resume"]):
        text = refused(*FLAGS, *more, "--out", str(tmp_path / below), capsys=capsys)
        assert str(tmp_path / "file") in text
    assert files(tmp_path) == {"file": b"precious"}


def test_names_that_no_disk_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(*FLAGS, "--out", str(tmp_path / ("x" * 300)), capsys=capsys)
    assert "--out" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of another kind")
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    (tmp_path / "closed").mkdir(mode=0o500)
    for place in ("closed", "closed/x"):
        assert "--out" in refused(*FLAGS, "--out", str(tmp_path / place), capsys=capsys)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied")], ids=repr)
def test_a_directory_that_cannot_be_written_even_by_root(
    error: OSError,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", closed)
    text = refused(*FLAGS, "--out", str(tmp_path / "x"), capsys=capsys)
    assert "Permission denied" in text
    assert "--out" in text


FOREIGN = {
    "thesis.tex": "a", "metrics.jsonl": "precious\n", "summary.json": "{}", "picture.png": "mine",
    "checkpoint/model.safetensors": "weights", "checkpoint/00000001.json": "{}",
    "checkpoint/00000007.safetensors": "weights", "events/x": "y", ".hidden": "z", "fold-0/x": "y",
    "lock": "precious",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused_and_kept(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x" / name
    path.parent.mkdir(parents=True)
    path.write_text(FOREIGN[name])
    if name != "lock":  # an older run's, for all we know
        for more in ([], ["--resume"]):
            text = refused(*FLAGS, *more, "--out", str(tmp_path / "x"), capsys=capsys)
            assert repr(name.partition("/")[0]) in text or "--every-fold" in text
    else:
        cli.main(["train", *FLAGS, "--out", str(tmp_path / "x")])
    assert path.read_text() == FOREIGN[name]


def test_a_foreign_picture_is_not_painted_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "picture.png").write_text("mine")
    refused(*FLAGS, "--folds", "2", "--every-fold", "--out", str(tmp_path), capsys=capsys)
    assert (tmp_path / "picture.png").read_text() == "mine"


def test_what_is_refused_at_once_can_be_mended_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error does not leave a run behind that stands in the way of the right one."""
    for wrong in (
        *("--limit 3", "--batch 1000", "--data nothing", "--model none"),
        *("--device meta", "--device cuda:77", "--skip *", "--limit 30"),
    ):
        refused(*FLAGS, *wrong.split(), "--out", str(tmp_path / "x"), capsys=capsys)
        assert not files(tmp_path), wrong
    assert cli.main(["train", *FLAGS, "--out", str(tmp_path / "x")]) == 0


def test_a_directory_in_use(
    out: Path, whole: tuple[bytes, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(out)
    with Run.hold(out):
        for more in ([], ["--resume"]):
            text = refused(*FLAGS, *more, "--out", str(out), capsys=capsys)
            assert "in use by another process" in text
        assert files(out) == before
    ends_well(out, whole)


def test_a_directory_in_use_by_another_process(
    warm: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x"
    long = ["--epochs", "1000", "--limit", "200"]
    child = warm.start(["train", *long, "--out", str(out)], tmp_path / "errors")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    text = refused(*long, "--resume", "--out", str(out), capsys=capsys)
    assert "in use by another process" in text
    os.kill(child, signal.SIGKILL)
    assert warm.wait() == -9
    with Run.hold(out):  # the dead hold nothing
        pass


# Which recipe, which data


CHANGES: dict[str, Any] = {
    "seed": 1, "epochs": 4, "period": 0.8, "noise": "normal", "skip": ("x",), "drop": None,
    "fold": 1, "limit": None, "batch": 33, "learning_rate": 2e-3, "static_mean": False,
    "weights": "int4", "precision": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_that_does_not_match_is_named(
    name: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(out)
    with pytest.raises(RunError, match=f"was begun with {name} = ") as caught:
        train(replace(RECIPE, **{name: CHANGES[name]}), out, resume=True)
    assert is_sentence(str(caught.value))
    assert repr(CHANGES[name]) in str(caught.value)
    flag, value = f"--{name.replace('_', '-')}", CHANGES[name]
    words = [flag, *(value if isinstance(value, tuple) else [str(value)])]
    words = ["--no-static-mean"] if value is False else words
    assert name in refused(*words, "--resume", "--out", str(out), capsys=capsys)
    assert files(out) == before


def test_a_preset_that_does_not_match(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused("--preset", "paper-speech", "--resume", "--out", str(out), capsys=capsys)
    assert "was begun with data = 'digits'" in text


def changed(digits: Dataset) -> Iterator[tuple[str, Dataset]]:
    first = digits.x.clone()
    first[-1, 0, 0, 0] += 1
    yield "x", replace(digits, x=first)
    labels = digits.y.clone()
    labels[0] = (labels[0] + 1) % 10
    yield "y", replace(digits, y=labels)
    yield "order", replace(digits, x=digits.x.flip(0), y=digits.y.flip(0))
    yield "fewer", replace(digits, x=digits.x[1:], y=digits.y[1:])
    yield "mean", replace(digits, mean=7.0)
    yield "std", replace(digits, std=7.0)
    yield "groups", replace(digits, groups=torch.arange(len(digits)) // 3)
    yield "test", replace(digits, test_x=digits.x[:50], test_y=digits.y[:50])


def test_data_that_changed_are_refused(
    out: Path, whole: tuple[bytes, list[Any]], tmp_path: Path
) -> None:
    before = files(out)
    for what, dataset in changed(load_digits().sample(200)):
        with pytest.raises(RunError, match="data") as caught:
            train(RECIPE, out, resume=True, dataset=dataset)
        assert is_sentence(str(caught.value)), what
        assert files(out) == before
    train(RECIPE, out, resume=True, dataset=load_digits().sample(200))
    assert metrics_of(out) == whole[0]


def test_a_model_that_changed_is_refused(out: Path) -> None:
    before = files(out)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with pytest.raises(CheckpointError, match="does not fit this network") as caught:
        train(RECIPE, out, resume=True, model=other)
    assert is_sentence(str(caught.value))
    assert files(out) == before
    with pytest.raises((RunError, CheckpointError)) as wrong:
        trained_network(out, load_digits(), other)
    assert is_sentence(str(wrong.value))


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match="holds no trained network") as caught:
            trained_network(place, load_digits())
        assert is_sentence(str(caught.value))


# Damaged files


def test_a_damaged_checkpoint_stops_the_run_and_the_one_before_is_good(
    tmp_path: Path, whole: tuple[bytes, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x"

    class Soon(Stop):
        def step(self, state: State) -> None:
            if state.step % 2 == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(2):  # two checkpoints
        with pytest.raises(Interrupted):
            train(RECIPE, out, resume=True, watchers=[Soon()])
    newest = max((out / "checkpoint").glob("*.json"))
    put(newest, newest.read_bytes()[:-9])
    before = files(out)
    text = refused("--resume", "--out", str(out), capsys=capsys)
    assert str(newest) in text
    assert "delete it to go back to the checkpoint before" in text
    assert files(out) == before
    newest.unlink()
    ends_well(out, whole)


def forged(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A checkpoint whose digests are right, and whose content is not."""
    state = checkpoint.load(out / "checkpoint")
    assert state is not None
    change(state)
    checkpoint.save(out / "checkpoint", state)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no network": lambda s: s.pop("network"),
    "no order": lambda s: s.update(order=None),
    "step of a half": lambda s: s.update(step=1.5),
    "step beyond": lambda s: s.update(step=99),
    "negative step": lambda s: s.update(step=-1),
    "epoch beyond": lambda s: s.update(epoch=99),
    "epoch a word": lambda s: s.update(epoch="1"),
    "epoch nothing": lambda s: s.update(epoch=None),
    "history too long": lambda s: s["history"].append({}),
    "history of something else": lambda s: s.update(history=[5]),
    "history without accuracy": lambda s: s.update(history=[{"epoch": 0}]),
    "order too short": lambda s: s.update(order=s["order"][:-1]),
    "order with a repetition": lambda s: s["order"].__setitem__(0, s["order"][1]),
    "order of floats": lambda s: s.update(order=s["order"].float()),
    "order a list": lambda s: s.update(order=[1, 2]),
    "network of words": lambda s: s.update(network={"a": "b"}),
    "another parameter": lambda s: s["network"].update(more=torch.zeros(1)),
    "another shape": lambda s: s["network"].update(
        {name: value[..., None] for name, value in s["network"].items()}
    ),
    "optimiser of more": lambda s: s["optimiser"]["state"].update(
        {999: {"exp_avg": torch.ones(2)}}
    ),
    "optimiser of words": lambda s: s["optimiser"].update(state={0: "x"}),
    "no groups": lambda s: s["optimiser"].update(param_groups=[]),
    "annealer of nothing": lambda s: s.update(annealer=None),
    "annealer elsewhere": lambda s: s["annealer"].update(steps=-5),
    "annealer of words": lambda s: s["annealer"].update(steps="x"),
    "generator": lambda s: s["generators"].update(cpu=torch.zeros(3, dtype=torch.uint8)),
    "generator of floats": lambda s: s["generators"].update(order=torch.zeros(5)),
    "no generators": lambda s: s.pop("generators"),
    "threads": lambda s: s.update(threads=-3),
    "threads of words": lambda s: s.update(threads="many"),
    "sums": lambda s: s.update(sums={"loss": 3.0}),
    "seconds": lambda s: s.update(seconds="long"),
    "origin a word": lambda s: s.update(origin="here"),
    "origin without data": lambda s: s["origin"].pop("data"),
    "origin of another recipe": lambda s: s["origin"]["recipe"].update(noise="pink"),
}


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_checkpoint_is_refused(
    name: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged(out, FORGERIES[name])
    before = files(out)
    refused("--resume", "--out", str(out), capsys=capsys)
    assert files(out) == before


OTHERS: dict[str, Any] = {"fold": 1, "seed": 7, "learning_rate": 0.01, "epochs": 4}


@pytest.mark.parametrize("field", OTHERS)
def test_a_checkpoint_of_another_recipe_is_refused(
    field: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another fold, for one, the network has been trained on the examples that validate."""
    other = recipe(**{field: OTHERS[field]})
    with pytest.raises(Interrupted):
        train(other, tmp_path / "other", watchers=[Stop()])
    shutil.rmtree(out / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", out / "checkpoint")
    before = files(out)
    values = f"{field} {getattr(other, field)!r} instead of {getattr(RECIPE, field)!r}"
    assert values in refused("--resume", "--out", str(out), capsys=capsys)
    assert files(out) == before
    with pytest.raises(CheckpointError, match=f"belongs to another training .{field}"):
        trained_network(out, load_digits())


def test_a_recipe_that_was_edited_does_not_fit_its_checkpoint(out: Path) -> None:
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace('"fold": 0', '"fold": 2'))
    with pytest.raises(CheckpointError, match="fold 0 instead of 2"):
        train(recipe(fold=2), out, resume=True)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    digits = load_digits()
    moved = replace(digits, y=digits.y.roll(1))
    for name, dataset in (("run", digits), ("other", moved)):
        with pytest.raises(Interrupted):
            train(RECIPE, tmp_path / name, dataset=dataset, watchers=[Stop()])
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", tmp_path / "run" / "checkpoint")
    with pytest.raises(CheckpointError, match=r"data set .* instead of") as caught:
        train(RECIPE, tmp_path / "run", dataset=digits, resume=True)
    assert is_sentence(str(caught.value))


def test_a_checkpoint_may_be_computed_by_other_kernels(out: Path, tmp_path: Path) -> None:
    """How a step is computed does not decide what is trained."""
    other = recipe(kernels="reference", precision="float32", compile="never", capture="never")
    with pytest.raises(Interrupted):
        train(other, tmp_path / "other", watchers=[Stop()])
    shutil.rmtree(out / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", out / "checkpoint")
    assert train(RECIPE, out, resume=True)["epochs"] == 3


def test_a_checkpoint_that_names_no_recipe_is_loaded_with_a_warning(
    out: Path, whole: tuple[bytes, list[Any]]
) -> None:
    """Older versions saved such ones."""
    forged(out, lambda state: state.pop("origin"))
    with pytest.warns(UserWarning, match="does not say with which recipe and data"):
        trained_network(out, load_digits())
    with pytest.warns(UserWarning, match="does not say with which recipe and data"):
        ends_well(out, whole)
    trained_network(out, load_digits())  # what the run saved since then says it


@pytest.mark.nightly
def test_ten_thousand_mutations_of_config(half: Path, tmp_path: Path) -> None:
    content = (half / "config.json").read_bytes()
    file = tmp_path / "config.json"
    file.write_bytes(content)
    read_well = refusals = 0
    for number, mutated in enumerate(mutations.mutations(content, 10_000)):
        put(file, mutated)
        begun, sentence = time.process_time(), "It was read."
        try:
            read_well += isinstance(recipe_of(tmp_path), Recipe)
        except RunError as error:
            sentence = str(error)
            refusals += 1
        assert is_sentence(sentence), (number, sentence)
        assert time.process_time() - begun < 1, number
    assert read_well > 100
    assert refusals > 5_000


def test_mutated_configs_when_resuming(
    half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: it goes on as it was begun, or one sentence says why not."""
    out = shutil.copytree(half, tmp_path / "run")
    content = (out / "config.json").read_bytes()
    monkeypatch.setattr(
        "softstair.train.loop.run_epochs", lambda *_: (_ for _ in ()).throw(Interrupted(2))
    )
    codes = {130: 0, 2: 0}
    for number, mutated in enumerate(mutations.mutations(content, 150, seed=5)):
        put(out / "config.json", mutated)
        codes[cli.main(["train", "--resume", "--out", str(out)])] += 1
        text = capsys.readouterr().err
        assert text.count("\n") == 1, (number, text)
        assert is_sentence(text), (number, text)
    assert codes[2] > 100


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_mutations_of_what_came_of_a_run(
    name: str,
    half: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = shutil.copytree(half, tmp_path / "run")
    train(RECIPE, out, resume=True)
    figure = "softstair.cli._train_picture.Figure.savefig"
    monkeypatch.setattr(figure, lambda *_, **__: None)  # the picture is not what takes a second
    content = (out / name).read_bytes()
    edited = [b"", b"x", b"{}", b"[]", b"null\n", content * 2, content[:-9], content[9:], b"\n\n\n"]
    for word in ("valid_accuracy", "test_accuracy", "noise", "train_loss", "recipe", "fold"):
        edited += [content.replace(f'"{word}"'.encode(), b'"other"')]
    for before, after in (
        (b": 0.", b': "x", "y": 0.'),
        (b": 0.", b": null, '': 0."),
        (b"[[", b"["),
    ):
        edited.append(content.replace(before, after))
    found = {0: 0, 2: 0}
    for number, mutated in enumerate([*edited, *mutations.mutations(content, 15, seed=2)]):
        put(out / name, mutated)
        code = cli.main(["train", "--resume", "--out", str(out)])
        text = capsys.readouterr().err
        found[code] += 1
        if code == 2:
            assert text.count("\n") == 1, (number, text)
            assert is_sentence(text), (number, text)
            assert name in text, (number, text)
    assert found[2] > 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "read"),
    [("summary.json", records.summary_of), ("metrics.jsonl", records.metrics_of)],
)
def test_ten_thousand_mutations_of_what_came_of_a_run(
    name: str, read: Callable[[Path], Any], half: Path, tmp_path: Path
) -> None:
    """Read as what they are, or refused in one sentence; and some of them are read."""
    out = shutil.copytree(half, tmp_path / "run")
    train(RECIPE, out, resume=True)
    content = (out / name).read_bytes()
    assert read(out)
    good = 0
    for number, mutated in enumerate(mutations.mutations(content, 10_000, seed=3)):
        put(out / name, mutated)
        refusal = None
        try:
            read(out)
            good += 1
        except RunError as error:
            refusal = str(error)
        assert refusal is None or (is_sentence(refusal) and name in refusal), (number, refusal)
    assert 0 < good < 5_000


# Full disks


@pytest.mark.parametrize(
    ("place", "at", "code"),
    [
        ("fsync", 1, errno.ENOSPC),
        ("fsync", 2, errno.EDQUOT),
        ("fsync", 3, errno.EIO),
        ("fsync", 5, errno.ENOSPC),
        ("fsync", 7, errno.ENOSPC),
        ("replace", 1, errno.ENOSPC),
        ("replace", 2, errno.ENOSPC),
        ("replace", 3, errno.ENOSPC),
        ("replace", 4, errno.ENOSPC),
    ],
)
def test_a_full_disk(
    place: str,
    at: int,
    code: int,
    out: Path,
    whole: tuple[bytes, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, real = [0], getattr(os, place)

    def full(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] >= at:
            raise OSError(code, os.strerror(code))
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, place, full)
        sentence = ""
        try:
            train(RECIPE, out, resume=True)
        except RunError as error:
            sentence = str(error)
    if not sentence:
        # What fails in putting a folder's entry on the disk is left to the system.
        assert place == "fsync"
        ends_well(out, whole)
        return
    assert is_sentence(sentence), sentence
    assert os.strerror(code) in sentence
    assert str(out) in sentence
    assert checkpoint.load(out / "checkpoint") is not None
    assert not [path for path in out.rglob("*.part")]
    ends_well(out, whole)


@pytest.mark.parametrize("limit", [2_000, 60_000, 300_000])
def test_a_file_may_become_no_longer(
    limit: int, warm: Warm, out: Path, whole: tuple[bytes, list[Any]], tmp_path: Path
) -> None:
    """A limit of the system's own, so that not a line of this is pretended."""
    held = files(out / "checkpoint")
    code = warm.run(["train", "--resume", "--out", str(out)], tmp_path / "errors", fsize=limit)
    text = (tmp_path / "errors").read_text()
    assert (code, is_sentence(text)) == (2, True), text
    assert "File too large" in text
    assert "--resume" in text
    assert files(out / "checkpoint") == held
    ends_well(out, whole)


# Losses that are no numbers


class Poisoned(nn.Module):
    """A network whose loss, or else whose gradient alone, is no number after some calls."""

    def __init__(self, kind: str, calls: int) -> None:
        super().__init__()
        hidden = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()]
        self.features, self.classifier = nn.Sequential(*hidden), nn.Linear(16, 10)
        self.shift = nn.Parameter(torch.zeros(1))
        self.kind = kind
        self.register_buffer("left", torch.tensor(calls))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classifier(self.features(x))
        if self.training:
            self.left -= 1
        if self.left >= 0 or not self.training:
            return scores + self.shift * 0
        if self.kind == "gradient":
            return scores + self.shift.abs().sqrt() * 0  # finite; its slope at 0 is not
        return scores * (float("nan") if self.kind == "loss" else float("inf"))


def finite(out: Path) -> None:
    """Nothing in the newest checkpoint but numbers."""
    state = checkpoint.load(out / "checkpoint")
    assert state is not None
    tensors = [*state["network"].values(), *state["sums"].values()]
    tensors += [value for one in state["optimiser"]["state"].values() for value in one.values()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


FLOAT = recipe(weights="float", features="float")


@pytest.mark.parametrize("kind", ["loss", "infinity", "gradient"])
@pytest.mark.parametrize("calls", [0, 7, 4, 9, 14])
def test_a_loss_that_is_no_number(kind: str, calls: int, tmp_path: Path) -> None:
    """In the middle of an epoch; in its last step, where only the evaluation can tell."""
    out = tmp_path / "x"

    class Save:
        """Saves as often as it can."""

        run: Run

        def begin(self, state: State) -> None:
            pass

        def step(self, state: State) -> None:
            self.run._saved_at = float("-inf")

        def epoch(self, state: State, metrics: dict[str, Any]) -> None:
            self.step(state)

    watcher = Save()
    holding = Run.__init__

    def hold(self: Run, *given: Any) -> None:
        holding(self, *given)
        watcher.run = self  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__init__", hold)
        with pytest.raises(RunError) as caught:
            train(FLOAT, out, model=Poisoned(kind, calls), watchers=[watcher])
    assert is_sentence(str(caught.value)), str(caught.value)
    assert f"in epoch {calls // 5 + 1}," in str(caught.value)
    if calls:
        finite(out)
        lines = metrics_of(out).decode().splitlines()
        assert len(lines) == calls // 5
        state = checkpoint.load(out / "checkpoint")
        assert state is not None
        assert (state["epoch"] * 5 + state["step"]) == calls
    else:
        assert checkpoint.load(out / "checkpoint") is None
    assert read_json(out, "summary.json") is None
    with pytest.raises(RunError, match="in epoch"):  # and it says the same again
        train(FLOAT, out, model=Poisoned(kind, calls), resume=True)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_signal_in_the_step_that_gave_no_number(kind: str, tmp_path: Path) -> None:
    """Whoever asks to stop just then finds nothing bad kept."""
    out = tmp_path / "x"

    class Now(Stop):
        def step(self, state: State) -> None:
            if (state.epoch, state.step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises((RunError, Interrupted)):
        train(FLOAT, out, model=Poisoned(kind, 7), watchers=[Now()])
    if checkpoint.load(out / "checkpoint") is not None:
        finite(out)


def test_a_loss_that_is_no_number_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) / (0.0 if self.training else 1.0)\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, "--model", "poison:Net", "--weights", "float", "--features", "float"]
    text = refused(*flags, "--out", "x", capsys=capsys)
    assert "loss became nan in epoch 1," in text
    assert "learning-rate" in text
    assert (
        json.loads((tmp_path / "x" / "config.json").read_text())["recipe"]["model"] == "poison:Net"
    )
