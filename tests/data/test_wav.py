"""Recordings written by the standard library, and files that are not what they should be."""

import io
import os
import struct
import wave
from pathlib import Path

import mutations
import numpy as np
import pytest

from softstair.data import DataError
from softstair.data.speech import wav

SAMPLES = np.random.default_rng(0).integers(-32768, 32768, 500).astype(np.int16)
HERE = Path("clip.wav")


def written(channels: int = 1, width: int = 2, rate: int = 16_000, data: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data)
    return stream.getvalue()


SOUND = written(data=SAMPLES.astype("<i2").tobytes())


def chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def test_samples_are_those_written(tmp_path: Path) -> None:
    path = tmp_path / "clip.wav"
    path.write_bytes(SOUND)
    samples = wav.read(path)
    assert samples.dtype == np.int16
    assert np.array_equal(samples, SAMPLES)
    assert samples.flags.writeable


def test_other_chunks_are_passed_over() -> None:
    odd = chunk(b"LIST", b"INFOIART\1\0\0\0x")
    parts = SOUND[:12], SOUND[12:36], SOUND[36:]
    assert np.array_equal(wav.parse(odd.join(parts) + odd, HERE), SAMPLES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a RIFF WAVE file"),
        (b"RIFX" + SOUND[4:], "is not a RIFF WAVE file"),
        (SOUND[:12], "has no format"),
        (SOUND[:36], "has no samples"),
        (SOUND[:12] + SOUND[36:] + SOUND[12:36], "has samples before their format"),
        (SOUND[:-1], "breaks off 1 bytes before its end"),
        (SOUND[:12] + chunk(b"fmt ", SOUND[20:34]) + SOUND[36:], "has a format of 14 bytes"),
        (SOUND[:20] + b"\x03\x00" + SOUND[22:], "is not plain PCM but of format 3"),
        (SOUND[:34] + b"\x0c\x00" + SOUND[36:], "has 12 bits a sample, 2 bytes apart"),
        (written(channels=2, data=bytes(8)), "has 2 channels"),
        (written(width=1, data=bytes(8)), "has 8 bits a sample"),
        (written(rate=8000, data=bytes(8)), "has 8000 samples a second"),
        (written(), "is empty"),
        (SOUND[:36] + chunk(b"data", bytes(3)), "ends within a sample, after 3 bytes"),
    ],
)
def test_what_is_no_such_recording_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"^'clip.wav' {message}.*: .*\.$"):
        wav.parse(data, HERE)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing"):
        wav.read(tmp_path / "none.wav")
    with pytest.raises(DataError, match="is not a file"):
        wav.read(tmp_path)
    (tmp_path / "broken.wav").symlink_to(tmp_path / "none.wav")
    with pytest.raises(DataError, match="is missing"):
        wav.read(tmp_path / "broken.wav")
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(DataError, match="is not a file"):
        wav.read(tmp_path / "pipe.wav")
    with (tmp_path / "long.wav").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(DataError, match="is larger than"):
        wav.read(tmp_path / "long.wav")


def test_mutations_are_read_or_refused() -> None:
    def parse(data: bytes) -> None:
        samples = wav.parse(data, HERE)
        assert samples.dtype == np.int16
        assert 0 < len(samples) <= len(data) // 2

    read, refused = mutations.outcomes(parse, SOUND, 10_000)
    assert read > 1000
    assert refused > 1000
