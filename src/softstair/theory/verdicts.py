"""What a verdict on one hypothesis is, and what the verdicts say together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["HYPOTHESES", "Conclusion", "Holds", "Verdict", "conclusion"]

Holds = Literal["holds", "fails", "exact", "open"]

HYPOTHESES: tuple[str, ...] = tuple(
    f"{group} {number}"
    for group in ("regparam", "convergence")
    for number in ("i", "ii", "iii", "iv")
)
"""The paper's names: regparam_hp_i … regparam_hp_iv and convergence_hp_i … convergence_hp_iv."""


@dataclass(frozen=True)
class Verdict:
    """One hypothesis of Theorem 2 in one layer.

    ``holds``
        ``"holds"``; ``"fails"``, for every rate where a rate is asked for; ``"exact"``: the
        layer, or its input, equals its target before the end, and the hypothesis is not needed;
        ``"open"``: too little is known of a family that is not ours.
    ``rate``
        r_ℓ(λ) for which it holds, ``"any"``, ``"none"``, or ``""`` where no rate is asked for.
    ``repair``
        Why a hypothesis that fails as it is printed does no harm to the proof, or ``""``.
    """

    name: str
    layer: int
    holds: Holds
    rate: str
    reason: str
    repair: str = ""

    @property
    def serves(self) -> bool:
        """Whether the proof gets what it needs here."""
        return self.holds in ("holds", "exact") or bool(self.repair)


@dataclass(frozen=True)
class Conclusion:
    """Where x_λ̂,ℓ → x_ℓ is proved: for ``"every input"``; for every input no pre-activation of
    which is exactly 0 (``"off thresholds"``); or nowhere (``"none"``)."""

    proved: Literal["every input", "off thresholds", "none"]
    text: str


def conclusion(verdicts: Iterable[Verdict]) -> Conclusion:
    """What the verdicts of :func:`softstair.theory.hypotheses` prove together.

    Pre-activations other than 0 need convergence i and ii alone: cases (A) and (B)(i) of the
    proof. iii and iv are for a pre-activation that is exactly 0, where H jumps.
    """
    verdicts = tuple(verdicts)
    broken = [verdict for verdict in verdicts if not verdict.serves]
    if not broken:
        repaired = sorted({verdict.name for verdict in verdicts if verdict.repair})
        aside = f" ({', '.join(repaired)} fails as printed, harmlessly)" if repaired else ""
        return Conclusion("every input", f"Theorem 2 applies to every input{aside}.")
    names = ", ".join(name for name in HYPOTHESES if any(name == b.name for b in broken))
    if any(verdict.name in ("convergence i", "convergence ii") for verdict in broken):
        return Conclusion("none", f"Theorem 2 does not apply: {names}.")
    return Conclusion(
        "off thresholds",
        f"Theorem 2 does not apply ({names}), but what is left of it proves convergence for every "
        "input none of whose pre-activations is exactly 0.",
    )
