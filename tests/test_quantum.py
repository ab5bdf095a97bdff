"""Fitted quanta against a fine search and against the naive ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import softstair as ss
from softstair._quantum import fit_quantum
from softstair.convert.options import stair_named

STAIRS = {
    "sign": ss.Stair.sign(),
    "ternary": ss.Stair.ternary(),
    "int2": ss.Stair.linear(2, signed=True, thresholds="midpoint"),
    "int4": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "int8": ss.Stair.linear(8, signed=True, thresholds="midpoint"),
}


def error(weight: torch.Tensor, stair: ss.Stair) -> float:
    return float((stair(weight.double()) - weight.double()).square().mean())


@pytest.mark.nightly(keep=7)  # each name once
@pytest.mark.parametrize("name", ["sign", "ternary", "int2", "int3", "int4", "uint2", "uint4"])
@pytest.mark.parametrize("count", [9, 60])
def test_as_good_as_a_dense_search(name, count):
    """Within a hundredth of the least squared error of 3,000 quanta, for each channel."""
    generator = np.random.default_rng(count)
    weight = generator.standard_normal((40, count)) * np.exp(generator.uniform(0, 1, (40, count)))
    stair = stair_named(name)
    levels, thresholds = np.array(stair.levels), np.array(stair.thresholds)

    def squared(quanta: np.ndarray) -> np.ndarray:
        ratio = weight / quanta[:, None]
        nearest = levels[np.searchsorted(thresholds, ratio, side="right")]
        return np.square((nearest - ratio) * quanta[:, None]).sum(1)

    widest = np.abs(weight).max(1) / min(abs(level) for level in levels[[0, -1]] if level)
    least = np.min([squared(widest * ratio) for ratio in np.linspace(0.005, 2, 3000)], axis=0)
    fitted = fit_quantum(torch.tensor(weight), stair, per_channel=True).quantum
    assert (squared(np.array(fitted)) <= 1.01 * least + 1e-9).all()


def test_weights_on_a_grid_of_many_levels_keep_their_quantum():
    index = torch.randint(-101, 102, (4, 700), generator=torch.Generator().manual_seed(0))
    weight = index * torch.tensor([0.01, 0.3, 1.0, 7.0])[:, None]
    assert error(weight, fit_quantum(weight, STAIRS["int8"], per_channel=True)) < 1e-9


@pytest.mark.parametrize("stair", STAIRS.values(), ids=STAIRS.keys())
def test_each_channel_for_itself(stair):
    """One quantum a channel is what each row alone would get."""
    torch.manual_seed(1)
    weight = torch.randn(5, 3, 3, 3) * torch.tensor([0.01, 0.1, 1, 10, 100]).reshape(5, 1, 1, 1)
    fitted = fit_quantum(weight, stair, per_channel=True)
    assert fitted.axis == 0
    for row, quantum in zip(weight, fitted.quantum, strict=True):
        assert fit_quantum(row[None], stair).quantum == pytest.approx(quantum, rel=1e-6)


def test_thresholds_at_levels_are_fitted_as_well_as_by_quantising():
    torch.manual_seed(2)
    weight, stair = torch.randn(3, 50), ss.Stair.linear(3, signed=True, thresholds="floor")
    for row, quantum in zip(weight, fit_quantum(weight, stair, True).quantum, strict=True):
        candidates = [float(row.abs().max()) / 4 * k / 80 for k in range(1, 101)]
        least = min(error(row, stair.with_quantum(candidate)) for candidate in candidates)
        assert error(row, stair.with_quantum(quantum)) <= 1.05 * least


@pytest.mark.parametrize("per_channel", [False, True])
def test_zeros_have_a_quantum_too(per_channel):
    fitted = fit_quantum(torch.zeros(4, 3), STAIRS["ternary"], per_channel)
    assert torch.equal(fitted(torch.zeros(4, 3)), torch.zeros(4, 3))


def test_survives_float32():
    """The quantum is saved in float32: it must be one."""
    quantum = fit_quantum(torch.randn(9, 9), STAIRS["int4"]).quantum
    assert float(torch.tensor(quantum, dtype=torch.float32)) == quantum
