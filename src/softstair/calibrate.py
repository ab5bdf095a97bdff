"""Quanta and statistics from a few batches.

Quanta of features are fitted to what the network computes, those of weights to the weights, and
running statistics of batch normalisations are estimated anew without noise.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from statistics import median_low
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import _check
from softstair._errors import SoftstairError, first_line, is_out_of_memory
from softstair._quantum import fit_quantum, fit_range
from softstair._stair_module import StairActivation, StairModule
from softstair.convert.graph import training_mode
from softstair.convert.units import set_input_units, tied_stairs
from softstair.nn import StairLayer, hooked, stair_modules
from softstair.stair import Quantum

Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]
"""The positional and the named arguments of a forward pass."""
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
    calibrate_stairs(net, islice(loader, batches), None, weights, norms, progress)
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
    device = next((tensor.device for tensor in net.state_dict().values()), torch.device("cpu"))
    inputs = [batch_arguments(net, batch, device) for batch in loader]
    if not inputs:
        raise _check.invalid("loader", "must have at least one batch, but it has none")
    layers = [module for module in net.modules() if isinstance(module, StairLayer)]
    fitted = [layer for layer in layers if weights is not None and is_chosen(layer.weight_stair)]
    stairs = [layer.weight_stair for layer in fitted]
    before = [(own, own.fit, own.stair.quantum) for own in stairs]
    for layer in fitted:
        layer.weight_stair.fit = "layer" if layer.output_axis is None else weights
        layer.weight_stair.refit(layer.weight)
    moving = running_norms(net, skip_frozen=net.training) if norms else []
    with training_mode(net, training=False), _batch_statistics(moving):
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
    with _unquantised(net):
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


@contextmanager
def _unquantised(net: nn.Module) -> Iterator[None]:
    """Compute without stairs; one in the place of an activation, from level 0 on, is a ReLU."""
    stairs = [stair for _, stair in stair_modules(net) if isinstance(stair, StairActivation)]
    layers = [layer for layer in net.modules() if isinstance(layer, StairLayer)]
    total = lambda own, x, named, _: own._sum(*x, *named.values(), own.weight, own.bias)
    with ExitStack() as hooks:
        hooks.enter_context(hooked({stair: stair for stair in stairs}, _activate))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(total, with_kwargs=True))
        yield


def _activate(stair: Any, arguments: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """Return what a stair quantises: of x, max(x, 0) if its lowest level is 0."""
    if stair.function is not None:
        return stair.function(*arguments)
    is_relu = stair.stair.levels[0] >= 0 and not stair.follows_range
    return arguments[0].relu() if is_relu else arguments[0]


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
        y, count = _activate(stair, arguments, output), max(VALUES // len(inputs), 1)
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
            _forward(net, arguments, keywords)
            if progress is not None:
                progress(number, len(inputs))
    return {stair: torch.cat(parts) for stair, parts in observed.items()}


@contextmanager
def _batch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let normalisations use the statistics of each batch, and keep their running ones."""
    buffers = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        for norm in norms:
            norm.train()
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise SoftstairError(
            "batch normalisation needs batches of two examples or more to estimate its statistics: "
            "use larger batches, or `norms=False` where you call `calibrate` yourself.",
            field="loader",
        ) from None
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def refresh_statistics(net: nn.Module, loader: Iterable[Any]) -> None:
    """Estimate the running statistics of a network's batch normalisations anew, without noise.

    The averages over the last batches of training belong to another network: weights still cross
    thresholds from step to step, and the features of training have noise. Here every module but the
    normalisations is in ``eval()``, and each batch has the same weight:

        running_mean = mean over batches of E[x],  running_var = mean over batches of Var[x]

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="3").eval()
    >>> loader = [(torch.randn(32, 4) + 5, torch.zeros(32)) for _ in range(10)]
    >>> ss.refresh_statistics(net, loader)
    >>> bool(net[1].running_mean.abs().max() > 1)
    True

    Args:
        net: The network, in place; its modules keep their modes. If it is in ``train()``,
            normalisations in ``eval()`` are frozen and keep their statistics; if it is in
            ``eval()``, all are estimated.
        loader: Batches of inputs, as tensors, tuples or mappings; see :func:`softstair.calibrate`.
            Augment them as in training. Some thousands of examples suffice. They are moved to the
            device of the network.

    Raises:
        SoftstairError: If the network has no such normalisation, or the loader no batch.
    """
    if not isinstance(net, nn.Module):
        raise _check.wrong("net", net, "a torch.nn.Module")
    norms = running_norms(net, skip_frozen=net.training)
    if not norms:
        raise _check.invalid("net", "must have a batch normalisation with running statistics")
    device = norms[0].get_buffer("running_mean").device
    average_statistics(net, norms, (batch_arguments(net, batch, device) for batch in loader))


def running_norms(
    net: nn.Module, skip_frozen: bool = True
) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the batch normalisations with running statistics; those in ``eval()`` are frozen."""
    norms = (m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    moving = (norm for norm in norms if norm.track_running_stats)
    return [norm for norm in moving if norm.training or not skip_frozen]


@torch.no_grad()
def average_statistics(
    net: nn.Module, norms: Sequence[nn.modules.batchnorm._BatchNorm], inputs: Iterable[Arguments]
) -> None:
    """Set running statistics to the means over batches; all other modules are in ``eval()``."""
    before = [(norm.momentum, [buffer.clone() for buffer in norm.buffers()]) for norm in norms]
    is_empty = True
    try:
        with training_mode(net, training=False):
            for arguments, keywords in inputs:
                for norm in norms if is_empty else ():
                    norm.train()
                    norm.reset_running_stats()
                    norm.momentum = None  # all batches have the same weight
                is_empty = False
                _forward(net, arguments, keywords)
    except BaseException:  # a batch that is refused leaves the network as it was
        for norm, (_, buffers) in zip(norms, before, strict=True):
            torch._foreach_copy_(list(norm.buffers()), buffers)
        raise
    finally:
        for norm, (momentum, (*_, tracked)) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if momentum is None:  # the count is then the weight of the next batch
                norm.get_buffer("num_batches_tracked").copy_(tracked)
    if is_empty:
        raise SoftstairError("`loader` must give at least one batch, but it gave none.")


def _forward(net: nn.Module, arguments: tuple[Tensor, ...], keywords: Mapping[str, Any]) -> None:
    """Run a batch; raise SoftstairError if the network does not take it."""
    try:
        net(*arguments, **keywords)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, SoftstairError) or is_out_of_memory(error):
            raise
        tensors = [*arguments, *keywords.values()]
        given = ", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in tensors)
        raise SoftstairError(
            "the batches of loader must be inputs of the network, normalised and with the batch "
            f"axis first, but for {given} it raised {type(error).__name__}: {first_line(error)}.",
            field="loader",
        ) from error


def batch_arguments(net: nn.Module, batch: Any, device: torch.device) -> Arguments:
    """Return the arguments of a forward pass for a batch; raise SoftstairError if one has NaN."""
    keywords: dict[str, Tensor] = {}
    if isinstance(batch, Mapping):
        names = inspect.signature(net.forward).parameters
        tensors = {name: x.to(device) for name, x in batch.items() if isinstance(x, Tensor)}
        keywords = {name: x for name, x in tensors.items() if name in names}
        batch = list(tensors.values())
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(first, Tensor):
        raise _check.wrong("loader", first, "batches of tensors, tuples or mappings of them")
    inputs = () if keywords else (first.to(device),)
    if any(bool(x.isnan().any()) for x in (*inputs, *keywords.values())):
        raise _check.invalid("loader", "must give numbers, but a batch has NaN")
    return inputs, keywords
