"""Experiments: designs of many trainings, engines that run them, and what comes of them."""

from softstair.experiments.design import DESIGNS, Configuration, Design, Unit, design

__all__ = ["DESIGNS", "Configuration", "Design", "Unit", "design"]
