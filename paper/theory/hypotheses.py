"""The hypotheses of Theorem 2, judged layer by layer for a schedule and a noise family.

Layer ℓ computes σ_ℓ(s) = F((s − α)/β), the expectation of the Heaviside under noise of mean α and
std β; F is the cdf of the standardised family. Its generalised inverse is
σ_ℓ⁻¹(u) = α + β·F⁻¹(u) for 0 < u < 1. As λ = (T − t)/T → 0 at the end T of the schedule, α and β
are each a constant or a power of λ_ℓ, which is n/(ℓ+1)·λ (same_end), λ (overlapped), and n·λ
(partition) or λ (same_start) in the last layer but 0 in the layers before it.

Every verdict follows from these powers and from the tails of F: |F⁻¹(u)| is at most the support
(bounded families), grows like a power of log(1/u) (normal, logistic), or is at most u^(−1/2) (any
family of std 1, by Chebyshev's inequality). The proof uses neither regparam i nor ii: convergence
i, ii and iii imply ii. convergence iv is judged with −σ_ℓ⁻¹(1 − εr_ℓ) > 0, which the proof divides
by; where convergence iii holds, this is the printed condition.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from softstair import Noise, Schedule, _check, noise as noises

Holds = Literal["holds", "fails", "exact", "open"]
Finding = tuple[Holds, str, str | None]
"""(holds, reason, rate if it is not the usual one)."""
CHEBYSHEV = "F(−z) ≤ 1/z² (Chebyshev)"
GENERALISED = "the generalised inverse α + βF⁻¹(u), 0 < u < 1, serves the proof as well"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one hypothesis of Theorem 2 in one layer.

    Attributes:
        name: One of ``HYPOTHESES``.
        layer: Layer, counted from 0.
        holds: ``"holds"``; ``"fails"`` (for every rate, if it has one); ``"exact"``: not needed,
            because the layer or its input equals its target before the end; ``"open"``: depends on
            unknown properties of a user's own family.
        rate: A rate r_ℓ(λ) for which it holds, ``"any"``, ``"none"``, or ``""`` without a rate.
        reason: Why, in one line.
        repair: Why the proof works although the hypothesis fails as printed, or ``""``.
    """

    name: str
    layer: int
    holds: Holds
    rate: str
    reason: str
    repair: str = ""

    @property
    def serves(self) -> bool:
        """Whether the proof has what it needs from this hypothesis."""
        return self.holds in ("holds", "exact") or bool(self.repair)


@dataclass(frozen=True)
class Conclusion:
    """For which inputs x_λ̂,ℓ → x_ℓ is proved, and the same as a sentence.

    ``"off thresholds"`` are the inputs with no pre-activation of exactly 0.
    """

    proved: Literal["every input", "off thresholds", "none"]
    text: str


def hypotheses(schedule: Schedule, noise: str | Noise) -> tuple[Verdict, ...]:
    """Return verdicts on the eight hypotheses of Theorem 2, layer by layer.

    The first layer has no verdict on convergence iv, which is about the layer before.

    Args:
        schedule: The schedule of the noise.
        noise: Noise family or its name.

    Raises:
        ValueError: If ``noise`` is not a probability measure.

    Example:
        >>> schedule = Schedule(layers=7, period=50, interval="same_end")
        >>> verdict = hypotheses(schedule, "normal")[6]
        >>> verdict.name, verdict.layer, verdict.holds, verdict.reason
        ('convergence iii', 0, 'fails', '1 − σ(0) = 1 − F(0) = 0.5 for every λ, while r → 0')
    """
    verdicts, layer = [], None
    for index in range(schedule.layers):
        layer = _LayerLimit(schedule, index, noises.get(noise), layer is None or layer.is_exact)
        for name in HYPOTHESES if index else HYPOTHESES[:-1]:
            holds, reason, rate = _exact(layer, name) if layer.is_exact else RULES[name](layer)
            if rate is None:
                rate = {"holds": layer.rate, "fails": "none", "exact": "any", "open": ""}[holds]
            rate = rate if name.startswith("convergence") else ""
            repair = GENERALISED if name == "regparam iii" and holds in ("fails", "open") else ""
            verdicts.append(Verdict(name, index, holds, rate, reason, repair))
    return tuple(verdicts)


def conclusion(verdicts: Iterable[Verdict]) -> Conclusion:
    """Return what the verdicts of :func:`hypotheses` prove together.

    Pre-activations other than 0 need only convergence i and ii: cases (A) and (B)(i) of the proof.
    convergence iii and iv are for a pre-activation of exactly 0, where H jumps.

    Args:
        verdicts: The verdicts on all layers.

    Example:
        >>> conclusion(hypotheses(Schedule(layers=3, period=10), "normal")).proved
        'off thresholds'
    """
    verdicts = tuple(verdicts)
    failing = {verdict.name for verdict in verdicts if not verdict.serves}
    names = ", ".join(name for name in HYPOTHESES if name in failing)
    if not failing:
        repaired = sorted({verdict.name for verdict in verdicts if verdict.repair})
        note = f" ({', '.join(repaired)} fails as printed, harmlessly)" if repaired else ""
        return Conclusion("every input", f"Theorem 2 applies to every input{note}.")
    if failing & {"convergence i", "convergence ii"}:
        return Conclusion("none", f"Theorem 2 does not apply: {names}.")
    return Conclusion(
        "off thresholds",
        f"Theorem 2 does not apply ({names}), but what is left of it proves convergence for every "
        "input none of whose pre-activations is exactly 0.",
    )


class _LayerLimit:
    """The noise of a layer near the end.

    ``mean`` and ``std`` are the coefficients of α and β, 0 if no noise is left; ``mean_limit`` is
    the limit of α; ``arrived`` is whether the annealing range ends before the schedule does;
    ``tail`` is "bounded", "light" (F(−z) decays faster than any power of 1/z, and
    F⁻¹(εu)/F⁻¹(u) → 1 as u → 0 for every ε > 0), or "unknown" for a user's own family.
    """

    def __init__(self, schedule: Schedule, index: int, noise: Noise, exact_input: bool) -> None:
        if not noise.proper:
            problem = f"must be a probability measure, but {noise!r} is not: choose one of "
            raise _check.invalid("noise", problem + ", ".join(noises.names()))
        self.schedule, self.index, self.noise = schedule, index, noise
        self.exact_input = exact_input
        self.arrived = schedule.range(index)[1] < schedule.end
        self.mean = 0.0 if self.arrived and not schedule.static_mean else schedule.first_mean
        self.std = 0.0 if self.arrived and not schedule.static_std else schedule.std0
        self.mean_limit = self.mean if schedule.static_mean else 0.0
        self.std_vanishes = self.std == 0 or not schedule.static_std
        self.is_exact = self.mean == 0 and self.std == 0
        light = type(noise) in (noises.Normal, noises.Logistic)
        self.tail = "bounded" if math.isfinite(noise.support) else "light" if light else "unknown"
        # The same power in all layers if the tails are known, else by Chebyshev.
        power = 1.5 * schedule.exponent(index) if self.tail == "unknown" else schedule.layers + 1
        self.rate = f"λ^{power:g}"

    def edge(self, side: int) -> float:
        """Return the lower (−1) or upper (+1) end of a bounded support under a static std."""
        reach = self.noise.support * self.std
        edge = self.mean_limit + side * reach
        # −0.5 + √3·(0.5/√3) differs from 0 by rounding.
        return 0.0 if math.isclose(edge, 0.0, abs_tol=1e-12 * reach) else edge

    def cdf(self, z: float) -> float:
        return float(self.noise.cdf(torch.tensor(z, dtype=torch.float64)))


def _cases(*cases: tuple[bool, Holds, str] | tuple[bool, Holds, str, str]) -> Finding:
    """Return the finding of the first case whose condition is true."""
    _, holds, reason, *rate = next(case for case in cases if case[0])
    return holds, reason, rate[0] if rate else None


def _exact(layer: _LayerLimit, name: str) -> Finding:
    """Return the finding for a layer without noise."""
    since = "before the end" if layer.arrived else "from the start"
    early = name == "regparam i" and layer.arrived
    return _cases(
        (name == "regparam iv", "holds", "σ is a probability"),
        (early, "exact", "λ_ℓ = 0 before the end, where the theorem wants λ_ℓ > 0"),
        (name == "regparam iii", "exact", f"σ = H {since}: a step, and no inverse is needed"),
        (True, "exact", f"σ = H {since}: the layer equals its target"),
    )


def _regparam_i(layer: _LayerLimit) -> Finding:
    """λ_ℓ → 0 as λ → 0."""
    n = layer.schedule.layers
    factor = {"same_end": f"{n}/(ℓ+1)·", "partition": f"{n}·"}.get(layer.schedule.interval, "")
    note = ", but no noise depends on it" if layer.schedule.is_static else ""
    return _cases(
        (layer.arrived, "holds", "λ_ℓ = 0 before the end, but the static noise stays"),
        (True, "holds", f"λ_ℓ = {factor}λ → 0{note}"),
    )


def _regparam_ii(layer: _LayerLimit) -> Finding:
    """σ_ℓ(s) → H(s) for every real s."""
    end, half = f"{layer.mean_limit:.4g}", f"{layer.cdf(0.0):.4g}"
    return _cases(
        (not layer.std_vanishes, "fails", f"β stays at {layer.std:.4g}: σ stays continuous"),
        (layer.mean_limit < 0, "fails", f"α stays at {end}: σ(s) → 1, not 0, for {end} < s < 0"),
        (layer.mean_limit > 0, "fails", f"α stays at {end}: σ(s) → 0, not 1, for 0 ≤ s < {end}"),
        (layer.mean == 0, "fails", f"at s = 0 only: σ(0) = F(0) = {half} for every λ"),
        (layer.mean > 0, "fails", "at s = 0 only: α > 0 and α/β → ∞, so σ(0) → 0, not 1"),
        (True, "holds", "α < 0 and |α|/β → ∞, so σ(0) → 1; for s ≠ 0 as α, β → 0"),
    )


def _regparam_iii(layer: _LayerLimit) -> Finding:
    """σ_ℓ is strictly increasing."""
    constant = f"σ is constant outside α ± {layer.noise.support:.4g}·β"
    return _cases(
        (layer.std == 0, "fails", "β = 0: σ is a step"),
        (layer.tail == "bounded", "fails", constant),
        (layer.tail == "unknown", "open", "F is only known to be non-decreasing"),
        (True, "holds", "F increases on all of ℝ, and β > 0"),
    )


def _inverse_vanishes(layer: _LayerLimit, side: int) -> Finding:
    """σ_ℓ⁻¹(εr_ℓ) → 0 (convergence i, side −1) or σ_ℓ⁻¹(1 − εr_ℓ) → 0 (convergence ii, side +1)."""
    inverse, infinity, relation = [("σ⁻¹(εr)", "−∞", "≤"), ("σ⁻¹(1 − εr)", "∞", "≥")][side > 0]
    bounded, mean = layer.tail == "bounded", layer.mean_limit
    if not layer.std_vanishes:
        edge = layer.edge(side) if bounded else math.inf
        limit = f"{edge:.4g}" if bounded else infinity
        return _cases(
            (edge == 0, "holds", "β is constant, but its support ends at 0 exactly", "any"),
            (True, "fails", f"β is constant: {inverse} → {limit} for every rate"),
        )
    vanishing = {
        "unknown": f"β·r^(−1/2) → 0 with {CHEBYSHEV}",
        "light": "β·log(1/r) → 0 for every power of λ",
        "bounded": "β·|F⁻¹| ≤ β·support → 0, whatever the rate",
    }[layer.tail]
    cancelling = "this rate makes βF⁻¹ tend to −α; no power of λ would"
    return _cases(
        (mean == 0 and layer.std == 0, "holds", "σ⁻¹ = α → 0, β being 0"),
        (mean == 0, "holds", f"α → 0, and {vanishing}"),
        (layer.std == 0 or bounded, "fails", f"{inverse} → α = {mean:.4g} for every rate"),
        (mean * side > 0, "fails", f"{inverse} {relation} α = {mean:.4g} for every small r"),
        (layer.tail == "unknown", "open", "depends on the tails of F, which are not known"),
        (True, "holds", cancelling, "F(−|α|/β)"),
    )


def _convergence_iii(layer: _LayerLimit) -> Finding:
    """(1 − σ_ℓ(0))/r_ℓ → 0, for pre-activations of exactly 0."""
    bounded = layer.tail == "bounded"
    if not layer.std_vanishes:
        missing = 1 - layer.cdf(-layer.mean_limit / layer.std)
        value = f"{missing:.4g}" if missing > 0 else "a constant above 0"
        below = bounded and layer.edge(+1) <= 0
        return _cases(
            (below, "holds", "σ(0) = 1: the whole support lies below 0", "any"),
            (True, "fails", f"1 − σ(0) → {value}, while r → 0"),
        )
    missing, light = 1 - layer.cdf(0.0), layer.tail == "light"
    return _cases(
        (layer.mean == 0, "fails", f"1 − σ(0) = 1 − F(0) = {missing:.4g} for every λ, while r → 0"),
        (layer.mean > 0, "fails", "α > 0: 1 − σ(0) → 1, while r → 0"),
        (layer.std == 0, "holds", "1 − σ(0) = 0 as soon as |α| ≥ 0 = β"),
        (bounded, "holds", f"1 − σ(0) = 0 as soon as |α| ≥ {layer.noise.support:.4g}·β"),
        (light, "holds", "1 − σ(0) = F(−|α|/β) falls faster than any power of λ"),
        (True, "holds", f"1 − σ(0) ≤ (β/α)² with {CHEBYSHEV}"),
    )


def _convergence_iv(layer: _LayerLimit) -> Finding:
    """r_{ℓ−1}/(−σ_ℓ⁻¹(1 − εr_ℓ)) → 0, the denominator positive, while layer ℓ−1 is still soft."""
    n, inverse = layer.schedule.layers, "−σ⁻¹(1 − εr)"
    below = layer.mean_limit < 0 and layer.tail == "bounded"
    edge = layer.edge(+1) if below else math.inf
    if layer.mean < 0 and layer.std_vanishes:
        law = "λ" if layer.schedule.power == "homogeneous" else f"λ^({n}−ℓ)"
        return _cases(
            (layer.mean_limit < 0, "holds", f"{inverse} → |α| = {-layer.mean:.4g}"),
            (True, "holds", f"{inverse} ~ |α| ∝ {law}, and r of ℓ−1 is smaller"),
        )
    # β·(support − F⁻¹(1 − εr)) is of order r for uniform noise and √r for triangular noise. For
    # other families r² < εr for small r, so that the rate below serves every ε.
    known = edge == 0 and type(layer.noise) in (noises.Uniform, noises.Triangular)
    edge_at_0 = "the support ends at 0, and r of ℓ−1 beats"
    exact_input = "layer ℓ−1 equals its target: the step this is for does not arise"
    printed = f"as printed, r = λ^{2 * n + 1} serves"
    return _cases(
        (edge < 0, "holds", f"{inverse} → {-edge:.4g} > 0"),
        (known, "holds", f"{edge_at_0} r of ℓ", f"λ^{n - layer.index}"),
        (
            edge == 0,
            "holds",
            f"{edge_at_0} its density there",
            "r of ℓ−1 = λ·(support − F⁻¹(1 − r²))",
        ),
        (layer.exact_input, "exact", exact_input),
        (True, "fails", f"σ⁻¹(1 − εr) > 0 in the end; the proof wants < 0 ({printed})"),
    )


RULES: dict[str, Callable[[_LayerLimit], Finding]] = {
    "regparam i": _regparam_i,
    "regparam ii": _regparam_ii,
    "regparam iii": _regparam_iii,
    "regparam iv": lambda layer: ("holds", "σ is a probability", None),
    "convergence i": partial(_inverse_vanishes, side=-1),
    "convergence ii": partial(_inverse_vanishes, side=+1),
    "convergence iii": _convergence_iii,
    "convergence iv": _convergence_iv,
}
HYPOTHESES: tuple[str, ...] = tuple(RULES)
"""The paper's regparam_hp_i to iv and convergence_hp_i to iv."""
