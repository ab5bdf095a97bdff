"""What a calibrated network keeps of the float one: classes, or the variance of its values."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from softstair._stair_module import StairActivation
from softstair._statistics import Arguments, forward, inputs_of, running_norms, without_stairs
from softstair.convert.conversion import ADDED, conversion_of
from softstair.convert.graph import training_mode
from softstair.convert.units import set_input_units
from softstair.nn import StairLayer, stair_modules

KEPT = 0.97
"""The share of the classes, or of the variance of the values, below which calibration warns."""


def reference_of(net: nn.Module, inputs: Sequence[Any], outputs: str) -> "Reference | None":
    """Return the float network's outputs; None if the activations that it had are not known."""
    relus = _relus(net)
    return None if relus is None else Reference(net, inputs, outputs, relus)


class Reference:
    """The outputs of the float network that a quantised one was made of."""

    def __init__(
        self, net: nn.Module, loader: Iterable[Any], outputs: str, relus: Collection[nn.Module]
    ) -> None:
        self.net, self.outputs, self.relus = net, outputs, relus
        self.inputs = inputs_of(net, loader)
        self.norms = running_norms(net, skip_frozen=False)
        self.buffers = [buffer.clone() for norm in self.norms for buffer in norm.buffers()]
        with without_stairs(net, relus=relus):
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
                with without_stairs(self.net, stair, self.relus):
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
