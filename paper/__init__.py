"""The paper's experiments, claims and theory: not part of the wheel, used from a clone.

Designs of many trainings, engines that run them, and what their results say. ``theory`` has
Theorem 2 and Proposition 1.
"""

from paper.design import DESIGNS, Configuration, Design, Unit, read_design
from paper.results import load
from paper.tables import Training

__all__ = ["DESIGNS", "Configuration", "Design", "Training", "Unit", "load", "read_design"]
