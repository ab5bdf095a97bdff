"""Sensitivity: what each layer of a trained network alone costs at fewer bits."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from softstair import _check
from softstair.calibrate import calibrate_stairs
from softstair.convert.bits import parse, parse_layers, stair_named
from softstair.convert.conversion import conversion_of
from softstair.convert.shortcuts import signed
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.nn import StairActivation, StairLayer, StairModule, stair_modules
from softstair.train.execution import choose_device
from softstair.train.metrics import evaluate
from softstair.train.network import stair_network
from softstair.train.trained import Own, Trained, trained_run

WIDTHS = ("int8", "int4", "int3", "int2", "ternary")
EXAMPLES, BATCHES = 512, 8
"""Training examples, and batches of them, with which a network of fewer bits is calibrated."""


class Cost(NamedTuple):
    """A network with other bits in one layer, or in all if the name is ``"*"``."""

    name: str  # of the module with the weights
    bits: str
    bytes: int  # of all weights
    loss: float
    accuracy: float
    examples: int  # on which it was measured


def layer_sensitivity(
    run: Path | str,
    widths: Sequence[str] = WIDTHS,
    size: int | None = None,
    limit: int | None = 2000,
    data_dir: Path | str = "data",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    model: str | None = None,
    data: str | None = None,
) -> list[Cost]:
    """Measure what each layer of a trained network alone costs at fewer bits, without training.

    Args:
        run: The directory of a finished run, of a float or a quantised network.
        widths: Bits to measure: ``"int4"`` is weights in int4 and the features that follow in
            uint4, ``"int4/float"`` is the weights alone, ``"float/uint4"`` the features alone.
        size: Propose bits for each layer, with at most so many bytes of weights in all.
        limit: Number of examples of the validation fold; with ``fold="all"``, of the training set.
        data_dir: Folder of the data sets.
        on_progress: Called with the numbers of measurements that are done, and in all.
        model: ``package.module:function`` of your own model.
        data: ``package.module:function`` of your own data.

    Returns:
        The network as it was trained; with each of the bits in each layer; and, if a size is given,
        with the proposal: the bits with the least sum of the losses that layers add alone.

    Raises:
        SoftstairError: If ``widths`` are not bits, or none of them fit into ``size``.
    """
    for width in widths:
        parse(width, field="widths")
    if limit is not None:
        _check.integer("limit", limit, 1)
    trial = _Trial(trained_run(Path(run), data_dir, Own(model, data)), limit)
    jobs = [("*", "float"), *((name, width) for name in trial.names for width in widths)]
    costs: list[Cost] = []
    for job in jobs:
        on_progress(len(costs), len(jobs))
        costs.append(trial.measure(*job))
    on_progress(len(jobs), len(jobs))
    return costs if size is None else [*costs, trial.measure("*", _proposal(*costs, size=size))]


def _proposal(trained: Cost, *costs: Cost, size: int) -> str:
    """Return the bits that minimise loss + price · bytes, for the lowest price that fits."""
    for power in range(-300, 300):
        value = lambda cost, price=1.1**power: cost.loss + price * cost.bytes
        least: dict[str, Cost] = {}
        for cost in costs:
            least[cost.name] = min(cost, least.get(cost.name, cost), key=value)
        total = trained.bytes + sum(cost.bytes - trained.bytes for cost in least.values())
        if total <= size:
            break
    else:
        raise _check.wrong("size", size, f"at least {total} bytes for these widths")
    most = Counter(cost.bits for cost in least.values()).most_common(1)[0][0]
    named = [f"{cost.name}={cost.bits}" for cost in least.values() if cost.bits != most]
    return ",".join([*named, f"*={most}"])


class _Trial:
    """A trained network, and the examples on which it is measured with other bits."""

    def __init__(self, source: Trained, limit: int | None) -> None:
        recipe, data, device = source.recipe, source.dataset, choose_device("auto")
        assert data is not None
        data = data.sample(recipe.limit)
        training, valid = split(data, recipe.fold, recipe.folds)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
        pick = lambda at: Examples(data.x[at], data.y[at], source.mean, source.std, device)
        self.examples = pick((valid if len(valid) else training[order])[:limit])
        self.inputs, _ = next(pick(training[order[:EXAMPLES]]).chunks(EXAMPLES))
        self.recipe, self.network = recipe, source.network.to(device)
        net = self._quantised("ternary") if recipe.is_float else copy.deepcopy(self.network)
        self.names = [name for name, m in net.named_modules() if isinstance(m, StairLayer)]

    def measure(self, name: str, bits: str) -> Cost:
        net, text = self.network, bits if name == "*" else f"{name}={bits},*=float"
        if text != "float":
            net = self._quantised(text) if self.recipe.is_float else self._narrowed(text)
        size = 0
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                stair = module.weight_stair.stair if isinstance(module, StairLayer) else None
                width = (len(stair) - 1).bit_length() if stair else 32
                size += -(-module.weight.numel() * width // 8)
        return Cost(name, bits, size, *evaluate(net, self.examples), len(self.examples))

    def _quantised(self, bits: str) -> nn.Module:
        """Return a float network with stairs in some layers, as a recipe would quantise it."""
        recipe = self.recipe.for_changes({"bits": bits})
        recipe = replace(recipe, bits=bits, quanta="fixed", shortcuts="same")
        net = stair_network(self.network, recipe, self.inputs[:2])
        calibrate_stairs(net.eval(), self.inputs.chunk(BATCHES), None)
        return net

    @torch.no_grad()
    def _narrowed(self, bits: str) -> nn.Module:
        """Return a quantised network with fewer levels in some layers, which are calibrated."""
        net, layers = copy.deepcopy(self.network).eval(), parse_layers(bits)
        shortcuts = {row.name for row in conversion_of(net).rows if row.is_shortcut}
        chosen: set[StairModule] = set()
        for name in self.names:
            layer: Any = net.get_submodule(name)
            weights, features = parse(layers.get(name, layers["*"]))
            layer.weight.copy_(layer.weight_stair.stair(layer.weight))
            for own, stair in stair_modules(net):
                wanted = features if isinstance(stair, StairActivation) else weights
                new = stair.stair if wanted == "float" else stair_named(wanted)
                new = new if stair.stair.levels[0] >= 0 else signed(new)
                is_own = stair.layer == layer.weight_stair.layer and own not in shortcuts
                if is_own and len(new) < len(stair.stair):
                    stair.log_ratio = None  # a learned quantum would replace the new one
                    stair.stair = new
                    chosen.add(stair)
        if chosen:
            calibrate_stairs(net, self.inputs.chunk(BATCHES), chosen)
        return net
