"""Schedules: functions (layer, t) ↦ (mean, std) of that layer's noise, without a clock.

λ_ℓ(t) = clip((t_end − t)/(t_end − t_start), 0, 1), α = c_α·λ^{d_α}, β = c_β·λ^{d_β}, with

=========== ============== ==========        =========== ======= ========
interval    t_start        t_end             power       d_α     d_β
=========== ============== ==========        =========== ======= ========
same_start  0              P(ℓ+1)            homogeneous 1       2
same_end    P(n−ℓ−1)       P·n               progressive n − ℓ   2(n − ℓ)
partition   P·ℓ            P(ℓ+1)
overlapped  0              P·n
=========== ============== ==========        =========== ======= ========

P is the period, n the number of quantised layers, ℓ and t count from 0. A start other than 0 is
added to t_start and t_end: before it the noise of all layers is static. Means and standard
deviations are in quanta of each layer's stair; t is in the unit that P is in (epochs, usually).

A schedule that blends leaves the noise as it is. Quantised weights are blended in instead: the
share of their hard value rises from 0 to 1 along a curve of u = 1 − λ_ℓ(t):

=========== =============================================================
blend       share
=========== =============================================================
linear      u
cosine      (1 − cos πu)/2
sigmoid     (s(u) − s(0))/(s(1) − s(0)), s(u) = 1/(1 + exp(−10·(u − ½)))
=========== =============================================================
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from torch import nn

from softstair import _check
from softstair.nn import layer_count, stair_modules
from softstair.noise import LARGEST

Interval = Literal["same_start", "same_end", "partition", "overlapped"]
Power = Literal["homogeneous", "progressive"]
INTERVALS: tuple[Interval, ...] = get_args(Interval)
POWERS: tuple[Power, ...] = get_args(Power)
Blend = Literal["linear", "cosine", "sigmoid"]
STEEPNESS = 10.0
"""Of the sigmoid."""

BLENDING = ("blend", "float_until")
"""Fields that other schedules do not save."""

NoisePath = Callable[[int, float], tuple[float, float]]
"""A :class:`Schedule`, or any function (layer, t) -> (mean, std)."""

UNIFORM_HALF_QUANTUM = 0.5 / math.sqrt(3.0)
"""The std at which uniform noise reaches half a quantum to either side."""


@dataclass(frozen=True)
class Schedule:
    """A noise schedule of the paper.

    >>> schedule = Schedule(layers=3, period=10, interval="partition", std0=0.4)
    >>> [round(schedule(1, t)[1], 3) for t in (0, 10, 15, 20)]
    [0.4, 0.4, 0.1, 0.0]
    >>> Schedule(layers=3, period=10, start=100).range(1)  # static noise until 100
    (110, 120)

    In the range of a layer, from t_start to t_end, λ falls from 1 to 0. A dynamic mean is
    mean0·λ^d and a dynamic std is std0·λ^(2d); static ones stay at their first value.

    Args:
        layers: The number n of quantised layers.
        period: The duration P of one layer's range, in any unit of time (epochs, usually).
        interval: The ranges: ``"same_start"``, ``"same_end"``, ``"partition"`` (one layer after
            the other) or ``"overlapped"`` (all at once).
        power: The exponent d: 1 (``"homogeneous"``), or n − ℓ in layer ℓ (``"progressive"``).
        static_mean: Whether the mean stays at ``mean0``.
        static_std: Whether the standard deviation stays at ``std0``.
        mean0: The first mean, in quanta. By default 0 if it is static and −0.5 if it is dynamic:
            with σ(x − ν), the theorem needs the negative sign.
        std0: The first standard deviation, in quanta.
        start: The time at which the ranges begin, for annealing late in a training: the noise of
            all layers is static before it.
        blend: The curve along which quantised weights are blended in, with static noise; None
            anneals the noise. See :meth:`blended`.
        float_until: With ``blend``: the time until which the network computes in float. The quanta
            of its weights are then fitted.

    Raises:
        ValueError: If an argument is out of range.
    """

    layers: int
    period: float
    interval: Interval = "partition"
    power: Power = "homogeneous"
    static_mean: bool = True
    static_std: bool = False
    mean0: float | None = None
    std0: float = UNIFORM_HALF_QUANTUM
    start: float = 0.0
    blend: Blend | None = None
    float_until: float = 0.0

    def __post_init__(self) -> None:
        _check.integer("layers", self.layers, 1)
        _check.number("period", self.period, above=0)
        _check.number("std0", self.std0, 0, LARGEST)
        _check.number("start", self.start, 0)
        if self.mean0 is not None:
            _check.number("mean0", self.mean0, -LARGEST, LARGEST)
        _check.choice("interval", self.interval, INTERVALS)
        _check.choice("power", self.power, POWERS)
        _check.boolean("static_mean", self.static_mean)
        _check.boolean("static_std", self.static_std)
        if self.blend is not None:
            _check.choice("blend", self.blend, get_args(Blend))
            if not self.static_mean:
                raise _check.wrong("static_mean", False, "True for a schedule that blends")
            object.__setattr__(self, "static_std", True)
        elif self.float_until:
            raise _check.invalid("float_until", "must be 0 for a schedule that does not blend")
        _check.number("float_until", self.float_until, 0)

    def __call__(self, layer: int, t: float) -> tuple[float, float]:
        """Return the mean and standard deviation, in quanta, of a layer's noise at time t."""
        power = self.exponent(layer)
        remaining = self.remaining(layer, t)
        mean = self.first_mean if self.static_mean else self.first_mean * remaining**power
        std = self.std0 if self.static_std else self.std0 * remaining ** (2 * power)
        return mean, std

    @property
    def first_mean(self) -> float:
        """c_α: the mean at t = 0."""
        if self.mean0 is not None:
            return float(self.mean0)
        return 0.0 if self.static_mean else -0.5

    @property
    def end(self) -> float:
        """The time from which the noise no longer changes."""
        return self.start + self.period * self.layers

    @property
    def is_static(self) -> bool:
        """Whether neither mean nor std changes: a classical straight-through estimator."""
        return self.static_mean and self.static_std

    def range(self, layer: int) -> tuple[float, float]:
        """Return (t_start, t_end), the annealing range of a layer."""
        n, period = self.layers, self.period
        _check.integer("layer", layer, 0, n - 1)
        first, last = {
            "same_start": (0.0, period * (layer + 1)),
            "same_end": (period * (n - layer - 1), period * n),
            "partition": (period * layer, period * (layer + 1)),
            "overlapped": (0.0, period * n),
        }[self.interval]
        return self.start + first, self.start + last

    def exponent(self, layer: int) -> int:
        """Return d_α, the exponent of the mean; that of the std is twice as large."""
        return 1 if self.power == "homogeneous" else self.layers - layer

    def remaining(self, layer: int, t: float) -> float:
        """Return λ_ℓ(t): 1 before the annealing range, 0 after it."""
        start, end = self.range(layer)
        return min(max((end - t) / (end - start), 0.0), 1.0)

    def share(self, layer: int, t: float) -> float:
        """Return the share of the hard value of a layer's weights at time t; 1 without a blend."""
        u = 1 - self.remaining(layer, t)
        if self.blend == "cosine":
            return (1 - math.cos(math.pi * u)) / 2
        if self.blend == "sigmoid":
            low, middle, high = (1 / (1 + math.exp(-STEEPNESS * (x - 0.5))) for x in (0.0, u, 1.0))
            return (middle - low) / (high - low)
        return u if self.blend == "linear" else 1.0

    @classmethod
    def blended(
        cls,
        net: nn.Module,
        steps: float,
        float_share: float = 0.0,
        start: float = 0.1,
        end: float = 0.5,
        curve: Blend = "linear",
        interval: Interval = "overlapped",
    ) -> "Schedule":
        """Return the schedule for transformers: quantised weights are blended in.

        >>> import softstair as ss
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        >>> net = ss.quantise(model, "ternary/int8:token")
        >>> schedule = Schedule.blended(net, steps=300, float_share=1 / 3)
        >>> [round(schedule.share(0, t), 2) for t in (100, 120, 160, 200)]
        [0.0, 0.0, 0.5, 1.0]

        For the first ``float_share`` of the steps the network computes in float, as if it had not
        been quantised; then the quanta are fitted to its weights. From ``start`` to ``end`` of the
        steps that remain, the value of a weight goes from w to its level. Its gradient is that of a
        straight-through estimator all the time.

        Args:
            net: A network with weights in groups, or features per token.
            steps: The steps of the training, or any unit of time.
            float_share: The share of the steps in float.
            start: When blending starts, as a share of the steps after those in float.
            end: When it ends.
            curve: ``"linear"``, ``"cosine"`` or ``"sigmoid"``.
            interval: ``"overlapped"``: all layers together; ``"partition"``: one after the other.

        Raises:
            ValueError: If an argument is out of range.
        """
        _check.number("steps", steps, above=0)
        _check.number("float_share", float_share, 0, 1)
        _check.number("start", start, 0, 1)
        if not start < _check.number("end", end, 0, 1):
            raise _check.wrong("end", end, f"above start, which is {start}")
        until, layers = float_share * steps, layer_count(net)
        first, last = (until + share * (steps - until) for share in (start, end))
        period = (last - first) / layers or 1.0  # all steps are in float
        settings: dict[str, Any] = {"interval": interval, "start": first, "float_until": until}
        return cls.for_network(net, period, blend=curve, **settings)

    @classmethod
    def for_network(cls, net: nn.Module, period: float, **settings: Any) -> "Schedule":
        """Return a schedule with as many layers as a quantised network.

        Args:
            net: A network of :func:`softstair.quantise`.
            period: The period.
            **settings: Other arguments of :class:`Schedule`. ``std0`` is by default that of the
                network's family of noise: 95 % of it is within half a quantum, or all of it if it
                is bounded.

        Raises:
            ValueError: If the network has several families of noise and ``std0`` is not given.
        """
        layers = layer_count(net)
        if "std0" not in settings:
            scheduled = [module.noise for _, module in stair_modules(net) if module.scheduled]
            stds = {noise.std_within(0.5) for noise in scheduled}
            if len(stds) > 1:
                families = " and ".join(sorted(map(repr, set(scheduled))))
                raise _check.invalid("std0", f"must be given: the network has {families} noise")
            if stds:
                settings["std0"] = stds.pop()
        return cls(layers=layers, period=period, **settings)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        data = asdict(self)
        return data if self.blend else {k: v for k, v in data.items() if k not in BLENDING}

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> "Schedule":
        """Return the schedule of :meth:`to_json`, from its data or its text."""
        known = {field.name for field in fields(cls)}
        return cls(**_check.json_fields(data, {"layers", "period"}, known))
