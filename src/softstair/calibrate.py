"""Quanta and statistics from a few batches.

Quanta of features are fitted to what the network computes, those of weights to the weights, and
running statistics of batch normalisations are estimated anew without noise.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from statistics import median_low
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from softstair import _check
from softstair._quantum import fit_quantum, fit_range
from softstair._stair_module import StairActivation, StairModule
from softstair._statistics import (
    Arguments,
    average_statistics,
    batch_arguments,
    batch_statistics,
    forward,
    running_norms,
)
from softstair.convert.conversion import ADDED, conversion_of
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
KEPT = 0.97
"""The share of the classes, or of the variance of the values, below which calibration warns."""


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
    relus, reference = _relus(net), None
    if outputs is not None and relus is not None:
        reference = _Reference(net, inputs, outputs, relus)
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
    inputs = _inputs(net, loader)
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


def _inputs(net: nn.Module, loader: Iterable[Any]) -> list[Arguments]:
    """Return the arguments of a forward pass for each batch, on the device of the network."""
    device = next((tensor.device for tensor in net.state_dict().values()), torch.device("cpu"))
    inputs = [batch_arguments(net, batch, device) for batch in loader]
    if not inputs:
        raise _check.invalid("loader", "must have at least one batch, but it has none")
    return inputs


class _Reference:
    """The outputs of the float network that a quantised one was made of."""

    def __init__(
        self, net: nn.Module, loader: Iterable[Any], outputs: str, relus: Collection[nn.Module]
    ) -> None:
        self.net, self.outputs, self.relus = net, outputs, relus
        self.inputs = _inputs(net, loader)
        self.norms = running_norms(net, skip_frozen=False)
        self.buffers = [buffer.clone() for norm in self.norms for buffer in norm.buffers()]
        with _unquantised(net, relus=relus):
            self.expected = self._run(self.inputs)

    @torch.no_grad()
    def _run(self, inputs: Sequence[Arguments]) -> list[tuple[Tensor, ...]]:
        """Return the outputs of each batch: classes, or values."""
        results = []
        with training_mode(self.net, training=False):
            for arguments, keywords in inputs:
                ys = _outputs(forward(self.net, arguments, keywords))
                results.append(tuple(map(self._answers, ys)))
        return results

    def _answers(self, y: Tensor) -> Tensor:
        """Return the classes of an output, or its values."""
        is_class = self.outputs == "classes" and y.dim() > 1
        return y.argmax(-1 if y.dim() == 3 else 1) if is_class else y.double()

    def _kept(self, actual: Sequence[tuple[Tensor, ...]]) -> float:
        """Return the share of classes that are equal, or R² of the values, of the output that is
        changed most."""
        outputs = zip(*(map(_joined, (actual, self.expected[: len(actual)]))), strict=True)
        return min(_share(a, b) for a, b in outputs)

    def compare(self) -> None:
        """Warn if too little of the float network is kept."""
        kept = self._kept(self._run(self.inputs))
        if kept >= KEPT:
            return
        what = "of the classes" if self.outputs == "classes" else "of the variance of the values"
        with torch.no_grad():
            name, alone = self._worst()
        why = f"Alone, {name!r} changes most: it keeps {alone:.1%}."
        if alone >= KEPT:
            why = "No layer does so alone: several do, or the new statistics of normalisations."
        warnings.warn(
            f"the calibrated network keeps {kept:.1%} {what} of the float network. {why} Train the "
            "network, or give its layers more bits.",
            stacklevel=3,
        )

    def _worst(self) -> tuple[str, float]:
        """Return the layer whose stairs alone change most on the first batch."""
        kept = {}
        for layer in [m for m in self.net.modules() if isinstance(m, StairLayer)]:
            layer.input_quantum = None  # the features are no multiples of it
        with _buffers(self.norms, self.buffers):
            for name, stair in stair_modules(self.net):
                with _unquantised(self.net, stair, self.relus):
                    part = self._kept(self._run(self.inputs[:1]))
                kept[name.removesuffix(".weight_stair")] = part
        set_input_units(self.net)
        return min(kept.items(), key=lambda item: item[1])


@contextmanager
def _buffers(norms: Sequence[nn.Module], values: Sequence[Tensor]) -> Iterator[None]:
    """Give the buffers of normalisations other values for a while."""
    own = [buffer for norm in norms for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in own]
    try:
        for buffer, value in zip(own, values, strict=True):
            buffer.copy_(value)
        yield
    finally:
        for buffer, value in zip(own, before, strict=True):
            buffer.copy_(value)


def _relus(net: nn.Module) -> set[nn.Module] | None:
    """Return the stairs that took the place of a ReLU; None if one took that of another function,
    whose parameters are gone."""
    modules = dict(net.named_modules(remove_duplicate=False))
    rows = {modules.get(row.name): row.kind.lower() for row in conversion_of(net).rows}
    replaced = {
        module: kind
        for module, kind in rows.items()
        if isinstance(module, StairActivation) and module.function is None and kind not in ADDED
    }
    return set(replaced) if set(replaced.values()) <= {"relu"} else None


def _outputs(result: Any) -> list[Tensor]:
    """Return the tensors of numbers that a network returns."""
    tensors = [y for y in tree_leaves(result) if isinstance(y, Tensor)]
    return [y for y in tensors if y.is_floating_point()]


def _joined(batches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return each output of all batches, as a vector."""
    return [torch.cat([y.flatten() for y in parts]) for parts in zip(*batches, strict=True)]


def _share(a: Tensor, b: Tensor) -> float:
    """Return the share of classes that are equal, or R² of values."""
    if not a.is_floating_point():
        return float((a == b).double().mean())
    return 1 - float((a - b).square().sum() / (b - b.mean()).square().sum().clamp(min=1e-30))


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
def _unquantised(
    net: nn.Module, kept: StairModule | None = None, relus: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Compute without stairs, or with one alone; one in the place of an activation, from level 0
    on, is a ReLU, and so are ``relus``."""
    others = [stair for _, stair in stair_modules(net) if stair is not kept]
    stairs = [stair for stair in others if isinstance(stair, StairActivation)]
    layers = [m for m in net.modules() if isinstance(m, StairLayer) and m.weight_stair is not kept]
    total = lambda own, x, named, _: own._sum(*x, *named.values(), own.weight, own.bias)
    activate = lambda own, x, y: x[0].relu() if own in relus else _activate(own, x, y)
    with ExitStack() as hooks:
        hooks.enter_context(hooked({stair: stair for stair in stairs}, activate))
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
            forward(net, arguments, keywords)
            if progress is not None:
                progress(number, len(inputs))
    return {stair: torch.cat(parts) for stair, parts in observed.items()}
