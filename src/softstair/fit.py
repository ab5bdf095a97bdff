"""The quantum with which a stair fits given weights best."""

import torch
from torch import Tensor

from softstair.stair import Stair

__all__ = ["fit_quantum"]

CANDIDATES = 96


@torch.no_grad()
def fit_quantum(weight: Tensor, stair: Stair, per_channel: bool = False) -> Stair:
    """``stair`` with the quantum ε that minimises ‖w − σ_ε(w)‖², over the layer or each channel.

    The candidates run from a hundredth of the quantum that reaches the largest weight to a quarter
    above it, so that the fit may clip outliers; channels are dimension 0.

    >>> weight = torch.tensor([[-0.3, 0.3, 0.0, 0.3], [0.6, -0.6, 0.0, 0.0]])
    >>> [round(q, 2) for q in fit_quantum(weight, Stair.ternary(), per_channel=True).quantum]
    [0.3, 0.6]
    """
    unit = stair.with_quantum(1.0)
    rows = weight.detach().double().reshape(weight.shape[0] if per_channel else 1, -1)
    reach = max(abs(unit.levels[0]), abs(unit.levels[-1]))
    widest = rows.abs().amax(dim=1, keepdim=True) / reach
    widest = torch.where(widest > 0, widest, torch.ones_like(widest))
    best = torch.full_like(widest, torch.inf)
    quantum = widest.clone()
    for share in torch.linspace(0.01, 1.25, CANDIDATES, dtype=torch.float64).tolist():
        candidate = widest * share
        error = (unit(rows / candidate) * candidate - rows).square().sum(dim=1, keepdim=True)
        quantum = torch.where(error < best, candidate, quantum)
        best = torch.minimum(best, error)
    # Rounded to float32, in which it is saved, so that what is loaded is what was trained.
    quanta = quantum.float().double().flatten().tolist()
    return stair.with_quantum(quanta, axis=0) if per_channel else stair.with_quantum(quanta[0])
