"""The naive float64 oracle: K-term sums over scipy's distributions, and nothing of softstair.

Where arithmetic in a smaller dtype is judged, truth is an interval: the value at x moved by a few
units in the last place (the expectation rises with x, a unimodal density is monotone on each side
of its mode, so the interval is exact), plus a few units in the last place of the result.
"""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import integrate, stats

with warnings.catch_warnings():
    # torch scripts its own rules at the first jvp, and deprecates doing so.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch._decomp.decompositions_for_jvp")

FAMILIES: dict[str, Any] = {
    "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    "triangular": stats.triang(0.5, -math.sqrt(6), 2 * math.sqrt(6)),
    "normal": stats.norm(),
    "logistic": stats.logistic(scale=math.sqrt(3) / math.pi),
    "laplace": stats.laplace(scale=1 / math.sqrt(2)),
    "gumbel": stats.gumbel_r(-np.euler_gamma * math.sqrt(6) / math.pi, math.sqrt(6) / math.pi),
}
"""Standardised distributions; the first four are the library's, the others a user's own."""
NAMES = ("uniform", "triangular", "normal", "logistic")
PEAKS = {"gumbel": -float(np.euler_gamma) * math.sqrt(6) / math.pi}
FORWARDS = ("expectation", "mode", "random", "hard")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def index(x: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Number of thresholds at or below x."""
    return sum((np.asarray(x) >= t).astype(np.int64) for t in thresholds)  # type: ignore[return-value]


def hard(x: np.ndarray, levels: Sequence[float], thresholds: Sequence[float]) -> np.ndarray:
    """sigma(x), NaN for NaN."""
    return np.where(np.isnan(x), np.nan, np.asarray(levels)[index(x, thresholds)])


def column(thresholds: Sequence[float], x: np.ndarray) -> np.ndarray:
    """Thresholds along a new first axis of x: scipy takes as long for one as for all at once."""
    return np.reshape(thresholds, (-1,) + (1,) * np.ndim(x))


def standardise(x: np.ndarray, threshold: Any, mean: float, std: float) -> np.ndarray:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return (x - threshold - mean) / std


def above(x: np.ndarray, threshold: Any, name: str, mean: float, std: float) -> np.ndarray:
    """F(x - threshold): the probability that x - noise is at or above the threshold."""
    if std == 0:
        return np.where(np.isnan(x), np.nan, (x - mean >= threshold).astype(float))
    with np.errstate(over="ignore"):
        return FAMILIES[name].cdf(standardise(x, threshold, mean, std))


def expectation(x, levels, thresholds, name, mean, std) -> np.ndarray:
    """q_0 + sum of (q_k - q_{k-1}) F(x - theta_k), term by term."""
    total = np.full(np.shape(x), float(levels[0]))
    for k, share in enumerate(above(x, column(thresholds, x), name, mean, std)):
        total = total + (levels[k + 1] - levels[k]) * share
    return total


def density(z: np.ndarray, name: str, std: float) -> np.ndarray:
    """mu at a standardised point: pdf(z) / std, 0 where scipy meets inf - inf."""
    with np.errstate(all="ignore"):
        mu = FAMILIES[name].pdf(z) / np.float64(std)
    return np.where(np.isnan(mu) & ~np.isnan(z), 0.0, mu)


def gradient(x, levels, thresholds, name, mean, std) -> np.ndarray:
    """Sum of (q_k - q_{k-1}) mu(x - theta_k), term by term; 0 for a Dirac."""
    total = np.zeros(np.shape(x))
    if std == 0:
        return total
    z = standardise(x, column(thresholds, x), mean, std)
    for k, mu in enumerate(density(z, name, std)):
        total = total + (levels[k + 1] - levels[k]) * mu
    return total


def probabilities(x, thresholds, name, mean, std) -> np.ndarray:
    """p_k of every level, along a new first axis; upper tails without cancellation."""
    if std == 0:
        return (
            np.stack([index(x - mean, thresholds) == k for k in range(len(thresholds) + 1)]) * 1.0
        )
    z = standardise(x, column(thresholds, x), mean, std)
    ends = np.full((1, *np.shape(x)), np.inf)
    z = np.concatenate([ends, z, -ends])
    with np.errstate(over="ignore"):
        low, high = -np.diff(FAMILIES[name].cdf(z), axis=0), np.diff(FAMILIES[name].sf(z), axis=0)
    return np.where(z[1:] > 0, high, low)


def convolution(x: float, levels, thresholds, name, mean, std) -> float:
    """The integral of sigma(x - nu) against the density of nu, by quadrature between the jumps."""
    family = FAMILIES[name]
    low, high = (mean + std * family.ppf(u) for u in (1e-13, 1 - 1e-13))
    cuts = sorted({low, high, mean, *(c for t in thresholds if low < (c := x - t) < high)})
    total = 0.0
    for a, b in itertools.pairwise(cuts):
        level = float(hard(np.asarray(x - (a + b) / 2), levels, thresholds))
        mass = integrate.fixed_quad(lambda v: family.pdf((v - mean) / std) / std, a, b, n=50)[0]
        total += level * mass
    return total


def slack(x: np.ndarray, threshold: Any, mean: float, dtype: torch.dtype) -> np.ndarray:
    """How far rounding in dtype may move x - threshold - mean.

    The floor lets a std far below anything that moves a number count as 0.
    """
    ulp, floor = 8 * torch.finfo(dtype).eps, 1e-100 if dtype == torch.float64 else 1e-30
    move = np.maximum(ulp * (np.abs(x) + np.abs(threshold) + abs(mean)), floor)
    return np.where(np.isfinite(x), move, 0.0)


def expectation_bounds(
    x, levels, thresholds, name, mean, std, dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The interval that an expectation computed in dtype must lie in."""
    lower, upper = (np.full(np.shape(x), float(levels[0])) for _ in range(2))
    threshold = column(thresholds, x)
    move = slack(x, threshold, mean, dtype)
    ends = [above(x + s * move, threshold, name, mean, std) for s in (-1, 1)]
    for k, rise in enumerate(np.diff(levels)):
        lower, upper = lower + rise * ends[0][k], upper + rise * ends[1][k]
    scale = np.abs(levels).max() + levels[-1] - levels[0]
    room = (8 + len(levels) / 8) * torch.finfo(dtype).eps * scale
    return lower - room, upper + room


def gradient_bounds(x, levels, thresholds, name, mean, std, dtype) -> tuple[np.ndarray, np.ndarray]:
    """The interval that a gradient computed in dtype must lie in; exactly 0 for a Dirac."""
    lower, upper = (np.zeros(np.shape(x)) for _ in range(2))
    if std == 0:
        return lower, upper
    mode = PEAKS.get(name, 0.0)
    peak, eps = density(np.asarray(mode), name, std), torch.finfo(dtype).eps
    threshold = column(thresholds, x)
    move = slack(x, threshold, mean, dtype)
    # Where the density jumps, x lies a millionth of the support further right by definition, so
    # that an edge of two supports is in the upper one: see docs/operator.md.
    shift = 1e-6 * math.sqrt(3) * std if name == "uniform" else 0.0
    ends = [standardise(x + shift + s * move, threshold, mean, std) for s in (-1, 1)]
    left, right = (density(z, name, std) for z in ends)
    inside = (ends[0] <= mode) & (mode <= ends[1])
    least, most = np.minimum(left, right), np.where(inside, peak, np.maximum(left, right))
    for k, rise in enumerate(np.diff(levels)):
        blur = 2 * eps * max(abs(levels[k]), abs(levels[k + 1]))
        with np.errstate(over="ignore"):
            lower = lower + (rise - blur) * least[k]
            upper = upper + (rise + blur) * most[k]
    room = (16 + len(levels) / 8) * eps * peak * (levels[-1] - levels[0])
    # Under noise of next to no width a slope is beyond all numbers.
    return np.minimum(lower - room, torch.finfo(dtype).max), upper + room


def probabilities_and_errors(x, thresholds, name, mean, std, dtype):
    """p_k, and how much moving x by rounding in dtype may change each of them."""
    p = probabilities(x, thresholds, name, mean, std)
    error = np.zeros_like(p)
    threshold = column(thresholds, x)
    move = slack(x, threshold, mean, dtype)
    ends = [above(x + s * move, threshold, name, mean, std) for s in (-1, 1)]
    error[:-1] += ends[1] - ends[0]
    error[1:] += ends[1] - ends[0]
    return p, error


def check_mode(indices, x, thresholds, name, mean, std, dtype) -> None:
    """The chosen level is the likeliest, up to what rounding in dtype does to the probabilities."""
    p, error = probabilities_and_errors(x, thresholds, name, mean, std, dtype)
    error = error + 4 * torch.finfo(dtype).eps
    chosen = np.take_along_axis(p + error, indices[None], 0)[0]
    wrong = chosen < (p - error).max(0)
    assert not wrong.any(), f"{x[wrong]} -> {indices[wrong]}, p = {p[:, wrong].T}"


def check_possible(indices, x, thresholds, name, mean, std, dtype) -> None:
    """No draw has probability 0; for a Dirac only one level is left."""
    p, error = probabilities_and_errors(x, thresholds, name, mean, std, dtype)
    wrong = np.take_along_axis(p + error, indices[None], 0)[0] <= 0
    assert not wrong.any(), f"{x[wrong]} -> {indices[wrong]}, p = {p[:, wrong].T}"


def check_between(value: torch.Tensor, lower: np.ndarray, upper: np.ndarray, x: np.ndarray) -> None:
    """NaN where x is NaN and nowhere else; within the bounds elsewhere."""
    got, nan = numpy(value), np.isnan(x)
    assert np.isnan(got[nan]).all(), "NaN in, NaN out"
    wrong = ~nan & ~((lower <= got) & (got <= upper))
    assert not wrong.any(), f"{x[wrong]} -> {got[wrong]}, not in {lower[wrong]} .. {upper[wrong]}"


def level_index(value: torch.Tensor, levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Positions of the outputs in the level set, exactly; NaN where x is, reported as level 0."""
    got, nan = numpy(value), np.isnan(x)
    assert np.isnan(got[nan]).all(), "NaN in, NaN out"
    assert np.isin(got[~nan], levels).all(), f"outside the set: {np.setdiff1d(got[~nan], levels)}"
    return np.searchsorted(levels, np.where(nan, levels[0], got))


def numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def rounded(values: Sequence[float], dtype: torch.dtype) -> np.ndarray:
    """The float64 values as the dtype knows them."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).to(torch.float64).numpy()


def compared(thresholds: Sequence[float], dtype: torch.dtype) -> np.ndarray:
    """The thresholds that x of the dtype is compared with: 16 bits are compared in float32."""
    return rounded(thresholds, torch.promote_types(dtype, torch.float32))


def value_and_gradient(f: Callable, x: torch.Tensor, weight: torch.Tensor | None = None):
    """f(x) and the gradient of sum(weight * f(x)), by .backward()."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = f(leaf)
    y.backward(torch.ones_like(y) if weight is None else weight)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def refuses(call: Callable, *words: object) -> None:
    """The call ends in one sentence that has all these words."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message.strip(), message
    missing = [w for w in words if str(w) not in message]
    assert not missing, f"{message!r} does not say {missing}"


@st.composite
def stairs(draw: st.DrawFn) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Levels and thresholds: random ones with 2 to 33 levels, or linear ones with up to 256."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["random", "random", "linear", "equal bins"]))
    if kind == "linear":
        count = 2 ** draw(st.integers(1, 8))
        unit = draw(st.sampled_from([1.0, 0.07, 0.25, 3.0]))
        multiples = [unit * (k - draw(st.just(count // 2))) for k in range(count)]
        shift = draw(st.sampled_from([0.0, 0.5]))
        return tuple(multiples), tuple(q - shift * unit for q in multiples[1:])
    count = draw(st.integers(2, 33))
    levels = rng.uniform(-30, 30) + np.cumsum(10 ** rng.uniform(-2, 1, count))
    gaps = np.full(count - 1, 0.5) if kind == "equal bins" else 10 ** rng.uniform(-2, 1, count - 1)
    thresholds = rng.uniform(-30, 30) + np.cumsum(gaps)
    return tuple(levels.tolist()), tuple(thresholds.tolist())


def points(levels, thresholds, mean: float, std: float, dtype: torch.dtype, seed: int = 0):
    """x for a stair: every threshold, with and without the mean, their neighbours, and extremes."""
    rng = np.random.default_rng(seed)
    spread = thresholds[-1] - thresholds[0] + 3 * std + 1
    middle = (thresholds[0] + thresholds[-1]) / 2 + mean
    edges = torch.tensor(thresholds, dtype=torch.float64).to(dtype)
    shifted = torch.tensor([t + mean for t in thresholds], dtype=torch.float64).to(dtype)
    near = [c * k for k in (edges, shifted) for c in (1 + 2e-3, 1 - 2e-3)]
    extremes = [math.inf, -math.inf, 1e30, -1e30, 1e-310, -1e-40, 1e-7, 0.0, -0.0, math.nan]
    random = torch.from_numpy(middle + spread * rng.normal(size=40)).to(dtype)
    return torch.cat([edges, shifted, *near, torch.tensor(extremes, dtype=dtype), random])
