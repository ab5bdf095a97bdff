"""Conversion of float networks: ``quantise``.

:mod:`~softstair.convert.bits` has the names of stairs. :mod:`~softstair.convert.graph` finds out
what a network computes. :mod:`~softstair.convert.ops` is the table of what each operation does to
quantised features. :mod:`~softstair.convert.sites` decides what is quantised, with which layer
number. :mod:`~softstair.convert.rewrite` turns functional activations into modules.
:mod:`~softstair.convert.conversion` replaces layers and records what became of each.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from softstair import _check, noise as noises
from softstair._quantum import fit_quantum, fit_range
from softstair.convert.bits import StairName, feature_stair, has_names, name_of, stairs_of
from softstair.convert.conversion import (
    ATTRIBUTE,
    Conversion,
    Row,
    add_version,
    conversion_of,
    copy_of,
    owners,
    require_stairs,
    stair_row,
    swap_modules,
)
from softstair.convert.graph import Graph, Traces, code_of, trace_or_record, traces_or_why
from softstair.convert.ops import OTHER_NORMS, Effect, operator_named, operator_of
from softstair.convert.rewrite import NewCall, call_names, register_constants, rewrite
from softstair.convert.shortcuts import SUMS, Sums, input_sites, signed, sum_sites, widen
from softstair.convert.sites import (
    LayerOptions,
    PerLayer,
    Site,
    find_sites,
    hint,
    learn_quanta,
    matches,
    number_layers,
    set_input_units,
    set_ranks,
    tied_stairs,
)
from softstair.nn import StairActivation, StairLayer, StairWeight
from softstair.noise import Noise
from softstair.regularise import FORWARDS, Forward
from softstair.stair import Stair
from softstair.ste import Estimator

DEEP = 16
"""Number of activations from which a network without shortcuts counts as deep. An extra level was
measured with 27 activations, where it raises the accuracy, and with 3, where it lowers it."""
SUMS_TRIED = 4096
"""Quantiles of a normal distribution to which the first range of a kept activation is fitted."""


def quantise(
    model: nn.Module,
    weights: PerLayer[Stair | str | None] = None,
    features: PerLayer[Stair | None] = None,
    noise: PerLayer[Noise | str | Estimator] = "uniform",
    forward: PerLayer[Forward] = "mode",
    skip: str | Sequence[str] = (),
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    init: Literal["auto", "thresholds", "keep"] = "auto",
    fit: Literal["auto", "layer", "channel"] | None = "auto",
    sums: Sums | None = "sum",
    shortcuts: Stair | StairName | None = None,
    gradient_margin: int | Literal["auto"] = "auto",
    quanta: Literal["fixed", "learned"] = "fixed",
    activation: Literal["auto", "keep", "replace"] = "auto",
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
    times, or if stairs are added (``sums``, ``shortcuts``). Then it calls the innermost modules,
    and hooks on blocks do not run.

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
        init: ``"thresholds"`` starts the weights at thresholds, as in the paper; ``"keep"`` keeps
            them; ``"auto"`` keeps them if stairs are given by name.
        fit: With ``init="keep"``: give each ``"layer"`` or ``"channel"`` the quantum that is
            nearest to its weights; None keeps the quantum of the stair. ``"auto"``: each channel
            (of ConvTranspose2d, the layer) if stairs are given by name, and otherwise the layer.
        sums: Where sums without an activation get a stair, which exact integers need:
            ``"sum"``: where weights read them, on one of two that are added (the shortcut of a
            residual block with weights of its own), and on a total without an activation;
            ``"branches"``: where weights read them, and on each that is added; None: nowhere. The
            stair is the features', continued below 0.
        shortcuts: A finer stair for features that are added to others, such as ``"uint8"``. Layers
            with weights read these features through a second stair, that of ``features``. It is
            used where it has more levels than ``features``; if those have negative levels, it is
            continued below 0. None: one stair for both.
        gradient_margin: Number of levels that are added to each end of the features' stairs in the
            backward pass only. Outputs stay the same, and gradients pass that many quanta farther.
            ``"auto"``: 1 for ternary features given by name, in networks with at least 16
            activations and no shortcuts; otherwise 0.
        quanta: ``"learned"`` makes the quanta parameters, of which those of the stairs are the
            start: one of the features of a layer, and one of its weights or of each channel.
            Features that are added or concatenated share one. See
            :meth:`softstair.nn.StairModule.learn_quantum`.
        activation: ``"keep"`` quantises the result of each activation; ``"replace"`` puts the stair
            in its place, and leaves gates such as Sigmoid in float; ``"auto"`` keeps it if the
            features are intN or uintN by name. A ReLU before a stair from 0 on is the stair itself.
        strict: Raise an error instead of a warning if more than a tenth of the weights, without
            embeddings, stay in float and are named neither in ``skip`` nor as ``"float"``.

    Returns:
        The quantised network.

    Raises:
        ValueError: If an option does not fit the network, or if nothing can be quantised.
    """
    if not isinstance(model, nn.Module):
        raise _check.wrong("model", model, "a torch.nn.Module")
    if weights is None and features is None:
        raise _check.invalid("weights", "or features must be a Stair, but both are None")
    given: dict[str, Any] = {"weights": weights, "features": features, "skip": skip, "fit": fit}
    given |= {"sums": sums, "shortcuts": shortcuts, "gradient_margin": gradient_margin}
    given |= {"quanta": quanta, "activation": activation}
    stairs: Any = weights
    if is_named := has_names(weights):
        if features is not None:
            problem = "must be left out if stairs are given by name: write both names, as in"
            raise _check.invalid("features", f"{problem} 'int4/uint4'")
        stairs, features = stairs_of(weights)
    _check.choice("init", init, ("auto", "thresholds", "keep"))
    _check.choice("quanta", quanta, ("fixed", "learned"))
    _check.choice("activation", activation, ("auto", "keep", "replace"))
    if init == "auto":
        init = "keep" if is_named else "thresholds"
    fits = ("auto", "layer", "channel")
    for name, value, allowed in (("fit", fit, fits), ("sums", sums, SUMS)):
        if value is not None and value not in allowed:
            raise _check.wrong(name, value, f"{', '.join(allowed)} or None")
    if fit == "channel" and init != "keep":
        raise _check.invalid("fit", "must be 'layer' or None unless init is 'keep'")
    if fit == "auto" and not is_named:
        fit = "layer"
    if isinstance(shortcuts, str):
        shortcuts = feature_stair(_check.choice("shortcuts", shortcuts, get_args(StairName)))
    elif not isinstance(shortcuts, Stair | None):
        raise _check.wrong("shortcuts", shortcuts, "a Stair, a name such as uint8, or None")
    patterns = _skip_patterns(skip)
    net = copy_of(model, "model")
    activations = _separate_activations(net)
    patterns = (*patterns, *_first_names(net, patterns))
    options = LayerOptions(stairs, features, noise, forward, patterns, is_named, activation)
    graph, traces = trace_or_record(net, example_inputs)
    traced, evaluation = None, None
    if isinstance(traces, Traces):
        traced, evaluation = traces.train, traces.eval_steps
    names = None if traced is None else call_names(traced, net)
    sites = find_sites(net, graph, options, names)
    if sums is not None:
        sites += sum_sites(net, graph, sites, options, names, sums, evaluation)
    if shortcuts is not None:
        if names is None or not graph.complete:
            problem = "must be None, since torch.fx cannot trace all of this model"
            raise _check.invalid("shortcuts", problem)
        sites += input_sites(net, graph, sites)
    sites.sort(key=lambda site: site.step)
    _check_sites(net, graph, sites, options)
    settings = _assign_options(graph, sites, options, shortcuts)
    for site in settings:
        is_stair = site.operator.name == "relu" and site.stair and site.stair.levels[0] >= 0
        if site.is_activation and not site.is_added and options.keeps(site.stair) and not is_stair:
            site.function = _function_of(site, traced, net)
    _warn_of_unsigned(settings)
    device = next((parameter.device for parameter in net.parameters()), None)
    is_deep = is_named and _is_deep(graph, settings)
    for site, keywords in settings.items():
        if site.is_weights:
            site.replacement = _layer(site, keywords, init, fit)
        else:
            if (count := gradient_margin) == "auto":
                is_estimator = not keywords.get("scheduled", True)
                count = int(is_deep and len(keywords["stair"]) == 3 and not is_estimator)
            site.replacement = _activation(site, keywords, count, is_named).to(device)
            if site.module is not None and not site.is_added:
                own = vars(site.module).items()
                vars(site.replacement).update({k: copy.copy(v) for k, v in own if "_hook" in k})
    rows = _rows(net, sites)
    replacements = {s.module: s.replacement for s in settings if s.module and not s.is_call}
    called = {site.module for site in sites}
    for copies in activations:
        # A name that is never called stands for the same stair as one that is.
        stairs = [replacements[module] for module in copies if module in replacements]
        unused = [module for module in copies if module not in called]
        replacements |= dict.fromkeys(unused, next(iter(stairs), None))
    swap_modules(net, replacements)
    calls: dict[int, list[NewCall]] = {}
    for site in settings:
        if site.is_call and site.replacement is not None:
            new = NewCall(site.name, site.replacement, site.is_added, site.readers)
            calls.setdefault(site.place if site.source else site.step, []).append(new)
    if isinstance(traces, Traces):
        if calls:
            rewrite(net, calls, traces)
        if isinstance(traces := traces_or_why(net), Traces):
            graph = traces.train_steps
            register_constants(net, traces.train, traces.evaluation)
    setattr(net, ATTRIBUTE, Conversion(rows, graph, given, traces, code_of(net)))
    if text := _floats(net, sites, options, weights):
        if strict:
            raise _check.invalid("model", f"must be quantised if strict is True, but {text}")
        advice = "softstair.report says why; name them in `skip` if that is meant"
        warnings.warn(f"{text}. {advice}", stacklevel=2)
    for group in tied_stairs(net):
        if any(stair.follows_range for stair in group):
            quantum = max(map(attrgetter("stair.quantum"), group))
            for stair in group:
                stair.set_quantum(quantum)
    if quanta == "learned":
        learn_quanta(net)
    set_input_units(net)
    net.register_state_dict_post_hook(add_version)
    net.register_load_state_dict_pre_hook(require_stairs)
    net.register_load_state_dict_post_hook(set_input_units)  # its features may have other quanta
    return net


def _is_deep(graph: Graph, sites: Iterable[Site]) -> bool:
    """Return whether a network has at least ``DEEP`` activations and no shortcuts."""
    adds = any(operator_named(step.function).effect is Effect.ADD for step in graph.steps)
    return not adds and sum(site.is_activation for site in sites) >= DEEP


def _skip_patterns(skip: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (skip,) if isinstance(skip, str) else skip
    if not isinstance(patterns, Sequence) or not all(isinstance(name, str) for name in patterns):
        raise _check.wrong("skip", skip, "names of modules")
    return tuple(patterns)


def _first_names(net: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the first names of modules that patterns fit by another name: those of their sites."""
    first: dict[nn.Module, str] = {}
    names = [
        (first.setdefault(module, name), name)
        for name, module in net.named_modules(remove_duplicate=False)
    ]
    fits = lambda name: any(matches(pattern, name) for pattern in patterns)
    return [own for own, name in names if own != name and fits(name)]


def _separate_activations(net: nn.Module) -> list[list[nn.Module]]:
    """Give each name of an activation a module of its own; return those that were one module.

    One without state is copied: the copy computes the same.
    """
    copies: dict[nn.Module, list[nn.Module]] = {}
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child is None or operator_of(child).effect is not Effect.ACTIVATION:
                continue
            if type(child) not in operator_of(child).modules or child.state_dict():
                continue
            if child in copies:
                parent._modules[name] = copy.deepcopy(child)
            copies.setdefault(child, []).append(parent.get_submodule(name))
    return list(copies.values())


def _check_sites(net: nn.Module, graph: Graph, sites: list[Site], options: LayerOptions) -> None:
    sites = [site for site in sites if not site.source]
    names = [site.name for site in sites]
    known = [*(name for name, _ in net.named_modules(remove_duplicate=False)), *names]
    options.check_names(sites)
    for pattern in options.skip:
        if not any(matches(pattern, name) for name in known):
            raise _check.invalid(
                "skip",
                f"must name modules of the model, but nothing in it is called {pattern!r}; "
                f"{hint(pattern, names)}",
            )
    if all(site.why_float for site in sites):
        reasons = ", ".join(f"{site.name} ({site.why_float})" for site in sites)
        raise _check.invalid(
            "model",
            f"must have something to quantise, but {type(net).__name__} has no Linear layer, "
            f"convolution or activation that is not left in float{reasons and ': ' + reasons}",
        )
    for site in sites:
        is_replaced = site.is_activation and not site.why_float
        in_place = [use for use in site.uses if is_replaced and graph.steps[use].written]
        if any(graph.is_read_elsewhere(use) for use in in_place):
            raise _check.invalid(
                "model",
                f"must take the results of its activations, but {site.name} works in place on a "
                "tensor that is used again; write y = activation(x), without inplace",
            )


def _assign_options(
    graph: Graph, sites: list[Site], options: LayerOptions, shortcuts: Stair | None
) -> dict[Site, dict[str, Any]]:
    """Number the layers, and return the sites to quantise with the keywords of their stairs.

    Options refer to layers of the float network; those that stay in float have no number in the
    quantised one.
    """
    candidates = [site for site in sites if not site.why_float]
    number_layers(graph, candidates)
    options.check_counts(1 + max(site.layer for site in candidates))
    layers = {site.layer: site for site in candidates if site.is_activation and not site.source}
    for site in candidates:
        if options.is_named and site.is_weights and site.layer in layers:
            layers[site.layer].weights.append(site.name)
    settings: dict[Site, dict[str, Any]] = {}
    for site in [site for site in candidates if not site.source]:
        site.stair = options.entry(site.option, site)
        if site.is_added and isinstance(site.stair, Stair):
            site.stair = signed(site.stair)
        if site.stair is None:
            site.why_float = f"no stair for {site.option}"
        elif site.operator.is_gate and not options.keeps(site.stair):
            site.why_float = site.operator.why
        elif not isinstance(site.stair, Stair):
            raise _check.wrong(site.option, site.stair, "a softstair.Stair or None")
        else:
            settings[site] = _noise(options.entry("noise", site), options.entry("forward", site))
    if shortcuts is not None:
        widen(sites, settings, shortcuts)
    if not settings:
        raise _check.invalid("weights", "and features must not be None for every layer")
    set_ranks({site: site.layer for site in settings})
    for site, keywords in settings.items():
        keywords.update(stair=site.stair, layer=site.layer)
    return settings


def _warn_of_unsigned(sites: Iterable[Site]) -> None:
    """Warn of weights that cannot be negative; the two levels of heaviside are meant."""
    stairs = {site.name: site.stair for site in sites if site.is_weights and site.stair}
    names = [name for name, stair in stairs.items() if stair.levels[0] >= 0 and len(stair) > 2]
    if names:
        warnings.warn(
            f"the weights of {names[0]!r}{' and others' if names[1:] else ''} cannot be negative; "
            "use a signed stair, such as Stair.linear(4, signed=True)",
            stacklevel=3,
        )


def _floats(net: nn.Module, sites: Iterable[Site], options: LayerOptions, given: Any) -> str:
    """Return which weights stay in float although the call does not say so, if they are many."""
    conversion, stairs = conversion_of(net), options.weights
    attributes = {name.rpartition(".")[0] for name in conversion.graph.attributes}
    used = attributes.union(step.module for step in conversion.graph.steps if step.module)
    layers = {site.name: site.layer for site in sites if site.why_float.startswith("no stair")}
    kept: Any = stairs if isinstance(stairs, Mapping) else dict.fromkeys(layers)
    keys = given if isinstance(given, Mapping) else kept
    entries = [*dict.fromkeys(options.skip).items(), *((key, kept.get(key, "")) for key in keys)]

    def is_named(name: str) -> bool:
        fits = lambda key: matches(key, name) if isinstance(key, str) else key == layers.get(name)
        return stairs is None or next((stair for key, stair in entries if fits(key)), "") is None

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


def _noise(noise: Noise | str | Estimator, forward: Forward) -> dict[str, Any]:
    """Return the keywords of a stair module that are about its noise."""
    if isinstance(noise, Estimator):
        moments = {"mean": noise.mean, "std": noise.std}
        return {"noise": noise.noise, "forward": "hard", "scheduled": False, **moments}
    family = noises.get(noise)
    if not family.proper:
        raise _check.invalid(
            "noise",
            f"must be a family with a cdf, or an estimator, but {noise!r} was given; take "
            "softstair.ste.identity() or softstair.ste.relu()",
        )
    return {"noise": family, "forward": _check.choice("forward", forward, FORWARDS)}


def _layer(
    site: Site, keywords: dict[str, Any], init: str, fit: Literal["auto", "layer", "channel"] | None
) -> StairLayer:
    module, stair, kind = site.module, site.stair, site.operator.replacement
    assert module is not None
    assert stair is not None
    assert kind is not None
    weight = module.get_parameter("weight")
    if fit == "auto":
        fit = "layer" if kind.output_axis is None else "channel"
    if init == "keep" and fit is not None:
        stair = fit_quantum(weight, stair, per_channel=fit == "channel")
    if isinstance(stair.quantum, tuple) and len(stair.quantum) != weight.shape[0]:
        raise _check.invalid(
            "weights",
            f"must have one quantum for each of the {weight.shape[0]} output channels of "
            f"{site.name}, but {len(stair.quantum)} were given",
        )
    weight_stair = StairWeight(**{**keywords, "stair": stair})
    weight_stair.fit = fit if init == "keep" else None
    layer: StairLayer = kind.from_float(module, weight_stair)
    if init == "thresholds":
        layer.start_at_thresholds()
    return layer


def _function_of(site: Site, traced: fx.Graph | None, net: nn.Module) -> Any:
    """Return the module of an activation that is kept."""

    def parameter(source: fx.Node) -> nn.Parameter:
        value = attrgetter(str(source.target))(net) if source.op == "get_attr" else None
        if not isinstance(value, nn.Parameter):
            problem = f"must give numbers or parameters to {site.name}, but gives {source.name!r}"
            raise _check.invalid("model", f"{problem}; pass activation='replace' or `skip` it")
        return value

    function: Any = copy.copy(site.module)
    if function is not None:  # its hooks are those of the stair
        hooks = {k: v for k, v in vars(function).items() if "_hook" in k and isinstance(v, dict)}
        vars(function).update({name: type(each)() for name, each in hooks.items()})
        function._modules = {}  # the module may get the stairs of other calls
    if site.operator.name == "silu":
        function = nn.SiLU()  # of x * sigmoid(x) too
    elif function is None:
        assert traced is not None
        assert site.operator.module_of_call is not None
        node = list(traced.nodes)[site.step]
        named = {name: value for name, value in node.kwargs.items() if name != "input"}
        args, settings = fx.map_arg((node.args[1:], named), parameter)
        function = site.operator.module_of_call(*args, **settings)
    if hasattr(function, "inplace"):
        function.inplace = False
    return function


def _activation(site: Site, keywords: dict[str, Any], extra: int, by_name: bool) -> StairActivation:
    """Return the stair of features; of uintN by name after a kept activation, it begins at the
    least value that this has for normally distributed sums."""
    activation = StairActivation(**keywords, function=site.function, gradient_margin=extra)
    function = site.function or (site.source and site.source.function)
    if function and by_name and (name_of(activation.stair) or "").startswith("uint"):
        x = torch.special.ndtri(torch.arange(0.5, SUMS_TRIED) / SUMS_TRIED)
        channels = sum(parameter.numel() for parameter in function.parameters())
        y = copy.deepcopy(function).cpu().float().eval()(x[:, None].expand(-1, max(channels, 1)))
        activation.follows_range = True
        if fitted := fit_range(y.detach(), len(activation.stair)):
            activation.set_range(*fitted)
    return activation


def _rows(net: nn.Module, sites: list[Site]) -> tuple[Row, ...]:
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
    called = {site.module for site in sites}
    for name, module in net.named_modules():
        operator, kind = operator_of(module), type(module)
        if operator.replacement and kind in operator.modules and module not in called:
            rows.append(Row(name, kind.__name__, None, "float: never called as a module"))
    return tuple(rows)
