"""The groups of a recipe: data, network, noise and run; that of the optimiser is beside it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from softstair import _check
from softstair.convert.options import StairName, parse_layers, stair_named, stairs_of
from softstair.data.augment import Augmentation, Moves
from softstair.models import NETWORKS
from softstair.regularise import Forward
from softstair.schedule import Interval, Power
from softstair.stair import Stair
from softstair.train.options import COUNT, POSITIVE, SHARE, TIME, check_values, option

PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")

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
class DataOptions:
    """Which examples train and validate, and how the network sees them."""

    name: str = option(
        "digits",
        "Data set: digits, cifar10, svhn, speech, or package.module:load.",
        "own_code",
        "architecture",
        flat="data",
    )
    limit: int | None = option(
        None, "Use only N random examples of each set, for a quick trial.", within=(1, 10**12)
    )
    fold: int | Literal["all"] = option(
        0,
        "Fold that validates, counting from 0 (all: train on every example, validate on none).",
        within=(0, 10**9),
    )
    folds: int = option(5, "Number of folds of the training set.", within=(2, 10**6))
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

    def __post_init__(self) -> None:
        check_values(self)
        allowed = AUGMENTATIONS.get(self.name, (self.augment,))
        if self.augment not in allowed:
            one_of = f"one of {', '.join(allowed)} for {self.name}"
            raise _check.wrong("augment", self.augment, one_of, allowed)
        for name in UNSUITED.get(self.name, ()):
            if getattr(self, name):
                raise _check.wrong(name, getattr(self, name), f"0 for {self.name}")
        if self.mixup and self.cutmix:
            raise _check.wrong("cutmix", self.cutmix, "0 with mixup")
        if self.fold != "all" and self.fold >= self.folds:
            raise _check.wrong("fold", self.fold, f"from 0 to {self.folds - 1}")


REPLACED = "weights weight_quantum features feature_quantum thresholds first_layer".split()
"""The fields that `bits` replaces."""


@dataclass(frozen=True)
class NetworkOptions:
    """Which network, from which weights it starts, what of it is quantised, to which levels."""

    model: str = option(
        "auto",
        f"Network: auto, {', '.join(NETWORKS)}, or package.module:build.",
        "own_code",
        "architecture",
    )

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
    quanta: Literal["auto", "fixed", "calibrated", "learned"] = option(
        "auto",
        "Keep the quanta, fit those of features to a few batches before training, or learn all "
        "with the weights (auto: calibrated with bits, else fixed).",
        "architecture",
    )
    init_from: str | None = option(
        None,
        "Start from the weights of a float run of the same model: its directory, or auto, which "
        "trains it first.",
    )

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantised: the float twin."""
        if self.bits is not None:
            return self.bits == "float"
        is_first_float = self.first_layer in ("same", "float")
        return self.weights == self.features == "float" and is_first_float

    @property
    def calibrates(self) -> bool:
        """Whether quanta of features are fitted to batches, learned ones too if none is given."""
        by_default = self.quanta != "fixed" and self.bits is not None
        return not self.is_float and (self.quanta == "calibrated" or by_default)

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

    def __post_init__(self) -> None:
        check_values(self)
        self.stair("weights"), self.stair("features"), self.stair("first_layer")
        if self.bits is not None:
            stairs_of(parse_layers(self.bits))
            for name in REPLACED:
                if (value := getattr(self, name)) != getattr(NetworkOptions, name):
                    raise _check.wrong(name, value, "left out with `bits`, which replaces it")

    def for_changes(self, given: Mapping[str, Any]) -> "NetworkOptions":
        """Return the options without stairs if `bits` is among the changes to make; else these."""
        if given.get("bits") is None:
            return self
        for name in REPLACED:
            if name in given:
                raise _check.wrong(name, given[name], "left out with `bits`, which replaces it")
        return replace(self, **{name: getattr(NetworkOptions, name) for name in REPLACED})


@dataclass(frozen=True)
class NoiseOptions:
    """The noise, and how it is annealed."""

    name: Literal["uniform", "triangular", "normal", "logistic"] | str = option(
        "uniform",
        "Noise family, or package.module:object, a Noise or Estimator of your own.",
        "own_code",
        "architecture",
        flat="noise",
    )
    forward: Forward = option(
        "mode", "What the forward pass computes from the noise.", "architecture"
    )
    static_mean: bool = option(
        True, "Keep the mean of the noise instead of annealing it to 0.", "schedule"
    )
    static_std: bool = option(
        False, "Keep the standard deviation instead of annealing it to 0.", "schedule"
    )
    mean0: float | None = option(
        None, "Initial mean in quanta (None: 0 if static, else -0.5).", "schedule"
    )
    std0: float | None = option(
        None, "Initial std in quanta (None: 95 % of the noise within half a quantum).", "schedule"
    )
    gradient_margin: int | Literal["auto"] = option(
        "auto",
        "Levels added to each end of the features' stairs in the backward pass only (auto: 1 for "
        "ternary bits in deep networks without shortcuts, else 0).",
        within=(0, 100),
    )
    interval: Interval = option(
        "partition",
        "Layers anneal one by one (partition), all at once, from one start, or to one end.",
        "schedule",
    )
    power: Power = option(
        "homogeneous", "Power law: same for all layers, or faster near the input.", "schedule"
    )
    period: float | Literal["auto"] | None = option(
        9.0,
        "Epochs to anneal one layer (all: times layers; auto: end at 97 % of the run).",
        "schedule",
        "scales_with_epochs",
    )
    noise_schedule: str | None = option(
        None, "Your own schedule, package.module:object.", "own_code"
    )
    anneal_from: float | str = option(
        0.0,
        "Epoch at which annealing begins, or a share of the epochs such as 50%.",
        "scales_with_epochs",
        within=TIME,
    )
    update: Literal["iteration", "epoch"] = option(
        "iteration", "Update the noise at every iteration, or once per epoch."
    )
    truncate: bool = option(
        True, "End the backward pass at layers that pass no gradient.", changes_result=False
    )

    @property
    def is_static(self) -> bool:
        """Whether neither its mean nor its std changes."""
        return self.static_mean and self.static_std

    def __post_init__(self) -> None:
        if isinstance(self.anneal_from, str) and not PERCENT.fullmatch(self.anneal_from):
            allowed = "a number of epochs, or a share of them such as 50%"
            raise _check.wrong("anneal_from", self.anneal_from, allowed)
        if self.period == "auto":
            object.__setattr__(self, "period", None)
        check_values(self)
        if ":" in self.name and self.std0 is None:
            raise _check.invalid("std0", f"must be given with your own noise, {self.name!r}")


@dataclass(frozen=True)
class RunOptions:
    """How long a training is, from which random numbers, and how its steps are computed."""

    batch: int = option(
        64, "Examples per batch; an incomplete last batch is left out.", within=(2, 10**9)
    )
    epochs: int = option(
        40,
        "Passes over the data; as a flag, scales all times in epochs.",
        within=(1, 10**7),
    )
    seed: int = option(
        0, "Seed of weights, order, augmentation and random forward passes.", within=(0, 2**63 - 1)
    )
    statistics: Literal["running", "fresh"] = option(
        "running",
        "Evaluate with running batch statistics, or with fresh ones of 4,096 training examples.",
    )
    precision: Literal["auto", "fast", "float32", "tf32", "bfloat16", "float8"] = option(
        "auto",
        "Precision of training steps (auto: bfloat16 on a GPU that has it; fast: also float8, on "
        "Hopper if the network is wide).",
    )
    compile: Literal["auto", "always", "never"] = option(
        "auto",
        "torch.compile the network (auto: in long runs on a GPU without fused kernels).",
        changes_result=False,
    )
    kernels: Literal["auto", "triton", "reference"] = option(
        "auto", "Kernels of the stairs: Triton on a GPU, or plain torch.", changes_result=False
    )
    capture: Literal["auto", "always", "never"] = option(
        "auto",
        "Run training steps on a GPU as a CUDA graph (auto: unless the model is your own).",
        changes_result=False,
    )

    def precision_on(self, device: torch.device) -> str:
        """Return the precision of training steps on a device: float32, tf32, bfloat16 or float8.

        With fast, ``choose_execution`` may use float8 instead, which depends on the network.

        >>> RunOptions().precision_on(torch.device("cpu"))
        'float32'
        """
        cuda = device.type == "cuda"
        if self.precision in ("auto", "fast"):
            return "bfloat16" if cuda and torch.cuda.is_bf16_supported(False) else "float32"
        needed = {"tf32": (8, 0), "float8": (9, 0)}.get(self.precision)
        if needed and not (cuda and torch.cuda.get_device_capability(device) >= needed):
            allowed = f"auto, float32 or bfloat16 on {device}, which has no compute capability of"
            raise _check.wrong("precision", self.precision, f"{allowed} {needed[0]}.{needed[1]}")
        return self.precision

    def __post_init__(self) -> None:
        check_values(self)
        if self.kernels == "triton" and self.compile == "always":
            raise _check.wrong("kernels", "triton", "auto or reference with compile=always")
