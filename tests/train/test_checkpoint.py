"""Checkpoints: whole or not there, the same when read back, and harmless whatever is in them."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from short import files, is_sentence, put

from softstair.train import checkpoint
from softstair.train.checkpoint import CheckpointError, load, save

SMALL = {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "groups": [{"lr": 0.1}, (None, True)]}


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, types and dtypes included."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
    if isinstance(a, dict):
        keys = type(b) is dict and [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def round_trip(state: Any, folder: Path) -> Any:
    save(folder, state)
    return load(folder)


STATES: dict[str, dict[Any, Any]] = {
    "empty": {},
    "plain": {"a": 1, "b": -0.0, "c": "ü\n\x00\ud800", "d": None, "e": True, "f": 1e-320},
    "nested": {"a": {"b": {}, "c": []}, "d": [[], (), {}, [()]], "e": ((1, [2]), {"x": (3,)})},
    "int keys": {"state": {0: {"m": torch.ones(2)}, 1: {}}, 7: {-1: "x"}},
    "odd keys": {"": 4, "@tensor": 5, "@items": {"@tuple": [torch.ones(1)]}, -3: {0: {}}},
    "tags": {"a": {"@tensor": "/a"}, "b": {"@tuple": 5}, "c": [{"@items": []}]},
    "scalars": {"a": torch.tensor(0.1), "b": torch.tensor(3), "c": torch.tensor(True)},
    "no elements": {"a": torch.zeros(0), "b": torch.zeros(3, 0, 2)},
    "not finite": {"a": torch.tensor([float("nan"), float("inf"), -0.0])},
    "strided": {"a": torch.arange(12).reshape(3, 4).T, "b": torch.arange(10)[::3]},
    "expanded": {"a": torch.ones(1).expand(5)},
    "with gradient": {"a": torch.nn.Parameter(torch.ones(2))},
    "collisions": {1: torch.zeros(1), "1": torch.ones(1)},
    "slashes": {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "/a": {"": torch.ones(2)}},
    "list and key": {"a": [torch.zeros(1)], "a/0": torch.ones(1)},
    "no name": {"": torch.zeros(1)},
    "metadata": {"__metadata__": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    state = STATES[name]
    detached = {k: v.detach() if isinstance(v, torch.nn.Parameter) else v for k, v in state.items()}
    assert same(detached, round_trip(state, tmp_path / "c"))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[0, 1, 3], [100, 7, 1]]).to(dtype)
    again = round_trip({"a": values, "b": values[0, 1]}, tmp_path / "c")
    assert (again["a"].dtype, again["b"].shape) == (dtype, ())
    assert torch.equal(again["a"], values)
    assert torch.equal(again["b"], values[0, 1])


def test_tied_tensors_and_views(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    again = round_trip({"a": tied, "b": tied, "c": tied[:2], "d": tied.view(2, 3)}, tmp_path / "c")
    assert same(again, {"a": tied, "b": tied, "c": tied[:2], "d": tied.view(2, 3)})
    again["a"][0] = 9  # what was loaded is the reader's own, to write to
    assert float(again["b"][0]) == 0.0


def test_an_optimiser_and_a_generator(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.Adam([weight], 0.1)
    weight.sum().backward()
    optimiser.step()
    state = {"optimiser": optimiser.state_dict(), "generator": torch.get_rng_state()}
    again = round_trip(state, tmp_path / "c")
    assert same(state, again)
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], 0.5)
    other.load_state_dict(again["optimiser"])
    assert same(other.state_dict(), state["optimiser"])


def test_saving_does_not_keep_what_it_saves(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    save(tmp_path / "c", {"w": weight})
    weight += 1
    state = load(tmp_path / "c")
    assert state is not None
    assert state["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "state",
    [
        {"a": {1, 2}}, {"a": b"x"}, {"a": object()}, {"a": 1j}, {"a": torch.float32},
        {"a": lambda: 0}, {(1, 2): 3}, {b"x": 1}, {frozenset(): 1}, {"a": float("nan")},
        {"a": float("inf")},
        {"t": torch.ones(3), "a": [{"b": float("nan")}]}, {"t": torch.ones(3), "a": {(1,): 1}},
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_refused(state: Any, tmp_path: Path) -> None:
    """When it is saved, not when it is needed; and the checkpoint before stays, alone."""
    save(tmp_path / "c", SMALL)
    before = files(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        save(tmp_path / "c", state)
    assert files(tmp_path) == before


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert load(tmp_path / "c") is None
    for number in range(5):
        save(tmp_path / "c", {"number": number, "w": torch.full((2,), float(number))})
    names = [path.name for path in sorted((tmp_path / "c").iterdir())]
    assert len(names) == 4
    state = load(tmp_path / "c")
    assert state is not None
    assert state["number"] == 4
    (tmp_path / "c" / names[2]).unlink()  # the manifest of the newest
    state = load(tmp_path / "c")
    assert state is not None
    assert (state["number"], state["w"].tolist()) == (3, [3.0, 3.0])
    save(tmp_path / "c", {"number": 5})
    state = load(tmp_path / "c")
    assert state is not None
    assert state["number"] == 5


def test_strangers_in_the_folder_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "c", SMALL)
    for name in ("notes.json", "x1.json", "٣.json", "-1.json", ".json", "1.5.json", "latest.json"):
        (tmp_path / "c" / name).write_text("{}")
    assert same(load(tmp_path / "c"), SMALL)
    save(tmp_path / "c", SMALL)
    assert same(load(tmp_path / "c"), SMALL)


# Writers that fail midway


def failing(at: int, error: BaseException) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that fails when it is called for the so-many-th time."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = [0]

        def called(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise error
            return function(*given, **named)

        return called

    return wrap


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize(
    ("place", "at"),
    [("os.replace", 1), ("os.replace", 2), ("os.fsync", 1), ("pathlib.Path.write_text", 1)],
)
def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(
    place: str, at: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", SMALL)
    before = files(tmp_path)
    owner, name = place.rsplit(".", 1)
    target = {"os": os, "pathlib.Path": Path}[owner]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing(at, error)(getattr(target, name)))
        try:
            save(tmp_path / "c", {"w": torch.zeros(5)})
        except type(error):
            pass
        else:
            pytest.fail(
                f"nothing called {place} so often: the writer has changed, and so must this"
            )
    assert files(tmp_path) == before
    assert same(load(tmp_path / "c"), SMALL)
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


def test_a_killed_writers_leavings_are_swept(tmp_path: Path) -> None:
    save(tmp_path / "c", SMALL)
    for name in ("00000002.safetensors", ".00000002.safetensors.77.part", ".00000003.json.78.part"):
        (tmp_path / "c" / name).write_bytes(b"half")
    assert same(load(tmp_path / "c"), SMALL)
    save(tmp_path / "c", {"a": 1})
    save(tmp_path / "c", {"a": 2})
    assert len(list((tmp_path / "c").iterdir())) == 4


# Damage


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder with two small checkpoints, and the newest one's two files."""
    folder = tmp_path / "c"
    save(folder, {"before": 1})
    manifest = save(folder, SMALL)
    return folder, manifest, manifest.with_suffix(".safetensors")


def outcome(folder: Path, what: object) -> str:
    """Refused in a sentence, or the very state that was saved; within a second."""
    begun, sentence = time.process_time(), "It was read."
    try:
        state = load(folder)
    except CheckpointError as error:
        found, sentence = "refused", str(error)
    except BaseException as error:
        raise AssertionError(f"{what}: {error!r}") from error
    else:
        assert same(state, SMALL), what
        found = "read"
    assert time.process_time() - begun < 1, what
    assert is_sentence(sentence), (what, sentence)
    return found


@pytest.mark.parametrize("which", [1, 2], ids=["manifest", "tensors"])
def test_every_byte_matters(which: int, sealed: tuple[Path, Path, Path]) -> None:
    folder, file = sealed[0], sealed[which]
    content = file.read_bytes()
    for place in range(len(content)):
        for mask in (1, 0x20, 0xFF):
            changed = bytearray(content)
            changed[place] ^= mask
            put(file, changed)
            assert outcome(folder, (place, mask)) == "refused"
        put(file, content[:place])
        assert outcome(folder, place) == "refused"
    file.write_bytes(content)
    assert outcome(folder, "whole") == "read"


@pytest.mark.nightly
@pytest.mark.parametrize("which", [1, 2], ids=["manifest", "tensors"])
def test_ten_thousand_mutations(which: int, sealed: tuple[Path, Path, Path]) -> None:
    folder, file = sealed[0], sealed[which]
    content = file.read_bytes()
    found = {"refused": 0, "read": 0}
    for number, mutated in enumerate(mutations.mutations(content, 5_000, seed=which)):
        put(file, mutated)
        found[outcome(folder, number)] += 1
    # What is read is what no mutation changed: a byte replaced by itself, for example.
    assert found["refused"] > 4_700


def reseal(manifest: Path, tensors: Path, state: Any = ...) -> None:
    """Makes the digests right again, as somebody would who edits a checkpoint on purpose."""
    body = json.loads(manifest.read_bytes())
    body.pop("digest")
    if state is not ...:
        body["state"] = state
    body["tensors"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
    canonical = json.dumps(body, sort_keys=True).encode()
    put(manifest, json.dumps({**body, "digest": hashlib.sha256(canonical).hexdigest()}).encode())


def test_mutated_tensors_under_a_right_digest(sealed: tuple[Path, Path, Path]) -> None:
    folder, manifest, tensors = sealed
    content = tensors.read_bytes()
    reseal(manifest, tensors)
    assert outcome(folder, "resealed") == "read"
    read = refused = 0
    for number, mutated in enumerate(mutations.mutations(content, 1_500, seed=3)):
        put(tensors, mutated)
        reseal(manifest, tensors)
        begun, sentence = time.process_time(), "It was read."
        try:
            read += isinstance(load(folder), dict)
        except CheckpointError as error:
            sentence = str(error)
            refused += 1
        assert is_sentence(sentence), (number, sentence)
        assert time.process_time() - begun < 1, number
    assert read > 50
    assert refused > 500


@pytest.mark.parametrize(
    "state",
    [
        5, None, [], "x", {"@tensor": "nowhere"}, {"a": {"@tensor": []}}, {"a": {"@tensor": None}},
        {"@items": 5}, {"a": {"@items": [[1]]}}, {"a": {"@items": [[[], 1]]}}, {"@tuple": None},
        {"a": {"@items": [[{}, 1]]}}, {"@tuple": {"@tensor": 0}}, {"@tuple": [1]},
        {"a": {"@tuple": 5}},
    ],
    ids=str,
)  # fmt: skip
def test_edited_states_under_a_right_digest(state: Any, sealed: tuple[Path, Path, Path]) -> None:
    folder, manifest, tensors = sealed
    reseal(manifest, tensors, state)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert is_sentence(str(caught.value))


class Bomb:
    """What a stranger's pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("which", [1, 2], ids=["manifest", "tensors"])
@pytest.mark.parametrize("sealing", [False, True])
def test_a_pickle_is_never_run(
    kind: str, which: int, sealing: bool, sealed: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    folder, file, fired = sealed[0], sealed[which], tmp_path / "fired"
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"w": Bomb(fired)}))
    else:
        torch.save({"w": Bomb(fired)}, file)
    if sealing and which == 2:
        reseal(sealed[1], sealed[2])
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert is_sentence(str(caught.value))
    assert not fired.exists()
    pickle.loads(pickle.dumps(Bomb(fired)))  # it would have worked
    assert fired.exists()


def test_what_stands_in_place_of_files(sealed: tuple[Path, Path, Path]) -> None:
    folder, manifest, tensors = sealed
    content = tensors.read_bytes()
    tensors.unlink()
    assert outcome(folder, "no tensors") == "refused"
    tensors.mkdir()
    assert outcome(folder, "a directory of tensors") == "refused"
    tensors.rmdir()
    tensors.symlink_to(tensors)
    assert outcome(folder, "a link to itself") == "refused"
    tensors.unlink()
    tensors.write_bytes(content)
    text = manifest.read_bytes()
    for other in (b"", b"null", b"[]", b"{}", b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"\x00"):
        manifest.write_bytes(other)
        assert outcome(folder, other[:9]) == "refused"
    manifest.write_bytes(text.replace(b'"step": 3', b'"step": ' + b"9" * 5000))
    assert outcome(folder, "a number of 5000 digits") == "refused"
    manifest.write_bytes(text.replace(b'"step": 3', b'"step": NaN'))
    assert outcome(folder, "not a number") == "refused"
    manifest.unlink()
    manifest.mkdir()
    assert outcome(folder, "a directory") == "refused"


def test_a_swapped_checkpoint_is_noticed(sealed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The tensors of another checkpoint of the same shapes are not those of this one."""
    other = save(tmp_path / "other", {**SMALL, "w": torch.zeros(2, 3)})
    shutil.copy(other.with_suffix(".safetensors"), sealed[2])
    assert outcome(sealed[0], "swapped") == "refused"


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
    assert outcome(folder, "saved anew") == "read"
    for file in folder.glob("*.json"):
        file.write_text("damaged")
    with pytest.raises(CheckpointError):
        load(folder)


def test_whether_states_are_alike() -> None:
    like = checkpoint.is_like
    assert like({"a": torch.zeros(2), "b": (1, [2.0])}, {"a": torch.ones(2), "b": (3, [4.0])})
    for loaded, mine in [
        ({}, {"a": 1}),
        ({"a": 1}, {}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int64)}),
        ({"a": 1.0}, {"a": torch.zeros(())}),
        ([1], [1, 2]),
        (None, {"a": 1}),
        ("x", [1]),
        ("x", 1),
    ]:
        assert not like(loaded, mine), (loaded, mine)
