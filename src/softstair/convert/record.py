"""The record of what became of each layer, and what a quantised network does when it is loaded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import nn

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
from softstair.convert.options import LayerOptions, matches
from softstair.convert.read import Model
from softstair.convert.sites import Site
from softstair.convert.units import learn_quanta, set_input_units, tied_stairs
from softstair.nn import StairLayer


def record(
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
    called = {site.module for site in sites}
    for name, module in net.named_modules():
        operator, kind = operator_of(module), type(module)
        if operator.replacement and kind in operator.modules and module not in called:
            rows.append(Row(name, kind.__name__, None, "float: never called as a module"))
    return tuple(rows)


def unnamed_floats(
    net: nn.Module, conversion: Conversion, sites: Sequence[Site], options: LayerOptions
) -> str:
    """Return which weights stay in float although the call does not say so, if they are many."""
    given, stairs = conversion.options["weights"], options.weights
    attributes = {name.rpartition(".")[0] for name in conversion.graph.attributes}
    used = attributes.union(step.module for step in conversion.graph.steps if step.module)
    layers = {site.name: site.layer for site in sites if site.why_float.startswith("no stair")}
    kept: Any = stairs if isinstance(stairs, Mapping) else dict.fromkeys(layers)
    keys = given if isinstance(given, Mapping) else kept
    entries = [*dict.fromkeys(options.skip).items(), *((key, kept.get(key, "")) for key in keys)]

    def is_named(name: str) -> bool:
        fits = lambda key: matches(key, name) or key == layers.get(name)
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
