"""Recipes: everything that decides how a network is trained, in one frozen, checked record."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from softstair import _check, noise as noises
from softstair._errors import SoftstairError
from softstair.regularise import Forward
from softstair.schedule import Interval, Power, Schedule
from softstair.train import options
from softstair.train.optimiser import OptimiserOptions
from softstair.train.options import Options, describe, option

LAST_SHARE = 0.97
"""Share of a run by which annealing ends if its period is fitted, or if it begins late."""
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True)
class NoiseOptions(Options):
    """The noise, and how it is annealed."""

    noise: Literal["uniform", "triangular", "normal", "logistic"] | str = option(
        "uniform",
        "Noise family, or package.module:object, a Noise or Estimator of your own.",
        "own_code",
        "architecture",
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
        within=options.TIME,
    )
    update: Literal["iteration", "epoch"] = option(
        "iteration", "Update the noise at every iteration, or once per epoch."
    )
    truncate: bool = option(
        True, "End the backward pass at layers that pass no gradient.", changes_result=False
    )

    def _check_together(self) -> None:
        super()._check_together()
        if ":" in self.noise and self.std0 is None:
            raise _check.invalid("std0", f"must be given with your own noise, {self.noise!r}")


@dataclass(frozen=True)
class ExecutionOptions(Options):
    """How a training step is computed."""

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

        >>> ExecutionOptions().precision_on(torch.device("cpu"))
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

    def _check_together(self) -> None:
        super()._check_together()
        if self.kernels == "triton" and self.compile == "always":
            raise _check.wrong("kernels", "triton", "auto or reference with compile=always")


@dataclass(frozen=True)
class Recipe(
    # A dataclass takes the fields of its last base first.
    ExecutionOptions,
    options.SplitOptions,
    options.TeacherOptions,
    OptimiserOptions,
    NoiseOptions,
    options.NetworkOptions,
    options.DataOptions,
):
    """All settings of one training. The defaults are a plain ternary network on the digits.

    The fields are declared in the groups that it inherits, and are given by name.

    Raises:
        SoftstairError: If a value is not allowed, or if two contradict each other.

    >>> Recipe(epochs=40, period=5.0, drop=32.0).rescaled(80).period
    10.0
    """

    def __post_init__(self) -> None:
        if isinstance(self.anneal_from, str):
            if (match := PERCENT.fullmatch(self.anneal_from)) is None:
                allowed = "a number of epochs, or a share of them such as 50%"
                raise _check.wrong("anneal_from", self.anneal_from, allowed)
            epochs = _check.integer("epochs", self.epochs, 1)
            object.__setattr__(self, "anneal_from", float(match[1]) / 100 * epochs)
        if self.period == "auto":
            object.__setattr__(self, "period", None)
        super().__post_init__()

    def _check_together(self) -> None:
        super()._check_together()
        self._schedule(1)
        if self.loss is not None:
            for name in ("label_smoothing", "mixup", "cutmix"):
                if value := getattr(self, name):
                    raise _check.wrong(name, value, "0 with your own loss")

    def schedule(self, layers: int) -> Schedule:
        """Return the noise schedule of a network with that many quantised layers.

        Raises:
            SoftstairError: If annealing begins late and would not end by 0.97 of the epochs, or by
                the last epoch if the noise is updated once per epoch.

        >>> schedule = Recipe(epochs=100, anneal_from="50%", period=None).schedule(layers=4)
        >>> schedule.start, schedule.period, schedule.end
        (50.0, 11.75, 97.0)
        """
        schedule = self._schedule(layers)
        last, place = self._last
        if schedule.start > 0 and schedule.end > last * (1 + 1e-5):  # the message has six digits
            allowed = f"must be at most {(last - schedule.start) / layers:g} for {layers} layers"
            span = f"to anneal from {schedule.start:g} until {last:g}, {place}"
            raise _check.invalid("period", f"{allowed} {span}, but {schedule.period:g} was given")
        return schedule

    def _schedule(self, layers: int) -> Schedule:
        values = {name: getattr(self, name) for name in fields_with("schedule")}
        if self.std0 is None:
            values["std0"] = noises.get(self.noise).std_within(0.5)
        start = float(self.anneal_from) if self.is_annealed else 0.0
        last, place = self._last
        if start >= last:
            allowed = f"must be below {last:g}, {place}"
            raise _check.invalid("anneal_from", f"{allowed}, but {start:g} was given")
        if self.period is None:
            values["period"] = (last - start) / layers
        return Schedule(layers=layers, start=start, **values)

    @property
    def _last(self) -> tuple[float, str]:
        """Latest end of an annealing that begins late or whose period is fitted, and its name."""
        last = LAST_SHARE * self.epochs
        # Noise that is updated once per epoch is in the last one what it is at its beginning.
        if self.update == "epoch" and 1 < self.epochs < last + 1:
            return self.epochs - 1.0, "the beginning of the last epoch"
        return last, f"{LAST_SHARE:g} of the epochs"

    def rescaled(self, epochs: int) -> "Recipe":
        """Return the recipe for another number of epochs; times in epochs scale in proportion."""
        if epochs == self.epochs:
            return self
        epochs = describe(Recipe)["epochs"].check(epochs)
        # Twelve digits, so that two steps of scaling give the same as one.
        scaled: dict[str, Any] = {
            name: float(f"{time * epochs / self.epochs:.12g}")
            for name in fields_with("scales_with_epochs")
            if (time := getattr(self, name)) is not None
        }
        return replace(self, epochs=epochs, **scaled)

    def differences(self, other: "Recipe") -> list[str]:
        """Return the names of the fields in which another recipe differs."""
        return [name for name in FIELDS if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        return {**asdict(self), "skip": list(self.skip)}

    @classmethod
    def from_json(cls, data: Any) -> "Recipe":
        """Return the recipe that :meth:`to_json` wrote."""
        given = set(data) if isinstance(data, Mapping) else set()
        missing = [name for name in FIELDS if name not in given]
        unknown = sorted(_check.shortened(name) for name in given - set(FIELDS))
        if missing or unknown:
            problem = f"{', '.join(missing[:3])} missing" if missing else f"{unknown[0]} unknown"
            raise SoftstairError(
                f"a recipe must have each of its {len(FIELDS)} fields and no other, but there is "
                f"{problem}."
            )
        return cls(**data)

    @property
    def is_annealed(self) -> bool:
        """Whether the noise changes."""
        return not (self.is_float or (self.static_mean and self.static_std))


FIELDS = tuple(describe(Recipe))


def fields_with(fact: options.Fact) -> tuple[str, ...]:
    """Return the names of the fields of which a fact is true, in order."""
    return tuple(name for name, known in describe(Recipe).items() if fact in known.facts)


PresetName = Literal[
    "digits",
    "paper-cifar10", "paper-svhn", "paper-speech",
    "best-cifar10", "best-cifar10-ternary", "best-cifar10-int4",
    "best-svhn", "best-svhn-ternary", "best-svhn-int4",
    "best-speech", "best-speech-ternary",
]  # fmt: skip

_DIGITS = Recipe(
    anneal_from="50%", period=None, learning_rate=3e-3, latent_rate=0.03, rate_shape="cosine",
    clip_latent=True, label_smoothing=0.1, drop=16.0, epochs=20,
)  # fmt: skip

_CIFAR10 = Recipe(
    data="cifar10", model="vgg8", augment="crop-flip", centre_input=False, static_std=True,
    period=50.0, update="epoch", drop=400.0, batch=256, epochs=500,
)  # fmt: skip

_SPEECH = replace(
    _CIFAR10, data="speech", model="dscnn", augment="none", weights="int4", weight_quantum=0.07,
    features="uint4", feature_quantum=0.07, period=10.0, drop=100.0, epochs=120,
)  # fmt: skip
_BEST_CIFAR10 = Recipe(
    data="cifar10", model="vgg8", augment="crop-flip", cutout=10, cutmix=0.5, integer_input=True,
    first_layer="int8", static_std=True, optimiser="adamw", learning_rate=3e-3, latent_rate=0.03,
    norm_rate=3.0, rate_shape="cosine", clip_latent=True, drop=None, batch=256, epochs=300,
    init_from="auto", teacher="auto", precision="fast",
)  # fmt: skip
_TERNARY: dict[str, Any] = {"first_layer": "same"}
_INT4: dict[str, Any] = {
    "weights": "int4", "weight_quantum": 0.125, "features": "uint4", "feature_quantum": 0.25,
    "first_layer": "same",
}  # fmt: skip
_BEST_SVHN = replace(_BEST_CIFAR10, data="svhn", augment="crop", epochs=200)
_BEST_SPEECH = replace(
    _BEST_CIFAR10, data="speech", model="dscnn", augment="shift", cutout=0, cutmix=0.0,
    time_mask=4, coefficient_mask=2, weights="int4", weight_quantum=0.07, features="uint4",
    feature_quantum=0.15, first_layer="same", learning_rate=2e-4, epochs=480,
)  # fmt: skip

PRESETS: dict[str, Recipe] = {
    "digits": _DIGITS,
    "paper-cifar10": _CIFAR10,
    # Digits that are flipped are no longer digits; the authors flipped them all the same.
    "paper-svhn": replace(_CIFAR10, data="svhn"),
    "paper-speech": _SPEECH,
    "best-cifar10": _BEST_CIFAR10,
    "best-cifar10-ternary": replace(_BEST_CIFAR10, **_TERNARY),
    "best-cifar10-int4": replace(_BEST_CIFAR10, **_INT4),
    "best-svhn": _BEST_SVHN,
    "best-svhn-ternary": replace(_BEST_SVHN, **_TERNARY),
    "best-svhn-int4": replace(_BEST_SVHN, **_INT4),
    "best-speech": _BEST_SPEECH,
    "best-speech-ternary": replace(
        _BEST_SPEECH, weights="ternary", weight_quantum=1.0, feature_quantum=0.2, learning_rate=3e-3
    ),
}


def preset(name: str) -> Recipe:
    """Return the recipe of that name.

    >>> preset("paper-cifar10").rescaled(100).period
    10.0
    """
    return PRESETS[_check.choice("preset", name, PRESETS)]
