"""The mode as a stair of its own: where the two unbounded end bins take over.

Under symmetric, uni-modal noise and bins of one width w, the likeliest level is the one whose bin
holds x, unless an end is likelier: p₀ = F(−d/β), with d the distance from the first threshold,
against F(f/β) − F((f − w)/β), with f the distance from the bin's own. The families here are
log-concave, so the likeliest level never falls as x grows, and the low end wins exactly up to one
margin beyond its threshold (the high end, by symmetry, as far before its own): the mode is σ with
its thresholds moved inwards to that margin. For uniform noise of half-width h the margin is
max(0, h − w); for the others it is found by search and remembered.
"""

from functools import lru_cache

import torch

from softstair.noise import Noise, Uniform

POINTS = 512
ROUNDS = 6


def mode_limits(
    first: float, last: float, spacing: float, noise: Noise, std: float, tie: float
) -> tuple[float, float]:
    """Where the low end stops winning and where the high end starts, for centred x.

    Probabilities closer than ``tie`` are equal, and the end does not win.
    """
    middle, half = 0.5 * (first + last), 0.5 * (last - first)
    share = _margin(noise, spacing / std, half / std, tie)
    margin = share * half
    return (middle, middle) if share >= 1 else (first + margin, last - margin)


@lru_cache(maxsize=4096)
def _margin(noise: Noise, width: float, half: float, tie: float) -> float:
    """The margin as a share of ``half``, where both ends meet; widths in standard deviations."""
    if half == 0:
        return 1.0
    if isinstance(noise, Uniform):
        return max(0.0, noise.support * (1 - 2 * tie) - width) / half
    low, high = 0.0, half
    for _ in range(ROUNDS):
        distance = torch.linspace(low, high, POINTS + 1, dtype=torch.float64)
        own = distance - (distance / width).floor() * width
        end = noise.cdf(-distance)
        # 1 − the two tails, each exact, rather than a difference of two numbers near 1.
        inside = 1 - noise.cdf(-own) - noise.cdf(own - width)
        wins = int((end > inside + tie).sum())
        if wins == 0:
            return low / half
        if wins > POINTS:
            return high / half
        low, high = float(distance[wins - 1]), float(distance[wins])
    return low / half
