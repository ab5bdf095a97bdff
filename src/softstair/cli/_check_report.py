"""Everything that ``softstair check`` finds out, as plain data; showing it is another matter."""

from dataclasses import dataclass

from softstair.schedule import Schedule
from softstair.stair import Stair
from softstair.theory import (
    Conclusion,
    Distances,
    Proposition,
    Synchronisation,
    Verdict,
    conclusion,
    distances_on_random_networks,
    hypotheses,
    proposition,
    synchronisation,
)

__all__ = ["Measured", "Report", "examine"]


@dataclass(frozen=True)
class Measured:
    """Proposition 1 at one mean and std, absolute."""

    mean: float
    std: float
    found: Proposition


@dataclass(frozen=True)
class Report:
    """(a) verdicts and conclusion, (b) synchronisation, (c) propositions, (d) distances."""

    schedule: Schedule
    noise: str
    stair: Stair
    verdicts: tuple[Verdict, ...]
    conclusion: Conclusion
    synchronisation: Synchronisation
    propositions: tuple[Measured, ...]
    distances: Distances
    """On networks with real weights: no pre-activation is exactly 0."""
    distances_at_ties: Distances
    """On networks with integer weights: many are."""
    distances_on_run: Distances | None = None
    """On the network of a run, where one was named."""


def examine(schedule: Schedule, noise: str, stair: Stair, seed: int = 0) -> Report:
    """The whole report for one schedule, one family and one stair.

    >>> report = examine(Schedule(layers=2, period=5.0), "uniform", Stair.ternary())
    >>> report.synchronisation.order, report.conclusion.proved
    ('strictly', 'off thresholds')
    """
    verdicts = hypotheses(schedule, noise)
    return Report(
        schedule=schedule,
        noise=noise,
        stair=stair,
        verdicts=verdicts,
        conclusion=conclusion(verdicts),
        synchronisation=synchronisation(schedule),
        propositions=_propositions(schedule, noise, stair),
        distances=distances_on_random_networks(schedule, noise, seed=seed),
        distances_at_ties=distances_on_random_networks(
            schedule, noise, weights="integer", seed=seed
        ),
    )


def _propositions(schedule: Schedule, noise: str, stair: Stair) -> tuple[Measured, ...]:
    """At the first noise of the last layer, and where 1/2 and 1/10 of its range are left."""
    last = schedule.layers - 1
    start, end = schedule.range(last)
    quantum = stair.quantum
    assert isinstance(quantum, float)
    noises = dict.fromkeys(schedule(last, end - left * (end - start)) for left in (1.0, 0.5, 0.1))
    return tuple(
        Measured(
            mean * quantum, std * quantum, proposition(stair, noise, mean * quantum, std * quantum)
        )
        for mean, std in noises
        if std > 0
    )
