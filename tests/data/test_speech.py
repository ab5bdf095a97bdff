"""The twelve classes out of a small tree of tones, and out of ready features of the same tones."""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import speech_tree
import torch
from speech_tree import OTHERS, SPEAKERS, TESTING, VALIDATION, WANTED, tone, write_wav

from softstair import data
from softstair.data import DataError, Dataset, folds, speech
from softstair.data.speech import audio as recordings

# 7 speakers train, the first with two takes: 8 clips of each of ten words, and a tenth of 80.
PER_WORD, EXTRA = 8, 8


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speech")
    speech_tree.make_folders(root / "speech_commands_v0.02")
    speech.load(root)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy with its features computed; times are kept, so that they stay valid."""
    return shutil.copytree(original, tmp_path / "data", symlinks=True)


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "speech_commands_v0.02"


def cache(root: Path) -> Path:
    (path,) = root.glob("speech-features-v1-*.npz")
    return path


def same(a: Dataset, b: Dataset) -> bool:
    pairs = [(a.x, b.x), (a.y, b.y), (a.groups, b.groups), (a.test_x, b.test_x)]
    return all(torch.equal(p, q) for p, q in [*pairs, (a.test_y, b.test_y)])  # type: ignore[arg-type]


def features(samples: np.ndarray) -> torch.Tensor:
    """Of one clip, in the shape of an example."""
    audio = np.zeros(16_000)
    audio[: len(samples)] = samples.astype(np.int16)[:16_000] / 32768
    return torch.from_numpy(recordings.features(iter([audio]), 1))


def holds(x: torch.Tensor, example: torch.Tensor) -> bool:
    return bool((x == example).flatten(1).all(1).any())


class Listening:
    """A progress that is remembered, and tells whether anything was computed."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.heard.append((done, total))


def test_classes_counts_and_groups(root: Path) -> None:
    found = data.load("speech", root)
    assert found.classes == ("silence", "unknown", *WANTED)
    assert found.x.shape == (10 * PER_WORD + 2 * EXTRA, 1, 49, 10)
    assert (found.mean, found.std) == (0.0, 1.0)
    assert found.numbers(centre=True) == found.numbers(integer=True, centre=True) == (128.0, 16.0)
    assert found.numbers() == found.numbers(integer=True) == (0.0, 1.0)
    assert torch.bincount(found.y).tolist() == [EXTRA, EXTRA, *[PER_WORD] * 10]
    # Two speakers test: 20 clips of words, so 2 of unknown and 2 of silence.
    assert found.test_y is not None
    assert torch.bincount(found.test_y).tolist() == [2, 2, *[2] * 10]
    assert found.groups is not None
    words = Counter(found.groups[found.y > 1].tolist())
    assert sorted(words.values()) == [10] * 6 + [20]
    assert set(found.groups[found.y == 1].tolist()) <= set(words)
    silences = found.groups[found.y == 0].tolist()
    assert len(set(silences)) == EXTRA
    assert min(silences) >= len(SPEAKERS)


def test_clips_are_where_they_belong(root: Path) -> None:
    found = speech.load(root)
    assert found.test_x is not None
    for number, key in enumerate(speech_tree.keys()):
        word, speaker = key.split("/")[0], key.split("/")[1][:8]
        example = features(speech_tree.first_second(number, key))
        if word in WANTED:
            label = found.classes.index(word)
            held = holds(found.x[found.y == label], example)
            assert held == (speaker not in VALIDATION + TESTING)
            assert holds(found.test_x[found.test_y == label], example) == (speaker in TESTING)
        elif speaker in VALIDATION + TESTING:
            assert not holds(found.x, example)
    others = [f"{word}/{speaker}" for word in OTHERS for speaker in SPEAKERS]
    assert len(others) >= EXTRA
    assert len(found.x[found.y == 1].unique(dim=0)) == EXTRA


def test_silence_is_noise_and_zeros_in_equal_parts(root: Path) -> None:
    kept = np.load(cache(root))
    # 110 clips of words: 11, and 3 for rounding up, from two noises and zeros.
    assert len(kept["silence"]) == 15
    zeros = (kept["silence"] == features(np.zeros(1)).numpy()).all((1, 2))
    assert zeros.tolist() == [False] * 10 + [True] * 5
    assert len(np.unique(kept["silence"][:10], axis=0)) == 10


def test_cuts_are_anywhere_and_of_any_volume(tmp_path: Path) -> None:
    write_wav(tmp_path / "ramp.wav", np.arange(-20_000, 20_000))
    cuts = np.stack(list(recordings.silences([tmp_path / "ramp.wav"], 200)))
    assert not cuts[200:].any()
    volumes = np.diff(cuts[:200]) * 32768
    assert np.allclose(volumes, volumes[:, :1])
    volumes = volumes[:, 0]
    places = cuts[:200, 0] * 32768 / volumes + 20_000
    assert np.allclose(places, np.round(places), atol=1e-6)
    # 200 uniform draws are further than 0.115 from their law in one case of a hundred.
    for draws in (volumes, places / 24_000):
        assert 0 <= draws.min() <= draws.max() <= 1
        assert np.abs(np.sort(draws) - np.arange(200) / 200).max() < 0.115


def test_noise_of_the_test_set_is_not_that_of_training(root: Path) -> None:
    zeros = features(np.zeros(1))
    for seed in range(8):
        found = speech.load(root, seed=seed)
        assert found.test_x is not None
        for example in found.test_x[found.test_y == 0]:
            assert torch.equal(example, zeros) or not holds(found.x, example)


def test_no_speaker_is_on_both_sides_of_a_fold(root: Path) -> None:
    found = speech.load(root)
    assert found.groups is not None
    for fold in range(5):
        train, valid = folds.split(found, fold, 5)
        assert not set(found.groups[train].tolist()) & set(found.groups[valid].tolist())
        assert len(train) + len(valid) == len(found)


def test_features_are_kept_and_used(root: Path) -> None:
    cache(root).unlink()
    listening = Listening()
    first = speech.load(root, progress=listening)
    total = len(speech_tree.keys()) + 15
    assert listening.heard[-1] == (total, total)
    assert [done for done, _ in listening.heard] == sorted({done for done, _ in listening.heard})
    assert not list(root.glob(".speech*"))
    listening = Listening()
    assert same(speech.load(root, progress=listening), first)
    assert listening.heard == []


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_damaged_features_are_computed_again(root: Path, damage: str) -> None:
    good = speech.load(root)
    path = cache(root)
    whole = path.read_bytes()
    if damage == "other":
        np.savez(path, clips=np.zeros((3, 49, 10), np.uint8), silence=np.load(path)["silence"])
    else:
        place = len(whole) // 2
        flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        path.write_bytes({"cut": whole[:place], "flip": flipped, "empty": b""}[damage])
    listening = Listening()
    assert same(speech.load(root, progress=listening), good)
    assert listening.heard
    assert path.read_bytes() == whole


def test_a_changed_folder_is_read_anew(root: Path, folder: Path) -> None:
    before = speech.load(root)
    path = folder / "yes" / f"{SPEAKERS[0]}_nohash_0.wav"
    write_wav(path, tone(3333))  # as long as it was
    os.utime(path, ns=(0, 0))
    after = speech.load(root)
    assert not same(before, after)
    assert holds(after.x[after.y == 2], features(tone(3333)))
    path.unlink()
    assert len(speech.load(root)) == len(before) - 1
    assert len(list(root.glob("speech-features-*.npz"))) == 3


def test_where_nothing_can_be_written_a_warning_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, path = speech.load(root), cache(root)
    path.unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\)"):
        assert same(speech.load(root), good)
    assert not path.exists()
    assert not list(root.glob(".speech*"))


def test_one_seed_one_draw_whatever_the_order_of_listing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = speech.load(root, seed=3)
    assert same(speech.load(root, seed=3), first)
    other = speech.load(root, seed=4)
    assert not torch.equal(first.x, other.x)
    assert torch.equal(first.x[first.y > 1], other.x[other.y > 1])
    with pytest.raises(ValueError, match="seed must be an integer from 0 on, but -1 was given"):
        speech.load(root, seed=-1)
    cache(root).unlink()
    listed = os.scandir

    class Reversed:
        def __init__(self, path: Path) -> None:
            with listed(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Reversed)
    assert same(speech.load(root, seed=3), first)


def test_ready_features_give_what_recordings_give(root: Path, folder: Path) -> None:
    speech_tree.make_features(folder, root / "other" / "gsc")
    found, ready = speech.load(root), speech.load(root / "other")
    assert found.groups is not None
    assert ready.groups is not None
    assert torch.equal(found.y, ready.y)
    assert torch.equal(found.groups[found.y > 0], ready.groups[ready.y > 0])
    assert torch.equal(found.x, ready.x)
    assert ready.test_y is not None
    assert torch.bincount(ready.test_y).tolist() == [2] * 12
    assert same(ready, speech.load(root / "other" / "gsc"))


@pytest.mark.parametrize(
    ("file", "name", "spoil", "message"),
    [
        ("features_v001", "split", lambda a: a + 1, "has 'split' from 1 to 3, not from 0 to 2"),
        ("features_v001", "word", lambda a: a + 1, "has 'word' from 1 to 12, not from 0 to 11"),
        ("features_v001", "words", np.zeros_like, "has the same word twice in 'words'"),
        ("features_v001", "speaker", lambda a: a[1:], "array 'speaker' has the shape"),
        ("features_v001", "x", lambda a: a[..., :9], "array 'x' has the shape"),
        ("testset_v002", "label", lambda a: a + 1, "has 'label' from 1 to 12, not from 0 to 11"),
        ("testset_v002", "classes", np.flip, "has other classes than silence, unknown, yes, no"),
        ("background", "x", lambda a: a[:0], "array 'x' has the shape"),
    ],
)
def test_features_that_contradict_themselves_are_refused(
    root: Path, folder: Path, file: str, name: str, spoil, message: str
) -> None:
    speech_tree.make_features(folder, root / "other" / "gsc")
    path = root / "other" / "gsc" / f"{file}.npz"
    arrays = dict(np.load(path))
    np.savez(path, **(arrays | {name: spoil(arrays[name])}))
    with pytest.raises(DataError, match=rf"{file}\.npz' .*{message}"):
        speech.load(root / "other")


def test_too_little_noise_is_repeated_within_its_group(root: Path, folder: Path) -> None:
    ready = root / "other" / "gsc"
    speech_tree.make_features(folder, ready)
    x = np.load(ready / "background.npz")["x"]
    np.savez(ready / "background.npz", x=x[:3])
    found = speech.load(root / "other")
    assert found.groups is not None
    silence = found.groups[found.y == 0]
    assert sorted(Counter(silence.tolist()).values()) == [2, 3, 3]
    for group in silence.unique():
        assert len(found.x[found.groups == group].unique(dim=0)) == 1


def test_the_official_test_set_is_taken_if_it_is_there(root: Path) -> None:
    before = speech.load(root)
    speech_tree.make_test_set(root / "speech_commands_test_set_v0.02")
    found = speech.load(root)
    assert found.test_x is not None
    assert found.test_y is not None
    assert torch.bincount(found.test_y).tolist() == [1, 1, 2, *[1] * 9]
    assert torch.equal(found.test_x[found.test_y == 5], features(tone(50 + 300 * 5))[None])
    assert torch.equal(before.x, found.x)
    (root / "speech_commands_test_set_v0.02" / "go" / "0.wav").unlink()
    with pytest.raises(DataError, match=r"go' holds no clip"):
        speech.load(root)


def test_recordings_come_before_features_and_the_newer_before_the_older(
    root: Path, folder: Path
) -> None:
    good = speech.load(root)
    (root / "gsc").mkdir()
    (root / "speech_commands_v0.01").mkdir()
    assert same(speech.load(root), good)
    assert same(speech.load(folder), good)  # the folder itself
    folder.rename(root / "elsewhere")
    with pytest.raises(DataError, match=r"speech_commands_v0\.01' has no clip of yes, no"):
        speech.load(root)
    (root / "speech_commands_v0.01").rmdir()
    with pytest.raises(DataError, match=r"features_v001\.npz' is missing: .*data fetch speech"):
        speech.load(root)


def test_the_version_says_which_recordings_and_which_test_set(root: Path, folder: Path) -> None:
    def version(where: Path) -> str | None:
        found = data.load("speech", where).version
        assert found == data.version("speech", where)
        return found

    assert version(root) == "speech-commands-v0.02 recordings, test by testing_list.txt"
    assert version(folder) == version(root)
    speech_tree.make_features(folder, root / "other" / "gsc")
    assert version(root / "other") == "speech-commands-v0.01 features, test v0.02"
    speech_tree.make_test_set(root / "speech_commands_test_set_v0.02")
    assert version(root) == "speech-commands-v0.02 recordings, test v0.02"
    folder.rename(root / "speech_commands_v0.01")
    assert version(root) == "speech-commands-v0.01 recordings, test v0.02"
    (root / "speech_commands_v0.01").rename(root / "mine")
    unknown = "speech-commands-(unknown release) recordings, test by testing_list.txt"
    assert version(root / "mine") == unknown


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no Speech Commands.*data fetch speech.*--data-dir"):
        speech.load(tmp_path)
    with pytest.raises(DataError, match="holds no Speech Commands"):
        speech.load(tmp_path / "none")


def test_odd_files_are_passed_over_or_named(root: Path, folder: Path) -> None:
    good = speech.load(root)
    (folder / "yes" / "._hidden.wav").write_bytes(b"no wav")
    (folder / "yes" / "notes.txt").write_text("no wav")
    (folder / "empty").mkdir()
    (folder / ".git").mkdir()
    assert same(speech.load(root), good)
    write_wav(folder / "yes" / "grandmother.wav", tone(999))
    write_wav(root / "elsewhere" / "linked.wav", tone(888))
    (folder / "no" / "grandfather_nohash_0.wav").symlink_to(root / "elsewhere" / "linked.wav")
    found = speech.load(root)
    assert holds(found.x[found.y == 2], features(tone(999)))
    assert holds(found.x[found.y == 3], features(tone(888)))
    assert found.groups is not None
    assert len(found.groups[found.y > 1].unique()) == 9


def test_a_name_that_is_not_text_is_a_name(root: Path, folder: Path) -> None:
    try:
        write_wav(folder / "yes" / os.fsdecode(b"caf\xe9_nohash_0.wav"), tone(999))
    except OSError:
        pytest.skip("the file system takes text alone")
    found = speech.load(root)
    assert holds(found.x[found.y == 2], features(tone(999)))


@pytest.mark.parametrize("what", ["text", "nothing", "link", "folder", "pipe"])
def test_a_clip_that_cannot_be_read_is_named(root: Path, folder: Path, what: str) -> None:
    path = folder / "bed" / "00000001_nohash_0.wav"
    match what:
        case "text":
            path.write_text("no recording")
        case "nothing":
            write_wav(path, np.zeros(0))
        case "link":
            path.symlink_to(folder / "none.wav")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    with pytest.raises(DataError, match=r"00000001_nohash_0\.wav' .*: .*\.$"):
        speech.load(root)
    assert cache(root)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f / "up"), "has no clip of up"),
        (lambda f: (f / "testing_list.txt").unlink(), r"testing_list\.txt' is missing"),
        (lambda f: (f / "testing_list.txt").write_text(""), "names none of the clips beside it"),
        (
            lambda f: shutil.copy(f / "testing_list.txt", f / "validation_list.txt"),
            r"testing_list\.txt' names '.*', as validation_list\.txt does",
        ),
        (lambda f: [shutil.rmtree(f / w) for w in OTHERS], "has no word besides the ten in its tr"),
        (
            lambda f: [p.unlink() for s in SPEAKERS[:7] for p in f.glob(f"go/{s}*")],
            "has no clip of 'go' in its training partition",
        ),
        (lambda f: shutil.rmtree(f / "_background_noise_"), "_background_noise_' cannot be read"),
        (
            lambda f: [p.unlink() for p in f.glob("_background_noise_/*.wav")],
            "_background_noise_' holds no recording",
        ),
        (
            lambda f: write_wav(f / "_background_noise_" / "hum.wav", tone(50, 15_999)),
            r"hum\.wav' lasts 15999 samples",
        ),
    ],
)
def test_what_is_missing_is_named(root: Path, folder: Path, spoil, message: str) -> None:
    spoil(folder)
    with pytest.raises(DataError, match=message):
        speech.load(root)


def test_lists_are_text_of_any_system(root: Path, folder: Path) -> None:
    good = speech.load(root)
    path = folder / "testing_list.txt"
    lines = path.read_text().split("\n")
    absent = "yes/ffffffff_nohash_0.wav"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["", absent, *lines]).encode())
    assert same(speech.load(root), good)


@pytest.mark.parametrize(
    "line",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../yes/a_nohash_0.wav",
        "yes/../../a.wav",
        "yes/..",
        "..\\a\\b.wav",
        "yes/a\0.wav",
        "_background_noise_/hum.wav",
        "yes",
    ],
)
def test_lists_lead_nowhere(root: Path, folder: Path, line: str) -> None:
    with (folder / "validation_list.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"validation_list\.txt' has '.*' in line 13, which is not"):
        speech.load(root)
