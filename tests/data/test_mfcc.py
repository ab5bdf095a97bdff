"""The coefficients against librosa, and their bytes against numpy."""

import warnings

import numpy as np
import pytest
import torch

from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES, RATE, mfcc, quantise


def recordings() -> np.ndarray:
    """Noise, a chirp, a loud tone beside nothing, a click at either end, silence, full scale."""
    draw = np.random.default_rng(0)
    time = np.arange(RATE) / RATE
    clips = np.zeros((7, RATE))
    clips[0] = draw.uniform(-1, 1, RATE)
    clips[1] = 0.5 * np.sin(2 * np.pi * (100 + 3000 * time) * time)
    clips[2, : RATE // 2] = np.sin(2 * np.pi * 440 * time[: RATE // 2])
    clips[3, [0, -1]] = 1
    clips[4] = 1e-4 * draw.standard_normal(RATE)
    clips[6] = np.sign(np.sin(2 * np.pi * 1000 * time))
    return clips


@pytest.fixture(scope="module")
def by_librosa() -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is not ours to mend
        import librosa

        mel = librosa.feature.melspectrogram(
            y=recordings(),
            sr=RATE,
            n_fft=1024,
            hop_length=320,
            win_length=640,
            window="hann",
            center=True,
            pad_mode="reflect",
            power=2.0,
            n_mels=40,
            fmin=20,
            fmax=4000,
            htk=True,
            norm=None,
            dtype=np.float64,
        )
        log = np.log(mel + 1e-6)
        coefficients = librosa.feature.mfcc(S=log, n_mfcc=10, dct_type=2, norm="ortho")
    assert coefficients.shape == (7, 10, 51)
    return coefficients.transpose(0, 2, 1)[:, :49]


@pytest.mark.nightly  # librosa alone takes seconds to import
@pytest.mark.parametrize("block", [1, 3, 128])
def test_coefficients_are_those_of_librosa(by_librosa: np.ndarray, block: int) -> None:
    ours = mfcc(torch.from_numpy(recordings()), block=block)
    assert ours.shape == (7, FRAMES, COEFFICIENTS)
    assert ours.dtype == torch.float64
    assert np.abs(ours.numpy() - by_librosa).max() < 1e-9


@pytest.mark.nightly
def test_float32_is_near(by_librosa: np.ndarray) -> None:
    ours = mfcc(torch.from_numpy(recordings()), torch.float32)
    assert ours.dtype == torch.float32
    assert np.abs(ours.numpy() - by_librosa).max() < 2e-3


@pytest.mark.nightly
def test_bytes_are_those_of_the_formula(by_librosa: np.ndarray) -> None:
    bytes_ = quantise(torch.from_numpy(by_librosa))
    expected = np.floor(np.clip(by_librosa.astype(np.float32) + np.float32(128), 0, 255))
    assert bytes_.dtype == torch.uint8
    assert np.array_equal(bytes_.numpy(), expected)
    assert len(np.unique(expected)) > 50


def test_int16_is_a_fraction_of_32768() -> None:
    samples = torch.from_numpy((recordings() * 32767).astype(np.int16))
    assert torch.equal(mfcc(samples), mfcc(samples.double() / 32768))


def test_digital_silence_is_exact() -> None:
    silence = quantise(mfcc(torch.zeros(3, RATE, dtype=torch.int16)))
    assert torch.equal(silence[..., 0], torch.full((3, FRAMES), 40, dtype=torch.uint8))
    assert bool((silence[..., 1:] == 128).all())


def test_the_sum_is_in_float32() -> None:
    assert quantise(torch.tensor([-1e-9], dtype=torch.float64)).tolist() == [128]


def test_blocks_are_of_no_consequence() -> None:
    audio = torch.from_numpy(recordings())
    assert torch.allclose(mfcc(audio, block=2), mfcc(audio), rtol=0, atol=1e-12)


def test_no_clip_gives_no_coefficients() -> None:
    assert mfcc(torch.zeros(0, RATE)).shape == (0, FRAMES, COEFFICIENTS)


@pytest.mark.parametrize(
    ("audio", "options", "message"),
    [
        (torch.zeros(RATE), {}, r"\(16000,\) was given"),
        (torch.zeros(1, RATE - 1), {}, r"\(1, 15999\) was given"),
        (torch.zeros(1, RATE, dtype=torch.int32), {}, "torch.int32 was given"),
        (torch.zeros(1, RATE), {"dtype": torch.float16}, "torch.float16 was given"),
        (torch.zeros(1, RATE), {"block": 0}, "block must be 1 or more, but 0"),
    ],
)
def test_other_audio_is_refused(audio: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mfcc(audio, **options)
