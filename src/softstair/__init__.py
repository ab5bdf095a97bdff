"""softstair: train quantised neural networks by additive noise annealing.

A quantiser is a stair; noise added to its input makes it smooth in expectation, so gradients flow;
annealing the noise layer by layer turns the smooth network back into the stair network.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from softstair import nn, noise, ste
from softstair._errors import SoftstairError
from softstair._statistics import refresh_statistics
from softstair.anneal import Annealer
from softstair.calibrate import calibrate
from softstair.convert import QuantiseOptions, quantise
from softstair.noise import Noise
from softstair.regularise import regularise
from softstair.schedule import Schedule
from softstair.stair import Stair

if TYPE_CHECKING:
    from softstair import deploy
    from softstair._sensitivity import sensitivity
    from softstair.deploy.freezing import freeze
    from softstair.deploy.frozen import load_frozen
    from softstair.deploy.summary import report

__all__ = [
    "Annealer",
    "Noise",
    "QuantiseOptions",
    "Schedule",
    "SoftstairError",
    "Stair",
    "calibrate",
    "deploy",
    "freeze",
    "load_frozen",
    "nn",
    "noise",
    "quantise",
    "refresh_statistics",
    "regularise",
    "report",
    "sensitivity",
    "ste",
]
__version__ = "0.1.0"

_ROOMS = ("data", "deploy", "models", "train", "zoo")
_NAMES = {
    "freeze": "softstair.deploy.freezing",
    "load_frozen": "softstair.deploy.frozen",
    "report": "softstair.deploy.summary",
    "sensitivity": "softstair._sensitivity",
}


def __getattr__(name: str) -> Any:
    """Import a part of the package when it is first used, such as ``softstair.deploy``."""
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS, *_NAMES})
