"""Recipes: everything that decides how a network is trained, in one frozen, checked record."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from softstair import _check, noise as noises
from softstair._errors import SoftstairError
from softstair.schedule import Schedule
from softstair.train.groups import PERCENT, DataOptions, NetworkOptions, NoiseOptions, RunOptions
from softstair.train.optimiser import OptimiserOptions
from softstair.train.options import Fact, Option, describe

LAST_SHARE = 0.97
"""Share of a run by which annealing ends if its period is fitted, or if it begins late."""


@dataclass(frozen=True)
class Recipe:
    """All settings of one training, in groups. The defaults are a ternary network on the digits.

    On the command line and in files a recipe is flat: each field has a name of its own. The fields
    ``name`` of the data, the noise and the optimiser are ``data``, ``noise`` and ``optimiser``.

    Raises:
        SoftstairError: If a value is not allowed, or if two contradict each other.

    >>> recipe = Recipe(network=NetworkOptions(bits="int4"), run=RunOptions(epochs=80))
    >>> recipe == Recipe.from_flat(bits="int4", epochs=80)
    True
    >>> recipe.replace(noise="normal").noise.name
    'normal'
    """

    data: DataOptions = field(default_factory=DataOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    optimiser: OptimiserOptions = field(default_factory=OptimiserOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        for name, kind in GROUPS.items():
            if not isinstance(value := getattr(self, name), kind):
                allowed = f"{kind.__name__}(…); Recipe.from_flat takes flat names"
                raise _check.wrong(name, value, allowed)
        if isinstance(share := self.noise.anneal_from, str):
            match = PERCENT.fullmatch(share)
            assert match is not None  # its group has checked it
            noise = replace(self.noise, anneal_from=float(match[1]) / 100 * self.run.epochs)
            object.__setattr__(self, "noise", noise)
        self._schedule(1)
        if self.optimiser.loss is not None:
            for name in ("label_smoothing", "mixup", "cutmix"):
                if value := self[name]:
                    raise _check.wrong(name, value, "0 with your own loss")

    def to_flat(self) -> dict[str, Any]:
        """Return every field by its flat name, as plain data for :func:`json.dumps`."""
        values = {flat: self[flat] for flat in PLACES}
        return {**values, "skip": list(self.network.skip)}

    def __getitem__(self, flat: str) -> Any:
        """Return a field by its flat name.

        >>> Recipe()["data"]
        'digits'
        """
        group, name = PLACES[flat]
        return getattr(getattr(self, group), name)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> "Recipe":
        """Return the recipe with these fields, by their flat names; others have their defaults.

        >>> Recipe.from_flat(Recipe().to_flat()) == Recipe()
        True
        """
        return cls().replace(**{**(values or {}), **more})

    def replace(self, **values: Any) -> "Recipe":
        """Return the recipe with other values of these fields, by their flat names."""
        changes: dict[str, dict[str, Any]] = {}
        for flat, value in values.items():
            if flat not in PLACES:
                problem = f"a recipe has no field {_check.shortened(flat)}"
                raise SoftstairError(f"{problem}{_check.ending(flat, PLACES)}", field=flat)
            group, name = PLACES[flat]
            changes.setdefault(group, {})[name] = value
        groups = {name: replace(getattr(self, name), **own) for name, own in changes.items()}
        return replace(self, **groups)

    def schedule(self, layers: int) -> Schedule:
        """Return the noise schedule of a network with that many quantised layers.

        Raises:
            SoftstairError: If annealing begins late and would not end by 0.97 of the epochs, or by
                the last epoch if the noise is updated once per epoch.

        >>> recipe = Recipe.from_flat(epochs=100, anneal_from="50%", period=None)
        >>> schedule = recipe.schedule(layers=4)
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
        values = {name: getattr(self.noise, name) for name in fields_with("schedule")}
        if self.noise.std0 is None:
            values["std0"] = noises.get(self.noise.name).std_within(0.5)
        start = float(self.noise.anneal_from) if self.is_annealed else 0.0
        last, place = self._last
        if start >= last:
            allowed = f"must be below {last:g}, {place}"
            raise _check.invalid("anneal_from", f"{allowed}, but {start:g} was given")
        if self.noise.period is None:
            values["period"] = (last - start) / layers
        return Schedule(layers=layers, start=start, **values)

    @property
    def _last(self) -> tuple[float, str]:
        """Latest end of an annealing that begins late or whose period is fitted, and its name."""
        epochs = self.run.epochs
        last = LAST_SHARE * epochs
        # Noise that is updated once per epoch is in the last one what it is at its beginning.
        if self.noise.update == "epoch" and 1 < epochs < last + 1:
            return epochs - 1.0, "the beginning of the last epoch"
        return last, f"{LAST_SHARE:g} of the epochs"

    def rescaled(self, epochs: int) -> "Recipe":
        """Return the recipe for another number of epochs; times in epochs scale in proportion.

        >>> Recipe.from_flat(epochs=40, period=5.0, drop=32.0).rescaled(80).noise.period
        10.0
        """
        if epochs == self.run.epochs:
            return self
        epochs = OPTIONS["epochs"].check(epochs)
        # Twelve digits, so that two steps of scaling give the same as one.
        scaled: dict[str, Any] = {
            name: float(f"{time * epochs / self.run.epochs:.12g}")
            for name in fields_with("scales_with_epochs")
            if (time := self[name]) is not None
        }
        return self.replace(epochs=epochs, **scaled)

    def differences(self, other: "Recipe") -> list[str]:
        """Return the flat names of the fields in which another recipe differs."""
        return [name for name in PLACES if self[name] != other[name]]

    @property
    def own_code(self) -> dict[str, str]:
        """The functions of the user's own that it names, by field."""
        named = {name: str(self[name]) for name in fields_with("own_code")}
        return {name: function for name, function in named.items() if ":" in function}

    @property
    def is_annealed(self) -> bool:
        """Whether the noise changes."""
        return not (self.network.is_float or self.noise.is_static)


GROUPS: dict[str, type] = {
    "data": DataOptions,
    "network": NetworkOptions,
    "noise": NoiseOptions,
    "optimiser": OptimiserOptions,
    "run": RunOptions,
}
PLACES = {
    known.flat: (group, name)
    for group, kind in GROUPS.items()
    for name, known in describe(kind).items()
}
"""The group of each flat name, and its name there."""
OPTIONS: dict[str, Option] = {
    known.flat: known for kind in GROUPS.values() for known in describe(kind).values()
}
"""What is known of each field, by its flat name."""


def fields_with(fact: Fact) -> tuple[str, ...]:
    """Return the flat names of the fields of which a fact is true, in order."""
    return tuple(name for name, known in OPTIONS.items() if fact in known.facts)


PresetName = Literal[
    "digits",
    "paper-cifar10", "paper-svhn", "paper-speech",
    "best-cifar10", "best-cifar10-ternary", "best-cifar10-int4",
    "best-svhn", "best-svhn-ternary", "best-svhn-int4",
    "best-speech", "best-speech-ternary",
]  # fmt: skip

_DIGITS = Recipe(
    noise=NoiseOptions(anneal_from="50%", period=None),
    optimiser=OptimiserOptions(
        learning_rate=3e-3, latent_rate=0.03, rate_shape="cosine", clip_latent=True,
        label_smoothing=0.1, drop=16.0,
    ),
    run=RunOptions(epochs=20),
)  # fmt: skip
_CIFAR10 = Recipe(
    data=DataOptions("cifar10", augment="crop-flip", centre_input=False),
    network=NetworkOptions("vgg8"),
    noise=NoiseOptions(static_std=True, period=50.0, update="epoch"),
    optimiser=OptimiserOptions(drop=400.0),
    run=RunOptions(epochs=500, batch=256),
)
_SPEECH = _CIFAR10.replace(
    data="speech", model="dscnn", augment="none", weights="int4", weight_quantum=0.07,
    features="uint4", feature_quantum=0.07, period=10.0, drop=100.0, epochs=120,
)  # fmt: skip
_BEST_CIFAR10 = Recipe(
    data=DataOptions(
        "cifar10", augment="crop-flip", cutout=10, cutmix=0.5, integer_input=True
    ),
    network=NetworkOptions("vgg8", first_layer="int8", init_from="auto"),
    noise=NoiseOptions(static_std=True),
    optimiser=OptimiserOptions(
        "adamw", learning_rate=3e-3, latent_rate=0.03, norm_rate=3.0, rate_shape="cosine",
        clip_latent=True, drop=None, teacher="auto",
    ),
    run=RunOptions(epochs=300, batch=256, precision="fast"),
)  # fmt: skip
_BEST_SVHN = _BEST_CIFAR10.replace(data="svhn", augment="crop", epochs=200)
_BEST_SPEECH = _BEST_CIFAR10.replace(
    data="speech", model="dscnn", augment="shift", cutout=0, cutmix=0.0,
    time_mask=4, coefficient_mask=2, weights="int4", weight_quantum=0.07, features="uint4",
    feature_quantum=0.15, first_layer="same", learning_rate=2e-4, epochs=480,
)  # fmt: skip
_TERNARY: dict[str, Any] = {"first_layer": "same"}
_INT4: dict[str, Any] = {
    "weights": "int4", "weight_quantum": 0.125, "features": "uint4", "feature_quantum": 0.25,
    "first_layer": "same",
}  # fmt: skip

PRESETS: dict[str, Recipe] = {
    "digits": _DIGITS,
    "paper-cifar10": _CIFAR10,
    # Digits that are flipped are no longer digits; the authors flipped them all the same.
    "paper-svhn": _CIFAR10.replace(data="svhn"),
    "paper-speech": _SPEECH,
    "best-cifar10": _BEST_CIFAR10,
    "best-cifar10-ternary": _BEST_CIFAR10.replace(**_TERNARY),
    "best-cifar10-int4": _BEST_CIFAR10.replace(**_INT4),
    "best-svhn": _BEST_SVHN,
    "best-svhn-ternary": _BEST_SVHN.replace(**_TERNARY),
    "best-svhn-int4": _BEST_SVHN.replace(**_INT4),
    "best-speech": _BEST_SPEECH,
    "best-speech-ternary": _BEST_SPEECH.replace(
        weights="ternary", weight_quantum=1.0, feature_quantum=0.2, learning_rate=3e-3
    ),
}


def preset(name: str) -> Recipe:
    """Return the recipe of that name.

    >>> preset("paper-cifar10").rescaled(100).noise.period
    10.0
    """
    return PRESETS[_check.choice("preset", name, PRESETS)]
