"""A small Speech Commands made of tones: the recordings, and features computed from them."""

import wave
from pathlib import Path

import numpy as np

from softstair.data import speech

WORDS = "yes no up down left right on off stop go".split()
OTHERS = ["bed", "cat"]
SPEAKERS = [f"{number:08x}" for number in range(0xA0, 0xAA)]
VALIDATION, TESTING = SPEAKERS[7:8], SPEAKERS[8:]
NOISES = ["hum", "pink"]


def write_wav(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


def tone(hertz: float, samples: int = 16_000) -> np.ndarray:
    return 8000 * np.sin(2 * np.pi * hertz * np.arange(samples) / 16_000)


def keys() -> list[str]:
    """Return all clips, as the lists name them: one per speaker and word, two of the first."""
    return [
        f"{word}/{speaker}_nohash_{take}.wav"
        for word in WORDS + OTHERS
        for speaker in SPEAKERS
        for take in range(2 if speaker == SPEAKERS[0] else 1)
    ]


def first_second(number: int, key: str) -> np.ndarray:
    """Return the samples of a clip, up to one second."""
    return tone(100 + 20 * number, 9_001 if SPEAKERS[1] in key else 16_000)


def make_folders(folder: Path) -> None:
    """Write the published layout; clips of the second speaker are short, of the third long."""
    for number, key in enumerate(keys()):
        samples = first_second(number, key)
        if SPEAKERS[2] in key:
            samples = np.concatenate([samples, tone(1234, 4000)])
        write_wav(folder / key, samples)
    for name, speakers in (("validation", VALIDATION), ("testing", TESTING)):
        lines = [key for key in keys() if key.split("/")[1][:8] in speakers]
        (folder / f"{name}_list.txt").write_text("".join(f"{line}\n" for line in lines))
    draw = np.random.default_rng(0)
    for name in NOISES:
        write_wav(folder / f"_background_noise_/{name}.wav", 3000 * draw.standard_normal(40_000))
    (folder / "README.md").write_text("one folder per word")


def make_test_set(folder: Path) -> None:
    """Write an official test set: one clip of every class, two of yes."""
    for number, name in enumerate(["_silence_", "_unknown_", *WORDS]):
        write_wav(folder / name / "0.wav", tone(50 + 300 * number))
    write_wav(folder / "yes" / "1.wav", tone(77))


def make_features(source: Path, folder: Path, seed: int = 0) -> None:
    """Write ``gsc/*.npz`` for the recordings in ``source``, the clips in a random order."""
    names = np.random.default_rng(seed).permutation(keys()).tolist()
    words = sorted(WORDS + OTHERS)
    speakers = [name.split("/")[1][:8] for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "features_v001.npz",
        x=speech.features(speech.first_seconds(source / n for n in names), len(names)),
        word=np.array([words.index(name.split("/")[0]) for name in names], dtype=np.uint8),
        words=np.array(words),
        split=np.array([(s in VALIDATION) + 2 * (s in TESTING) for s in speakers], dtype=np.uint8),
        speaker=np.array(speakers),
        utt=np.array([int(name[-5]) for name in names], dtype=np.uint8),
    )
    noises = [source / "_background_noise_" / f"{name}.wav" for name in NOISES]
    np.savez(
        folder / "background.npz",
        x=speech.features(speech.noise_cuts(noises, 5), 15),
        source=np.repeat(np.array([0, 1, 255], dtype=np.uint8), 5),
    )
    np.savez(
        folder / "testset_v002.npz",
        x=np.random.default_rng(seed).integers(40, 172, (24, 49, 10)).astype(np.uint8),
        label=np.repeat(np.arange(12, dtype=np.uint8), 2),
        classes=np.array(["silence", "unknown", *WORDS]),
    )
