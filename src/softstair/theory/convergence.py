"""convergence i–iv: is there a rate r_ℓ, and which?

σ_ℓ⁻¹(u) = α_ℓ + β_ℓ·F⁻¹(u) for 0 < u < 1, so that everything turns on how fast β_ℓ and α_ℓ vanish
and on the tails of F: |F⁻¹(u)| is at most the support (bounded families), grows like a power of
log(1/u) (normal, logistic), or is at most u^(−1/2) (any family of std 1, by Chebyshev).
"""

from softstair import noise as noises
from softstair.theory.cases import Case, Finding

__all__ = ["convergence_i", "convergence_ii", "convergence_iii", "convergence_iv"]

CHEBYSHEV = "F(−z) ≤ 1/z² (Chebyshev)"


def convergence_i(case: Case) -> Finding:
    """σ_ℓ⁻¹(εr_ℓ) → 0: what a pre-activation below 0 needs."""
    return _inverse_vanishes(case, side=-1)


def convergence_ii(case: Case) -> Finding:
    """σ_ℓ⁻¹(1 − εr_ℓ) → 0: what a pre-activation above 0 needs."""
    return _inverse_vanishes(case, side=+1)


def _inverse_vanishes(case: Case, side: int) -> Finding:
    """convergence i (side −1) and ii (side +1): α + β·F⁻¹(u) → 0 as u → 0 or u → 1."""
    inverse = "σ⁻¹(εr)" if side < 0 else "σ⁻¹(1 − εr)"
    if not case.limit.std.vanishes:
        return _inverse_at_static_std(case, side, inverse)
    end = case.mean_at_end
    if end == 0:
        if case.limit.std.is_zero:
            reason = "σ⁻¹ = α → 0, β being 0"
        elif case.tail == "unknown":
            reason = f"α → 0, and β·r^(−1/2) → 0 with {CHEBYSHEV}"
        elif case.tail == "light":
            reason = "α → 0, and β·log(1/r) → 0 for every power of λ"
        else:
            reason = "α → 0, and β·|F⁻¹| ≤ β·support → 0, whatever the rate"
        return Finding("holds", case.rate, reason)
    if case.limit.std.is_zero or case.tail == "bounded":
        return Finding("fails", "none", f"{inverse} → α = {end:.4g} for every rate")
    if end * side > 0:
        bound = "≤" if side < 0 else "≥"
        return Finding("fails", "none", f"{inverse} {bound} α = {end:.4g} for every small r")
    if case.tail == "unknown":
        return Finding("open", "", "only some tails reach back to 0 from a static mean")
    rate = "F(−|α|/β)"
    return Finding("holds", rate, "this rate makes βF⁻¹ tend to −α; no power of λ would")


def _inverse_at_static_std(case: Case, side: int, inverse: str) -> Finding:
    if case.tail != "bounded":
        away = "−∞" if side < 0 else "∞"
        return Finding("fails", "none", f"β is constant: {inverse} → {away} for every rate")
    edge = case.settle(case.mean_at_end + side * case.reach_at_end)
    if edge == 0:
        return Finding("holds", "any", "β is constant, but its support ends at 0 exactly")
    return Finding("fails", "none", f"β is constant: {inverse} → {edge:.4g} for every rate")


def convergence_iii(case: Case) -> Finding:
    """(1 − σ_ℓ(0))/r_ℓ → 0: what a pre-activation of exactly 0 needs."""
    mean, std = case.limit.mean, case.limit.std
    if not std.vanishes:
        if case.tail == "bounded" and case.below_zero >= 0:
            return Finding("holds", "any", "σ(0) = 1: the whole support lies below 0")
        missing = 1 - case.cdf(-case.mean_at_end / std.coefficient)
        shown = f"{missing:.4g}" if missing > 0 else "a constant above 0"
        return Finding("fails", "none", f"1 − σ(0) → {shown}, while r → 0")
    if mean.is_zero:
        value = f"1 − F(0) = {1 - case.cdf(0.0):.4g}"
        return Finding("fails", "none", f"1 − σ(0) = {value} for every λ, while r → 0")
    if mean.coefficient > 0:
        return Finding("fails", "none", "α > 0: 1 − σ(0) → 1, while r → 0")
    if std.is_zero or case.tail == "bounded":
        reach = "0 = β" if std.is_zero else f"{case.noise.support:.4g}·β"
        return Finding("holds", case.rate, f"1 − σ(0) = 0 as soon as |α| ≥ {reach}")
    if case.tail == "light":
        reason = "1 − σ(0) = F(−|α|/β) falls faster than any power of λ"
        return Finding("holds", case.rate, reason)
    return Finding("holds", case.rate, f"1 − σ(0) ≤ (β/α)² with {CHEBYSHEV}")


def convergence_iv(case: Case) -> Finding:
    """r_{ℓ−1}/(−σ_ℓ⁻¹(1 − εr_ℓ)) → 0: what it needs when layer ℓ−1 is not there yet."""
    found = _ratio(case)
    if found.holds == "fails" and case.input_is_exact:
        reason = "layer ℓ−1 equals its target: the step this is for does not arise"
        return Finding("exact", "any", reason)
    return found


def _ratio(case: Case) -> Finding:
    """r_{ℓ−1}/(−σ_ℓ⁻¹(1 − εr_ℓ)) → 0 with a denominator that is positive in the end."""
    mean, std = case.limit.mean, case.limit.std
    if mean.coefficient < 0 and std.vanishes:
        if mean.exponent == 0:
            return Finding("holds", case.rate, f"−σ⁻¹(1 − εr) → |α| = {-mean.coefficient:.4g}")
        law = "λ" if case.schedule.power == "homogeneous" else f"λ^({case.schedule.layers}−ℓ)"
        return Finding("holds", case.rate, f"−σ⁻¹(1 − εr) ~ |α| ∝ {law}, and r of ℓ−1 is smaller")
    if mean.coefficient < 0 and case.tail == "bounded" and not mean.vanishes:
        if (gap := case.below_zero) > 0:
            return Finding("holds", case.rate, f"−σ⁻¹(1 − εr) → {gap:.4g} > 0")
        if gap == 0:
            return _ratio_at_edge(case)
    printed = f"λ^{2 * case.schedule.layers + 1}"
    reason = f"σ⁻¹(1 − εr) > 0 in the end; the proof wants < 0 (as printed, r = {printed} serves)"
    return Finding("fails", "none", reason)


def _ratio_at_edge(case: Case) -> Finding:
    """β·(support − F⁻¹(1 − εr_ℓ)) is of order r_ℓ for uniform noise, √r_ℓ for triangular."""
    if type(case.noise) in (noises.Uniform, noises.Triangular):
        rate = f"λ^{case.schedule.layers - case.limit.layer}"
        return Finding("holds", rate, "the support ends at 0, and r of ℓ−1 beats r of ℓ")
    # r² is below εr in the end, whatever ε is, so that this r of ℓ−1 beats every ε at once.
    rate = "r of ℓ−1 = λ·(support − F⁻¹(1 − r²))"
    return Finding("holds", rate, "the support ends at 0, and r of ℓ−1 beats its density there")
