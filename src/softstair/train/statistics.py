"""Fresh statistics: those of the very network that is evaluated.

A batch normalisation is evaluated with means and variances that it has averaged over its last
batches. Two things make them another network's: weights that still cross thresholds from step to
step, which in depthwise networks moves whole channels, and noise that is in the features of
training and not in those of evaluation. Estimated anew, without noise, from some training examples,
they fit; training itself never uses them.
"""

from collections.abc import Callable

import torch
from torch import nn

from softstair.data.examples import Examples
from softstair.train.evaluate import in_float32

__all__ = ["refresh"]

ENOUGH = 4096
"""Examples: what a channel's mean is off by is then a 64th of its deviation at most."""


@torch.no_grad()
def refresh(
    network: nn.Module,
    examples: Examples,
    batch: int,
    seed: int,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Gives every batch normalisation of the network the mean and the variance of its batches,
    averaged over some of the examples, which the seed chooses; ``between`` is called after each."""
    norms = [
        module
        for module in network.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=draw).to(examples.y.device)
    batches = order.split(batch)[: max(1, min(ENOUGH, len(order)) // batch)]
    was_training, momenta = network.training, [norm.momentum for norm in norms]
    network.eval()
    try:
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # all batches weigh the same
        with in_float32():
            for indices in batches:
                network(examples.batch(indices)[0])
                between()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        network.train(was_training)
