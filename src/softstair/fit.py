"""The quantum of a stair that fits given values best."""

import torch
from torch import Tensor

from softstair.stair import Stair

RATIOS, STEPS = torch.linspace(0.01, 2.25, 192).tolist(), 3
"""Quanta that are tried, as shares of the largest; and steps of refinement after them."""
NUMBERS = 1 << 20
"""Thresholds that are compared at a time."""


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
    # Sorted weights of a level l are neighbours: the error is ‖w‖² + Σ (n·(εl)² − 2εl·Σw) over
    # levels. For these levels ε = Σ l·w / Σ l² is best; with it, some weights may get others.
    rows = rows.sort(dim=1).values
    sums = torch.nn.functional.pad(rows.cumsum(1), (1, 0))
    levels = rows.new_tensor(unit.levels)
    edges = rows.new_tensor((-torch.inf, *unit.thresholds, torch.inf))
    ratios = rows.new_tensor((*RATIOS, min(reach) / max(reach), 1.0))
    parts = ratios.split(max(1, NUMBERS // (len(rows) * len(edges))))
    for part in (*parts, *[None] * STEPS):
        candidates = refined if part is None else largest * part
        ends = torch.searchsorted(rows, (candidates[..., None] * edges).flatten(1))
        counts, totals = (
            values.unflatten(1, (-1, len(edges))).diff() for values in (ends, sums.gather(1, ends))
        )
        squares, products = (counts * levels.square()).sum(2), (totals * levels).sum(2)
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
