"""The groups of options that make up a recipe; each checks its own fields."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from softstair import _check
from softstair import noise as noises
from softstair._errors import SoftstairError
from softstair.schedule import Interval, Power, Schedule
from softstair.stair import Stair
from softstair.train.options import Fact, Options, names_with, option

__all__ = [
    "DataOptions",
    "ExecutionOptions",
    "NetworkOptions",
    "NoiseOptions",
    "OptimiserOptions",
    "SplitOptions",
    "StairName",
    "stair_named",
]

StairName = Literal[
    "heaviside", "sign", "ternary",
    "int2", "int3", "int4", "int5", "int6", "int7", "int8",
    "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "uint8",
]  # fmt: skip

IDENTITY: tuple[Fact, ...] = ("architecture", "in_tables")
AXIS: tuple[Fact, ...] = ("paper_axis", "in_tables")
SCHEDULE_AXIS: tuple[Fact, ...] = ("schedule", *AXIS)

AUGMENTATIONS = {
    **dict.fromkeys(("digits", "cifar10", "svhn"), ("none", "crop", "crop-flip")),
    "speech": ("none", "shift"),
}
"""The augmentations of each data set; a data set of the user's own has all of them."""


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


@dataclass(frozen=True)
class DataOptions(Options):
    """Which data are trained on, with which network, and how the network sees them."""

    data: str = option(
        "digits",
        "Data set: digits, cifar10, svhn, speech, or your own function as package.module:load.",
        *IDENTITY,
    )
    model: str = option(
        "auto",
        "Network: digits, vgg8, dscnn, or your own package.module:build (auto: by the data set).",
        *IDENTITY,
    )
    limit: int | None = option(
        None, "Use only N random examples of each set, for a quick trial.", low=1, high=10**12
    )
    augment: Literal["none", "crop", "crop-flip", "shift"] = option(
        "none", "Images: random crops after padding by 4, and flips. Speech: shifts up to 0.1 s."
    )
    integer_input: bool = option(
        False,
        "Normalise the input with an integer zero point and a power-of-two scale, so that the "
        "first layer is exact in integers.",
        older_value=False,
    )
    centre_input: bool = option(
        True, "Centre the input of speech: (x - 128) / 16 instead of x.", older_value=False
    )

    def _check_together(self) -> None:
        super()._check_together()
        allowed = AUGMENTATIONS.get(self.data, (self.augment,))
        if self.augment not in allowed:
            raise SoftstairError(
                f"augment must be one of {', '.join(allowed)} for {self.data}, but "
                f"{self.augment!r} was given.",
                field="augment",
            )


@dataclass(frozen=True)
class NetworkOptions(Options):
    """What of the network is quantised, and to which levels."""

    weights: StairName | Literal["float"] = option(
        "ternary", "Stair of the weights.", "architecture"
    )
    weight_quantum: float = option(
        1.0, "Quantum of the weights' stair.", "architecture", low=1e-30, high=1e30
    )
    features: StairName | Literal["float"] = option(
        "ternary",
        "Stair of the features (weights and features in float: float twin).",
        "architecture",
    )
    feature_quantum: float = option(
        1.0, "Quantum of the features' stair.", "architecture", low=1e-30, high=1e30
    )
    thresholds: Literal["midpoint", "floor"] = option(
        "midpoint",
        "Thresholds of intN and uintN: midway between levels, or at them.",
        "architecture",
    )
    last_layer: Literal["float", "stair"] = option(
        "float", "Keep the last layer in float, or quantise its weights too.", "architecture"
    )
    skip: tuple[str, ...] = option(
        (), "Further modules to keep in float, by name or pattern.", "architecture"
    )

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantised: the float twin."""
        return self.weights == self.features == "float"

    def stair(self, of: Literal["weights", "features"]) -> Stair | None:
        """Return the stair of weights or features; None for float."""
        name = getattr(self, of)
        quantum = self.weight_quantum if of == "weights" else self.feature_quantum
        return None if name == "float" else stair_named(name, quantum, self.thresholds)

    def _check_together(self) -> None:
        super()._check_together()
        self.stair("weights"), self.stair("features")


@dataclass(frozen=True)
class NoiseOptions(Options):
    """The noise, and how it is annealed."""

    noise: Literal["uniform", "triangular", "normal", "logistic"] = option(
        "uniform", "Noise family.", "architecture", *AXIS
    )
    forward: Literal["expectation", "mode", "random", "hard"] = option(
        "mode", "What the forward pass computes from the noise.", "architecture", *AXIS
    )
    static_mean: bool = option(
        True, "Keep the mean of the noise instead of annealing it to 0.", *SCHEDULE_AXIS
    )
    static_std: bool = option(
        False, "Keep the standard deviation instead of annealing it to 0.", *SCHEDULE_AXIS
    )
    mean0: float | None = option(
        None, "Initial mean in quanta (None: 0 if static, else -0.5).", "schedule"
    )
    std0: float | None = option(
        None,
        "Initial standard deviation in quanta (None: 95 % of the noise, or all if it is bounded, "
        "lies within half a quantum).",
        "schedule",
    )
    interval: Interval = option(
        "partition",
        "When each layer anneals: one after another from the input on (partition), all at once "
        "(overlapped), from a common start, or to a common end.",
        *SCHEDULE_AXIS,
    )
    power: Power = option(
        "homogeneous",
        "Power law: the same for all layers, or faster near the input.",
        *SCHEDULE_AXIS,
    )
    period: float = option(
        9.0,
        "Epochs to anneal one layer; all layers are annealed after period times layers.",
        "schedule",
        "scales_with_epochs",
    )
    update: Literal["iteration", "epoch"] = option(
        "iteration", "Update the noise at every iteration, or once per epoch."
    )
    truncate: bool = option(
        True,
        "End the backward pass at annealed layers, which pass no gradient.",
        changes_result=False,
    )
    freeze: bool = option(
        False, "Freeze parameters before annealed layers, which momentum would still move."
    )

    def schedule(self, layers: int) -> Schedule:
        """Return the noise schedule of a network with that many quantised layers."""
        values = {name: getattr(self, name) for name in names_with("schedule", NoiseOptions)}
        if self.std0 is None:
            values["std0"] = noises.get(self.noise).std_within(0.5)
        return Schedule(layers=layers, **values)

    def _check_together(self) -> None:
        super()._check_together()
        if self.freeze and not self.truncate:
            raise SoftstairError(
                "freeze goes with truncate, but truncate=False was given.", field="freeze"
            )
        self.schedule(1)


@dataclass(frozen=True)
class OptimiserOptions(Options):
    """The optimiser, its learning rate, and how long it runs."""

    optimiser: Literal["adam", "sgd"] = option(
        "adam", "Adam, or stochastic gradient descent with momentum."
    )
    learning_rate: float = option(1e-3, "Initial learning rate.", low=0.0, high=1e6)
    momentum: float = option(0.9, "Momentum of sgd.", low=0.0, high=0.999999)
    weight_decay: float = option(0.0, "Weight decay.", low=0.0, high=1e6)
    drop: float | None = option(
        32.0,
        "Epoch at which the learning rate drops (None: never).",
        "scales_with_epochs",
        low=0.0,
        high=1e9,
    )
    drop_factor: float = option(0.1, "Factor by which the learning rate drops.", low=0.0, high=1e6)
    batch: int = option(
        64, "Examples per batch; an incomplete last batch is left out.", low=2, high=10**9
    )
    epochs: int = option(
        40,
        "Passes over the data; as a flag, scales period and drop.",
        "in_tables",
        low=1,
        high=10**7,
    )

    def learning_rate_at(self, t: float) -> float:
        """Return the learning rate at time ``t`` in epochs, counting from 0."""
        dropped = self.drop is not None and t >= self.drop
        return self.learning_rate * self.drop_factor if dropped else self.learning_rate


@dataclass(frozen=True)
class SplitOptions(Options):
    """What is trained on, what validates, and how it is evaluated."""

    statistics: Literal["running", "fresh"] = option(
        "running",
        "Evaluate batch normalisation with its running averages, or with statistics estimated "
        "without noise on about 4,096 augmented training examples.",
        older_value="running",
    )
    fold: int = option(0, "Fold that validates, counting from 0.", low=0, high=10**9)
    folds: int = option(5, "Number of folds of the training set.", low=2, high=10**9)
    seed: int = option(
        0, "Seed of weights, order, augmentation and random forward passes.", low=0, high=2**63 - 1
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.fold >= self.folds:
            raise SoftstairError(
                f"fold must be less than folds, {self.folds}, counting from 0, but {self.fold} "
                "was given.",
                field="fold",
            )


@dataclass(frozen=True)
class ExecutionOptions(Options):
    """How a training step is computed."""

    precision: Literal["auto", "float32", "tf32", "bfloat16"] = option(
        "auto", "Precision of training steps (auto: bfloat16 on a GPU that has it).", "in_tables"
    )
    compile: Literal["auto", "always", "never"] = option(
        "auto",
        "Compile the network with torch.compile (auto: in long runs on a GPU without fused "
        "kernels).",
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
        """Return the precision of training steps on a device: float32, tf32 or bfloat16.

        >>> ExecutionOptions().precision_on(torch.device("cpu"))
        'float32'
        """
        cuda = device.type == "cuda"
        if self.precision == "auto":
            return "bfloat16" if cuda and torch.cuda.is_bf16_supported(False) else "float32"
        has_tf32 = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
        if self.precision == "tf32" and not has_tf32:
            raise SoftstairError(
                f"precision must be auto, float32 or bfloat16 on {device}, which has no TF32, but "
                "'tf32' was given.",
                field="precision",
            )
        return self.precision

    def _check_together(self) -> None:
        super()._check_together()
        if self.kernels == "triton" and self.compile == "always":
            raise SoftstairError(
                "kernels must be auto or reference with compile=always, since a compiler makes "
                "its own kernels, but 'triton' was given.",
                field="kernels",
            )
