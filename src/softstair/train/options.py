"""How options are declared, with help, range and role; those of data, network and split."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from softstair import _check
from softstair.convert.options import StairName, parse_layers, stair_named, stairs_of
from softstair.data.augment import Augmentation, Moves
from softstair.models import NETWORKS
from softstair.stair import Stair

ValueT = TypeVar("ValueT")
OptionsT = TypeVar("OptionsT", bound="NetworkOptions")

Fact = Literal[
    "architecture",  # decides which network is built
    "schedule",  # is a parameter of the noise schedule
    "scales_with_epochs",  # is a time in epochs, which Recipe.rescaled scales
    "changes_result",  # another value gives another trained network
    "own_code",  # may name a function of the user's own
]


@dataclass(frozen=True)
class Option:
    """What is known of a field: its declaration, and from ``name`` on what its annotation says."""

    help: str
    facts: frozenset[str]
    within: tuple[Any, Any] = (None, None)  # the least and the greatest number
    name: str = ""
    kind: type = str  # bool, int, float, str or tuple
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # which a number may be instead
    is_optional: bool = False
    is_open: bool = False  # whether it may be package.module:function instead of a choice

    def check(self, value: Any) -> Any:
        """Return the value as the field stores it, or raise SoftstairError."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        if self.choices and not (self.is_open and isinstance(value, str) and ":" in value):
            return _check.choice(self.name, value, self.choices)
        if self.kind is bool:
            return _check.boolean(self.name, value)
        if self.words and self.kind is int and type(value) is not int:
            raise _check.wrong(self.name, value, f"{', '.join(self.words)} or an integer")
        if self.kind is int:
            return _check.integer(self.name, value, *self.within)
        if self.kind is float:
            return _check.number(self.name, value, *self.within)
        if self.kind is tuple and isinstance(value, tuple | list):
            value = tuple(value)
        texts, allowed = (value, "names of modules") if self.kind is tuple else ((value,), "a name")
        if isinstance(texts, tuple) and all(isinstance(text, str) and text for text in texts):
            return value
        raise _check.wrong(self.name, value, allowed)


def option(
    default: ValueT, help: str, *facts: Fact, changes_result: bool = True, **limits: Any
) -> ValueT:
    """Declare a field of a group: its default, help text, facts, and attributes of `Option`."""
    known = Option(help, frozenset((*facts, *["changes_result"] * changes_result)), **limits)
    return dataclasses.field(default=default, metadata={"option": known})


@dataclass(frozen=True)
class Options:
    """A group of options, whose values are checked when it is built.

    Raises:
        SoftstairError: If a value is not allowed, or if two contradict each other.
    """

    def __post_init__(self) -> None:
        for name, known in describe(type(self)).items():
            object.__setattr__(self, name, known.check(getattr(self, name)))
        self._check_together()

    @property
    def own_code(self) -> dict[str, str]:
        """The functions of the user's own that it names, by field."""
        named = [name for name, known in describe(type(self)).items() if "own_code" in known.facts]
        functions = {name: str(getattr(self, name)) for name in named}
        return {name: function for name, function in functions.items() if ":" in function}

    def _check_together(self) -> None:
        """Raise SoftstairError if fields of the group contradict each other."""


_DESCRIPTIONS: dict[type[Options], dict[str, Option]] = {}


def describe(options: type[Options]) -> Mapping[str, Option]:
    """Return the options of a group by name, in order."""
    if options not in _DESCRIPTIONS:
        types = get_type_hints(options)
        described = {field.name: _describe(field, types[field.name]) for field in fields(options)}
        _DESCRIPTIONS[options] = described
    return _DESCRIPTIONS[options]


def _describe(field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    alternatives = get_args(annotation) if is_union else (annotation,)
    kinds = [get_origin(kind) or kind for kind in alternatives if kind is not NoneType]
    names = tuple(name for kind in alternatives for name in get_args(kind) if Literal in kinds)
    are_choices = kinds[0] is Literal
    return replace(
        field.metadata["option"],
        name=field.name,
        kind=str if are_choices else kinds[0],
        choices=names if are_choices else (),
        words=() if are_choices else names,
        is_optional=NoneType in alternatives,
        is_open=are_choices and str in alternatives,
    )


COUNT, POSITIVE = (0, 10**6), (1e-30, 1e30)
RATE, SHARE, TIME = (0.0, 1e6), (0.0, 1.0), (0.0, 1e9)
"""Ranges of numbers; times are in epochs."""

IMAGES = ("digits", "cifar10", "svhn")
AUGMENTATIONS = {
    **dict.fromkeys(IMAGES, ("none", "crop", "crop-flip")),
    "speech": ("none", "shift"),
}
"""The augmentations of each data set; a data set of the user's own has all of them."""
UNSUITED = {
    **dict.fromkeys(IMAGES, ("time_mask", "coefficient_mask")),
    "speech": ("cutout",),
}
"""The fields that must be 0 for a data set."""


@dataclass(frozen=True)
class DataOptions(Options):
    """Which data are trained on, with which network, and how the network sees them."""

    data: str = option(
        "digits",
        "Data set: digits, cifar10, svhn, speech, or package.module:load.",
        "own_code",
        "architecture",
    )
    model: str = option(
        "auto",
        f"Network: auto, {', '.join(NETWORKS)}, or package.module:build.",
        "own_code",
        "architecture",
    )
    limit: int | None = option(
        None, "Use only N random examples of each set, for a quick trial.", within=(1, 10**12)
    )
    augment: Moves = option(
        "none", "Images: random crops after padding by 4, and flips. Speech: shifts up to 0.1 s."
    )
    cutout: int = option(0, "Side of a random square of each image that is set to 0.", within=COUNT)
    mixup: float = option(0.0, "Largest share of a second example in a mixture.", within=SHARE)
    cutmix: float = option(
        0.0, "Largest share of the area that a second example replaces.", within=SHARE
    )
    time_mask: int = option(0, "Most frames of a recording that are set to 0.", within=COUNT)
    coefficient_mask: int = option(
        0, "Most coefficients of a recording that are set to 0.", within=COUNT
    )
    integer_input: bool = option(
        False,
        "Normalise the input with an integer zero point and a power-of-two scale, so that the "
        "first layer is exact in integers.",
    )
    centre_input: bool = option(True, "Centre the input of speech: (x - 128) / 16 instead of x.")

    @property
    def augmentation(self) -> Augmentation:
        """What is done to the examples of each training batch."""
        return Augmentation(
            **{field.name: getattr(self, field.name) for field in fields(Augmentation)}
        )

    def _check_together(self) -> None:
        super()._check_together()
        allowed = AUGMENTATIONS.get(self.data, (self.augment,))
        if self.augment not in allowed:
            one_of = f"one of {', '.join(allowed)} for {self.data}"
            raise _check.wrong("augment", self.augment, one_of, allowed)
        for name in UNSUITED.get(self.data, ()):
            if getattr(self, name):
                raise _check.wrong(name, getattr(self, name), f"0 for {self.data}")
        if self.mixup and self.cutmix:
            raise _check.wrong("cutmix", self.cutmix, "0 with mixup")


REPLACED = "weights weight_quantum features feature_quantum thresholds first_layer".split()
"""The fields that `bits` replaces."""


@dataclass(frozen=True)
class NetworkOptions(Options):
    """What of the network is quantised, and to which levels."""

    weights: StairName | Literal["float"] = option("ternary", "Stair of weights.", "architecture")
    weight_quantum: float = option(
        1.0, "Quantum of the weights' stair.", "architecture", within=POSITIVE
    )
    features: StairName | Literal["float"] = option(
        "ternary", "Stair of the features (both in float: float twin).", "architecture"
    )
    feature_quantum: float = option(
        1.0, "Quantum of the features' stair.", "architecture", within=POSITIVE
    )
    thresholds: Literal["midpoint", "floor"] = option(
        "midpoint", "Thresholds of intN and uintN: between levels, or at them.", "architecture"
    )
    first_layer: Literal["same"] | StairName | Literal["float"] = option(
        "same",
        "Stair of the first layer's weights (same: as the others; intN: within ±1).",
        "architecture",
    )
    last_layer: Literal["float", "stair"] = option(
        "float", "Keep the last layer in float, or quantise its weights too.", "architecture"
    )
    sums: Literal["sum", "branches", "none"] = option(
        "sum",
        "Stairs for sums without an activation: as few as export needs, on all branches, or none.",
        "architecture",
    )
    shortcuts: Literal["same"] | StairName = option(
        "same",
        "Finer stair for features that are added to others, such as uint8; weights still read them "
        "with the bits of the layer (same: no second stair).",
        "architecture",
    )
    skip: tuple[str, ...] = option(
        (), "Further modules to keep in float, by name or pattern.", "architecture"
    )

    bits: str | None = option(
        None,
        "Stairs by name, with fitted quanta: int4, ternary, int4/uint4, or stem=int8,*=int4.",
        "architecture",
    )

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantised: the float twin."""
        if self.bits is not None:
            return self.bits == "float"
        is_first_float = self.first_layer in ("same", "float")
        return self.weights == self.features == "float" and is_first_float

    def stair(self, of: Literal["weights", "features", "first_layer"]) -> Stair | None:
        """Return the stair of weights, features or the first layer's weights; None for float.

        A first layer of its own has levels within ±1: int8 has the quantum 2⁻⁷.

        >>> NetworkOptions(first_layer="int8").stair("first_layer").quantum
        0.0078125
        """
        if of == "first_layer" and self.first_layer == "same":
            of = "weights"
        name = getattr(self, of)
        if name == "float":
            return None
        quantum = self.weight_quantum if of == "weights" else self.feature_quantum
        if of == "first_layer":
            reach = max(map(abs, stair_named(name).levels))
            quantum = 2.0 ** -math.ceil(math.log2(reach))
        return stair_named(name, quantum, self.thresholds)

    def _check_together(self) -> None:
        super()._check_together()
        self.stair("weights"), self.stair("features"), self.stair("first_layer")
        if self.bits is not None:
            stairs_of(parse_layers(self.bits))
            for name in REPLACED:
                if (value := getattr(self, name)) != getattr(NetworkOptions, name):
                    raise _check.wrong(name, value, "left out with `bits`, which replaces it")

    def for_changes(self: OptionsT, given: Mapping[str, Any]) -> OptionsT:
        """Return the options without stairs if `bits` is among the changes to make; else these."""
        if given.get("bits") is None:
            return self
        for name in REPLACED:
            if name in given:
                raise _check.wrong(name, given[name], "left out with `bits`, which replaces it")
        return replace(self, **{name: getattr(NetworkOptions, name) for name in REPLACED})


@dataclass(frozen=True)
class TeacherOptions(Options):
    """Float runs from which the network starts, and whose scores it learns."""

    init_from: str | None = option(
        None,
        "Start from the weights of a float run of the same model: its directory, or auto, which "
        "trains it first.",
    )
    teacher: str | None = option(
        None, "Learn the scores of a float run too: its directory, or auto."
    )
    teacher_weight: float = option(0.9, "Weight of the teacher in the loss.", within=SHARE)
    temperature: float = option(
        4.0, "Divisor of all scores before the softmax.", within=(1e-3, 1e6)
    )

    def _check_together(self) -> None:
        super()._check_together()
        for name, default in (("teacher_weight", 0.9), ("temperature", 4.0)):
            if self.teacher is None and (value := getattr(self, name)) != default:
                raise _check.wrong(name, value, "left out, or given with a `teacher`")


@dataclass(frozen=True)
class SplitOptions(Options):
    """What is trained on, what validates, and how it is evaluated."""

    statistics: Literal["running", "fresh"] = option(
        "running",
        "Evaluate with running batch statistics, or with fresh ones of 4,096 training examples.",
    )
    fold: int | Literal["all"] = option(
        0,
        "Fold that validates, counting from 0 (all: train on every example, validate on none).",
        within=(0, 10**9),
    )
    folds: int = option(5, "Number of folds of the training set.", within=(2, 10**6))
    seed: int = option(
        0, "Seed of weights, order, augmentation and random forward passes.", within=(0, 2**63 - 1)
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.fold != "all" and self.fold >= self.folds:
            raise _check.wrong("fold", self.fold, f"from 0 to {self.folds - 1}")
