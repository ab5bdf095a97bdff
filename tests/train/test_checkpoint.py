"""Checkpoints: complete or absent, identical when read back, and harmless whatever they hold."""

import errno
import hashlib
import io
import os
import pickle
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from short import files, put

from softstair.train.checkpoint import CheckpointError, load, save

SMALL = {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "groups": [{"lr": 0.1}, (None, True)]}


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal to the last bit, types and dtypes included."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        bits = lambda tensor: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return alike and bits(a) == bits(b)
    if isinstance(a, dict):
        keys = type(b) is dict and [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_round_trip(tmp_path: Path) -> None:
    state = {
        **SMALL,
        "state": {0: {"m": torch.ones(2).bfloat16()}, 1: {}},
        "generator": torch.get_rng_state(),
        "strided": torch.arange(12).reshape(3, 4).T,
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    save(tmp_path / "c", state)
    assert same(state, load(tmp_path / "c"))


def test_the_last_is_kept_and_the_files_of_others(tmp_path: Path) -> None:
    kept = {"7.pt", "best.pt", ".state.txt.4711.part"}
    for name in (".state.pt.4711.part", *kept):
        (tmp_path / name).touch()
    assert load(tmp_path) is None
    for number in range(3):
        save(tmp_path, {"number": number})
    assert load(tmp_path) == {"number": 2}
    assert set(files(tmp_path)) == {*kept, "state.pt"}


@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "pathlib.Path.write_bytes"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_a_writer_that_fails_leaves_the_previous_checkpoint(
    place: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", SMALL)
    before = files(tmp_path)
    assert pydoc.locate(place) is not None

    def failing(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(place, failing)
        with pytest.raises(type(error)):
            save(tmp_path / "c", {"w": torch.zeros(5)})
    assert files(tmp_path) == before
    save(tmp_path / "c", {"w": torch.zeros(5)})
    assert same(load(tmp_path / "c"), {"w": torch.zeros(5)})


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync, then rename."""
    synced: set[int] = set()
    renamed: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(number: int) -> None:
        fsync(number)
        synced.add(os.fstat(number).st_ino)

    def rename(source: Path, target: Path) -> None:
        assert source.stat().st_ino in synced
        assert source.parent == target.parent
        replace(source, target)
        renamed.append(target.suffix)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    save(tmp_path / "c", SMALL)
    assert renamed == [".pt"]
    assert (tmp_path / "c").stat().st_ino in synced


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small checkpoint."""
    return save(tmp_path / "c", SMALL)


def is_damaged(folder: Path) -> bool:
    """Whether load raises CheckpointError; otherwise it returns exactly what was saved."""
    try:
        state = load(folder)
    except CheckpointError:
        return True
    assert same(state, SMALL)
    return False


def sealed(content: bytes) -> bytes:
    """The content with the right digest, as somebody would write it who edits a checkpoint."""
    return hashlib.sha256(content).digest() + content


def test_changed_cut_and_other_files_are_damaged(file: Path) -> None:
    content = file.read_bytes()
    for place in (0, 40, len(content) // 2, len(content) - 1):
        put(file, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert is_damaged(file.parent), place
        put(file, content[:place])
        assert is_damaged(file.parent), place
    stream = io.BytesIO()
    torch.save([1], stream)
    for other in (b"", b"null", stream.getvalue()):
        put(file, sealed(other))
        assert is_damaged(file.parent), other[:9]
    put(file, content)
    assert not is_damaged(file.parent)


class Bomb:
    """What a stranger's pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_run(file: Path, tmp_path: Path) -> None:
    fired, stream = tmp_path / "fired", io.BytesIO()
    torch.save({"format": 1, "w": Bomb(fired)}, stream)
    for content in (pickle.dumps(Bomb(fired)), stream.getvalue()):
        file.write_bytes(sealed(content))
        assert is_damaged(file.parent)
    assert not fired.exists()
    pickle.loads(pickle.dumps(Bomb(fired)))  # it would have worked
    assert fired.exists()


def test_a_damaged_one_says_what_to_do_and_that_helps(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="delete it to start again") as error:
        load(file.parent)
    assert str(file) in str(error.value)
    file.unlink()
    assert load(file.parent) is None
    save(file.parent, SMALL)
    assert not is_damaged(file.parent)
