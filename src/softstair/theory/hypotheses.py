"""Theorem 2, hypothesis by hypothesis and layer by layer, for the schedules of the paper.

With σ_ℓ(s) = F((s − α_ℓ)/β_ℓ), F the cdf of the standardised family, the generalised inverse is
σ_ℓ⁻¹(u) = α_ℓ + β_ℓ·F⁻¹(u) for 0 < u < 1, and everything follows from how α_ℓ and β_ℓ go to 0.
convergence iv is judged with the minus sign that its proof divides by, −σ_ℓ⁻¹(1 − εr_ℓ) > 0, and
that the printed hypothesis lacks.
"""

from collections.abc import Callable

from softstair import noise as noises
from softstair.noise import Noise
from softstair.schedule import Schedule
from softstair.theory import convergence, regparam
from softstair.theory.cases import Case, Finding
from softstair.theory.limits import limit, tail
from softstair.theory.verdicts import HYPOTHESES, Verdict

__all__ = ["hypotheses"]


def hypotheses(schedule: Schedule, noise: str | Noise) -> tuple[Verdict, ...]:
    """The eight hypotheses in every layer; convergence iv is not asked of the first.

    >>> schedule = Schedule(layers=7, period=50, interval="same_end")
    >>> verdict = hypotheses(schedule, "normal")[6]
    >>> verdict.name, verdict.layer, verdict.holds, verdict.reason
    ('convergence iii', 0, 'fails', '1 − σ(0) = 1 − F(0) = 0.5 for every λ, while r → 0')
    >>> moving = Schedule(layers=7, period=50, interval="same_end", static_mean=False)
    >>> {verdict.holds for verdict in hypotheses(moving, "normal")}
    {'holds'}
    """
    family = noises.get(noise)
    kind = tail(family)
    limits = [limit(schedule, layer) for layer in range(schedule.layers)]
    verdicts = []
    for now, before in zip(limits, [None, *limits[:-1]], strict=True):
        case = Case(now, before is None or before.is_exact, schedule, family, kind)
        for name in HYPOTHESES:
            if before is None and name == "convergence iv":
                continue
            found = _exact(case, name) if now.is_exact else RULES[name](case)
            verdicts.append(
                Verdict(name, now.layer, found.holds, found.rate, found.reason, found.repair)
            )
    return tuple(verdicts)


def _exact(case: Case, name: str) -> Finding:
    if name == "regparam iv":
        return RULES[name](case)
    since = "before the end" if case.limit.arrived else "from the start"
    if name == "regparam i" and case.limit.arrived:
        return Finding("exact", "", "λ_ℓ = 0 before the end, where the theorem wants λ_ℓ > 0")
    if name == "regparam iii":
        return Finding("exact", "", f"σ = H {since}: a step, and no inverse is needed")
    rate = "any" if name.startswith("convergence") else ""
    return Finding("exact", rate, f"σ = H {since}: the layer equals its target")


RULES: dict[str, Callable[[Case], Finding]] = {
    "regparam i": regparam.regparam_i,
    "regparam ii": regparam.regparam_ii,
    "regparam iii": regparam.regparam_iii,
    "regparam iv": regparam.regparam_iv,
    "convergence i": convergence.convergence_i,
    "convergence ii": convergence.convergence_ii,
    "convergence iii": convergence.convergence_iii,
    "convergence iv": convergence.convergence_iv,
}
