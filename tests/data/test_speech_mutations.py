"""Damaged lists and features: read or refused with a sentence, in no time, and nothing else."""

import io
import zipfile
from pathlib import Path
from typing import IO

import mutations
import numpy as np
import pytest
import speech_tree

from softstair.data import speech
from softstair.data.formats import arrays
from softstair.data.speech import features, folders, listing

LINES = "".join(f"{key}\n" for key in speech_tree.keys()[:40]).encode()


@pytest.mark.parametrize("name", folders.LISTS.values())
def test_lists(name: str) -> None:
    def parse(data: bytes) -> None:
        for key in listing.parse_list(data, Path(name)):
            word, file = key.split("/")
            assert not word.startswith((".", "_"))
            assert not file.startswith(".")

    read, refused = mutations.outcomes(parse, LINES, 10_000, seed=len(name))
    assert read > 1000
    assert refused > 1000


def test_lists_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "speech_commands_v0.01"
    speech_tree.make_folders(folder)
    speech.load(tmp_path)
    for name in folders.LISTS.values():
        path = folder / name
        whole = path.read_bytes()

        def parse(data: bytes, path: Path = path) -> None:
            path.write_bytes(data)
            speech.load(tmp_path)

        read, refused = mutations.outcomes(parse, whole, 50)
        assert read
        assert refused
        path.write_bytes(whole)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ready features of the fewest clips: one of each word and one other, of two speakers."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "gsc"
    folder.mkdir()
    np.savez(
        folder / features.CLIPS,
        x=draw.integers(40, 172, (22, 49, 10)).astype(np.uint8),
        word=np.arange(22, dtype=np.uint8) % 11,
        words=np.array([*speech_tree.WANTED, "bed"]),
        split=np.arange(22, dtype=np.uint8) // 11,
        speaker=np.array(["0a7c2a8d"] * 11 + ["0ab3b47d"] * 11),
        utt=np.zeros(22, dtype=np.uint8),
    )
    np.savez(
        folder / features.TEST,
        x=draw.integers(40, 172, (12, 49, 10)).astype(np.uint8),
        label=np.arange(12, dtype=np.uint8),
        classes=np.array(speech.CLASSES),
    )
    np.savez(folder / features.NOISE, x=draw.integers(40, 172, (2, 49, 10)).astype(np.uint8))
    return folder


@pytest.fixture
def load(small: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads them with one file's bytes replaced, without writing it: discs are slow."""
    kept = {path.name: path.read_bytes() for path in small.iterdir()}

    def load(name: str, data: bytes) -> None:
        def opened(path: Path, limit: int, remedy: str) -> IO[bytes]:
            return io.BytesIO(data if path.name == name else kept[path.name])

        monkeypatch.setattr(arrays, "_open", opened)
        found = speech.load(small)
        assert len(found) > 10

    return load


FILES = [features.CLIPS, features.TEST, features.NOISE]


@pytest.mark.parametrize("name", FILES)
def test_ready_features(small: Path, load, name: str) -> None:
    whole = (small / name).read_bytes()
    load(name, whole)
    _, refused = mutations.outcomes(lambda data: load(name, data), whole, 1_000)
    assert refused > 500


@pytest.mark.parametrize("name", FILES)
def test_ready_features_with_sound_checksums(small: Path, load, name: str) -> None:
    """Each array of the archive damaged in turn; the archive itself stays whole."""
    with zipfile.ZipFile(small / name) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    for spoilt in members:

        def parse(data: bytes, spoilt: str = spoilt) -> None:
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w") as archive:
                for member, content in members.items():
                    archive.writestr(member, data if member == spoilt else content)
            load(name, stream.getvalue())

        read, refused = mutations.outcomes(parse, members[spoilt], 1_000 // len(members))
        assert read
        assert refused
