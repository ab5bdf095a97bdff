"""MFCC against librosa, and their bytes against NumPy."""

import warnings

import numpy as np
import pytest
import torch

from softstair.data.mfcc import COEFFICIENTS, FRAMES, RATE, mfcc, quantise


def recordings() -> np.ndarray:
    """Noise, a chirp, half a loud tone, clicks at both ends, faint noise, silence, full scale."""
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


@pytest.fixture
def librosa_mfcc() -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that librosa imports
        import librosa

        mel = librosa.feature.melspectrogram(
            y=recordings(), sr=RATE, n_fft=1024, hop_length=320, win_length=640, window="hann",
            center=True, pad_mode="reflect", power=2.0, n_mels=40, fmin=20, fmax=4000, htk=True,
            norm=None, dtype=np.float64,
        )  # fmt: skip
        log = np.log(mel + 1e-6)
        coefficients = librosa.feature.mfcc(S=log, n_mfcc=10, dct_type=2, norm="ortho")
    return coefficients.transpose(0, 2, 1)[:, :49]


@pytest.mark.nightly  # librosa takes seconds to import
def test_coefficients_and_their_bytes_are_those_of_librosa(librosa_mfcc):
    coefficients = mfcc(torch.from_numpy(recordings()))
    assert coefficients.shape == (7, FRAMES, COEFFICIENTS)
    assert np.abs(coefficients.numpy() - librosa_mfcc).max() < 1e-9
    result = quantise(torch.from_numpy(librosa_mfcc))
    expected = np.floor(np.clip(librosa_mfcc.astype(np.float32) + np.float32(128), 0, 255))
    assert result.dtype == torch.uint8
    assert np.array_equal(result.numpy(), expected)
    assert len(np.unique(expected)) > 50


def test_a_frame_of_a_chirp_is_that_of_librosa():
    frame = quantise(mfcc(torch.from_numpy(recordings()[1:2])))[0, 24]
    assert frame.tolist() == [58, 105, 144, 119, 127, 134, 117, 140, 116, 137]


def test_digital_silence_is_exact():
    silence = quantise(mfcc(torch.zeros(3, RATE, dtype=torch.float64)))
    assert torch.equal(silence[..., 0], torch.full((3, FRAMES), 40, dtype=torch.uint8))
    assert bool((silence[..., 1:] == 128).all())
