"""Quanta and statistics from a few batches.

Quanta of features are fitted to what the network computes, those of weights to the weights, and
running statistics of batch normalisations are estimated anew without noise.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from statistics import median_low
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import _check
from softstair._quantum import fit_quantum, fit_range
from softstair._stair_module import StairActivation, StairModule
from softstair._statistics import (
    Arguments,
    average_statistics,
    batch_statistics,
    before_stair,
    forward,
    inputs_of,
    running_norms,
    without_stairs,
)
from softstair.convert.graph import training_mode
from softstair.convert.units import set_input_units, tied_stairs
from softstair.nn import StairLayer, hooked, stair_modules
from softstair.stair import Quantum

VALUES = 1 << 18
"""Inputs of an activation that its quantum is fitted to, from all batches together."""
MOST_SAMPLING_ERROR = 0.1
"""Running statistics are corrected, not replaced, if their distance from the statistics of the
batches is smaller in the median over all normalisations. With augmentation, that of the first
normalisation is often larger."""


def calibrate(
    net: nn.Module,
    loader: Iterable[Any],
    *,
    batches: int = 8,
    weights: Literal["channel", "layer"] | None = "channel",
    norms: bool = True,
    outputs: Literal["classes", "values"] | None = "classes",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Quantum]:
    """Give a quantised network the quanta that fit its weights and a few batches, in place.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, "int4").eval()
    >>> quanta = ss.calibrate(net, [torch.randn(32, 4) for _ in range(4)])
    >>> sorted(quanta)
    ['0.weight_stair', '1', '2.weight_stair']

    Quanta minimise the squared error ‖x − σ(x)‖². Weights come first. Then the batches run once
    with quantised weights and unquantised features: an activation that is kept computes itself, a
    stair in the place of one max(x, 0) if its lowest level is 0, and else x. Activations whose
    values are added or concatenated share a quantum, so that the network stays exact in integers.

    Sums of quantised weights have other means and variances than those of the float network, so
    batch normalisations use the statistics of each batch. At the end the running ones are estimated
    with quantised features, as by :func:`softstair.refresh_statistics`; those of the float network
    are changed by the difference that quantisation makes on these batches. Modules keep their mode.

    A warning says so where the network keeps fewer than 97 % of the classes of the float network on
    these batches, or of the variance of its values, and names the layer that changes most alone;
    of several outputs, it is about the one that changes most.
    Nothing is compared where a stair took the place of another activation than ReLU.

    Args:
        net: A network of :func:`softstair.quantise`.
        loader: Batches of inputs: tensors, tuples that begin with one, or mappings, whose entries
            go to the arguments of those names, or the first of them if there are none.
        batches: How many batches to read.
        weights: Fit a quantum to each output ``"channel"`` or to each ``"layer"``; None keeps the
            quanta of weights. A network that loads the state must have as many quanta.
        norms: Estimate the running statistics of batch normalisations; of a network in ``train()``,
            those in ``eval()`` are frozen and keep theirs. False normalises by the running
            statistics, and keeps all.
        outputs: What is compared with the float network: ``"classes"``, ``"values"`` of a network
            that is no classifier, or None for nothing, as before a training.
        progress: Called with the number of batches that have run, and of all.

    Returns:
        The quanta of all stairs by name.

    Raises:
        SoftstairError: If the network has no stairs, the loader no batch, or an option is wrong.
    """
    _check.integer("batches", batches, 1)
    if weights not in (None, "channel", "layer"):
        raise _check.wrong("weights", weights, "channel, layer or None")
    _check.boolean("norms", norms)
    if outputs is not None:
        _check.choice("outputs", outputs, ("classes", "values"))
    inputs = list(islice(loader, batches))
    reference = None
    if outputs is not None:
        from softstair._kept import reference_of

        reference = reference_of(net, inputs, outputs)
    calibrate_stairs(net, inputs, None, weights, norms, progress)
    if reference is not None:
        reference.compare()
    return {name: module.stair.quantum for name, module in stair_modules(net)}


@torch.no_grad()
def calibrate_stairs(
    net: nn.Module,
    loader: Iterable[Any],
    chosen: Collection[StairModule] | None,
    weights: Literal["channel", "layer"] | None = "channel",
    norms: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Calibrate some stairs of a network with all batches, as :func:`calibrate` does all stairs."""
    is_chosen = lambda stair: chosen is None or stair in chosen
    groups = [[s for s in tied if is_chosen(s)] for tied in tied_stairs(net)]
    groups = [[s for s in tied if isinstance(s.stair.quantum, float)] for tied in groups]
    inputs = inputs_of(net, loader)
    layers = [module for module in net.modules() if isinstance(module, StairLayer)]
    fitted = [layer for layer in layers if weights is not None and is_chosen(layer.weight_stair)]
    stairs = [layer.weight_stair for layer in fitted]
    before = [(own, own.fit, own.stair.quantum) for own in stairs]
    for layer in fitted:
        layer.weight_stair.fit = "layer" if layer.output_axis is None else weights
        layer.refit()
    moving = running_norms(net, skip_frozen=net.training) if norms else []
    with training_mode(net, training=False), batch_statistics(moving):
        try:
            observed = _observe(net, inputs, layers, progress)
        except BaseException:  # a batch that does not fit the network leaves it as it was
            for own, fit, own_quantum in before:
                own.fit = fit
                own.set_quantum(own_quantum)
            raise
        finally:
            set_input_units(net)
    for group in groups:
        values = {stair: observed[stair] for stair in group if stair in observed}
        if quantum := _quantum(values):
            for stair in group:
                stair.set_quantum(quantum)
    set_input_units(net)
    if moving:  # with some stairs chosen, the statistics are those of a network with the others
        (_estimate_statistics if chosen is None else average_statistics)(net, moving, inputs)


def _estimate_statistics(
    net: nn.Module, norms: Sequence[nn.modules.batchnorm._BatchNorm], inputs: Sequence[Arguments]
) -> None:
    """Set running statistics to those of a few batches, corrected for the sampling error of these.

    Where the running statistics are those of the unquantised network, which come from more batches:

        mean = E[quantised] + (mean − E[unquantised]),  var = Var[quantised]·var/Var[unquantised]
    """
    names = ("running_mean", "running_var")
    statistics = lambda: [[norm.get_buffer(name).clone() for name in names] for norm in norms]
    running = statistics()
    with without_stairs(net):
        average_statistics(net, norms, inputs)
    unquantised = statistics()
    average_statistics(net, norms, inputs)
    to_reference, to_own = (
        median_low(map(_distance, running, others, [norm.eps for norm in norms]))
        for others in (unquantised, statistics())
    )
    if to_reference >= min(MOST_SAMPLING_ERROR, 2 * to_own):
        return
    for norm, before, reference in zip(norms, running, unquantised, strict=True):
        norm.get_buffer("running_mean").add_(before[0] - reference[0])
        ratio = (before[1] + norm.eps) / (reference[1] + norm.eps)
        norm.get_buffer("running_var").mul_(ratio)


def _distance(a: Sequence[Tensor], b: Sequence[Tensor], eps: float) -> float:
    """Return the mean over channels of (mean₁ − mean₂)²/var₂ + ln²(var₁/var₂)."""
    logarithm = ((a[1] + eps) / (b[1] + eps)).log()
    return float(((a[0] - b[0]).square() / (b[1] + eps) + logarithm.square()).mean())


def _quantum(observed: Mapping[StairActivation, Tensor]) -> float | None:
    """Return the quantum for the inputs of stairs; None if all are at the lowest level, 0.

    Stairs that follow the range begin at the least value of their own inputs.
    """
    quanta = []
    for follower in [stair for stair in observed if stair.follows_range]:
        if fitted := fit_range(observed[follower], len(follower.stair)):
            follower.set_range(*fitted)
            quanta.append(fitted[0])
    others = {stair: x for stair, x in observed.items() if not stair.follows_range}
    if quanta:
        return max(_quantum(others) or 0.0, *quanta)
    if not others:
        return None
    stair, values = next(iter(others)).stair, torch.cat([*others.values()])
    if stair.levels[0] >= 0:
        values = values[values > 0]
    if not len(values) or not values.any():
        return None
    quantum = fit_quantum(values, stair).quantum
    assert isinstance(quantum, float)
    return quantum


def _observe(
    net: nn.Module,
    inputs: Sequence[Arguments],
    layers: Sequence[StairLayer],
    progress: Callable[[int, int], None] | None,
) -> dict[StairActivation, Tensor]:
    """Return inputs of the activations, with unquantised features."""
    observed: dict[StairActivation, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(0)

    def activate(stair: StairActivation, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        y, count = before_stair(stair, arguments, output), max(VALUES // len(inputs), 1)
        values = y.flatten()
        if len(values) > count:
            chosen = torch.randint(len(values), (count,), generator=generator)
            values = values[chosen.to(y.device)]
        observed.setdefault(stair, []).append(values.to(torch.float32, copy=True))
        return y

    stairs = [stair for _, stair in stair_modules(net) if isinstance(stair, StairActivation)]
    for layer in layers:
        layer.input_quantum = None  # the features are no multiples of it
    with hooked({stair: stair for stair in stairs}, activate):
        for number, (arguments, keywords) in enumerate(inputs, 1):
            forward(net, arguments, keywords)
            if progress is not None:
                progress(number, len(inputs))
    return {stair: torch.cat(parts) for stair, parts in observed.items()}
