"""Running statistics of batch normalisations, estimated anew from batches without noise."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _check
from softstair._errors import SoftstairError, first_line, is_out_of_memory
from softstair._stair_module import StairActivation, StairModule
from softstair.convert.graph import training_mode
from softstair.nn import StairLayer, hooked, stair_modules

Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]
"""The positional and the named arguments of a forward pass."""


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
                forward(net, arguments, keywords)
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


def forward(net: nn.Module, arguments: tuple[Tensor, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the outputs for a batch; raise SoftstairError if the network does not take it."""
    try:
        return net(*arguments, **keywords)
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


@contextmanager
def batch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
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


def inputs_of(net: nn.Module, loader: Iterable[Any]) -> list[Arguments]:
    """Return the arguments of a forward pass for each batch, on the device of the network."""
    device = next((tensor.device for tensor in net.state_dict().values()), torch.device("cpu"))
    inputs = [batch_arguments(net, batch, device) for batch in loader]
    if not inputs:
        raise _check.invalid("loader", "must have at least one batch, but it has none")
    return inputs


@contextmanager
def without_stairs(
    net: nn.Module, kept: StairModule | None = None, relus: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Compute without stairs, or with one alone; one in the place of an activation, from level 0
    on, is a ReLU, and so are ``relus``."""
    others = [stair for _, stair in stair_modules(net) if stair is not kept]
    stairs = [stair for stair in others if isinstance(stair, StairActivation)]
    layers = [m for m in net.modules() if isinstance(m, StairLayer) and m.weight_stair is not kept]
    total = lambda own, x, named, _: own._sum(*x, *named.values(), own.weight, own.bias)
    activate = lambda own, x, y: x[0].relu() if own in relus else before_stair(own, x, y)
    with ExitStack() as hooks:
        hooks.enter_context(hooked({stair: stair for stair in stairs}, activate))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(total, with_kwargs=True))
        yield


def before_stair(stair: Any, arguments: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """Return what a stair quantises: of x, max(x, 0) if its lowest level is 0."""
    if stair.function is not None:
        return stair.function(*arguments)
    is_relu = stair.stair.levels[0] >= 0 and not stair.follows_range
    return arguments[0].relu() if is_relu else arguments[0]
