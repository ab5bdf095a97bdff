"""Fresh statistics: those of the very network that is evaluated.

A batch normalisation is evaluated with means and variances that it has averaged over its last
batches. Two things make them another network's: weights that still cross thresholds from step to
step, each of which shifts its channel by a level times the mean of its input, and noise that is in
the features of training and not in those of evaluation. Estimated anew, without noise, from some
training examples, they fit. These are augmented as in training: black borders are part of what the
thresholds behind the normalisations were trained on. Statistics that training itself uses, of
modules that are in evaluation then too, stay as they are.
"""

from collections.abc import Callable

import torch
from torch import nn

from softstair.convert.graph import training_mode
from softstair.data.batches import Examples
from softstair.train.parallel import ALONE, Team
from softstair.train.products import products_in

__all__ = ["refresh"]

ENOUGH = 4096
"""Examples, or a batch if that is more: the standard error of a mean is then a 64th of what one
value is off by."""


@torch.no_grad()
def refresh(
    network: nn.Module,
    examples: Examples,
    batch: int,
    seed: int,
    augment: str = "none",
    between: Callable[[], None] = lambda: None,
    team: Team = ALONE,
) -> None:
    """Gives every batch normalisation that is in training the mean and the variance of its
    batches, averaged over some of the examples, which the seed chooses and augments; ``between``
    is called after each batch. A team has what the first one finds."""
    norms = [
        module
        for module in network.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.track_running_stats
    ]
    if not norms:
        return
    draw = torch.Generator().manual_seed(seed)
    device = examples.y.device
    order = torch.randperm(len(examples), generator=draw).to(device)
    drawn = torch.Generator(device).manual_seed(seed)
    batches = order.split(batch)[: max(1, min(ENOUGH, len(order)) // batch)]
    before = [(norm.momentum, norm.get_buffer("num_batches_tracked").clone()) for norm in norms]
    try:
        with training_mode(network, training=False), products_in("float32"):
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # all batches weigh the same
            for indices in batches:
                network(examples.batch(indices, augment, drawn)[0])
                between()
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if momentum is None:  # then it is the weight of the next batch
                norm.get_buffer("num_batches_tracked").copy_(tracked)
    if team.size > 1:
        names = ("running_mean", "running_var")
        found = [norm.get_buffer(name) for norm in norms for name in names]
        firsts = team.share(lambda: [one.cpu() for one in found])
        for mine, first in zip(found, firsts, strict=True):
            mine.copy_(first)
