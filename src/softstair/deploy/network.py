"""An integer network: nodes in the order in which they run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from softstair.deploy.nodes import Input, Node

__all__ = ["IntegerNetwork"]


@dataclass(frozen=True)
class IntegerNetwork:
    """Whole numbers from the bytes of the input to the scores; :func:`integerise` makes it.

    nodes   in the order in which they run; the first is the input, the last gives the scores
    sizes   the shape of what each gives, without the batch
    stairs  the nodes that give what the stairs of the trained network give, under their names
    """

    nodes: tuple[Node, ...]
    sizes: Mapping[str, tuple[int, ...]]
    stairs: tuple[str, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The scores of bytes, (N, C, H, W) uint8 -> (N, classes) float32."""
        return self.features(x)[self.nodes[-1].name]

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """What every node gives, by its name."""
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != self.input.shape:
            raise ValueError(
                f"x must hold bytes of shape (N, {', '.join(map(str, self.input.shape))}), but "
                f"{x.dtype} of shape {tuple(x.shape)} was given."
            )
        known: dict[str, Tensor] = {}
        for node in self.nodes:
            taken = [known[name] for name in node.inputs] if node.inputs else [x]
            known[node.name] = node.run(*taken)
        return known

    @property
    def input(self) -> Input:
        """The bytes, and what they mean."""
        first = self.nodes[0]
        assert isinstance(first, Input)
        return first
