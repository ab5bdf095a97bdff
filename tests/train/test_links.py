"""Symbolic links inside a run directory: no file elsewhere is changed through them.

A run directory may come from anybody, so a link in it may point to any file of the user.
"""

import os
import shutil
from pathlib import Path

import pytest
from short import files, recipe

from softstair._files import LinkError, write
from softstair.cli import main
from softstair.train import train
from softstair.train.checkpoint import load, save

SHORT = recipe(epochs=1)
OWN = ("best.safetensors", ".notes.part", "picture.png", "lock", "other.json")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with files of the user."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in OWN:
        (folder / name).write_text(f"{name} of the user")
    return folder


@pytest.fixture(scope="module")
def without_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a recipe, and with no checkpoint yet; not to be changed."""
    out = tmp_path_factory.mktemp("begun") / "run"
    train(SHORT, out)
    shutil.rmtree(out / "checkpoint")
    (out / "summary.json").unlink()
    return out


@pytest.fixture
def begun(without_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(without_checkpoint, tmp_path / "run")


@pytest.mark.parametrize(("name", "target"), [("checkpoint", "."), ("lock", "lock")])
def test_training_refuses_a_link(name: str, target: str, begun: Path, elsewhere: Path) -> None:
    before = files(elsewhere), (elsewhere / "lock").read_text()
    (begun / name).unlink(missing_ok=True)
    (begun / name).symlink_to(elsewhere / target)
    with pytest.raises(ValueError, match=f"{name}' is a symbolic link"):
        train(SHORT, begun, resume=True)
    assert (files(elsewhere), (elsewhere / "lock").read_text()) == before


def test_saving_a_checkpoint_removes_only_its_own_incomplete_files(elsewhere: Path) -> None:
    before = files(elsewhere)
    left = ("00000007.safetensors", ".00000008.json.4711.part", ".00000008.safetensors.4711.part")
    kept = ("7.safetensors", "0007.json", ".00000008.txt.4711.part", ".00000008.json.part")
    kept += ("٣.json", "-1.json", "1.5.json")
    for name in (*left, *kept):
        (elsewhere / name).touch()
    save(elsewhere, {"step": 1})
    assert load(elsewhere) == {"step": 1}
    saved = {"00000001.json", "00000001.safetensors"}
    assert set(files(elsewhere)) == {*before, *kept, *saved}
    assert before.items() <= files(elsewhere).items()


def test_tensorboard_events_refuse_a_link(tmp_path: Path, elsewhere: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")

    from softstair.train.progress import TensorBoardEvents

    (tmp_path / "events").symlink_to(elsewhere)
    with pytest.raises(LinkError):
        TensorBoardEvents(tmp_path / "events")


def test_files_that_a_training_writes_replace_links(
    begun: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(elsewhere)
    names = ("metrics.jsonl", "network.txt", "summary.json", "picture.png")
    for name in names:
        (begun / name).unlink(missing_ok=True)
        target = "picture.png" if name == "picture.png" else f"absent-{name}"
        (begun / name).symlink_to(elsewhere / target)
    assert main(["train", "--resume", "--out", str(begun)]) == 0, capsys.readouterr().err
    assert files(elsewhere) == before
    assert not [name for name in names if (begun / name).is_symlink()]


def test_a_linked_temporary_file_is_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    before = files(elsewhere)
    (tmp_path / f".config.json.{os.getpid()}.part").symlink_to(elsewhere / "other.json")
    write(tmp_path / "config.json", "{}")
    assert files(elsewhere) == before
    assert (tmp_path / "config.json").read_text() == "{}"
    assert not (tmp_path / "config.json").is_symlink()


def test_the_run_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(SHORT, tmp_path / "run")
    assert (tmp_path / "disk" / "summary.json").is_file()
    assert (tmp_path / "run").is_symlink()
