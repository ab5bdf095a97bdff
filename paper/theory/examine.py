"""Proposition 1, measured, and everything that the theory says about one schedule, drawn.

Proposition 1: E[σ(x − ν)] = (μ ∗ σ)(x), and |D E[σ(x − ν)]| ≤ ‖σ‖_∞·|Dμ|(ℝ). The expectation and
its derivative come from :func:`softstair.regularise`, which uses the cdf and the density. The
convolution ∫ σ(x − y)·μ(y) dy is a quadrature that uses only the density and the hard stair, so
that an error in either shows.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paper.theory.annealing import (
    Distances,
    Synchronisation,
    distances_on_random_networks,
    synchronisation,
)
from paper.theory.hypotheses import Conclusion, Verdict, conclusion, hypotheses
from softstair import Noise, Schedule, Stair, _check, noise as noises
from softstair._errors import SoftstairError, import_extra
from softstair.regularise import regularise

NODES = 12
"""Gauss–Legendre nodes per panel: exact for polynomials of degree 23."""
CORE = 8.0
"""Panels have the same width up to this many standard deviations and grow beyond."""


@dataclass(frozen=True)
class Proposition:
    """Both parts of Proposition 1 for a stair and a noise, over ``points`` values of x.

    ``error`` is the largest difference between the expectation and the convolution; ``norm`` is
    ‖σ‖_∞ = max |qₖ|; ``bound`` is the paper's ‖σ‖_∞·|Dμ|(ℝ); ``tight_bound`` is
    ½(q_{K−1} − q₀)·|Dμ|(ℝ), which does not change if a constant is added to σ.
    """

    mean: float
    std: float
    error: float
    largest_derivative: float
    norm: float
    bound: float
    tight_bound: float
    points: int

    @property
    def holds(self) -> bool:
        """Whether expectation and convolution agree and the derivative is within both bounds."""
        # The tolerance is for rounding where the bound is attained, and for the grid on which the
        # variation of a user's own family is summed.
        within = self.largest_derivative <= min(self.bound, self.tight_bound) * (1 + 1e-6)
        return within and self.error <= 1e-6 * self.norm


def proposition(
    stair: Stair, noise: str | Noise, mean: float = 0.0, std: float = 1.0, points: int = 401
) -> Proposition:
    """Measure Proposition 1 for a stair and a noise.

    Args:
        stair: A stair with one quantum.
        noise: Noise family or its name.
        mean: Mean of the noise, in units of x (not in quanta).
        std: Standard deviation of the noise, above 0, in units of x.
        points: Number of evenly spaced values of x; the thresholds are added.

    Returns:
        The errors, derivatives and bounds.

    Raises:
        ValueError: If the stair has one quantum per channel, or ``mean`` or ``std`` is invalid.

    Example:
        >>> result = proposition(Stair.heaviside(), "uniform", std=0.5 / math.sqrt(3))
        >>> result.error < 1e-12, round(result.largest_derivative, 6), round(result.bound, 6)
        (True, 1.0, 2.0)
    """
    family = noises.get(noise)
    if isinstance(stair.quantum, tuple):
        raise SoftstairError("stair must have one quantum, not one per channel.", field="stair")
    mean, std = _check.number("mean", mean), _check.number("std", std, above=0)
    x = _grid(stair, family, mean, std, points).requires_grad_()
    expectation = regularise(x, stair, family, mean, std, forward="expectation")
    (derivative,) = torch.autograd.grad(expectation.sum(), x)
    error = expectation.detach() - _convolution(x.detach(), stair, family, mean, std)
    variation = _total_variation(family) / std
    lowest, highest = stair.levels[0], stair.levels[-1]
    norm = max(abs(lowest), abs(highest))
    return Proposition(
        mean=mean,
        std=std,
        error=float(error.abs().max()),
        largest_derivative=float(derivative.abs().max()),
        norm=norm,
        bound=norm * variation,
        tight_bound=0.5 * (highest - lowest) * variation,
        points=len(x),
    )


@dataclass(frozen=True)
class Examination:
    """The result of :func:`examine`.

    ``propositions`` are at the start of the last layer's annealing range and with 1/2 and 1/10 of
    it left. ``distances`` are on random networks with real weights, ``distances_at_ties`` on ones
    with integer weights, where pre-activations are often exactly 0.
    """

    schedule: Schedule
    noise: Noise
    stair: Stair
    verdicts: tuple[Verdict, ...]
    conclusion: Conclusion
    synchronisation: Synchronisation
    propositions: tuple[Proposition, ...]
    distances: Distances
    distances_at_ties: Distances

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        first = self.synchronisation.first
        propositions = []
        for part in self.propositions:
            figures = asdict(part)
            moments = {name: figures.pop(name) for name in ("mean", "std")}
            propositions.append({**moments, "found": figures})
        return {
            "schedule": self.schedule.to_json(),
            "noise": self.noise.name,
            "stair": self.stair.to_json(),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "conclusion": asdict(self.conclusion),
            "synchronised": self.synchronisation.holds,
            "first_break": asdict(first) if first else None,
            "synchronisation": asdict(self.synchronisation),
            "propositions": propositions,
            "distances": asdict(self.distances),
            "distances_at_ties": asdict(self.distances_at_ties),
        }


def examine(
    schedule: Schedule, noise: str | Noise = "uniform", stair: Stair | None = None, seed: int = 0
) -> Examination:
    """Examine a schedule, as ``python -m paper check`` does.

    Args:
        schedule: The schedule.
        noise: Noise family or its name.
        stair: Stair of Proposition 1, with one quantum; None: ``Stair.ternary()``.
        seed: Seed of the random networks.

    Returns:
        Verdicts on Theorem 2, the order of the layers, Proposition 1 and distances.

    Raises:
        ValueError: If ``noise`` is not a probability measure, or ``stair`` has several quanta.

    Example:
        >>> examination = examine(Schedule(layers=2, period=5.0), "uniform")
        >>> examination.synchronisation.order, examination.conclusion.proved
        ('strictly', 'off thresholds')
    """
    family, stair = noises.get(noise), stair or Stair.ternary()
    verdicts = hypotheses(schedule, family)
    last = schedule.layers - 1
    start, end = schedule.range(last)
    path = dict.fromkeys(schedule(last, end - left * (end - start)) for left in (1, 0.5, 0.1))
    quantum = stair.quantum if isinstance(stair.quantum, float) else 1.0
    return Examination(
        schedule,
        family,
        stair,
        verdicts,
        conclusion(verdicts),
        synchronisation(schedule),
        tuple(proposition(stair, family, m * quantum, s * quantum) for m, s in path if s > 0),
        distances_on_random_networks(schedule, family, seed=seed),
        distances_on_random_networks(schedule, family, weights="integer", seed=seed),
    )


def draw(examination: Examination, path: Path) -> None:
    """Draw the noise of each layer and the distances over time, with matplotlib."""
    matplotlib = import_extra("matplotlib")
    # Not by pyplot, which would ask for a window system.
    figures = import_extra("matplotlib.figure")
    schedule, order = examination.schedule, examination.synchronisation
    panels = ["std", "distance"] if schedule.static_mean else ["std", "mean", "distance"]
    figure = figures.Figure(figsize=(9, 1 + 2.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    colours = matplotlib.colormaps["viridis"].resampled(schedule.layers + 1)
    for axis, panel in zip(axes, panels, strict=True):
        if panel == "distance":
            _draw_distances(axis, examination, colours)
        else:
            _draw_noise(axis, schedule, colours, panel)
        axis.grid(alpha=0.25)
        for pair in order.breaks:
            alpha = min(0.05, 0.3 / len(order.breaks))
            axis.axvspan(pair.start, pair.end, color="tab:red", alpha=alpha, linewidth=0)
    if order.first is not None:
        place = {"xycoords": axes[0].get_xaxis_transform(), "textcoords": "offset points"}
        text = f"layer {order.first.later} ahead of layer {order.first.earlier}, which feeds it"
        corner, style = (order.first.start, 0.04), {"fontsize": 8, "color": "tab:red"}
        axes[0].annotate(text, corner, xytext=(4, 0), **place, **style)
    axes[-1].set_xlabel("t")
    handles, labels = axes[0].get_legend_handles_labels()
    step = max(1, -(-len(handles) // 10))  # at most ten layers in the legend
    figure.legend(handles[::step], labels[::step], title="layer", loc="outside right upper")
    names = {"strictly": "in order", "weakly": "in order, weakly", "broken": "out of order"}
    title = f"{examination.noise.name}, {schedule.interval}, {schedule.power}"
    figure.suptitle(f"{title}: layers {names[order.order]}", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_noise(axis: Any, schedule: Schedule, colours: Any, panel: str) -> None:
    times = [schedule.end * index / 700 for index in range(701)]
    for layer in range(schedule.layers):
        values = [schedule(layer, t)[panel == "std"] for t in times]
        # Lines that coincide differ in width: the line of the first layer is the widest.
        width = 1.2 + 3.0 * (schedule.layers - 1 - layer) / max(1, schedule.layers - 1)
        axis.plot(times, values, color=colours(layer), linewidth=width, label=str(layer))
    axis.set_ylabel(f"{panel} (quanta)")


def _draw_distances(axis: Any, examination: Examination, colours: Any) -> None:
    solid, dotted = {"marker": ".", "markersize": 4}, {"linestyle": ":", "linewidth": 1}
    parts = (examination.distances, solid), (examination.distances_at_ties, dotted)
    for distances, style in parts:
        for layer, values in enumerate(distances.values):
            axis.plot(distances.times, values, color=colours(layer), **style)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("‖soft − hard features‖")
    axis.set_title("random Heaviside networks; dotted: with ties", fontsize=8, loc="right")


def _grid(stair: Stair, noise: Noise, mean: float, std: float, points: int) -> Tensor:
    """Return an even grid beyond both ends of the stair, and the thresholds, where μ peaks."""
    thresholds = torch.tensor(stair.thresholds, dtype=torch.float64) + mean
    reach = min(noise.support, CORE) * std + 0.5
    low, high = float(thresholds[0]) - reach, float(thresholds[-1]) + reach
    even = torch.linspace(low, high, points, dtype=torch.float64)
    # Shifted, because both densities count at a point where two supports of uniform noise meet.
    return torch.cat([even, thresholds]).sort().values + 1e-7 * std


def _convolution(x: Tensor, stair: Stair, noise: Noise, mean: float, std: float) -> Tensor:
    """Return (μ ∗ σ)(x) by quadrature; panels end where the integrand jumps or μ peaks."""
    reach = noise.support if math.isfinite(noise.support) else CORE
    panels = torch.linspace(-reach, reach, 65, dtype=torch.float64)
    if math.isinf(noise.support):
        # By Chebyshev, less than 10⁻¹⁶ of any family lies beyond 10⁸ standard deviations.
        growing = CORE * 1.3 ** torch.arange(1, 63, dtype=torch.float64)
        panels = torch.cat([-growing.flip(0), panels, growing])
    panels = mean + std * panels
    jumps = x[:, None] - torch.tensor(stair.thresholds, dtype=torch.float64)
    jumps = jumps.clamp(float(panels[0]), float(panels[-1]))
    edges = torch.cat([panels.expand(len(x), -1), jumps], dim=1).sort(dim=1).values
    half = 0.5 * edges.diff(dim=1)
    total = torch.zeros_like(x)
    for node, weight in zip(*np.polynomial.legendre.leggauss(NODES), strict=True):
        y = edges[:, :-1] + half * (1 + node)
        density = noise.pdf((y - mean) / std) / std
        total += weight * (stair(x[:, None] - y) * density * half).sum(dim=1)
    return total


def _total_variation(noise: Noise) -> float:
    """Return |Dμ|(ℝ) of the standardised density: twice its peak for a unimodal family."""
    if noise.peaked:
        return 2 * float(noise.pdf(torch.zeros((), dtype=torch.float64)))
    # A sum over a grid never exceeds the variation.
    reach = min(noise.support, 100.0) * (1 + 1e-9)
    z = torch.linspace(-reach, reach, 2**18 + 1, dtype=torch.float64)
    density = torch.cat([z.new_zeros(1), noise.pdf(z), z.new_zeros(1)])
    return float(density.diff().abs().sum())
