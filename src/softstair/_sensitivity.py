"""Sensitivity: what each layer of a network alone costs at fewer bits, without training."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair import _check
from softstair.calibrate import calibrate_stairs
from softstair.convert import quantise
from softstair.convert.conversion import conversion_of
from softstair.convert.graph import training_mode
from softstair.convert.options import parse, parse_layers, stair_named
from softstair.convert.shortcuts import signed
from softstair.nn import StairActivation, StairLayer, StairModule, stair_modules

WIDTHS = ("int8", "int4", "int3", "int2", "ternary")
INPUTS, BATCHES, CHUNK = 512, 8, 500
"""Inputs, and batches of them, for calibration; examples that are evaluated at a time."""


class Cost(NamedTuple):
    """A network with other bits in one layer, or in all if the name is ``"*"``."""

    name: str  # of the module with the weights
    bits: str
    bytes: int  # of all weights
    loss: float
    accuracy: float


@torch.no_grad()
def sensitivity(
    net: nn.Module,
    examples: tuple[Tensor, Tensor],
    widths: Sequence[str] = WIDTHS,
    size: int | None = None,
    *,
    skip: str | Sequence[str] = (),
    calibration: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cost]:
    """Measure what each layer alone costs at fewer bits, all others as they are, without training.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> examples = torch.randn(32, 4), torch.randint(2, (32,))
    >>> [tuple(cost[:3]) for cost in sensitivity(net, examples, ["int4"], skip="2")]
    [('*', 'float', 192), ('0', 'int4', 80)]

    Args:
        net: A classifier, in float or of :func:`softstair.quantise`. It is left as it is.
        examples: Inputs and labels, on which loss (cross entropy) and accuracy are measured.
        widths: Bits to measure: ``"int4"`` is weights in int4 and the features that follow in
            uint4, ``"int4/float"`` is the weights alone, ``"float/uint4"`` the features alone.
        size: Propose bits for each layer, with at most so many bytes of weights in all.
        skip: Names of modules of a float network, or patterns of names, that stay in float.
        calibration: Inputs with which networks of fewer bits are calibrated; None: the first 512 of
            the examples.
        progress: Called with the numbers of measurements that are done, and in all.

    Returns:
        The network as it is; with each of the bits in each layer; and, if a size is given, with the
        proposal: the bits with the least sum of the losses that layers add alone.

    Raises:
        SoftstairError: If ``widths`` are not bits, or none of them fit into ``size``.
    """
    for width in widths:
        parse(width, field="widths")
    inputs = examples[0][:INPUTS] if calibration is None else calibration
    trial = _Trial(net, examples, inputs, skip)
    jobs = [("*", "float"), *((name, width) for name in trial.names for width in widths)]
    costs: list[Cost] = []
    for done, job in enumerate(jobs, 1):
        costs.append(trial.measure(*job))
        if progress is not None:
            progress(done, len(jobs))
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
    """A network, and the examples on which it is measured with other bits."""

    def __init__(
        self,
        net: nn.Module,
        examples: tuple[Tensor, Tensor],
        inputs: Tensor,
        skip: str | Sequence[str] = (),
    ) -> None:
        self.network, self.skip = net, skip
        self.device = next((tensor.device for tensor in net.state_dict().values()), inputs.device)
        self.examples = [part.to(self.device) for part in examples]
        self.inputs = inputs.to(self.device)
        self.is_float = not any(isinstance(module, StairModule) for module in net.modules())
        stairs = self._quantised("ternary") if self.is_float else net
        self.names = [name for name, m in stairs.named_modules() if isinstance(m, StairLayer)]

    def measure(self, name: str, bits: str) -> Cost:
        net, text = self.network, bits if name == "*" else f"{name}={bits},*=float"
        if text != "float":
            net = self._quantised(text) if self.is_float else self._narrowed(text)
        size = 0
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                stair = module.weight_stair.stair if isinstance(module, StairLayer) else None
                width = (len(stair) - 1).bit_length() if stair else 32
                size += -(-module.weight.numel() * width // 8)
        return Cost(name, bits, size, *self._evaluate(net))

    def _evaluate(self, net: nn.Module) -> tuple[float, float]:
        """Return the mean loss and the accuracy in ``eval()``."""
        x, y = self.examples
        with training_mode(net, training=False):
            scores = torch.cat([net(part).float() for part in x.split(CHUNK)])
        correct = scores.argmax(1) == y
        return F.cross_entropy(scores, y).item(), correct.double().mean().item()

    def _quantised(self, bits: str) -> nn.Module:
        """Return a float network with stairs in some layers."""
        layers, example = parse_layers(bits), self.inputs[:2]
        net = quantise(self.network, layers, skip=self.skip, example_inputs=example).eval()
        calibrate_stairs(net, self.inputs.chunk(BATCHES), None)
        return net

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
                follows = isinstance(stair, StairActivation) and stair.follows_range
                new = new if follows or stair.stair.levels[0] >= 0 else signed(new)
                is_own = stair.layer == layer.weight_stair.layer and own not in shortcuts
                if is_own and len(new) < len(stair.stair):
                    stair.log_ratio = None  # a learned quantum would replace the new one
                    stair.stair = new
                    if isinstance(stair, StairActivation) and "int" not in wanted:
                        stair.function, stair.follows_range = None, False  # it takes its place
                    chosen.add(stair)
        if chosen:
            calibrate_stairs(net, self.inputs.chunk(BATCHES), chosen)
        return net
