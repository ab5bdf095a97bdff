"""Conversion of float networks: ``quantise``, in four steps.

:mod:`~softstair.convert.sites` finds out what a model computes. :mod:`~softstair.convert.place`
decides what is quantised, with which stair and layer number. :mod:`~softstair.convert.rewrite` puts
modules in the places of layers and of functions. :mod:`~softstair.convert.conversion` is the record
of what became of each. :mod:`~softstair.convert.options` has the names of stairs, and
:mod:`~softstair.convert.ops` is the table of what each operation does to quantised features.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from softstair import _check
from softstair.convert.conversion import (
    ATTRIBUTE,
    Conversion,
    Row,
    add_version,
    owners,
    require_stairs,
    stair_row,
)
from softstair.convert.graph import Traces, code_of
from softstair.convert.ops import OTHER_NORMS, operator_of
from softstair.convert.options import (
    Activation,
    LayerOptions,
    PerLayer,
    QuantiseOptions,
    by_layer,
    is_by_module,
    matches,
    resolved,
)
from softstair.convert.place import place_stairs
from softstair.convert.rewrite import replace_modules
from softstair.convert.sites import Model, Site, read_model
from softstair.convert.units import learn_quanta, set_input_units, tied_stairs
from softstair.nn import StairLayer, TokenLinear
from softstair.noise import Noise
from softstair.regularise import Forward
from softstair.stair import Stair
from softstair.ste import Estimator

__all__ = ["QuantiseOptions", "quantise"]

DEFAULTS = QuantiseOptions()


def quantise(
    model: nn.Module,
    weights: PerLayer[Stair | str | None] = None,
    features: PerLayer[Stair | None] = None,
    noise: PerLayer[Noise | str | Estimator] = "uniform",
    forward: PerLayer[Forward] = "mode",
    skip: str | Sequence[str] = (),
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    quanta: Literal["fixed", "learned"] = "fixed",
    activation: Activation = "auto",
    options: QuantiseOptions = DEFAULTS,
    strict: bool = False,
) -> nn.Module:
    """Return a copy of a float network with quantised weights and features.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = quantise(model, "int4", skip="3")
    >>> [type(layer).__name__ for layer in net]
    ['StairLinear', 'BatchNorm1d', 'StairActivation', 'Linear']

    ``"int4"`` is weights of int4 and features of uint4, ``"int4/int8"`` names both, ``"ternary"``
    is both, and ``"float"`` is none. Then weights are kept and their quanta fitted. A pattern of
    names is for weights and for the activation that follows them, or for an activation alone.
    :func:`softstair.calibrate` fits the quanta of features to data.

    >>> net = quantise(model, {"3": "int8/float", "*": "ternary"})
    >>> net = quantise(model, weights=Stair.ternary(), features=Stair.ternary(), skip="3")

    Linear layers and convolutions become layers of :mod:`softstair.nn`, and activations, whether
    modules or functions, get a stair for each call. Features of intN and uintN by name keep the
    activation and quantise its result; other stairs take its place (see ``activation``). Anything
    else stays as it is; :func:`softstair.report` gives the reason. Parameters keep their names, so
    that checkpoints of the float network load.

    The forward pass is rewritten if an activation is a function, or a module that is called several
    times, or if stairs are added (:class:`softstair.QuantiseOptions`, ``sums`` and ``shortcuts``).
    Then it calls the innermost modules, and hooks on blocks do not run.

    The options ``weights``, ``features``, ``noise`` and ``forward`` may differ from layer to layer:
    give a sequence with one entry per layer, or a mapping from layer numbers and patterns of module
    names, of which the first that fits counts.

    >>> int4 = Stair.linear(bits=4, signed=True, quantum=0.1)
    >>> net = quantise(model, weights={"0": int4, "*": Stair.ternary()}, forward=["mode", "random"])

    Args:
        model: The float network, which is left as it is.
        weights: The stair of the weights; None leaves them in float. A name such as ``"int4"`` is
            for weights and features: of intN and uintN, the quantum of the features is that which
            is best for normally distributed ones of variance 1, and of others it is 1. In a
            mapping of names, layers that no pattern fits stay in float.
        features: The stair of the features; None leaves activations as they are.
        noise: A family of noise or its name, or an estimator of :mod:`softstair.ste`.
        forward: ``"expectation"``, ``"mode"``, ``"random"`` or ``"hard"``; see
            :func:`softstair.regularise`.
        skip: Names of modules, or patterns of names, to leave in float with all that they contain.
        example_inputs: The arguments of one forward pass, in order or by name, for models that
            torch.fx cannot trace.
        quanta: ``"learned"`` makes the quanta parameters, of which those of the stairs are the
            start: one of the features of a layer, and one of its weights or of each channel.
            Features that are added or concatenated share one. See
            :meth:`softstair.nn.StairModule.learn_quantum`.
        activation: ``"keep"`` quantises the result of each activation; ``"replace"`` puts the stair
            in its place, and leaves gates such as Sigmoid in float; ``"auto"`` keeps it if the
            features are intN or uintN by name. A ReLU before a stair from 0 on is the stair itself.
        options: Rare options: how weights start, where sums and shortcuts get stairs.
        strict: Raise an error instead of a warning if more than a tenth of the weights, without
            embeddings, stay in float and are named neither in ``skip`` nor as ``"float"``.

    Returns:
        The quantised network.

    Raises:
        ValueError: If an option does not fit the network, or if nothing can be quantised.
    """
    _check.choice("quanta", quanta, ("fixed", "learned"))
    source = read_model(model, example_inputs, is_by_module(weights))
    stairs = (weights, features, noise, forward)
    chosen = resolved(source.net, *stairs, skip, activation, options)
    sites = place_stairs(source, chosen)
    traces = replace_modules(source, sites, chosen)
    _leave_fast_paths(source.net)
    given: dict[str, Any] = {
        "weights": weights,
        "features": features,
        "skip": skip,
        "quanta": quanta,
    }
    given |= {"activation": activation, "options": options}
    conversion = _record(source, sites, traces, given)
    if text := _unnamed_floats(source.net, conversion, sites, chosen):
        if strict:
            raise _check.invalid("model", f"must be quantised if strict is True, but {text}")
        advice = "softstair.report says why; name them in `skip` if that is meant"
        warnings.warn(f"{text}. {advice}", stacklevel=2)
    return source.net


def _record(
    model: Model,
    sites: Sequence[Site],
    traces: Traces | str,
    given: dict[str, Any],
) -> Conversion:
    """Keep in a quantised network what became of each layer, with the options that are ``given``;
    tie its quanta, and let it take checkpoints."""
    net = model.net
    graph = model.graph if isinstance(traces, str) else traces.train_steps
    conversion = Conversion(_rows(net, sites), graph, given, traces, code_of(net))
    setattr(net, ATTRIBUTE, conversion)
    for group in tied_stairs(net):
        if any(stair.follows_range for stair in group):
            quantum = max(map(attrgetter("stair.quantum"), group))
            for stair in group:
                stair.set_quantum(quantum)
    if given["quanta"] == "learned":
        learn_quanta(net)
    set_input_units(net)
    net.register_state_dict_post_hook(add_version)
    net.register_load_state_dict_pre_hook(require_stairs)
    net.register_load_state_dict_post_hook(set_input_units)  # its features may have other quanta
    return conversion


def _leave_fast_paths(net: nn.Module) -> None:
    """Let blocks of torch call their quantised layers in evaluation too, where a fused operation
    would read the float weights."""
    for module in net.modules():
        if any(isinstance(child, StairLayer) for child in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _rows(net: nn.Module, sites: Sequence[Site]) -> tuple[Row, ...]:
    rows = []
    for site in sites:
        if site.replacement is None:
            rows.append(Row(site.name, site.kind, None, f"float: {site.why_float}"))
        else:
            row = stair_row(site.name, site.kind, site.replacement)
            row = replace(row, is_shortcut=site.is_shortcut)
            if site.is_activation and len(site.uses) > 1:
                row = replace(row, became=f"{row.became}, one for {len(site.uses)} calls")
            rows.append(row)
    called, known = {site.module for site in sites}, {site.name for site in sites}
    for name, module in net.named_modules():
        if isinstance(module, TokenLinear) and name not in known:  # the last of an attention
            rows.append(stair_row(name, "Linear", module))
        operator, kind = operator_of(module), type(module)
        if operator.replacement and kind in operator.modules and module not in called:
            rows.append(Row(name, kind.__name__, None, "float: never called as a module"))
    return tuple(rows)


def _unnamed_floats(
    net: nn.Module, conversion: Conversion, sites: Sequence[Site], options: LayerOptions
) -> str:
    """Return which weights stay in float although the call does not say so, if they are many."""
    attributes = {name.rpartition(".")[0] for name in conversion.graph.attributes}
    used = attributes.union(step.module for step in conversion.graph.steps if step.module)
    layers = {site.name: site.layer for site in sites if site.why_float.startswith("no stair")}
    given = {key: options.weights[key] for key in by_layer(conversion.options["weights"])}
    entries = [*dict.fromkeys(options.skip).items(), *given.items()]

    def is_named(name: str) -> bool:
        fits = lambda key: matches(key, name) or key == layers.get(name)
        return next((stair for key, stair in entries if fits(key)), "") is None

    no_products = (nn.Embedding, nn.EmbeddingBag, *OTHER_NORMS)
    count, left = 0, Counter[str]()
    for parameter, (name, kind) in owners(net, conversion.rows).items():
        if isinstance(parameter, nn.UninitializedParameter):
            continue  # of a lazy layer
        module = net.get_submodule(name)
        is_used = name in used or not type(module).__module__.startswith("torch.nn")
        if is_used and parameter.dim() > 1 < len(parameter) and not isinstance(module, no_products):
            count += parameter.numel()
            if not isinstance(module, StairLayer) and not is_named(name):
                left[f"{name!r} ({kind})"] += parameter.numel()
    names = [name for name, _ in left.most_common(3)] + ["and others"] * (len(left) > 3)
    share = left.total() / max(1, count)
    return f"{share:.0%} of the weights stay in float: {', '.join(names)}" if share > 0.1 else ""
