"""How a frozen network differs from the float one: levels, classes and values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softstair.deploy.frozen import FrozenNetwork
from softstair.nn import StairActivation, hooked

Answers = Sequence[list[Tensor]]
"""Classes or values of each output, in parts."""
CHUNK = 50
"""Examples that run at a time."""


@dataclass(frozen=True)
class LayerReport:
    """How many levels of a stair differ between the frozen network and ``eval()``."""

    name: str
    compared: int = 0
    differing: int = 0
    largest: int = 0

    def __str__(self) -> str:
        counts = f"{self.differing:,} of {self.compared:,} levels"
        return f"{self.name}: {counts}, by at most {self.largest}"

    def with_levels(self, expected: Tensor, actual: Tensor) -> "LayerReport":
        """Return the report with more levels compared."""
        distance = (expected - actual).abs()
        counts = (self.compared + distance.numel(), self.differing + int((distance > 0).sum()))
        return LayerReport(self.name, *counts, max(self.largest, int(distance.max())))


@dataclass(frozen=True)
class FreezeReport:
    """What freezing changed; ``print`` shows it.

    Attributes:
        layers: The levels of each stair, compared with ``eval()`` on the examples.
        examples: How many examples there were.
        last_bits: Bits of the weights of the last layer; None if it was not in float.
        input_bits: Bits of the table of the input; None if there is no table.
        changed: How many classes differ from those of ``eval()``; None without examples, and for
            networks that are no classifiers.
        classes: How many classes there were: one for each example, output and position.
        error: The distance of the values, as a share of their size; None for classes.
        changed_by_last: The share of classes that the last layer changes by having integers, or its
            part of ``error``.
        clamped: How many weights of -128 became -127, in INT8 arithmetic.
    """

    layers: tuple[LayerReport, ...] = ()
    examples: int = 0
    last_bits: int | None = None
    input_bits: int | None = None
    changed: int | None = None
    classes: int = 0
    error: float | None = None
    changed_by_last: float | None = None
    clamped: int = 0

    @property
    def differing(self) -> int:
        """How many levels differ in all."""
        return sum(layer.differing for layer in self.layers)

    def __str__(self) -> str:
        last = "" if self.last_bits is None else f"the last layer has INT{self.last_bits} weights"
        if self.changed_by_last is not None:
            what = "of the classes" if self.changed is not None else "of the outputs' size"
            last += f", which changes {self.changed_by_last:.2%} {what}"
        entry = "" if self.input_bits is None else f"the input's table has INT{self.input_bits}"
        weights = f"{self.clamped:,} weights of -128 became -127" if self.clamped else ""
        made = [part for part in (last, entry, weights) if part]
        if not self.examples:
            return "; ".join([*made, "no examples were given, so nothing was compared"]) + "."
        total = sum(layer.compared for layer in self.layers)
        lines = [f"{self.differing:,} of {total:,} levels differ from eval()"]
        if self.changed is not None:
            lines.append(f"{self.changed:,} of {self.classes:,} classes differ")
        if self.error is not None:
            lines.append(f"the outputs differ by {self.error:.2%} of their size")
        text = "; ".join([*lines, *made]) + "."
        return "\n".join([text, *(f"  {layer}" for layer in self.layers if layer.differing)])


def in_quanta(activation: StairActivation, y: Tensor) -> Tensor:
    """Return the integers that features stand for, found among the levels and not by division."""
    stair = activation.stair
    assert stair.integers is not None
    levels = torch.tensor(stair.rounded(torch.float32).levels)
    index = torch.searchsorted(levels, y.contiguous()).clamp(max=len(levels) - 1)
    return torch.tensor(stair.integers, dtype=torch.int32)[index]


def levels_of(module: nn.Module, names: Iterable[str], x: Tensor) -> dict[str, Tensor]:
    """Return the levels of stairs, by name, and the output under ""."""
    stairs: dict[str, Any] = {name: module.get_submodule(name) for name in names}
    results: dict[str, Tensor] = {}

    def record(name: str, _: object, y: Tensor) -> None:
        results[name] = in_quanta(stairs[name], y)

    with torch.no_grad(), hooked(stairs, record):
        results[""] = module(x)
    return results


def difference(a: Answers, b: Answers, is_class: bool) -> float:
    """Return the share of classes that differ, or the distance as a share of b's size, the largest
    of all outputs."""
    pairs = [(torch.cat(x), torch.cat(y)) for x, y in zip(a, b, strict=True)]
    if is_class:
        differing = sum(int((x != y).sum()) for x, y in pairs)
        return differing / max(1, sum(x.numel() for x, _ in pairs))
    sizes = [(y - y.mean(0)).square().mean().sqrt().clamp(min=1e-30) for _, y in pairs]
    distances = [(x - y).square().mean().sqrt() for x, y in pairs]
    return max(float(d / size) for d, size in zip(distances, sizes, strict=True))


def after(
    frozen: FrozenNetwork, layers: Iterable[str], results: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the results of a network for those of one that differs in some layers alone."""
    known, changed = dict(results), {*layers}
    for node in frozen.nodes:
        if not changed.isdisjoint({node.name, *node.inputs}):
            known[node.name] = node.run(*[known[name] for name in node.inputs])
            changed.add(node.name)
    return known
