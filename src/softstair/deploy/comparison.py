"""Are the answers the same? Every feature of every layer, and the class, counted one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from softstair.deploy.network import IntegerNetwork
from softstair.deploy.nodes import Rescaled, Steps
from softstair.nn import StairActivation

__all__ = ["CLASS", "Comparison", "Runner", "trained", "verify"]

CLASS = "class"
"""The row of the answers themselves."""
Runner = Callable[[Tensor], Mapping[str, Tensor]]
"""Bytes -> what each layer gives, by name: whole numbers, and the scores where they come of whole
weights, so that they are the same however they are added up; and the class under :data:`CLASS`."""


@dataclass
class Comparison:
    """How one way to run the network compares with the trained one.

    compared    numbers that were compared, by layer
    wrong       how many of them differ
    first       (layer, example, place, expected, found) of the first that does
    """

    compared: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    first: tuple[str, int, tuple[int, ...], float, float] | None = None

    @property
    def mismatches(self) -> int:
        """In all; 0 is the answer that is expected."""
        return sum(self.wrong.values())

    def add(self, layer: str, wanted: Tensor, found: Tensor, start: int) -> None:
        """Compares what a layer gives for some examples, the first of which has that number."""
        if wanted.shape != found.shape:
            raise ValueError(
                f"{layer} must give {tuple(wanted.shape)} numbers, but it gave "
                f"{tuple(found.shape)}."
            )
        differ = wanted != found
        self.compared[layer] = self.compared.get(layer, 0) + wanted.numel()
        count = int(differ.sum())
        self.wrong[layer] = self.wrong.get(layer, 0) + count
        if count and self.first is None:
            where = tuple(int(one) for one in differ.nonzero()[0])
            example, place = start + where[0], where[1:]
            self.first = (layer, example, place, wanted[where].item(), found[where].item())

    def __str__(self) -> str:
        total = sum(self.compared.values())
        if self.first is None:
            return f"0 mismatches of {total:,} numbers"
        layer, example, place, wanted, found = self.first
        at = f" at {place}" if place else ""
        return (
            f"{self.mismatches:,} mismatches of {total:,} numbers; the first in {layer}, example "
            f"{example}{at}: {found} and not {wanted}"
        )


def verify(
    net: nn.Module,
    integer: IntegerNetwork,
    x: Tensor,
    others: Mapping[str, Runner] | None = None,
    chunk: int = 100,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Comparison]:
    """Runs the trained network, the integer one and all others on the same bytes, and compares.

    ``net`` is the stair network in float, in ``eval()`` and on the CPU; ``others`` may hold what an
    exported file computes. ``tell`` hears how many examples are done.

    >>> import softstair as ss
    >>> from softstair.deploy import integerise
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8),
    ...                       nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> print(verify(net, integerise(net, (1, 2, 2), zero=128, scale=64.0), x)["integer network"])
    0 mismatches of 45 numbers
    """
    runners: dict[str, Runner] = {"integer network": whole(integer), **(others or {})}
    found = {name: Comparison() for name in runners}
    reference = trained(net, integer)
    done = 0
    for part in x.split(chunk):
        wanted = reference(part)
        for name, run in runners.items():
            given = run(part)
            for layer, numbers in wanted.items():
                if layer not in given:
                    raise ValueError(f"{name} must give what {layer} gives, but it does not.")
                found[name].add(layer, numbers, given[layer], done)
        done += len(part)
        tell(done)
    return found


def whole(integer: IntegerNetwork) -> Runner:
    """The integer network as a runner."""

    def run(x: Tensor) -> dict[str, Tensor]:
        features = integer.features(x)
        scores = features[integer.nodes[-1].name]
        kept = {name: features[name] for name in layers(integer)}
        return {**kept, CLASS: scores.argmax(1)}

    return run


def trained(net: nn.Module, integer: IntegerNetwork) -> Runner:
    """The trained network as a runner: its features in quanta, its class."""
    net = net.eval()
    stairs = [name for name in layers(integer) if name != integer.nodes[-1].name]
    modules = {name: net.get_submodule(name) for name in stairs}
    zero, scale = integer.input.zero, integer.input.scale

    def run(x: Tensor) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        with _listening(modules, seen), torch.no_grad():
            scores = net((x.float() - zero) / scale)
        seen[integer.nodes[-1].name] = scores
        return {**{name: seen[name] for name in layers(integer)}, CLASS: scores.argmax(1)}

    return run


def layers(integer: IntegerNetwork) -> Sequence[str]:
    """The stairs of the network, whose features are compared; and the scores of whole weights."""
    last = integer.nodes[-1]
    stairs = integer.stairs or [node.name for node in integer.nodes if isinstance(node, Steps)]
    return [*stairs, last.name] if isinstance(last, Rescaled) else stairs


class _listening:
    """Notes what stair activations give, in quanta, while it is entered."""

    def __init__(self, modules: Mapping[str, nn.Module], seen: dict[str, Tensor]) -> None:
        self._modules, self._seen = modules, seen

    def __enter__(self) -> None:
        self._hooks = [
            module.register_forward_hook(self._note(name)) for name, module in self._modules.items()
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, _: object, output: Tensor) -> None:
            assert isinstance(module, StairActivation)
            self._seen[name] = in_quanta(module, output)

        return note


def in_quanta(activation: StairActivation, y: Tensor) -> Tensor:
    """The whole numbers that features stand for: the level that each is, looked up and not
    divided."""
    stair = activation.stair
    assert stair.integers is not None
    levels = torch.tensor(stair.rounded(torch.float32).levels)
    index = torch.searchsorted(levels, y.contiguous())
    if not torch.equal(levels[index.clamp(max=len(levels) - 1)], y):
        raise ValueError("a feature of the trained network is no level of its stair.")
    return torch.tensor(stair.integers)[index]
