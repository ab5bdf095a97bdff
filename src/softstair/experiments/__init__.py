"""Experiments: designs of many trainings, engines that run them, and their results."""

from softstair.experiments.design import DESIGNS, Configuration, Design, Unit, read_design
from softstair.experiments.results import Training, load

__all__ = ["DESIGNS", "Configuration", "Design", "Training", "Unit", "load", "read_design"]
