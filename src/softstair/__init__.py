"""softstair: train quantised neural networks by additive noise annealing.

A quantiser is a stair; noise added to its input makes it smooth in expectation, so gradients flow;
annealing the noise layer by layer turns the smooth network back into the stair network.
"""

from importlib import import_module
from types import ModuleType

from softstair import deploy, nn, noise, ste
from softstair.anneal import Annealer
from softstair.calibrate import calibrate, refresh_statistics
from softstair.convert import quantise
from softstair.deploy.summary import report
from softstair.noise import Noise
from softstair.regularise import regularise
from softstair.schedule import Schedule
from softstair.stair import Stair

__all__ = [
    "Annealer",
    "Noise",
    "Schedule",
    "Stair",
    "calibrate",
    "deploy",
    "nn",
    "noise",
    "quantise",
    "refresh_statistics",
    "regularise",
    "report",
    "ste",
]
__version__ = "0.1.0"

_LOADED_WHEN_USED = ("bench", "data", "experiments", "models", "theory", "train", "zoo")


def __getattr__(name: str) -> ModuleType:
    """Import a part of the package when it is first used, such as ``softstair.zoo``."""
    if name in _LOADED_WHEN_USED:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
