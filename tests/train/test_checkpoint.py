"""Checkpoints: complete or absent, identical when read back, and harmless whatever they hold."""

import errno
import io
import os
import pickle
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from short import files, put

from softstair.train import checkpoint
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


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
TIED = torch.arange(6.0)
STATES: dict[str, dict[Any, Any]] = {
    "empty": {},
    "plain": {"a": 1, "b": -0.0, "c": "ü\n\x00\ud800", "d": None, "e": True, "f": 1e-320},
    "nested": {"a": {"b": {}, "c": []}, "d": [[], (), {}, [()]], "e": ((1, [2]), {"x": (3,)})},
    "int keys": {"state": {0: {"m": torch.ones(2)}, 1: {}}, 7: {-1: "x"}},
    "generator": {"state": torch.get_rng_state()},
    "tags": {"a": {"@tensor": "/a"}, "b": {"@tuple": 5}, "@items": [{"@items": []}], -3: {0: {}}},
    "dtypes": {str(dtype): torch.tensor([0, 1, 100]).to(dtype) for dtype in DTYPES},
    "scalars": {"a": torch.tensor(0.1), "b": torch.tensor(3), "c": torch.tensor(True)},
    "no elements": {"a": torch.zeros(0), "b": torch.zeros(3, 0, 2)},
    "not finite": {"a": torch.tensor([float("nan"), float("inf"), -0.0])},
    "strided": {"a": torch.arange(12).reshape(3, 4).T, "b": torch.ones(1).expand(5)},
    "tied": {"a": TIED, "b": TIED, "c": TIED[:2], "d": TIED.view(2, 3)},
    "with gradient": {"a": torch.nn.Parameter(torch.ones(2))},
    "collisions": {1: torch.zeros(1), "1": torch.ones(1)},
    "names": {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "": {"__metadata__": TIED}},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    save(tmp_path / "c", STATES[name])
    assert same(STATES[name], load(tmp_path / "c"))


@pytest.mark.parametrize(
    "state",
    [
        {"a": {1, 2}}, {"a": object()}, {b"x": 1}, {"a": float("inf")},
        {"t": torch.ones(3), "a": [{"b": float("nan")}]},
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_saved_changes_nothing(state: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", SMALL)
    before = files(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        save(tmp_path / "c", state)
    assert files(tmp_path) == before


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert load(tmp_path / "c") is None
    for number in range(5):
        save(tmp_path / "c", {"number": number})
    assert len(list((tmp_path / "c").iterdir())) == 4
    assert load(tmp_path / "c") == {"number": 4}
    max((tmp_path / "c").glob("*.json")).unlink()
    assert load(tmp_path / "c") == {"number": 3}
    save(tmp_path / "c", {"number": 5})
    assert load(tmp_path / "c") == {"number": 5}


def test_saving_a_checkpoint_removes_only_its_own_incomplete_files(tmp_path: Path) -> None:
    left = ("00000007.safetensors", ".00000008.json.4711.part", ".00000008.safetensors.4711.part")
    kept = ("7.safetensors", "0007.json", ".00000008.txt.4711.part", ".00000008.json.part")
    kept += ("٣.json", "-1.json", "1.5.json")
    for name in (*left, *kept):
        (tmp_path / name).touch()
    save(tmp_path, {"step": 1})
    assert load(tmp_path) == {"step": 1}
    saved = {"00000001.json", "00000001.safetensors"}
    assert set(files(tmp_path)) == {*kept, *saved}


@pytest.mark.parametrize(
    ("place", "call"),
    [("os.replace", 1), ("os.replace", 2), ("os.fsync", 1), ("pathlib.Path.write_text", 1)],
)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_a_writer_that_fails_leaves_the_previous_checkpoint(
    place: str, call: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", SMALL)
    before = files(tmp_path)
    function, calls = pydoc.locate(place), []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return function(*arguments, **named)

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
    """fsync, then rename; the manifest, which makes a checkpoint of it, after the tensors."""
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
    assert renamed == [".safetensors", ".json"]
    assert (tmp_path / "c").stat().st_ino in synced


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder with two small checkpoints, and the newest one's two files."""
    folder = tmp_path / "c"
    save(folder, {"before": 1})
    manifest = save(folder, SMALL)
    return folder, manifest, manifest.with_suffix(".safetensors")


def is_damaged(folder: Path) -> bool:
    """Whether load raises CheckpointError; otherwise it returns exactly what was saved."""
    try:
        state = load(folder)
    except CheckpointError:
        return True
    assert same(state, SMALL)
    return False


@pytest.mark.parametrize("which", [1, 2], ids=["manifest", "tensors"])
def test_changed_or_cut_files_are_damaged(which: int, sealed: tuple[Path, Path, Path]) -> None:
    folder, file = sealed[0], sealed[which]
    content = file.read_bytes()
    for place in (0, 9, len(content) // 2, len(content) - 1):
        put(file, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert is_damaged(folder), place
        put(file, content[:place])
        assert is_damaged(folder), place
    put(file, content)
    assert not is_damaged(folder)


@pytest.mark.parametrize(
    "state",
    [
        {"@tensor": "nowhere"}, {"@items": 5}, {"a": {"@items": [[{}, 1]]}}, {"a": {"@tuple": 5}},
    ],
    ids=str,
)  # fmt: skip
def test_edited_states_under_a_right_digest(
    state: Any, sealed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_encode", lambda value, path, tensors: state)
    save(sealed[0], {})
    assert is_damaged(sealed[0])


def dumped_by_torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Bomb:
    """What a stranger's pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("which", [1, 2], ids=["manifest", "tensors"])
def test_a_pickle_is_never_run(
    which: int, sealed: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, fired = sealed[0], sealed[which], tmp_path / "fired"
    for dumps in (pickle.dumps, dumped_by_torch):
        content = dumps({"w": Bomb(fired)})
        file.write_bytes(content)
        assert is_damaged(folder)
        # With the right digest, as somebody would write it who edits a checkpoint on purpose.
        monkeypatch.setattr("safetensors.torch.save", lambda tensors, data=content: data)
        save(tmp_path / "other", {})
        assert is_damaged(tmp_path / "other")
    assert not fired.exists()
    pickle.loads(pickle.dumps(Bomb(fired)))  # it would have worked
    assert fired.exists()


def test_other_things_in_place_of_the_files(sealed: tuple[Path, Path, Path]) -> None:
    folder, manifest, tensors = sealed
    content = tensors.read_bytes()
    tensors.unlink()
    assert is_damaged(folder)
    tensors.mkdir()
    assert is_damaged(folder)
    tensors.rmdir()
    tensors.write_bytes(content)
    text = manifest.read_bytes()
    edited = [text.replace(b'"step": 3', b'"step": ' + value) for value in (b"9" * 5000, b"NaN")]
    for other in (b"", b"null", b"[]", b"{}", b"[" * 10**6, b"\xff\xfe", *edited):
        manifest.write_bytes(other)
        assert is_damaged(folder), other[:9]


def test_a_damaged_one_says_what_to_do_and_that_helps(sealed: tuple[Path, Path, Path]) -> None:
    folder, manifest, tensors = sealed
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match="delete it to go back to the checkpoint before"
    ) as error:
        load(folder)
    assert str(manifest) in str(error.value)
    manifest.unlink()
    assert load(folder) == {"before": 1}
    save(folder, SMALL)
    assert not is_damaged(folder)
