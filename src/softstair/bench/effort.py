"""How much is measured: enough for a steady median, and no more than a minute or two."""

from dataclasses import dataclass, replace

import torch

__all__ = ["REPEATS", "Effort"]

REPEATS = (1, 1000)
"""The fewest and the most repeats."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    repeats   samples of each contestant; medians and spreads are over them
    calls     calls in a sample on CUDA, between two events
    seconds   what a sample lasts at least on a CPU
    elements  of the operator's tensor
    quick     fewer stairs, precisions and twins

    >>> Effort.on(torch.device("cuda")).elements
    33554432
    """

    repeats: int
    calls: int
    seconds: float
    elements: int
    quick: bool = False

    def __post_init__(self) -> None:
        low, high = REPEATS
        if not low <= self.repeats <= high:
            raise ValueError(
                f"repeats must be a whole number from {low} to {high}, but {self.repeats} was "
                "given."
            )

    @classmethod
    def on(cls, device: torch.device, quick: bool = False, repeats: int | None = None) -> "Effort":
        """What suits a device; ``quick``: to see that it works, not to quote."""
        if device.type == "cuda":
            whole = cls(repeats=7, calls=50, seconds=0.0, elements=1 << 25)
            less = replace(whole, repeats=3, elements=1 << 22, quick=True)
        else:
            whole = cls(repeats=5, calls=1, seconds=0.1, elements=1 << 20)
            less = replace(whole, repeats=2, seconds=0.01, elements=1 << 14, quick=True)
        chosen = less if quick else whole
        return chosen if repeats is None else replace(chosen, repeats=repeats)
