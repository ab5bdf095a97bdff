"""The replaced layers of a network: a record of them, and whether a checkpoint has their stairs."""

import copy
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import softstair
from softstair import _check, kernels
from softstair._errors import SoftstairError
from softstair._grouped import GroupedWeight
from softstair._stair_module import EXTRA_STATE
from softstair.convert.graph import Graph, Traces, code_of
from softstair.convert.options import name_of
from softstair.nn import StairActivation, StairLayer, stair_modules

ATTRIBUTE = "_softstair_conversion"
"""The attribute of a quantised network that holds its conversion."""


ADDED = ("sum", "product", "input")
"""The kinds of stairs that are added to a network and replace nothing."""


@dataclass(frozen=True)
class Row:
    """A module or function call, and what became of it."""

    name: str
    kind: str  # its class, or the name of the function
    layer: int | None  # None if it is left in float
    became: str  # what it is now, or why it is left in float
    stair: str = ""
    noise: str = ""
    forward: str = ""
    is_shortcut: bool = False  # whether ``shortcuts`` is the stair of its features


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`softstair.quantise`."""

    rows: tuple[Row, ...]  # in order of execution
    graph: Graph
    options: dict[str, Any]  # of quantise, but for noise, forward and the inputs
    traces: Traces | str  # or why torch.fx cannot trace it
    code: str  # the digest of what was traced


def conversion_of(net: nn.Module) -> Conversion:
    """Return what became of each layer of a quantised network, with its present stairs."""
    conversion, modules = _stored(net), dict(net.named_modules(remove_duplicate=False))
    rows = tuple(_present_row(modules.get(row.name), row) for row in conversion.rows)
    return replace(conversion, rows=rows)


def graph_of(net: nn.Module, training: bool = True) -> Graph:
    """Return the graph of a quantised network; in evaluation, if torch.fx can trace it."""
    conversion = _stored(net)
    if training or isinstance(conversion.traces, str):
        return conversion.graph
    return conversion.traces.eval_steps


def is_traced(net: nn.Module) -> bool:
    """Return whether torch.fx traced a quantised network; else only its modules are known."""
    return isinstance(_stored(net).traces, Traces)


def traces_of(net: nn.Module) -> Traces:
    """Return copies of the graphs that :func:`softstair.quantise` traced.

    Raises SoftstairError if it could not, or if the network has other blocks or code since. What
    attributes have changed that its code reads is not seen.
    """
    conversion = _stored(net)
    if vars(net).get(ATTRIBUTE) is not conversion:  # of torch.compile
        raise _wrong_network(net)
    if isinstance(conversion.traces, str):
        problem = f"must be traceable by torch.fx, but it is not: {conversion.traces}"
        raise _check.invalid("net", problem)
    if conversion.code != code_of(net):
        problem = "must have the blocks and the code that softstair.quantise gave it, but they were"
        raise _check.invalid("net", f"{problem} changed; change the model before it is quantised")
    return copy.deepcopy(conversion.traces)


def options_of(net: nn.Module) -> dict[str, Any]:
    """Return the options that :func:`softstair.quantise` was called with."""
    return _stored(net).options


def _stored(net: nn.Module) -> Conversion:
    conversion = getattr(net, ATTRIBUTE, None)
    if not isinstance(conversion, Conversion):
        raise _wrong_network(net)
    return conversion


def _wrong_network(net: object) -> SoftstairError:
    return _check.invalid(
        "net",
        f"must be a network that softstair.quantise returned, but {type(net).__name__} is not; "
        "pass the network inside DDP or torch.compile",
    )


def stair_row(name: str, kind: str, replacement: StairLayer | StairActivation) -> Row:
    """Return the row of a module of class ``kind``, or of a function, that was replaced."""
    module = replacement.weight_stair if isinstance(replacement, StairLayer) else replacement
    quantum = module.stair.quantum
    quanta = f"{len(quantum)} quanta" if isinstance(quantum, tuple) else f"quantum {quantum:.4g}"
    low, high = (module.stair.integers or module.stair.levels)[:: len(module.stair) - 1]
    name_of_levels = name_of(module.stair)
    levels = name_of_levels or f"{len(module.stair)} levels {low:g}…{high:g}"
    if isinstance(module, GroupedWeight):
        reads = getattr(replacement, "rounding", None)
        quanta = f"{quanta} ({module.group})" + (f", reads {reads.name}" if reads else "")
    noise, became = repr(module.noise), "stair activation"
    if isinstance(replacement, StairLayer):
        became = "stair weights"
    elif replacement.function is not None:
        became = f"{kind}, then a stair"
    elif kind.lower() not in ADDED and not (kind.lower() == "relu" and low >= 0):
        became = f"{name_of_levels or 'other'} stair instead of {kind}"
    return Row(name, kind, module.layer, became, f"{levels}, {quanta}", noise, module.strategy)


def _present_row(module: nn.Module | None, row: Row) -> Row:
    """Return a row with the present stair; a checkpoint may have had another quantum."""
    if not isinstance(module, StairLayer | StairActivation):
        return row
    return replace(row, stair=stair_row(row.name, row.kind, module).stair)


def add_version(net: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Add the version of softstair to a state dict; loading ignores it."""
    numbers = re.findall(r"\d+", softstair.__version__)[:3]
    state_dict.setdefault(f"{prefix}{EXTRA_STATE}", torch.tensor([*map(int, numbers)]))


def require_stairs(
    net: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any
) -> None:
    """Before loading, report the stairs that a checkpoint with other stairs does not have.

    Of a checkpoint of the float network, warn if its weights are not on the scale of the stairs.
    """
    if type(net).set_extra_state is nn.Module.set_extra_state:
        state_dict.pop(f"{prefix}{EXTRA_STATE}", None)
    first: dict[nn.Parameter, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        key, in_float = f"{prefix}{name}", f"{prefix}{name.replace('.function.', '.')}"
        if key not in state_dict and in_float in state_dict:  # of an activation that is kept
            state_dict[key] = state_dict.pop(in_float)
        if (own := first.setdefault(parameter, key)) in state_dict:  # of F.prelu, or of two calls
            state_dict.setdefault(key, state_dict[own])
    keys = {name: f"{prefix}{name}.std" for name, _ in stair_modules(net)}
    if any(key in state_dict for key in keys.values()):
        *_, missing, _, _ = arguments
        for name, key in keys.items():
            if key not in state_dict and name.rpartition(".")[0] not in keys:
                missing.append(key)
    else:
        loaded = {name: state_dict.get(f"{prefix}{name}.weight") for name, _ in _layers(net)}
        if names := constant_layers(net, loaded):
            warnings.warn(
                f"all weights that are loaded into {names} fall on one level of their stair. To "
                'start from a float checkpoint, quantise the model with init="keep".',
                stacklevel=6,  # the caller of load_state_dict
            )


def constant_layers(net: nn.Module, weights: Mapping[str, Any] | None = None) -> str:
    """Return the names of the layers whose weights all fall on one level.

    ``weights`` are those to be loaded, before quanta are fitted to them.
    """
    names = []
    for name, layer in _layers(net):
        weight = layer.weight if weights is None else weights.get(name)
        is_fitted = weights is not None and layer.weight_stair.fit is not None
        if is_fitted or not isinstance(weight, Tensor) or weight.shape != layer.weight.shape:
            continue
        stair = layer.weight_stair
        index = kernels.index(stair.in_groups(weight.detach()), stair.stair)
        if index.numel() > 1 and bool((index == index.flatten()[0]).all()):
            names.append(repr(name))
    return ", ".join(names if len(names) < 4 else [*names[:3], f"and {len(names) - 3} others"])


def copy_of(net: nn.Module, field: str = "net") -> nn.Module:
    """Return a copy of a network; torch cannot copy weights that hooks compute from others."""
    undo = {"_mask": "prune.remove", "_g": "remove_weight_norm", "_u": "remove_spectral_norm"}
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            if not isinstance(value, Tensor):
                continue
            ends = [end for end in undo if hasattr(module, f"{key}{end}")]
            if not value.is_leaf or (ends and ends != ["_u"]):  # a spectral norm may stay
                call = f"torch.nn.utils.{undo[ends[0]]}(layer, {key!r})" if ends else "detach_()"
                problem = f"must hold its tensors itself, but {name!r} computes its {key!r}"
                raise _check.invalid(field, f"{problem} from others; first call {call}")
    return copy.deepcopy(net)


def owners(net: nn.Module, rows: Iterable[Row]) -> dict[nn.Parameter, tuple[str, str]]:
    """Return the name and kind of what holds each parameter: of a row, or else of a module."""
    kinds, found = {row.name: row.kind for row in rows}, dict[nn.Parameter, tuple[str, str]]()
    layers = sorted(_layers(net), key=lambda entry: -entry[0].count("."))  # the innermost first
    for name, module in [*layers, *net.named_modules()]:
        for parameter in module.parameters(recurse=name in kinds):
            found.setdefault(parameter, (name, kinds.get(name, type(module).__name__)))
    return found


def _layers(net: nn.Module) -> list[tuple[str, StairLayer]]:
    return [(name, layer) for name, layer in net.named_modules() if isinstance(layer, StairLayer)]


def swap_modules(net: nn.Module, replacements: Mapping[nn.Module, nn.Module | None]) -> None:
    """Replace modules of a network under every name that they have."""
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            replacement = replacements.get(child) if child is not None else None
            if child is not None and replacement is not None:
                parent._modules[name] = replacement.train(child.training)
