"""The quantum of a stair that fits given values best."""

from itertools import product

import torch
from torch import Tensor

from softstair.stair import Stair

RATIOS, STEPS = torch.linspace(0.01, 2.25, 192).tolist(), 3
"""Quanta that are tried, as shares of the largest; and steps of refinement after them."""
NUMBERS = 1 << 20
"""Thresholds or values that are compared at a time."""


@torch.no_grad()
def fit_quantum(weight: Tensor, stair: Stair, per_channel: bool = False) -> Stair:
    """Return ``stair`` with the quantum ε that minimises ‖w − σ_ε(w)‖².

    >>> weight = torch.tensor([[-0.3, 0.3, 0.0, 0.3], [0.6, -0.6, 0.0, 0.0]])
    >>> [round(q, 2) for q in fit_quantum(weight, Stair.ternary(), per_channel=True).quantum]
    [0.3, 0.6]

    Args:
        weight: The weights w; dimension 0 is the output channels.
        stair: The stair σ, whose own quantum does not matter.
        per_channel: Fit a quantum to each output channel instead of one to all weights.
    """
    unit = stair.with_quantum(1.0)
    rows = weight.detach().double().reshape(weight.shape[0] if per_channel else 1, -1)
    reach = [abs(level) for level in (unit.levels[0], unit.levels[-1]) if level]
    largest = rows.abs().amax(dim=1, keepdim=True) / min(reach)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    best, quantum, refined = torch.full_like(largest, torch.inf), largest, largest
    # The error is ‖w‖² + ε²·Σ l² − 2ε·Σ l·w for weights w of levels εl. For these levels
    # ε = Σ l·w / Σ l² is best; with it, some weights may get others.
    count = rows.shape[1]
    moments = _moments_of_few if count <= len(stair) else _moments_of_many
    ratios = rows.new_tensor((*RATIOS, min(reach) / max(reach), 1.0))
    parts = ratios.split(max(1, NUMBERS // (len(rows) * min(count, len(stair)))))
    rows = rows.sort(dim=1).values
    for part in (*parts, *[None] * STEPS):
        candidates = refined if part is None else largest * part
        squares, products = moments(rows, candidates, unit)
        errors = candidates * (candidates * squares - 2 * products)
        least = errors.argmin(dim=1, keepdim=True)
        error, candidate, squares, products = (
            values.gather(1, least) for values in (errors, candidates, squares, products)
        )
        refined = torch.where((error < best) & (products > 0), products / squares, refined)
        quantum = torch.where(error < best, candidate, quantum)
        best = torch.minimum(best, error)
    # Rounded to float32, in which it is saved, so that a loaded network is the trained one.
    quanta = quantum.float().double().flatten().tolist()
    return stair.with_quantum(quanta, axis=0) if per_channel else stair.with_quantum(quanta[0])


SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Ends of ranges that are tried, as shares of the least and of the greatest value."""
SAMPLE = 1 << 14


@torch.no_grad()
def fit_range(values: Tensor, levels: int) -> tuple[float, int] | None:
    """Return the quantum ε, and the lowest of so many levels in quanta, that fit values best.

    The levels zε … (z + levels − 1)·ε hold 0. Returns None if all values are 0.

    >>> quantum, lowest = fit_range(torch.tensor([-1.0, 0.0, 14.0]), levels=16)
    >>> round(quantum, 2), lowest
    (1.0, -1)
    """
    x = values.flatten()[:: -(-values.numel() // SAMPLE)].double()
    low, high = float(values.min().clamp(max=0)), float(values.max().clamp(min=0))
    best = None
    for a, b in product(SHARES if low else (1.0,), SHARES if high else (1.0,)):
        quantum = (b * high - a * low) / (levels - 1)
        if quantum > 0:
            lowest = round(a * low / quantum)
            error = (x / quantum).round().clamp(lowest, lowest + levels - 1) * quantum - x
            trial = (float(error.square().sum()), quantum, lowest)
            best = trial if best is None else min(best, trial)
    # Rounded to float32, in which it is saved.
    return None if best is None else (float(torch.tensor(best[1])), best[2])


def shifted(stair: Stair, lowest: int) -> Stair:
    """Return a stair of intN or uintN with the same number of levels, the lowest elsewhere.

    >>> shifted(Stair.linear(2, quantum=0.5), -1).levels
    (-0.5, 0.0, 0.5, 1.0)
    """
    levels = tuple(range(lowest, lowest + len(stair)))
    unit = Stair(levels, tuple(level - 0.5 for level in levels[1:]))
    return unit.with_quantum(stair.quantum, stair.axis)


def _moments_of_few(rows: Tensor, quanta: Tensor, unit: Stair) -> tuple[Tensor, Tensor]:
    """Return (Σ l², Σ l·w) over the weights of each row (R, n) for each of its quanta (R, C)."""
    index = torch.bucketize(
        rows[:, None] / quanta[..., None], rows.new_tensor(unit.thresholds), right=True
    )
    levels = rows.new_tensor(unit.levels)[index]
    return levels.square().sum(2), (levels * rows[:, None]).sum(2)


def _moments_of_many(rows: Tensor, quanta: Tensor, unit: Stair) -> tuple[Tensor, Tensor]:
    """Return the same for sorted rows, in which the weights of a level are consecutive."""
    levels = rows.new_tensor(unit.levels)
    edges = rows.new_tensor((-torch.inf, *unit.thresholds, torch.inf))
    sums = torch.nn.functional.pad(rows.cumsum(1), (1, 0))
    ends = torch.searchsorted(rows, (quanta[..., None] * edges).flatten(1))
    counts, totals = (
        values.unflatten(1, (-1, len(edges))).diff() for values in (ends, sums.gather(1, ends))
    )
    return (counts * levels.square()).sum(2), (totals * levels).sum(2)
