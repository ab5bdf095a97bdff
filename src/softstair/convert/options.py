"""The options of ``quantise``: names of stairs, rare options, and those of each layer.

``"int4"`` is weights of int4 and features of uint4, ``"ternary"`` is both. ``"int4/int8"`` names
both, and ``"float"`` is neither. ``"ternary:64/int8:token"`` has a quantum for each group of 64
weights, and rounds the features that a linear layer reads per token. In ``{"stem": "int8", "*":
"int4"}`` a pattern is for the weights whose names it fits and for the activation that follows them.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch import nn

from softstair import _check
from softstair._grouped import GROUPS, Group
from softstair._tokens import TOKEN_NAMES, TokenName
from softstair.noise import Noise
from softstair.regularise import Forward
from softstair.stair import Stair
from softstair.ste import Estimator

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


class GroupedBits(NamedTuple):
    """Names of bits without what they say of groups and tokens, and that."""

    bits: str
    group: Group | None  # the weights that share a quantum
    tokens: TokenName | None  # the rounding of the features that a linear layer reads

    @property
    def is_grouped(self) -> bool:
        """Whether the weights are in groups, with features in float or per token."""
        return self.group is not None or self.tokens is not None


def parse_groups(text: Any) -> GroupedBits:
    """Return what a name of bits says of groups and tokens.

    >>> parse_groups("ternary:64/int8:token")
    GroupedBits(bits='ternary/float', group=64, tokens='int8:token')
    >>> parse_groups("int4").is_grouped
    False
    """
    weights, slash, features = text.partition("/") if isinstance(text, str) else ("", "", "")
    weights, colon, group = weights.partition(":")
    if not colon and ":" not in features:
        return GroupedBits(text, None, None)
    groups = {str(known): known for known in GROUPS}
    is_known = not colon or group in groups
    if not slash or not is_known or features not in (*TOKEN_NAMES, "float"):
        groups_of = f"weights with {', '.join(f':{known}' for known in groups)} or nothing"
        allowed = f"{groups_of}, then one of /float, {', '.join(f'/{n}' for n in TOKEN_NAMES)}"
        raise _check.wrong("bits", text, allowed)
    tokens: Any = None if features == "float" else features
    return GroupedBits(f"{weights}/float", groups.get(group), tokens)


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


Value = TypeVar("Value")
PerLayer: TypeAlias = (
    Value | Sequence[Value] | Mapping[int, Value] | Mapping[str, Value] | Mapping[int | str, Value]
)
"""A value for all layers, a sequence with one per layer, or a mapping from layer numbers and
patterns of module names."""
ByLayer: TypeAlias = Mapping[Any, Value]
"""The same as a mapping, see :func:`by_layer`."""
PER_LAYER = ("weights", "features", "noise", "forward")
Activation = Literal["auto", "keep", "replace"]
Init = Literal["auto", "thresholds", "keep"]
Fit = Literal["auto", "layer", "channel"]
Sums = Literal["sum", "branches"]


@dataclass(frozen=True, kw_only=True)
class QuantiseOptions:
    """Rare options of :func:`softstair.quantise`.

    >>> QuantiseOptions(shortcuts="uint8").sums
    'sum'

    Args:
        init: ``"thresholds"`` starts the weights at thresholds, as in the paper; ``"keep"`` keeps
            them; ``"auto"`` keeps them if stairs are given by name.
        fit: With ``init="keep"``: give each ``"layer"`` or ``"channel"`` the quantum that is
            nearest to its weights; None keeps the quantum of the stair. ``"auto"``: each channel
            (of ConvTranspose2d, the layer) if stairs are given by name, and otherwise the layer.
        sums: Where sums without an activation get a stair, which integers need:
            ``"sum"``: where weights read them, on one of two that are added (the shortcut of a
            residual block with weights of its own), and on a total without an activation;
            ``"branches"``: where weights read them, and on each that is added; None: nowhere. The
            stair is the features', continued below 0.
        shortcuts: A finer stair for features that are added to others, such as ``"uint8"``. Layers
            with weights read these features through a second stair, that of ``features``. It is
            used where it has more levels than ``features``; if those have negative levels, it is
            continued below 0. None: one stair for both.
        half: Round the quanta of weights in groups, or beside features per token, to float16, which
            files for llama.cpp hold.
        weight_margin: As ``gradient_margin``, for weights. ``"auto"``: 1 for weights in groups, or
            beside features per token; otherwise 0.
        gradient_margin: Number of levels that are added to each end of the features' stairs in the
            backward pass only. Outputs stay the same, and gradients pass that many quanta farther.
            ``"auto"``: 1 for ternary features given by name, in networks with at least 16
            activations and no shortcuts; otherwise 0.

    Raises:
        SoftstairError: If a value is none of these.
    """

    init: Init = "auto"
    fit: Fit | None = "auto"
    sums: Sums | None = "sum"
    shortcuts: Stair | StairName | None = None
    gradient_margin: int | Literal["auto"] = "auto"
    half: bool = False
    weight_margin: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check.choice("init", self.init, get_args(Init))
        for name, allowed in (("fit", get_args(Fit)), ("sums", get_args(Sums))):
            if (value := getattr(self, name)) is not None and value not in allowed:
                raise _check.wrong(name, value, f"{', '.join(allowed)} or None")
        if isinstance(self.shortcuts, str):
            _check.choice("shortcuts", self.shortcuts, get_args(StairName))
        elif not isinstance(self.shortcuts, Stair | None):
            raise _check.wrong(
                "shortcuts", self.shortcuts, "a Stair, a name such as uint8, or None"
            )
        for name in ("gradient_margin", "weight_margin"):
            if (margin := getattr(self, name)) != "auto":
                _check.integer(name, margin, 0)
        _check.boolean("half", self.half)


@dataclass(frozen=True)
class LayerOptions:
    """The options of ``quantise`` that say what a site becomes, with stairs for names.

    If the stairs were given as names of bits, the names of weights stand for their activation too.
    """

    weights: ByLayer[Stair | None]
    features: ByLayer[Stair | None]
    noise: ByLayer[Noise | str | Estimator]
    forward: ByLayer[Forward]
    skip: tuple[str, ...]
    activation: Activation
    rare: QuantiseOptions
    is_named: bool
    groups: ByLayer[Group | None]
    tokens: ByLayer[TokenName | None]

    def keeps(self, stair: Stair | None) -> bool:
        """Return whether an activation is kept before a stair."""
        by_bits = self.is_named and stair is not None and "int" in (name_of(stair) or "")
        return by_bits if self.activation == "auto" else self.activation == "keep"

    def follows(self, stair: Stair) -> bool:
        """Return whether calibration may choose where a stair that is not a ReLU begins."""
        return self.is_named and (name_of(stair) or "").startswith("uint")

    @property
    def may_keep(self) -> bool:
        """Whether it may keep the activation of some layer."""
        return any(map(self.keeps, self.features.values()))

    def check_numbers(self, layers: int) -> None:
        """Raise ValueError if an option is for a layer that there is not."""
        for option in PER_LAYER:
            for key in getattr(self, option):
                if isinstance(key, int) and not 0 <= key < layers:
                    allowed = f"must be for layers from 0 to {layers - 1}"
                    raise _check.invalid(option, f"{allowed}, but one for layer {key} was given")


def by_layer(option: Any) -> dict[Any, Any]:
    """Return an option as a mapping from layer numbers and patterns of names, ``"*"`` for all."""
    if isinstance(option, Mapping):
        return dict(option)
    return dict(enumerate(option)) if isinstance(option, list | tuple) else {"*": option}


def hint(key: object, names: Sequence[str]) -> str:
    """Return a question with the names that are like ``key``, or some of all names."""
    return _check.suggestion(key, names) or f"use {', '.join(names[:12])}"


def matches(pattern: object, *names: str) -> bool:
    """Return whether a pattern fits one of the names, or that of a module which contains it."""
    if not isinstance(pattern, str):
        return False  # the number of a layer
    fits = lambda name: name == pattern or name.startswith(f"{pattern}.")
    return any(fits(name) or fnmatch.fnmatchcase(name, pattern) for name in names)


def resolved(
    net: nn.Module,
    weights: Any,
    features: Any,
    noise: PerLayer[Noise | str | Estimator],
    forward: PerLayer[Forward],
    skip: str | Sequence[str],
    activation: Activation,
    rare: QuantiseOptions,
) -> LayerOptions:
    """Return the options of ``quantise`` with stairs for names, and with what names decide."""
    if weights is None and features is None:
        raise _check.invalid("weights", "or features must be a Stair, but both are None")
    patterns = (skip,) if isinstance(skip, str) else skip
    if not isinstance(patterns, Sequence) or not all(isinstance(name, str) for name in patterns):
        raise _check.wrong("skip", skip, "names of modules")
    _check.choice("activation", activation, get_args(Activation))
    if not isinstance(rare, QuantiseOptions):
        raise _check.wrong("options", rare, "a softstair.QuantiseOptions or None")
    is_mapping, weights = isinstance(weights, Mapping), by_layer(weights)
    if is_named := any(isinstance(value, str) for value in weights.values()):
        if is_mapping:
            weights.setdefault("*", "float")
        if features is not None:
            problem = "must be left out if stairs are given by name: write both names, as in"
            raise _check.invalid("features", f"{problem} 'int4/uint4'")
        named = {key: parse_groups(name) for key, name in weights.items()}
        weights, features = stairs_of({key: names.bits for key, names in named.items()})
    else:
        named = {"*": GroupedBits("", None, None)}
    is_grouped = any(names.is_grouped for names in named.values())
    if rare.half and not is_grouped:
        problem = "needs weights in groups or features per token, as in 'int4:32/int8:32'"
        raise _check.invalid("half", problem)
    if is_grouped and rare.init == "thresholds":
        raise _check.invalid("init", "must be 'keep' for weights in groups")
    if rare.init == "auto":
        rare = replace(rare, init="keep" if is_named else "thresholds")
    if rare.fit == "channel" and rare.init != "keep":
        raise _check.invalid("fit", "must be 'layer' or None unless init is 'keep'")
    if rare.fit == "auto" and not is_named:
        rare = replace(rare, fit="layer")
    if isinstance(rare.shortcuts, str):
        rare = replace(rare, shortcuts=feature_stair(rare.shortcuts))
    chosen = (weights, by_layer(features), by_layer(noise), by_layer(forward))
    patterns = (*patterns, *_first_names(net, patterns))
    groups = {key: names.group for key, names in named.items()}
    tokens = {key: names.tokens for key, names in named.items()}
    return LayerOptions(*chosen, patterns, activation, rare, is_named, groups, tokens)


def is_by_module(weights: Any) -> bool:
    """Return whether names of bits quantise modules alone: with features per token or in float."""
    names = [name for name in by_layer(weights).values() if isinstance(name, str)]
    named = [parse_groups(name) for name in names]
    by_module = [names.is_grouped or names.bits.endswith("float") for names in named]
    return any(names.is_grouped for names in named) and all(by_module)


def _first_names(net: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the first names of modules that patterns fit by another name: those of their sites."""
    first: dict[nn.Module, str] = {}
    for name, module in net.named_modules(remove_duplicate=False):
        own = first.setdefault(module, name)
        if own != name and any(matches(pattern, name) for pattern in patterns):
            yield own
