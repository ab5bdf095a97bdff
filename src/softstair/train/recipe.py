"""A recipe: everything that decides how a network is trained, in one frozen, checked record."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from softstair import noise as noises
from softstair._check import shortened
from softstair.schedule import Interval, Power, Schedule
from softstair.stair import Stair
from softstair.train.stairs import StairName, named

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Every degree of freedom of the paper, and what else a training needs; the defaults train a
    ternary network on the digits. A recipe that makes no sense is refused when it is built.

    >>> Recipe(epochs=40, period=5.0, drop=32.0).rescaled(80).period
    10.0
    """

    data: str = "digits"
    """digits, cifar10, svhn, speech, or your own function as package.module:load."""
    model: str = "auto"
    """vgg8, dscnn, digits, or your own function as package.module:build; auto: the data's own."""
    limit: int | None = None
    """Train and test on so many examples alone; None: on all."""
    augment: Literal["none", "crop", "crop-flip", "shift"] = "none"
    """Pictures: random crops of the image padded by 4 black pixels, and random flips; speech:
    random shifts by up to a tenth of a second."""
    integer_input: bool = False
    """Let a whole number of the input's bytes be 0, and a power of two of them 1, instead of their
    mean and std: a network that is to run in integers sees the input exactly."""
    centre_input: bool = True
    """Centre the input where the data set's own mean and std do not: speech is seen as
    (x - 128)/16 instead of x. No effect on images and digits, which their mean centres already."""

    weights: StairName | Literal["float"] = "ternary"
    """Stair of the weights."""
    weight_quantum: float = 1.0
    """Quantum of the weights' stair."""
    features: StairName | Literal["float"] = "ternary"
    """Stair of the features; weights and features in float: the network's float twin."""
    feature_quantum: float = 1.0
    """Quantum of the features' stair."""
    thresholds: Literal["midpoint", "floor"] = "midpoint"
    """Of intN and uintN: half-way between levels, as in the paper's experiments, or at the levels,
    as in its text."""
    last_layer: Literal["float", "stair"] = "float"
    """Whether the weights of the last layer are quantised too."""
    skip: tuple[str, ...] = ()
    """Modules, by name or pattern, that stay in float besides."""

    noise: Literal["uniform", "triangular", "normal", "logistic"] = "uniform"
    """Family of noise."""
    forward: Literal["expectation", "mode", "random", "hard"] = "mode"
    """What the forward pass computes from the noise."""
    static_mean: bool = True
    """Keep the noise's mean where it starts, or let it decay to 0."""
    static_std: bool = False
    """Keep the noise's std where it starts, or let it decay to 0."""
    mean0: float | None = None
    """First mean in quanta; None: 0 if static, else -0.5."""
    std0: float | None = None
    """First std in quanta; None: 95% of the noise (all, if bounded) within half a quantum."""
    interval: Interval = "partition"
    """When each layer anneals: one after another from the input on (partition), all together
    (overlapped), from one start, or to one end."""
    power: Power = "homogeneous"
    """How fast it does within its interval: all alike, or the faster the nearer to the input."""
    period: float = 9.0
    """Epochs that one layer takes to anneal; all are annealed after period times layers."""
    update: Literal["iteration", "epoch"] = "iteration"
    """Move the noise at every iteration, or once an epoch."""
    truncate: bool = True
    """End the backward pass at annealed layers, behind which no gradient is left."""
    freeze: bool = False
    """Parameters behind annealed layers stand still (momentum would move them on)."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """Adam, or stochastic gradient descent with momentum."""
    learning_rate: float = 1e-3
    """First learning rate."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    drop: float | None = 32.0
    """Epoch from which the learning rate is lower; None: never."""
    drop_factor: float = 0.1
    """By how much it is then multiplied."""
    batch: int = 64
    """Examples in a batch; what is left over of an epoch's order is left out."""
    epochs: int = 40
    """How often the training examples are seen; as a flag, period and drop follow in proportion."""

    statistics: Literal["running", "fresh"] = "running"
    """Batch normalisations are evaluated with what they averaged over their last batches, or with
    what is estimated anew, without noise, from some 4,096 training examples, augmented as ever."""

    fold: int = 0
    """Which fold validates, counting from 0."""
    folds: int = 5
    """Into how many folds the training partition is cut."""
    seed: int = 0
    """Seed of weights, order, augmentation and random forward passes; folds do not depend on it."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Of the training steps; tf32: float32 whose factors a GPU rounds to 11 bits; auto: bfloat16
    on a GPU that has it, else float32. Evaluation is in float32."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the network with torch.compile; auto: on a GPU, where the run is long enough and its
    layers are not fused by kernels of softstair's own."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """What works on the stairs: kernels in Triton (a GPU), or plain torch; auto: the fastest."""
    capture: Literal["auto", "always", "never"] = "auto"
    """Run a training step on a GPU as one captured graph; auto: unless the model is your own."""

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, (low, high, allowed) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be {allowed}, but {shortened(value)} was given.")
        if self.fold >= self.folds:
            raise ValueError(
                f"fold must be less than folds, {self.folds}, counting from 0, but {self.fold} "
                "was given."
            )
        suited = AUGMENTATIONS.get(self.data, (self.augment,))
        if self.augment not in suited:
            raise ValueError(
                f"augment must be one of {', '.join(suited)} for {self.data}, but "
                f"{self.augment!r} was given."
            )
        if self.kernels == "triton" and self.compile == "always":
            raise ValueError(
                "kernels must be auto or reference with compile=always, since a compiler makes "
                "kernels of its own, but 'triton' was given."
            )
        if self.freeze and not self.truncate:
            raise ValueError("freeze goes with truncate, but truncate=False was given.")
        self.stair("weights"), self.stair("features"), self.schedule(1)

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantised: the float twin."""
        return self.weights == self.features == "float"

    def stair(self, of: Literal["weights", "features"]) -> Stair | None:
        """The stair of weights or features; None for float."""
        name = getattr(self, of)
        quantum = self.weight_quantum if of == "weights" else self.feature_quantum
        return None if name == "float" else named(name, quantum, self.thresholds)

    def precision_on(self, device: torch.device) -> str:
        """The precision of the training steps on a device: float32, tf32 or bfloat16.

        >>> Recipe().precision_on(torch.device("cpu"))
        'float32'
        """
        cuda = device.type == "cuda"
        if self.precision == "auto":
            return "bfloat16" if cuda and torch.cuda.is_bf16_supported(False) else "float32"
        has_tf32 = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
        if self.precision == "tf32" and not has_tf32:
            raise ValueError(
                f"precision must be auto, float32 or bfloat16 on {device}, which has no TF32, but "
                "'tf32' was given."
            )
        return self.precision

    def schedule(self, layers: int) -> Schedule:
        """The noise schedule of a network with so many quantised layers."""
        std0 = noises.get(self.noise).std_within(0.5) if self.std0 is None else self.std0
        names = ("period", "interval", "power", "static_mean", "static_std", "mean0")
        return Schedule(layers=layers, std0=std0, **{name: getattr(self, name) for name in names})

    def learning_rate_at(self, t: float) -> float:
        """The learning rate at a time in epochs, counting from 0."""
        low = self.drop is not None and t >= self.drop
        return self.learning_rate * self.drop_factor if low else self.learning_rate

    def rescaled(self, epochs: int) -> "Recipe":
        """The same recipe over another number of epochs; period and drop follow in proportion."""
        if epochs == self.epochs:
            return self
        fewer = replace(self, epochs=epochs)  # refuses what is no number of epochs
        drop = None if self.drop is None else _stretched(self.drop, epochs, self.epochs)
        return replace(fewer, period=_stretched(self.period, epochs, self.epochs), drop=drop)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for :func:`json.dumps`."""
        return {**asdict(self), "skip": list(self.skip)}

    @classmethod
    def from_json(cls, data: Any) -> "Recipe":
        """The recipe that :meth:`to_json` wrote, before some fields came to it perhaps."""
        names = {field.name for field in fields(cls)}
        given = set(data) if isinstance(data, Mapping) else set()
        needed = names - set(FIELDS_ADDED_LATER)
        if not needed <= given <= names:
            missing, unknown = sorted(needed - given), sorted(map(repr, given - names))
            what = f"{', '.join(missing[:3])} missing" if missing else f"{unknown[0][:80]} unknown"
            raise ValueError(
                f"a recipe must hold each of its {len(names)} fields and nothing else, but there "
                f"is {what}."
            )
        return cls(**{**FIELDS_ADDED_LATER, **data})

    def differences(self, other: "Recipe") -> list[str]:
        """The names of the fields in which another recipe differs."""
        mine, others = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != others[name]]

    def training_differences(self, other: "Recipe") -> list[str]:
        """Return the names of the fields in which another recipe describes another training.

        ``compile``, ``kernels`` and ``capture`` may differ, and ``precision`` if one of the two is
        ``auto``, which the device decides.

        >>> Recipe(fold=1, kernels="reference").training_differences(Recipe(precision="float32"))
        ['fold']
        """
        allowed = EXECUTION
        if "auto" in (self.precision, other.precision):
            allowed = EXECUTION | {"precision"}
        return [name for name in self.differences(other) if name not in allowed]


EXECUTION = frozenset({"compile", "kernels", "capture"})
"""Fields that choose how a step is computed, and not which training it belongs to."""

FIELDS_ADDED_LATER: dict[str, Any] = {
    "integer_input": False,
    "centre_input": False,
    "statistics": "running",
}
"""Fields that older recipes do not have, and the values that these recipes are trained with."""

_PICTURES = ("none", "crop", "crop-flip")
AUGMENTATIONS = {
    "digits": _PICTURES,
    "cifar10": _PICTURES,
    "svhn": _PICTURES,
    "speech": ("none", "shift"),
}

RANGES: dict[str, tuple[float, float, str]] = {
    "limit": (1, 10**12, "a whole number from 1 to 10^12, or None"),
    "weight_quantum": (1e-30, 1e30, "a number from 1e-30 to 1e30"),
    "feature_quantum": (1e-30, 1e30, "a number from 1e-30 to 1e30"),
    "learning_rate": (0.0, 1e6, "a number from 0 to 1e6"),
    "momentum": (0.0, 0.999999, "a number from 0 to 0.999999"),
    "weight_decay": (0.0, 1e6, "a number from 0 to 1e6"),
    "drop": (0.0, 1e9, "a number of epochs from 0 to 1e9, or None"),
    "drop_factor": (0.0, 1e6, "a number from 0 to 1e6"),
    "batch": (2, 10**9, "a whole number from 2 to 10^9: batch-norm needs two examples"),
    "epochs": (1, 10**7, "a whole number from 1 to 10^7"),
    "fold": (0, 10**9, "a whole number from 0 to 10^9"),
    "folds": (2, 10**9, "a whole number from 2 to 10^9"),
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
}


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Recipe)


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value, if it is of the kind that the field's annotation says."""
    options = _options(kind)
    words = tuple(word for option in options for word in get_args(option) or ())
    if any(get_origin(option) is Literal for option in options):
        if not isinstance(value, str) or value not in words:
            raise ValueError(
                f"{name} must be one of {', '.join(words)}, but {shortened(value)} was given."
            )
        return value
    if NoneType in options and value is None:
        return value
    if bool in options:
        good, wanted = isinstance(value, bool), "True or False"
    elif int in options:
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif float in options:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good, wanted = good and abs(value) <= sys.float_info.max, "a finite number"
        value = float(value) if good else value
    elif str in options:
        good, wanted = isinstance(value, str) and value != "", "a name"
    else:
        good = isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)
        wanted = "names of modules"
        value = tuple(value) if good else value
    if not good:
        none = " or None" if NoneType in options else ""
        raise ValueError(f"{name} must be {wanted}{none}, but {shortened(value)} was given.")
    return value


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation."""
    union = get_origin(kind) not in (None, Literal, tuple)
    return get_args(kind) if union else (kind,)


def _stretched(time: float, epochs: int, before: int) -> float:
    """In proportion; in twelve digits, so that it is the same by one step and by two.

    >>> _stretched(_stretched(32, 6, 40), 2, 6)
    1.6
    """
    return float(f"{time * epochs / before:.12g}")
