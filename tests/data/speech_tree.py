"""A small Speech Commands of tones: the folders, the lists, the noise, and the ready features.

Tests in this folder take it by ``import speech_tree``.
"""

import wave
from pathlib import Path

import numpy as np

from softstair.data.speech import audio

WANTED = "yes no up down left right on off stop go".split()
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
    """Every clip, as the lists name it: each speaker says each word once, the first one twice."""
    return [
        f"{word}/{speaker}_nohash_{take}.wav"
        for word in WANTED + OTHERS
        for speaker in SPEAKERS
        for take in range(2 if speaker == SPEAKERS[0] else 1)
    ]


def first_second(number: int, key: str) -> np.ndarray:
    """What is heard of the clip of that number in ``keys()``."""
    return tone(100 + 20 * number, 9_001 if SPEAKERS[1] in key else 16_000)


def make_folders(folder: Path) -> None:
    """The published layout in ``folder``; the second speaker is brief, the third goes on."""
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
    (folder / "_background_noise_/README.md").write_text("noise")
    (folder / "README.md").write_text("a folder a word")


def make_test_set(folder: Path) -> None:
    """The official test set: a clip of every class, two of yes."""
    for number, name in enumerate(["_silence_", "_unknown_", *WANTED]):
        write_wav(folder / name / "0.wav", tone(50 + 300 * number))
    write_wav(folder / "yes" / "1.wav", tone(77))


def make_features(recordings: Path, folder: Path, seed: int = 0) -> None:
    """The ready features of folders made above, the clips in an order of their own."""
    names = np.random.default_rng(seed).permutation(keys()).tolist()
    words = sorted(WANTED + OTHERS)
    speakers = [name.split("/")[1][:8] for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "features_v001.npz",
        x=audio.features(audio.clips(recordings / n for n in names), len(names)),
        word=np.array([words.index(name.split("/")[0]) for name in names], dtype=np.uint8),
        words=np.array(words),
        split=np.array([(s in VALIDATION) + 2 * (s in TESTING) for s in speakers], dtype=np.uint8),
        speaker=np.array(speakers),
        utt=np.array([int(name[-5]) for name in names], dtype=np.uint8),
    )
    noises = [recordings / "_background_noise_" / f"{name}.wav" for name in NOISES]
    np.savez(
        folder / "background.npz",
        x=audio.features(audio.silences(noises, 5), 15),
        source=np.repeat(np.array([0, 1, 255], dtype=np.uint8), 5),
    )
    np.savez(
        folder / "testset_v002.npz",
        x=np.random.default_rng(seed).integers(40, 172, (24, 49, 10)).astype(np.uint8),
        label=np.repeat(np.arange(12, dtype=np.uint8), 2),
        classes=np.array(["silence", "unknown", *WANTED]),
    )
