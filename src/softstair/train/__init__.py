"""Training: recipes, presets, one loop, and runs that survive."""

from softstair.train.fit import fit
from softstair.train.groups import DataOptions, NetworkOptions, NoiseOptions, RunOptions
from softstair.train.metrics import evaluate
from softstair.train.network import trained_network
from softstair.train.optimiser import OptimiserOptions
from softstair.train.parallel import Interrupted
from softstair.train.recipe import PRESETS, Recipe, preset
from softstair.train.records import RunError
from softstair.train.run import Run

__all__ = [
    "PRESETS",
    "DataOptions",
    "Interrupted",
    "NetworkOptions",
    "NoiseOptions",
    "OptimiserOptions",
    "Recipe",
    "Run",
    "RunError",
    "RunOptions",
    "evaluate",
    "fit",
    "preset",
    "trained_network",
]
