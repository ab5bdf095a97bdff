"""The modules of stairs, put in the place of what they replace."""

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from softstair import _check
from softstair._quantum import fit_quantum, fit_range
from softstair.convert.bits import name_of
from softstair.convert.conversion import swap_modules
from softstair.convert.graph import Traces
from softstair.convert.options import LayerOptions
from softstair.convert.read import Model
from softstair.convert.rewrite import NewCall, rewrite
from softstair.convert.sites import Site
from softstair.nn import StairActivation, StairLayer, StairWeight

SUMS_TRIED = 4096
"""Quantiles of a normal distribution to which the first range of a kept activation is fitted."""


def replace_modules(model: Model, sites: Sequence[Site], options: LayerOptions) -> Traces | str:
    """Put stairs in the places of the sites; return the graphs of the network that it then is."""
    net = model.net
    device = next((parameter.device for parameter in net.parameters()), None)
    quantised = [site for site in sites if not site.why_float]
    for site in quantised:
        if site.is_weights:
            site.replacement = _layer(site, options)
        else:
            site.replacement = _activation(site, model, options).to(device)
    replacements = {s.module: s.replacement for s in quantised if s.module and not s.is_call}
    called = {site.module for site in sites}
    for copies in model.copies:
        # A name that is never called stands for the same stair as one that is.
        stairs = [replacements[module] for module in copies if module in replacements]
        unused = [module for module in copies if module not in called]
        replacements |= dict.fromkeys(unused, next(iter(stairs), None))
    swap_modules(net, replacements)
    if isinstance(model.traces, str):
        return model.traces
    calls: dict[int, list[NewCall]] = {}
    for site in quantised:
        if site.is_call and site.replacement is not None:
            new = NewCall(site.name, site.replacement, site.is_added, site.readers)
            calls.setdefault(site.place if site.source else site.step, []).append(new)
    return rewrite(net, calls, model.traces)


def _layer(site: Site, options: LayerOptions) -> StairLayer:
    module, stair, kind, rare = site.module, site.stair, site.operator.replacement, options.rare
    assert module is not None
    assert stair is not None
    assert kind is not None
    weight, fit = module.get_parameter("weight"), rare.fit
    if fit == "auto":
        fit = "layer" if kind.output_axis is None else "channel"
    if rare.init != "keep":
        fit = None
    if fit is not None:
        stair = fit_quantum(weight, stair, per_channel=fit == "channel")
    if isinstance(stair.quantum, tuple) and len(stair.quantum) != weight.shape[0]:
        raise _check.invalid(
            "weights",
            f"must have one quantum for each of the {weight.shape[0]} output channels of "
            f"{site.name}, but {len(stair.quantum)} were given",
        )
    weight_stair = StairWeight(stair, layer=site.layer, **site.noise)
    weight_stair.fit = fit
    layer: StairLayer = kind.from_float(module, weight_stair)
    if rare.init == "thresholds":
        layer.start_at_thresholds()
    return layer


def _activation(site: Site, model: Model, options: LayerOptions) -> StairActivation:
    """Return the stair of features; of uintN by name after a kept activation, it begins at the
    least value that this has for normally distributed sums."""
    assert site.stair is not None
    is_relu = site.operator.name == "relu" and site.stair.levels[0] >= 0
    is_kept = options.keeps(site.stair) and not is_relu and not site.is_added
    function = _function_of(site, model) if is_kept else None
    settings = {"layer": site.layer, "gradient_margin": site.margin, **site.noise}
    activation = StairActivation(site.stair, function=function, **settings)
    if site.source and isinstance(site.source.replacement, StairActivation):
        function = site.source.replacement.function
    if function and options.is_named and (name_of(site.stair) or "").startswith("uint"):
        x = torch.special.ndtri(torch.arange(0.5, SUMS_TRIED) / SUMS_TRIED)
        channels = sum(parameter.numel() for parameter in function.parameters())
        y = copy.deepcopy(function).cpu().float().eval()(x[:, None].expand(-1, max(channels, 1)))
        activation.follows_range = True
        if fitted := fit_range(y.detach(), len(activation.stair)):
            activation.set_range(*fitted)
    if site.module is not None and not site.is_added:
        vars(activation).update(
            {k: copy.copy(v) for k, v in vars(site.module).items() if "_hook" in k}
        )
    return activation


def _function_of(site: Site, model: Model) -> Any:
    """Return the module of an activation that is kept."""

    def parameter(source: fx.Node) -> nn.Parameter:
        value = attrgetter(str(source.target))(model.net) if source.op == "get_attr" else None
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
        assert isinstance(model.traces, Traces)
        assert site.operator.module_of_call is not None
        node = list(model.traces.train.nodes)[site.step]
        named = {name: value for name, value in node.kwargs.items() if name != "input"}
        args, settings = fx.map_arg((node.args[1:], named), parameter)
        function = site.operator.module_of_call(*args, **settings)
    if hasattr(function, "inplace"):
        function.inplace = False
    return function
