"""Experiments: designs of many trainings, engines that run them, and their results."""

from softstair.experiments.design import DESIGNS, Configuration, Design, Unit, read_design
from softstair.experiments.results import load
from softstair.experiments.tables import Training

__all__ = ["DESIGNS", "Configuration", "Design", "Training", "Unit", "load", "read_design"]
