"""Stairs by name, as recipes and flags give them: ``ternary``, ``int4``, ``uint4``, …"""

from functools import lru_cache
from typing import Literal, get_args

from softstair.stair import Stair

__all__ = ["StairName", "named"]

StairName = Literal[
    "heaviside",
    "sign",
    "ternary",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "int8",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "uint8",
]


@lru_cache(maxsize=64)  # frozen data, and rounding it to every dtype takes milliseconds
def named(
    name: str, quantum: float = 1.0, thresholds: Literal["floor", "midpoint"] = "midpoint"
) -> Stair:
    """The stair of that name; ``thresholds`` is for intN and uintN, see :meth:`Stair.linear`.

    >>> named("ternary", quantum=0.5).levels
    (-0.5, 0.0, 0.5)
    """
    if name not in get_args(StairName):
        raise ValueError(
            f"a stair must be one of {', '.join(get_args(StairName))}, but {name!r} was given."
        )
    plain = {"heaviside": Stair.heaviside, "sign": Stair.sign, "ternary": Stair.ternary}
    if name in plain:
        return plain[name](quantum=quantum)
    signed, bits = not name.startswith("u"), int(name[-1])
    return Stair.linear(bits, signed, quantum, thresholds)
