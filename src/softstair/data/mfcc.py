"""Mel-frequency cepstral coefficients as in the paper's experiments, equal to librosa's.

A second of audio at 16 kHz becomes 49 frames of 10 coefficients:

    power spectrum    of frames of 640 samples every 320, under a periodic Hann window, n_fft 1024;
                      the clip is reflected at both ends, so frame t is centred on sample 320·t
    40 mel bands      triangles of height 1, equally spaced on the HTK scale from 20 to 4000 Hz
    logarithm         log(mel + 1e-6)
    cosine transform  DCT-II, orthonormal, the first 10 coefficients
    bytes             floor(clip(x + 128, 0, 255))
"""

import math
from typing import Final

import torch
from torch import Tensor

RATE: Final = 16_000  # samples of a clip, which has one second
FRAMES: Final = 49  # the first 49 of the 51 that fit
COEFFICIENTS: Final = 10

_FFT, _WINDOW, _HOP, _BANDS = 1024, 640, 320, 40
_LOWEST, _HIGHEST = 20.0, 4000.0
_FLOOR = 1e-6


def mfcc(clips: Tensor) -> Tensor:
    """Return coefficients (N, 49, 10) of clips (N, 16000) of float64 between −1 and 1."""
    bands = _mel_bands()
    # A frame of n_fft samples is 0 outside of its window. Where the window is in it affects the
    # phase of the spectrum, not its power, so here it comes first.
    padded = torch.nn.functional.pad(clips, (_WINDOW // 2, _WINDOW // 2), mode="reflect")
    window = torch.hann_window(_WINDOW, dtype=torch.float64)
    frames = padded.unfold(1, _WINDOW, _HOP)[:, :FRAMES] * window
    spectrum = torch.fft.rfft(frames, n=_FFT)[..., : len(bands)]
    power = spectrum.real**2 + spectrum.imag**2
    return torch.log(power @ bands + _FLOOR) @ _cosines()


def quantise(coefficients: Tensor) -> Tensor:
    """Return floor(clip(x + 128, 0, 255)) as uint8.

    The sum is in float32, where 128 absorbs the rounding errors of coefficients that are exactly 0
    in theory, as those of digital silence are. In float64 some of them would become 127.

    >>> quantise(torch.tensor([-1e-9, -0.1, 0.9, -200.0, 200.0], dtype=torch.float64)).tolist()
    [128, 127, 128, 0, 255]
    """
    return (coefficients.float() + 128).clamp(0, 255).floor().to(torch.uint8)


def _mel_bands() -> Tensor:
    """Return the weights (frequencies, 40) of the bands; frequencies above 4 kHz have none."""
    frequencies = torch.arange(_FFT // 2 + 1, dtype=torch.float64) * (RATE / _FFT)
    frequencies = frequencies[frequencies <= _HIGHEST, None]
    lowest, highest = (2595 * math.log10(1 + hertz / 700) for hertz in (_LOWEST, _HIGHEST))
    mels = torch.linspace(lowest, highest, _BANDS + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mels / 2595) - 1)
    lower, centre, upper = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies - lower) / (centre - lower)
    falling = (upper - frequencies) / (upper - centre)
    return torch.minimum(rising, falling).clamp(min=0)


def _cosines() -> Tensor:
    """Return the matrix (40, 10) of the orthonormal DCT-II."""
    band = torch.arange(_BANDS, dtype=torch.float64)[:, None]
    order = torch.arange(COEFFICIENTS, dtype=torch.float64)
    cosines = torch.cos(math.pi / _BANDS * (band + 0.5) * order) * math.sqrt(2 / _BANDS)
    cosines[:, 0] = math.sqrt(1 / _BANDS)
    return cosines
