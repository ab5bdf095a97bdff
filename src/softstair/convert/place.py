"""Which stair, with which noise and layer number, each site of a float network gets."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from softstair import _check, noise as noises
from softstair.convert.ops import Effect, operator_named
from softstair.convert.options import LayerOptions, hint, matches
from softstair.convert.shortcuts import PRODUCT, input_sites, signed, sum_sites, widen
from softstair.convert.sites import (
    Model,
    Site,
    check_names,
    entry_for,
    find_sites,
    number_layers,
    set_ranks,
)
from softstair.noise import Noise
from softstair.regularise import FORWARDS, Forward
from softstair.stair import Stair
from softstair.ste import Estimator

DEEP = 16
"""Number of activations from which a network without shortcuts counts as deep. An extra level was
measured with 27 activations, where it raises the accuracy, and with 3, where it lowers it."""


def place_stairs(model: Model, options: LayerOptions) -> list[Site]:
    """Return what is quantised, with its stair, and what stays in float, in order of execution."""
    sites = find_sites(model, options)
    sites += sum_sites(model, sites, options)
    if options.rare.shortcuts is not None:
        sites += input_sites(model, sites)
    sites.sort(key=lambda site: site.step)
    _check_sites(model, sites, options)
    _assign_options(model, sites, options)
    if isinstance(options.rare.shortcuts, Stair):
        widen(sites, options.rare.shortcuts)
    quantised = [site for site in sites if not site.why_float]
    if not quantised:
        reasons = {site.why_float for site in sites}
        problem = "and features must not be None for every layer"
        raise _check.invalid("weights", f"{problem}: {'; '.join(sorted(reasons))}")
    # Layers that stay in float have no number in the quantised network.
    set_ranks({site: site.layer for site in quantised})
    _set_margins(model, quantised, options)
    _warn_of_unsigned(quantised)
    return sites


def _check_sites(model: Model, sites: list[Site], options: LayerOptions) -> None:
    net, graph = model.net, model.graph
    sites = [site for site in sites if not site.source]
    names = [site.name for site in sites]
    known = [*(name for name, _ in net.named_modules(remove_duplicate=False)), *names]
    check_names(sites, options)
    for pattern in options.skip:
        if not matches(pattern, *known):
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


def _assign_options(model: Model, sites: list[Site], options: LayerOptions) -> None:
    """Number the layers of the float network, to which options refer, and set the stairs."""
    candidates = [site for site in sites if not site.why_float]
    number_layers(model.graph, candidates)
    options.check_numbers(1 + max(site.layer for site in candidates))
    layers = {site.layer: site for site in candidates if site.is_activation and not site.source}
    for site in candidates:
        if options.is_named and site.is_weights and site.layer in layers:
            layers[site.layer].weights.append(site.name)
    for site in [site for site in candidates if not site.source]:
        stair = entry_for(site, site.option, options)
        if stair is None:
            site.why_float = f"no stair for {site.option}"
        elif site.is_weights and (why := _grouped(site, options)):
            site.why_float = why
        elif site.operator.is_gate and not options.keeps(stair):
            site.why_float = site.operator.why
        elif not isinstance(stair, Stair):
            raise _check.wrong(site.option, stair, "a softstair.Stair or None")
        else:
            follows = site.operator is PRODUCT and options.follows(stair)
            site.stair = signed(stair) if site.is_added and not follows else stair
            noise, forward = (entry_for(site, name, options) for name in ("noise", "forward"))
            site.noise = _noise(noise, forward)


def _grouped(site: Site, options: LayerOptions) -> str:
    """Set how the weights of a site are grouped, if they are; return why that cannot be."""
    group, tokens = (entry_for(site, name, options) for name in ("groups", "tokens"))
    is_grouped = group is not None or tokens is not None
    if is_grouped and site.operator.grouped is None:
        return "groups of weights and features per token are for linear layers; name other bits"
    if is_grouped or site.operator.replacement is None:
        site.tokens = tokens
        site.group = group or ("tensor" if options.rare.fit == "layer" else "row")
        kind = site.operator.grouped
        assert site.module is not None
        assert kind is not None
        inputs = kind.matrix(site.module.get_parameter(kind.weight_name)).shape[1]
        sizes = [group] if isinstance(group, int) else []
        sizes += [int(size) for size in [str(tokens).partition(":")[2]] if size.isdigit()]
        if any(inputs % size for size in sizes):
            problem = f"in groups of {sizes[0]} must divide the inputs of a layer"
            raise _check.invalid("weights", f"{problem}, but {site.name!r} has {inputs}")
    return ""


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


def _set_margins(model: Model, sites: Sequence[Site], options: LayerOptions) -> None:
    """Set how many levels the stairs of features have beyond their ends in the backward pass."""
    adds = any(operator_named(s.function).effect is Effect.ADD for s in model.graph.steps)
    stairs = [site for site in sites if site.is_activation]
    is_deep = options.is_named and not adds and len(stairs) >= DEEP
    for site in [site for site in sites if site.is_weights and site.stair is not None]:
        is_scheduled = bool(site.group) and site.noise.get("scheduled", True)
        margin = options.rare.weight_margin
        margin = int(is_scheduled) if margin == "auto" else margin
        site.margin = margin if len(site.stair or ()) > 2 else 0
    for site in stairs:
        margin = options.rare.gradient_margin
        if margin == "auto":
            is_ternary = site.stair is not None and len(site.stair) == 3
            margin = int(is_deep and is_ternary and site.noise.get("scheduled", True))
        site.margin = margin


def _warn_of_unsigned(sites: Iterable[Site]) -> None:
    """Warn of weights that cannot be negative; the two levels of heaviside are meant."""
    stairs = {site.name: site.stair for site in sites if site.is_weights and site.stair}
    names = [name for name, stair in stairs.items() if stair.levels[0] >= 0 and len(stair) > 2]
    if names:
        warnings.warn(
            f"the weights of {names[0]!r}{' and others' if names[1:] else ''} cannot be negative; "
            "use a signed stair, such as Stair.linear(4, signed=True)",
            stacklevel=4,
        )
