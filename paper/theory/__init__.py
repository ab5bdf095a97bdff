"""Theorem 2 and Proposition 1 of the paper, executable; ``python -m paper check`` prints them.

:func:`examine` returns all of it for one schedule: the eight :func:`hypotheses` of the theorem in
each layer and their :func:`conclusion`, the order of the layers (:func:`synchronisation`),
:func:`proposition` 1, and distances between soft and hard features.
"""

from paper.theory.annealing import (
    Break,
    Distances,
    Synchronisation,
    distances_on_network,
    distances_on_random_networks,
    synchronisation,
    times_to_watch,
)
from paper.theory.examine import Examination, Proposition, examine, proposition
from paper.theory.hypotheses import HYPOTHESES, Conclusion, Verdict, conclusion, hypotheses

__all__ = [
    "HYPOTHESES",
    "Break",
    "Conclusion",
    "Distances",
    "Examination",
    "Proposition",
    "Synchronisation",
    "Verdict",
    "conclusion",
    "distances_on_network",
    "distances_on_random_networks",
    "examine",
    "hypotheses",
    "proposition",
    "synchronisation",
    "times_to_watch",
]
