"""Names of stairs: ``"int4"`` is weights of int4 and features of uint4, ``"ternary"`` is both.

``"int4/int8"`` names both, and ``"float"`` is neither. In ``{"stem": "int8", "*": "int4"}`` a
pattern is for the weights whose names it fits and for the activation that follows them.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch

from softstair import _check
from softstair.stair import Stair

StairName = Literal[
    "heaviside", "sign", "ternary",
    "int2", "int3", "int4", "int5", "int6", "int7", "int8",
    "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "uint8",
]  # fmt: skip


class Bits(NamedTuple):
    """The names of the stairs of a layer: of its weights and of its features."""

    weights: StairName | Literal["float"]
    features: StairName | Literal["float"]


@lru_cache(maxsize=64)  # frozen data, and rounding it to every dtype takes milliseconds
def stair_named(
    name: str, quantum: float = 1.0, thresholds: Literal["floor", "midpoint"] = "midpoint"
) -> Stair:
    """Return the stair of that name; ``thresholds`` is for intN and uintN, see `Stair.linear`.

    >>> stair_named("ternary", quantum=0.5).levels
    (-0.5, 0.0, 0.5)
    """
    _check.choice("stair", name, get_args(StairName))
    simple = {"heaviside": Stair.heaviside, "sign": Stair.sign, "ternary": Stair.ternary}
    if name in simple:
        return simple[name](quantum=quantum)
    return Stair.linear(int(name[-1]), not name.startswith("u"), quantum, thresholds)


def name_of(stair: Stair) -> StairName | None:
    """Return the name of the levels of a stair, whatever its quanta; None if they have none.

    >>> name_of(Stair.linear(bits=4, quantum=0.1)), name_of(Stair((0, 1, 4), (0.5, 2.5)))
    ('uint4', None)
    """
    return _names_by_level().get(stair.integers)


@cache
def _names_by_level() -> Mapping[tuple[int, ...] | None, StairName]:
    names: tuple[StairName, ...] = get_args(StairName)
    return {stair_named(name).integers: name for name in names}


def parse(text: Any, field: str = "bits") -> Bits:
    """Return the stairs that a name of bits means; errors name ``field``.

    >>> parse("int4")
    Bits(weights='int4', features='uint4')
    >>> parse("ternary/uint2")
    Bits(weights='ternary', features='uint2')
    """
    names = ("float", *get_args(StairName))
    weights, slash, features = text.partition("/") if isinstance(text, str) else ("", "", "")
    if not slash:
        features = f"u{weights}" if weights.startswith("int") else weights
    for name in (weights, features):
        if name not in names:
            allowed = "float, ternary, sign, int2 to int8, or two of weights and features, as in "
            problem = f"must be {allowed}int4/uint4, but {_check.shortened(text)} was given"
            hint = _check.suggestion(name, names)
            raise _check.invalid(field, f"{problem}; {hint}" if hint else problem)
    return Bits(weights, features)  # type: ignore[arg-type]


def parse_layers(text: str) -> dict[str, str]:
    """Return the mapping from patterns of names to bits that a text means.

    >>> parse_layers("stem=int8,*=int4"), parse_layers("ternary")
    ({'stem': 'int8', '*': 'int4'}, {'*': 'ternary'})
    """
    if "=" not in text:
        return {"*": text}
    layers: dict[str, str] = {}
    for entry in text.split(","):
        pattern, equals, bits = (part.strip() for part in entry.partition("="))
        if not (pattern and equals) or pattern in layers:
            allowed = "bits, or one pattern=bits for each pattern of names, as in stem=int8,*=int4"
            raise _check.wrong("bits", text, allowed)
        layers[pattern] = bits
    return layers


def stairs_of(bits: Mapping[Any, Any]) -> tuple[dict[Any, Stair | None], dict[Any, Stair | None]]:
    """Return the stairs of weights and those of features, by the same patterns or numbers."""
    if "*" in bits and (last := list(bits)[-1]) != "*":
        problem = f"must have '*' last, but has {last!r} after it: the first that fits counts"
        raise _check.invalid("bits", problem)
    layers = {key: parse(name) for key, name in bits.items()}
    weights = {key: weight_stair(names.weights) for key, names in layers.items()}
    return weights, {key: feature_stair(names.features) for key, names in layers.items()}


def weight_stair(name: str) -> Stair | None:
    """Return the stair of weights, whose quanta are to be fitted; None for ``"float"``."""
    return None if name == "float" else stair_named(name)


@cache
def feature_stair(name: str) -> Stair | None:
    """Return the stair of features, with a quantum to start from; None for ``"float"``.

    Of intN and uintN it has the least squared error for normally distributed features of variance
    1, as after a batch normalisation, which uintN rectifies. Of other stairs it is 1.

    >>> round(feature_stair("uint4").quantum, 2)
    0.19
    """
    stair = weight_stair(name)
    if stair is None or "int" not in name:
        return stair
    x = torch.linspace(0.0 if name.startswith("u") else -6.0, 6.0, 4096, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    candidates = (torch.arange(1.0, 6.0, 0.05) / stair.levels[-1]).tolist()
    error = lambda quantum: float((density * (quantum * stair(x / quantum) - x).square()).sum())
    return stair.with_quantum(min(candidates, key=error))
