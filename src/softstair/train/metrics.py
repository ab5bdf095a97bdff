"""What is measured of a network in training: accuracy, fresh statistics, use of the stairs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair import kernels
from softstair._statistics import Arguments, average_statistics, running_norms
from softstair.convert.graph import training_mode
from softstair.data.augment import Augmentation
from softstair.data.batches import PLAIN, Examples
from softstair.nn import StairLayer, StairModule, StairWeight, hooked, stair_modules
from softstair.train.optimiser import Bounds, absolute_bounds
from softstair.train.settings import matmul_precision
from softstair.train.state import State

EXAMINED = 64
"""Examples that show how the levels of the stairs are occupied."""
CHUNK, CHUNK_ON_GPU = 500, 1000
"""Examples per evaluation step; on a GPU more, since launching kernels takes time too."""
ENOUGH_EXAMPLES = 4096
"""For fresh statistics: the standard error of a mean is 1/64 of the standard deviation."""
NEARLY_ALL = 0.995
NARROW = 0.05
"""Standard deviation in quanta; narrower noise is about to end, and its gradient with it."""


def measure(
    state: State, training: Examples, valid: Examples, between: Callable[[], None]
) -> dict[str, Any]:
    """Return the metrics of the epoch that has just ended; ``between`` is called during it."""
    recipe = state.recipe
    if recipe.run.statistics == "fresh":
        settings = (recipe.run.batch, recipe.run.seed, recipe.data.augmentation)
        refresh_statistics(state.network, training, *settings, between)
    valid_loss = valid_accuracy = None
    if len(valid):
        forward = state.execution.eval_forward
        valid_loss, valid_accuracy = evaluate(state.network, valid, between, forward)
    metrics: dict[str, Any] = {
        "epoch": state.epoch,
        "learning_rate": state.learning_rate,
        "train_loss": state.mean_loss(),
        "train_accuracy": state.accuracy(),
        "valid_loss": valid_loss,
        "valid_accuracy": valid_accuracy,
    }
    if state.annealer is not None:
        x, _ = next((valid if len(valid) else training).chunks(EXAMINED))
        stairs = stair_health(state.network, x, state.latent_bounds)
        messages = [stair.warning(fading=not recipe.noise.static_std) for stair in stairs]
        metrics["noise"] = [list(noise or ()) for noise in state.annealer.noise]
        metrics["annealed"] = list(state.annealer.annealed)
        metrics["stairs"] = [stair.to_json() for stair in stairs]
        metrics["warnings"] = [message for message in messages if message]
    return metrics


@torch.no_grad()
def evaluate(
    network: nn.Module,
    examples: Examples,
    callback: Callable[[], None] = lambda: None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy in ``eval()``, without noise and in float32.

    Args:
        network: A network that returns scores; its mode is restored.
        examples: What to evaluate on; on the device of the network.
        callback: Called after every chunk of examples; it may raise to stop.
        forward: What computes the scores, if not the network itself.

    Returns:
        (mean loss, share of the labels with the highest score).

    >>> x, y = torch.zeros(4, 2, dtype=torch.uint8), torch.tensor([0, 0, 0, 1])
    >>> biased = nn.Linear(2, 2)
    >>> biased.bias.data[:] = torch.tensor([1.0, 0.0])
    >>> evaluate(biased, Examples(x, y, mean=0.0, std=1.0))[1]
    0.75
    """

    def score(x: Tensor, y: Tensor) -> Tensor:
        scores = (forward or network)(examples.normalised(x)).float()
        loss = F.cross_entropy(scores, y, reduction="sum")
        return torch.stack([loss.double(), (scores.argmax(1) == y).sum().double()])

    size = CHUNK_ON_GPU if examples.y.device.type == "cuda" else CHUNK
    chunks = -(-len(examples) // size)
    # The sums stay on the device: reading them would wait for it.
    sums = torch.zeros((chunks, 2), dtype=torch.float64, device=examples.y.device)
    with training_mode(network, training=False), matmul_precision("float32"):
        parts = zip(examples.x.split(size), examples.y.split(size), strict=True)
        for number, part in enumerate(parts):
            sums[number] = score(*part)
            callback()
    loss, correct = sums.sum(0).tolist()
    return loss / len(examples), correct / len(examples)


def chosen_inputs(
    examples: Examples, batch: int, seed: int, augmentation: Augmentation = PLAIN
) -> Iterator[Tensor]:
    """Yield batches of up to 4,096 training examples that ``seed`` chooses and augments."""
    device = examples.y.device
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    for indices in order.split(batch)[: max(1, min(ENOUGH_EXAMPLES, len(order)) // batch)]:
        yield examples.batch(indices, augmentation, generator)[0]


def refresh_statistics(
    network: nn.Module,
    examples: Examples,
    batch: int,
    seed: int,
    augmentation: Augmentation = PLAIN,
    callback: Callable[[], None] = lambda: None,
) -> None:
    """Estimate running statistics anew from training examples that ``seed`` chooses and augments.

    They are augmented as in training, since black borders are part of what the next thresholds were
    trained on. Normalisations that are in ``eval()`` keep their statistics.
    """
    if not (norms := running_norms(network)):
        return

    def inputs() -> Iterator[Arguments]:
        for x in chosen_inputs(examples, batch, seed, augmentation):
            yield (x,), {}
            callback()

    with matmul_precision("float32"):
        average_statistics(network, norms, inputs())


@dataclass(frozen=True)
class Health:
    """How one stair is used: two silent failures of quantised training show here.

    Attributes:
        occupancy: Share of the inputs at each level. If all are at one level, the stair computes a
            constant.
        dead: Share of the inputs that pass no gradient; None without noise, when none does.
        edge: Share of the weights at the bounds to which they are clipped; None if they are not.
    """

    name: str
    layer: int
    std: float
    occupancy: tuple[float, ...]
    dead: float | None
    edge: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, rounded to four digits, for a line of metrics."""
        dead = None if self.dead is None else round(self.dead, 4)
        levels = [round(share, 4) for share in self.occupancy]
        edge = {} if self.edge is None else {"edge": round(self.edge, 4)}
        return {"name": self.name, "layer": self.layer, "levels": levels, "dead": dead, **edge}

    def warning(self, fading: bool) -> str | None:
        """Return what is wrong, or None; noise that is ``fading`` passes no gradient at the end."""
        expected = fading and self.std <= NARROW
        if self.dead is not None and self.dead >= NEARLY_ALL and not expected:
            return f"{self.dead:.1%} of the inputs of {self.name} pass no gradient"
        if max(self.occupancy) >= NEARLY_ALL:
            return f"{max(self.occupancy):.1%} of the inputs of {self.name} lie at one level"
        if self.edge is not None and self.edge >= NEARLY_ALL:
            return f"{self.edge:.1%} of {self.name} lie at the bounds to which they are clipped"
        return None


@torch.no_grad()
def stair_health(
    network: nn.Module, x: Tensor, bounds: Mapping[str, Bounds] | None = None
) -> list[Health]:
    """Return the health of every stair of a network for some inputs; draws no random numbers.

    ``bounds`` are those to which the weights of layers are clipped, by the name of the layer.
    """
    stairs, limits = dict(stair_modules(network)), bounds or {}
    if not stairs:
        return []
    # One transfer for all stairs, instead of three for each.
    measured = _measure_stairs(network, x, limits).cpu()
    rows = measured.split([3 + len(module.stair) for module in stairs.values()])
    return [
        _health(name, stairs[name], row.tolist(), name.removesuffix(".weight_stair") in limits)
        for name, row in zip(stairs, rows, strict=True)
        if not row[0].isnan()
    ]


def _measure_stairs(network: nn.Module, x: Tensor, bounds: Mapping[str, Bounds]) -> Tensor:
    """Return what :func:`_measure` returns, of one stair after another; NaN of those not used."""
    stairs = dict(stair_modules(network))
    inputs: dict[str, Tensor] = {}
    keep = lambda name, arguments, _: inputs.__setitem__(name, arguments[0])
    features = {name: each for name, each in stairs.items() if not isinstance(each, StairWeight)}
    with training_mode(network, training=False), hooked(features, keep):
        network(x)
    layers: Any = dict(network.named_modules())
    for name, module in layers.items():
        if isinstance(module, StairLayer):
            inputs[f"{name}.weight_stair"] = module.weight
    limits = {
        f"{name}.weight_stair": absolute_bounds(layers[name], limit)
        for name, limit in bounds.items()
    }
    unused = lambda stair: x.new_full((3 + len(stair),), torch.nan, dtype=torch.float64)
    rows = [
        _measure(site, inputs[name], limits.get(name)) if name in inputs else unused(site.stair)
        for name, site in stairs.items()
    ]
    return torch.cat(rows)


def _measure(module: StairModule, x: Tensor, limits: Bounds | None) -> Tensor:
    """Return (std, share without gradient, share at the limits, share of each level …) of ``x``."""
    counts = torch.bincount(module.stair.index(x).flatten(), minlength=len(module.stair))
    x = x.float()
    mean, std = module._absolute(module.mean, x), module._absolute(module.std, x)
    stair = module.longer_stair(in_quanta=False) or module.stair
    soft = kernels.SoftStair(stair, module.noise, mean, std)
    dead = (kernels.backward(torch.ones_like(x), x, soft) == 0).sum()
    edge = torch.zeros_like(dead)
    if limits is not None:
        edge = ((x <= limits[0]) | (x >= limits[1])).sum()
    shares = torch.cat([dead[None], edge[None], counts]).double() / x.numel()
    return torch.cat([module.std.double().reshape(1), shares])


def _health(name: str, module: StairModule, numbers: list[float], clipped: bool) -> Health:
    std, dead, edge, *occupancy = numbers
    weights = " weights" if isinstance(module, StairWeight) else ""
    name = name.removesuffix(".weight_stair") + weights
    dead_share, edge_share = (dead if std > 0 else None), (edge if clipped else None)
    return Health(name, module.layer, std, tuple(occupancy), dead_share, edge_share)
