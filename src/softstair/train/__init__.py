"""Training: recipes, presets, one loop, and runs that survive."""

from softstair.train.interrupt import Interrupted
from softstair.train.job import train
from softstair.train.network import trained_network
from softstair.train.recipe import PRESETS, Recipe, preset
from softstair.train.run import Run, RunError

__all__ = [
    "PRESETS",
    "Interrupted",
    "Recipe",
    "Run",
    "RunError",
    "preset",
    "train",
    "trained_network",
]
