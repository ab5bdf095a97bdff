"""What the caller of quantise asked for: one value for all, or one by layer or by module name."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from softstair import noise as noises
from softstair.regularise import Forward, check_forward
from softstair.stair import Stair
from softstair.ste import Estimator

__all__ = ["Settings", "check", "matches", "names"]


@dataclass(frozen=True)
class Settings:
    """What the caller asked for, by module name and layer."""

    weights: Any
    features: Any
    noise: Any
    forward: Any
    skip: tuple[str, ...]
    init: str
    fit: str | None

    def at(self, option: str, name: str, layer: int) -> Any:
        """The value of an option for one module."""
        value = getattr(self, option)
        if isinstance(value, Mapping):
            for key, entry in value.items():
                if key == layer or (isinstance(key, str) and matches(key, name)):
                    return entry
            raise ValueError(
                f"{option} must say what module {name} in layer {layer} gets, but its keys are "
                f"{', '.join(map(repr, value))}; add the name, the number or '*'."
            )
        return value[layer] if isinstance(value, list | tuple) else value

    def wants(self, option: str, name: str) -> bool:
        """Whether weights or features of that name are quantised, before layers have numbers."""
        value = getattr(self, option)
        if isinstance(value, Mapping):
            for key, entry in value.items():
                if isinstance(key, int):
                    return True  # perhaps: the layer is not known yet
                if isinstance(key, str) and matches(key, name):
                    return entry is not None
            return False
        return value is not None

    def skips(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.skip)

    def check_length(self, layers: int) -> None:
        for option in ("weights", "features", "noise", "forward"):
            value = getattr(self, option)
            if isinstance(value, list | tuple) and len(value) != layers:
                raise ValueError(
                    f"{option} must have one entry for each of the network's {layers} layers, "
                    f"but {len(value)} were given."
                )

    def shape(self, name: str, layer: int) -> dict[str, Any]:
        """The noise and forward of a module, as its constructor takes them."""
        given = self.at("noise", name, layer)
        if isinstance(given, Estimator):
            return {
                "noise": given.noise,
                "forward": "hard",
                "mean": given.mean,
                "std": given.std,
                "scheduled": False,
            }
        forward: Forward = self.at("forward", name, layer)
        check_forward(forward)
        family = noises.get(given)
        if not family.proper:
            raise ValueError(
                f"noise must be a family with a cdf, or an estimator, but {given!r} was given; "
                "take softstair.ste.identity() or softstair.ste.relu()."
            )
        return {"noise": family, "forward": forward}


def check(model: Any, weights: Any, features: Any, init: str, fit: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, but {model!r} was given.")
    for option, value in (("weights", weights), ("features", features)):
        if not (value is None or isinstance(value, Stair | Mapping | list | tuple)):
            raise ValueError(
                f"{option} must be a softstair.Stair, one a layer, or None, "
                f"but {value!r} was given."
            )
    if weights is None and features is None:
        raise ValueError("weights or features must be a Stair, but None was given for both.")
    if init not in ("thresholds", "keep"):
        raise ValueError(f"init must be thresholds or keep, but {init!r} was given.")
    if fit not in ("layer", "channel", None):
        raise ValueError(f"fit must be layer, channel or None, but {fit!r} was given.")


def names(skip: Any) -> tuple[str, ...]:
    names = (skip,) if isinstance(skip, str) else skip
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"skip must be names of modules, but {skip!r} was given.")
    return tuple(names)


def matches(pattern: str, name: str) -> bool:
    inside = name.startswith(pattern + ".")
    return name == pattern or inside or fnmatch.fnmatchcase(name, pattern)
