"""Speech Commands from a small tree of tones, and from features of the same tones."""

import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import mutations
import numpy as np
import pytest
import speech_tree
import torch
from speech_tree import OTHERS, SPEAKERS, TESTING, VALIDATION, WORDS, tone, write_wav

from softstair import data
from softstair.data import DataError, Dataset, speech

# Seven speakers are in the training partition, one of them with two clips per word: 8 clips of
# each of ten words, and a tenth of 80 for each of the other two classes.
PER_WORD, EXTRA = 8, 8


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speech")
    speech_tree.make_folders(root / "speech_commands_v0.02")
    speech_tree.make_features(root / "speech_commands_v0.02", root / "other" / "gsc")
    speech.load(root)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy with computed features, which stay valid because times are copied."""
    return shutil.copytree(original, tmp_path / "data", symlinks=True)


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "speech_commands_v0.02"


@pytest.fixture
def gsc(root: Path) -> Path:
    return root / "other" / "gsc"


def cache(root: Path) -> Path:
    (path,) = root.glob("speech-features-v1-*.npz")
    return path


def same(a: Dataset, b: Dataset) -> bool:
    fields = ("x", "y", "groups", "test_x", "test_y")
    return all(torch.equal(getattr(a, field), getattr(b, field)) for field in fields)


def features(samples: np.ndarray) -> torch.Tensor:
    """Return the features of one clip, in the shape of an example."""
    audio = np.zeros(16_000)
    audio[: len(samples)] = samples.astype(np.int16)[:16_000] / 32768
    return torch.from_numpy(speech.features(iter([audio]), 1))


def contains(x: torch.Tensor, example: torch.Tensor) -> bool:
    return bool((x == example).flatten(1).all(1).any())


def test_classes_counts_and_groups(root):
    dataset = data.load("speech", root)
    assert dataset.classes == ("silence", "unknown", *WORDS)
    assert dataset.x.shape == (10 * PER_WORD + 2 * EXTRA, 1, 49, 10)
    assert (dataset.mean, dataset.std, dataset.centred) == (0.0, 1.0, (128.0, 16.0))
    assert torch.bincount(dataset.y).tolist() == [EXTRA, EXTRA, *[PER_WORD] * 10]
    # Two speakers are in the test set: 20 clips of words, so 2 of unknown and 2 of silence.
    assert torch.bincount(dataset.test_y).tolist() == [2, 2, *[2] * 10]
    words = Counter(dataset.groups[dataset.y > 1].tolist())
    assert sorted(words.values()) == [10] * 6 + [20]
    assert set(dataset.groups[dataset.y == 1].tolist()) <= set(words)
    silences = dataset.groups[dataset.y == 0].tolist()
    assert len(set(silences)) == EXTRA
    assert min(silences) >= len(SPEAKERS)


def test_clips_are_in_their_partition_and_class(root):
    dataset = speech.load(root)
    for number, key in enumerate(speech_tree.keys()):
        word, speaker = key.split("/")[0], key.split("/")[1][:8]
        example = features(speech_tree.first_second(number, key))
        if word in WORDS:
            label = dataset.classes.index(word)
            in_training = contains(dataset.x[dataset.y == label], example)
            assert in_training == (speaker not in VALIDATION + TESTING)
            in_test = contains(dataset.test_x[dataset.test_y == label], example)
            assert in_test == (speaker in TESTING)
        elif speaker in VALIDATION + TESTING:
            assert not contains(dataset.x, example)
    assert len(dataset.x[dataset.y == 1].unique(dim=0)) == EXTRA


def test_noise_cuts_have_random_places_and_volumes(tmp_path):
    write_wav(tmp_path / "ramp.wav", np.arange(-20_000, 20_000))
    cuts = np.stack(list(speech.noise_cuts([tmp_path / "ramp.wav"], 200)))
    assert len(cuts) == 400
    assert not cuts[200:].any()
    slopes = np.diff(cuts[:200]) * 32768
    assert np.allclose(slopes, slopes[:, :1])
    volumes = slopes[:, 0]
    places = cuts[:200, 0] * 32768 / volumes + 20_000
    assert np.allclose(places, np.round(places), atol=1e-6)
    # Kolmogorov-Smirnov: 200 uniform numbers exceed 0.115 in one of a hundred cases.
    for numbers in (volumes, places / 24_000):
        assert 0 <= numbers.min() <= numbers.max() <= 1
        assert np.abs(np.sort(numbers) - np.arange(200) / 200).max() < 0.115


def test_the_test_set_has_other_noise_than_training(root):
    zeros = features(np.zeros(1))
    for seed in range(8):
        dataset = speech.load(root, seed=seed)
        for example in dataset.test_x[dataset.test_y == 0]:
            assert torch.equal(example, zeros) or not contains(dataset.x, example)


def test_the_seed_alone_chooses_the_clips(root, monkeypatch):
    first, other = speech.load(root, seed=3), speech.load(root, seed=4)
    assert not torch.equal(first.x, other.x)
    assert torch.equal(first.x[first.y > 1], other.x[other.y > 1])
    # The order of the file system does not matter.
    cache(root).unlink()
    scandir = os.scandir
    backwards = lambda path: contextlib.nullcontext(list(scandir(path))[::-1])
    monkeypatch.setattr(os, "scandir", backwards)
    assert same(speech.load(root, seed=3), first)


def test_stored_features_give_what_recordings_give(root, gsc):
    dataset, stored = speech.load(root), speech.load(gsc.parent)
    assert torch.equal(dataset.x, stored.x)
    assert torch.equal(dataset.y, stored.y)
    assert torch.equal(dataset.groups[dataset.y > 0], stored.groups[stored.y > 0])
    assert torch.bincount(stored.test_y).tolist() == [2] * 12
    assert same(stored, speech.load(gsc))


@pytest.mark.parametrize(
    ("file", "name", "change"),
    [
        ("features_v001", "word", lambda a: a + 1),
        ("features_v001", "words", np.zeros_like),
        ("testset_v002", "label", lambda a: a + 1),
        ("testset_v002", "classes", np.flip),
    ],
)
def test_invalid_features_are_refused(gsc, file, name, change):
    arrays = dict(np.load(gsc / f"{file}.npz"))
    np.savez(gsc / f"{file}.npz", **(arrays | {name: change(arrays[name])}))
    with pytest.raises(DataError, match=rf"{file}\.npz' "):
        speech.load(gsc)


def test_the_official_test_set_is_used_if_it_is_there(root):
    before = speech.load(root)
    speech_tree.make_test_set(root / "speech_commands_test_set_v0.02")
    dataset = speech.load(root)
    assert torch.bincount(dataset.test_y).tolist() == [1, 1, 2, *[1] * 9]
    assert torch.equal(dataset.test_x[dataset.test_y == 5], features(tone(50 + 300 * 5))[None])
    assert torch.equal(before.x, dataset.x)
    (root / "speech_commands_test_set_v0.02" / "go" / "0.wav").unlink()
    with pytest.raises(DataError, match=r"go' contains no recordings"):
        speech.load(root)


def test_recordings_are_preferred_and_the_version_names_them(root, folder, gsc):
    def version(path: Path) -> str | None:
        version = data.load("speech", path).version
        assert version == data.version("speech", path)
        return version

    assert version(root) == version(folder)
    shutil.move(gsc, root / "gsc")
    (root / "speech_commands_v0.01").mkdir()
    assert version(root) == "speech-commands-v0.02 recordings, test by testing_list.txt"
    speech_tree.make_test_set(root / "speech_commands_test_set_v0.02")
    assert version(root) == "speech-commands-v0.02 recordings, test v0.02"
    folder.rename(root / "mine")
    with pytest.raises(DataError, match=r"speech_commands_v0\.01' has no clips of down, go"):
        speech.load(root)
    (root / "speech_commands_v0.01").rmdir()
    assert version(root) == "speech-commands-v0.01 features, test v0.02"
    unknown = "speech-commands-(unknown release) recordings, test by testing_list.txt"
    assert version(root / "mine") == unknown
    with pytest.raises(DataError, match="contains no Speech Commands"):
        speech.load(root / "none")


def test_features_are_computed_once_unless_they_are_damaged(root):
    calls: list[tuple[int, int]] = []
    progress = lambda done, total: calls.append((done, total))
    before, path = speech.load(root, progress=progress), cache(root)
    assert calls == []
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (content[:middle], flipped):
        path.write_bytes(damaged)
        assert same(speech.load(root, progress=progress), before)
        assert path.read_bytes() == content
    total = len(speech_tree.keys()) + 15
    assert calls == [(128, total), (total, total)] * 2


def test_changed_recordings_are_read_again(root, folder):
    before = speech.load(root)
    path = folder / "yes" / f"{SPEAKERS[0]}_nohash_0.wav"
    write_wav(path, tone(3333))  # of the same length
    os.utime(path, ns=(0, 0))
    after = speech.load(root)
    assert contains(after.x[after.y == 2], features(tone(3333)))
    path.unlink()
    assert len(speech.load(root)) == len(before) - 1
    assert len(list(root.glob("speech-features-*.npz"))) == 3


def test_a_cache_that_cannot_be_written_is_a_warning(root, monkeypatch):
    before = speech.load(root)
    cache(root).unlink()
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert same(speech.load(root), before)
    assert not list(root.glob("*speech-features*"))


def test_other_files_and_lines_are_ignored_and_links_are_followed(root, folder):
    before = speech.load(root)
    (folder / "yes" / "._hidden.wav").write_bytes(b"no wav")
    (folder / "yes" / "notes.txt").write_text("no wav")
    (folder / "empty").mkdir()
    (folder / ".git").mkdir()
    path = folder / "testing_list.txt"
    lines = ["", "yes/ffffffff_nohash_0.wav", "../../etc/passwd", *path.read_text().split("\n")]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert same(speech.load(root), before)
    write_wav(root / "elsewhere" / "linked.wav", tone(888))
    (folder / "no" / "grandfather.wav").symlink_to(root / "elsewhere" / "linked.wav")
    dataset = speech.load(root)
    assert contains(dataset.x[dataset.y == 3], features(tone(888)))
    assert len(dataset.groups[dataset.y > 1].unique()) == 8


def test_a_clip_that_cannot_be_read_is_named(root, folder):
    path = folder / "bed" / "00000001_nohash_0.wav"
    write_wav(path, tone(50))
    content = path.read_bytes()
    slow = content.replace((16_000).to_bytes(4, "little"), (8_000).to_bytes(4, "little"))
    for damaged in (content[:-2], slow, b"no recording", None):
        path.unlink()
        os.mkfifo(path) if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"00000001_nohash_0\.wav' "):
            speech.load(root)


def test_mutated_recordings_are_read_or_refused(tmp_path):
    path = tmp_path / "clip.wav"
    write_wav(path, tone(440, 500))

    def read(content: bytes) -> None:
        path.write_bytes(content)
        (clip,) = speech.first_seconds([path])
        assert clip.shape == (16_000,)

    assert min(mutations.outcomes(read, path.read_bytes())) > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: shutil.rmtree(f / "up"), "has no clips of up"),
        (lambda f: (f / "testing_list.txt").unlink(), r"testing_list\.txt' is missing"),
        (lambda f: (f / "testing_list.txt").write_bytes(b"\xff"), r"testing_list\.txt' cannot be"),
        (
            lambda f: shutil.copy(f / "testing_list.txt", f / "validation_list.txt"),
            r"testing_list\.txt' names .* in the other list",
        ),
        (lambda f: [shutil.rmtree(f / w) for w in OTHERS], "class 'unknown' in its training"),
        (lambda f: shutil.rmtree(f / "_background_noise_"), "_background_noise_' cannot be listed"),
        (
            lambda f: write_wav(f / "_background_noise_" / "hum.wav", tone(50, 15_999)),
            r"hum\.wav' has only 15,999 samples",
        ),
    ],
)
def test_what_is_missing_is_named(root, folder, change, message):
    change(folder)
    with pytest.raises(DataError, match=message):
        speech.load(root)
