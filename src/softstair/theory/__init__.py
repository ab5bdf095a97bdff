"""Theorem 2 and Proposition 1 of the paper, executable: ``softstair check`` prints them.

==================================== ===============================================================
:func:`hypotheses`                   the theorem's eight hypotheses, layer by layer, with rates
:func:`conclusion`                   what they prove together
:func:`synchronisation`              is every layer at least as annealed as those after it?
:func:`proposition`                  expectation against convolution, derivative against its bound
:func:`distances_on_random_networks` ‖x_λ̂,ℓ − x_ℓ‖ along a schedule, random Heaviside networks
:func:`distances_on_network`         the same on a stair network and a batch of inputs
==================================== ===============================================================
"""

from softstair.theory.distances import Distances, distances_on_random_networks, times_to_watch
from softstair.theory.hypotheses import hypotheses
from softstair.theory.networks import distances_on_network
from softstair.theory.proposition import Proposition, proposition
from softstair.theory.synchronisation import Break, Synchronisation, synchronisation
from softstair.theory.verdicts import HYPOTHESES, Conclusion, Verdict, conclusion

__all__ = [
    "HYPOTHESES",
    "Break",
    "Conclusion",
    "Distances",
    "Proposition",
    "Synchronisation",
    "Verdict",
    "conclusion",
    "distances_on_network",
    "distances_on_random_networks",
    "hypotheses",
    "proposition",
    "synchronisation",
    "times_to_watch",
]
