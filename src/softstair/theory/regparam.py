"""regparam i–iv: λ_ℓ → 0, σ_ℓ → H pointwise, σ_ℓ strictly increasing, 0 ≤ σ_ℓ ≤ 1.

The proof uses neither i nor ii: convergence i, ii and iii imply ii, at s < 0, s > 0 and s = 0.
"""

from softstair.theory.cases import Case, Finding

__all__ = ["regparam_i", "regparam_ii", "regparam_iii", "regparam_iv"]

GENERALISED = "the generalised inverse α + βF⁻¹(u), 0 < u < 1, serves the proof as well"


def regparam_i(case: Case) -> Finding:
    """λ_ℓ → 0 as λ → 0."""
    if case.limit.arrived:
        return Finding("holds", "", "λ_ℓ = 0 before the end, but noise stays that ignores it")
    n = case.schedule.layers
    factor = {"same_end": f"{n}/(ℓ+1)·", "partition": f"{n}·"}.get(case.schedule.interval, "")
    aside = ", but no noise depends on it" if case.schedule.is_static else ""
    return Finding("holds", "", f"λ_ℓ = {factor}λ → 0{aside}")


def regparam_ii(case: Case) -> Finding:
    """σ_ℓ(s) → H(s) for every real s."""
    mean, std = case.limit.mean, case.limit.std
    end = case.mean_at_end
    if not std.vanishes:
        return Finding("fails", "", f"β stays at {std.coefficient:.4g}: σ stays continuous")
    if end < 0:
        return Finding("fails", "", f"α stays at {end:.4g}: σ(s) → 1, not 0, for {end:.4g} < s < 0")
    if end > 0:
        return Finding("fails", "", f"α stays at {end:.4g}: σ(s) → 0, not 1, for 0 ≤ s < {end:.4g}")
    if mean.is_zero:
        return Finding("fails", "", f"at s = 0 only: σ(0) = F(0) = {case.cdf(0.0):.4g} for every λ")
    if mean.coefficient > 0:
        return Finding("fails", "", "at s = 0 only: α > 0 and α/β → ∞, so σ(0) → 0, not 1")
    return Finding("holds", "", "α < 0 and |α|/β → ∞, so σ(0) → 1; for s ≠ 0 as α, β → 0")


def regparam_iii(case: Case) -> Finding:
    """σ_ℓ is strictly increasing."""
    if case.limit.std.is_zero:
        return Finding("fails", "", "β = 0: σ is a step", GENERALISED)
    if case.tail == "bounded":
        half = f"{case.noise.support:.4g}"
        return Finding("fails", "", f"σ is constant outside α ± {half}·β", GENERALISED)
    if case.tail == "unknown":
        return Finding("open", "", "of F it is only known that it does not fall", GENERALISED)
    return Finding("holds", "", "F increases on all of ℝ, and β > 0")


def regparam_iv(case: Case) -> Finding:
    """0 ≤ σ_ℓ ≤ 1."""
    return Finding("holds", "", "σ is a probability")
