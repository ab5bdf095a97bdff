"""Everything that the theory says about one schedule, in one record."""

from dataclasses import dataclass

from softstair import noise as noises
from softstair.noise import Noise
from softstair.schedule import Schedule
from softstair.stair import Stair
from softstair.theory.distances import Distances, distances_on_random_networks
from softstair.theory.hypotheses import Conclusion, Verdict, conclusion, hypotheses
from softstair.theory.order import Synchronisation, synchronisation
from softstair.theory.proposition import Proposition, proposition

__all__ = ["Examination", "examine"]


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


def examine(
    schedule: Schedule, noise: str | Noise = "uniform", stair: Stair | None = None, seed: int = 0
) -> Examination:
    """Examine a schedule, as ``softstair check`` does.

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
