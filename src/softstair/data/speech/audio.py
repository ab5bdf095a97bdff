"""Features of recordings, some at a time: of whole clips, and of cuts from background noise."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from softstair.data.dataset import DataError
from softstair.data.speech import wav
from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES, RATE, mfcc, quantise

__all__ = ["clips", "features", "silences"]

Audio = NDArray[np.float64]

_BLOCK: Final = 128


def clips(paths: Iterable[Path]) -> Iterator[Audio]:
    """One second of each file: what is longer is cut, what is shorter is followed by zeros."""
    for path in paths:
        samples = wav.read(path)[:RATE]
        yield np.pad(samples / 32768, (0, RATE - len(samples)))


def silences(paths: Sequence[Path], each: int) -> Iterator[Audio]:
    """``each`` cuts of every recording at random places, times U(0, 1); then as many of zeros.

    So silence is every source in equal parts, one source being a microphone that is off. The cuts
    are the same every time: which of them are taken is for the reader to draw.
    """
    random = np.random.default_rng(0)
    for path in paths:
        samples = wav.read(path)
        if len(samples) < RATE:
            raise DataError(path, f"lasts {len(samples)} samples", f"give {RATE} or more")
        places = (random.random(each) * (len(samples) - RATE + 1)).astype(np.int64)
        for place, volume in zip(places, random.random(each), strict=True):
            yield volume * (samples[place : place + RATE] / 32768)
    for _ in range(each):
        yield np.zeros(RATE)


def features(
    audio: Iterator[Audio], count: int, step: Callable[[int], None] = lambda done: None
) -> NDArray[np.uint8]:
    """(count, 49, 10) bytes of ``count`` seconds of audio; ``step`` hears how many more are done.

    >>> features(iter([np.zeros(RATE)]), 1)[0, 0].tolist()
    [40, 128, 128, 128, 128, 128, 128, 128, 128, 128]
    """
    x = np.empty((count, FRAMES, COEFFICIENTS), dtype=np.uint8)
    for start in range(0, count, _BLOCK):
        block = np.stack(list(islice(audio, min(_BLOCK, count - start))))
        x[start : start + len(block)] = quantise(mfcc(torch.from_numpy(block))).numpy()
        step(len(block))
    return x
