"""The named straight-through estimators: hard forward, their own density backward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracle
import softstair as ss

STEP = ss.Stair.heaviside()
X = torch.linspace(-2.5, 2.5, 2000, dtype=torch.float64)
FAMILIES = {
    "clipped_relu": "uniform",
    "hard_sigmoid": "uniform",
    "piecewise_polynomial": "triangular",
    "error_function": "normal",
    "sigmoid": "logistic",
}
SLOPES = {
    "clipped_relu": lambda x: ((x >= 0) & (x < 1)).double(),
    "hard_sigmoid": lambda x: ((x >= -0.5) & (x < 0.5)).double(),
    "piecewise_polynomial": lambda x: (1 - x.abs()).clamp(min=0),
    "error_function": lambda x: torch.exp(-x.square()) / math.sqrt(math.pi),
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "identity": torch.ones_like,
    "relu": lambda x: (x >= 0).double(),
}
STAIRS = {
    "heaviside": STEP,
    "sign": ss.Stair.sign(quantum=0.5),
    "ternary": ss.Stair.ternary(quantum=0.07),
    "int4": ss.Stair.linear(4, signed=True, quantum=0.25, thresholds="floor"),
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_closed_forms_on_the_heaviside(name):
    """Slopes of clip(x, 0, 1), clip(x + 1/2, 0, 1), Bi-Real's parabola, (1 + erf x)/2, the sigmoid,
    x and max(x, 0)."""
    y, g = oracle.value_and_gradient(lambda x: getattr(ss.ste, name)()(x, STEP), X)
    torch.testing.assert_close(y, (X >= 0).double(), rtol=0, atol=0)
    torch.testing.assert_close(g, SLOPES[name](X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*FAMILIES, "identity", "relu"])
@pytest.mark.parametrize("stair", STAIRS)
def test_forward_is_hard_and_backward_the_density(name, stair):
    """On any stair the value is sigma(x), thresholds included; the noise is in its quanta."""
    shape, estimator = STAIRS[stair], getattr(ss.ste, name)()
    x = torch.cat([X, X.new_tensor(shape.thresholds)])
    weight = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    y, g = oracle.value_and_gradient(lambda v: estimator(v, shape), x, weight)
    torch.testing.assert_close(y, shape(x), rtol=0, atol=0)
    if name in ("identity", "relu"):
        torch.testing.assert_close(g, weight * SLOPES[name](x), rtol=0, atol=1e-15)
        return
    law = (FAMILIES[name], estimator.mean * shape.quantum, estimator.std * shape.quantum)
    v, levels = oracle.numpy(x), np.array(shape.levels)
    bounds = oracle.gradient_bounds(v, levels, shape.thresholds, *law, torch.float64)
    oracle.check_between(g / weight, *bounds, v)


def test_channels_are_refused():
    """An estimator's noise is in quanta, of which a per-channel stair has many."""
    stair = ss.Stair.ternary(quantum=(0.1, 2.0), axis=0)
    oracle.refuses(lambda: ss.ste.sigmoid()(torch.zeros(2, 3), stair), "stair", "quantum", "2")


@pytest.mark.parametrize("name", [*FAMILIES, "identity", "relu"])
def test_dtype_nan_and_extremes(name):
    """Every dtype is kept; the forward stays in the level set, NaN stays NaN, slopes finite."""
    estimator = getattr(ss.ste, name)()
    for dtype in oracle.DTYPES:
        x = torch.tensor([-math.inf, -1e30, -1.0, 0.0, 0.5, 1e30, math.inf, math.nan]).to(dtype)
        y, g = oracle.value_and_gradient(lambda v: estimator(v, ss.Stair.ternary()), x)
        assert y.dtype == g.dtype == dtype
        assert y[:-1].tolist() == [-1, -1, -1, 0, 1, 1, 1]
        assert y[-1].isnan()
        assert g[:-1].isfinite().all()
