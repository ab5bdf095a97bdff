"""Mel-frequency cepstral coefficients as the paper's experiments take them, on any device.

A second of audio at 16 kHz becomes 49 frames of 10 coefficients:

    power spectrum    of frames of 640 samples every 320, under a periodic Hann window, n_fft 1024,
                      the clip mirrored at both ends so that frame t is centred on sample 320·t
    40 mel bands      triangles of height 1, equally spaced on the HTK scale from 20 to 4000 Hz
    logarithm         log(mel + 1e-6)
    cosine transform  DCT-II, orthonormal, the first 10 coefficients
    bytes             floor(clip(x + 128, 0, 255))
"""

import math
from typing import Final

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "FRAMES", "RATE", "mfcc", "quantise"]

RATE: Final = 16_000  # samples of a clip, which lasts one second
FRAMES: Final = 49  # the first 49 of the 51 that fit
COEFFICIENTS: Final = 10

_FFT: Final = 1024
_WINDOW: Final = 640
_HOP: Final = 320
_BANDS: Final = 40
_LOWEST: Final = 20.0
_HIGHEST: Final = 4000.0
_FLOOR: Final = 1e-6


def mfcc(audio: Tensor, dtype: torch.dtype = torch.float64, block: int = 128) -> Tensor:
    """Coefficients (N, 49, 10) in ``dtype`` of clips (N, 16000), ``block`` clips at a time.

    Audio is either int16 samples, which are divided by 32768, or floats between −1 and 1.

    >>> silence = torch.zeros(1, RATE, dtype=torch.int16)
    >>> quantise(mfcc(silence))[0, 0]
    tensor([ 40, 128, 128, 128, 128, 128, 128, 128, 128, 128], dtype=torch.uint8)
    """
    if audio.dim() != 2 or audio.shape[1] != RATE:
        raise ValueError(f"audio must be (N, {RATE}), but {tuple(audio.shape)} was given.")
    if audio.dtype != torch.int16 and not audio.dtype.is_floating_point:
        raise ValueError(f"audio must be int16 or floating point, but {audio.dtype} was given.")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, but {dtype} was given.")
    if block < 1:
        raise ValueError(f"block must be 1 or more, but {block} was given.")
    device = audio.device
    # The tables are small and made in float64 on the CPU: some devices have no float64.
    window = torch.hann_window(_WINDOW, dtype=torch.float64).to(device, dtype)
    bands = _mel_bands().to(device, dtype)
    cosines = _cosines().to(device, dtype)
    coefficients = torch.empty(len(audio), FRAMES, COEFFICIENTS, dtype=dtype, device=device)
    for start in range(0, len(audio), block):
        clips = audio[start : start + block].to(dtype)
        if audio.dtype == torch.int16:
            clips = clips / 32768
        # A window centred in 1024 samples that are centred on 320·t begins 320 samples before
        # that; where it lies within the 1024 only turns the spectrum's phase, not its power.
        padded = torch.nn.functional.pad(clips, (_WINDOW // 2, _WINDOW // 2), mode="reflect")
        frames = padded.unfold(1, _WINDOW, _HOP)[:, :FRAMES] * window
        spectrum = torch.fft.rfft(frames, n=_FFT)[..., : len(bands)]
        power = spectrum.real**2 + spectrum.imag**2
        coefficients[start : start + block] = torch.log(power @ bands + _FLOOR) @ cosines
    return coefficients


def quantise(coefficients: Tensor) -> Tensor:
    """floor(clip(x + 128, 0, 255)) as uint8.

    The sum is taken in float32, where 128 absorbs the rounding of coefficients that are 0 in
    exact arithmetic, as all but the first of digital silence are: in float64 they might become 127.

    >>> quantise(torch.tensor([-1e-9, -0.1, 0.9, -200.0, 200.0], dtype=torch.float64)).tolist()
    [128, 127, 128, 0, 255]
    """
    return (coefficients.float() + 128).clamp(0, 255).floor().to(torch.uint8)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _mel_bands() -> Tensor:
    """(frequencies, 40): how much each band takes of each frequency; none lies above 4 kHz."""
    frequencies = torch.arange(_FFT // 2 + 1, dtype=torch.float64) * (RATE / _FFT)
    frequencies = frequencies[frequencies <= _HIGHEST, None]
    mels = torch.linspace(_mel(_LOWEST), _mel(_HIGHEST), _BANDS + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mels / 2595) - 1)
    lower, centre, upper = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies - lower) / (centre - lower)
    falling = (upper - frequencies) / (upper - centre)
    return torch.minimum(rising, falling).clamp(min=0)


def _cosines() -> Tensor:
    """(40, 10): the orthonormal DCT-II."""
    band = torch.arange(_BANDS, dtype=torch.float64)[:, None]
    order = torch.arange(COEFFICIENTS, dtype=torch.float64)
    cosines = torch.cos(math.pi / _BANDS * (band + 0.5) * order) * math.sqrt(2 / _BANDS)
    cosines[:, 0] = math.sqrt(1 / _BANDS)
    return cosines
