"""Designs: which configurations are trained, and on which folds. A grid as data.

The paper's three are :data:`DESIGNS`; :func:`softstair.experiments.files.read` makes one of a TOML
file. A configuration is a recipe with a name; on a fold it is a unit, which has a run directory.

>>> {name: len(design.configurations) for name, design in DESIGNS.items()}
{'paper-cifar10': 264, 'paper-svhn': 32, 'paper-speech': 32}
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from softstair import noise as noises
from softstair.schedule import INTERVALS, POWERS
from softstair.train.recipe import Recipe, preset

__all__ = ["DESIGNS", "FREEDOMS", "Configuration", "Design", "Unit", "named", "value_of"]

FREEDOMS = ("noise", "forward", "static_mean", "static_std", "interval", "power")
"""The paper's degrees of freedom, as a recipe names them."""
FORWARDS = ("expectation", "mode", "random")
FIELDS = tuple(field.name for field in fields(Recipe))
HINTS = get_type_hints(Recipe)
OPTIONAL = tuple(name for name in FIELDS if NoneType in get_args(HINTS[name]))
"""The fields that may be None."""
NONE = "none"
"""The interval and the power law of noise that stays as it is: they do not matter."""


@dataclass(frozen=True)
class Configuration:
    """A recipe with a name, which is the name of its directory; its folds are units."""

    name: str
    recipe: Recipe

    def unit(self, fold: int) -> "Unit":
        """This configuration on a fold."""
        return Unit(self.name, replace(self.recipe, fold=fold))


@dataclass(frozen=True)
class Unit:
    """One training: a configuration on one fold."""

    configuration: str
    recipe: Recipe

    @property
    def name(self) -> str:
        """Such as uniform-mode-static/fold-0."""
        return f"{self.configuration}/fold-{self.recipe.fold}"

    def path(self, folder: Path) -> Path:
        """Its run directory, in the grid's."""
        return folder / self.configuration / f"fold-{self.recipe.fold}"


@dataclass(frozen=True)
class Design:
    """Configurations, and the folds on which each is trained.

    >>> few = DESIGNS["paper-svhn"].where({"interval": ["partition"], "power": ["progressive"]})
    >>> len(few), next(few.units()).name
    (15, 'uniform-expectation-std-partition-progressive/fold-0')
    """

    name: str
    configurations: tuple[Configuration, ...]
    folds: tuple[int, ...]
    names_folds: bool = True
    """Whether it says which folds it takes; else it takes all that its recipes have."""
    left_out: int = 0
    """Combinations that are no configurations of it, since it says so."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.configurations]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"each configuration must have a name of its own, but {twice!r} was given to two."
            )
        if not names:
            raise ValueError("a design must have a configuration at least, but none was given.")
        least = min(one.recipe.folds for one in self.configurations)
        good = all(type(fold) is int and 0 <= fold < least for fold in self.folds)
        if not self.folds or not good or len(set(self.folds)) != len(self.folds):
            raise ValueError(
                f"folds must be different whole numbers from 0 to {least - 1}, but "
                f"{list(self.folds)} was given."
            )

    def __len__(self) -> int:
        """The number of units."""
        return len(self.configurations) * len(self.folds)

    def units(self) -> Iterator[Unit]:
        """Every configuration on every fold; the folds of one configuration lie together."""
        for configuration in self.configurations:
            for fold in self.folds:
                yield configuration.unit(fold)

    def where(self, wanted: Mapping[str, Sequence[str]]) -> "Design":
        """The configurations in which each of these fields has one of these values."""
        left = self.configurations
        for name, allowed in wanted.items():
            refuse_unknown(name)
            values = list(dict.fromkeys(value_of(one.recipe, name) for one in self.configurations))
            allowed = [_like(value, values) for value in allowed]
            for value in allowed:
                if value not in values:
                    raise ValueError(
                        f"{name} must be {_or(values)} in {self.name}{_perhaps(value, values)}, "
                        f"but {value!r} was given."
                    )
            left = tuple(one for one in left if value_of(one.recipe, name) in allowed)
        if not left:
            asked = " ".join(f"{name}={','.join(values)}" for name, values in wanted.items())
            raise ValueError(
                f"{self.name} has no configuration with {asked}: leave one of them out."
            )
        return replace(self, configurations=left)

    def rescaled(self, epochs: int) -> "Design":
        """The same over another number of epochs; periods and drops follow in proportion."""
        return self.each(lambda recipe: recipe.rescaled(epochs))

    def each(self, change: Callable[[Recipe], Recipe]) -> "Design":
        """The same with another recipe for each."""
        changed = [replace(one, recipe=change(one.recipe)) for one in self.configurations]
        return replace(self, configurations=tuple(changed))

    def varied(self) -> tuple[str, ...]:
        """The fields in which its configurations differ."""
        recipes = [one.recipe for one in self.configurations]
        return tuple(name for name in FIELDS if len({value_of(one, name) for one in recipes}) > 1)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for :func:`json.dumps`."""
        units = [{"name": one.name, **one.recipe.to_json()} for one in self.configurations]
        return {"name": self.name, "folds": list(self.folds), "configurations": units}


def value_of(recipe: Recipe, name: str) -> str:
    """A field of a recipe in words, as ``--where`` names it; ``none`` where it does not matter.

    >>> value_of(Recipe(static_std=True), "interval"), value_of(Recipe(), "static_std")
    ('none', 'false')
    """
    if name in ("interval", "power") and (
        recipe.is_float or (recipe.static_mean and recipe.static_std)
    ):
        return NONE
    value = getattr(recipe, name)
    if isinstance(value, tuple):
        return ",".join(value) or NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_unknown(name: str) -> None:
    """Refuses what is no field of a recipe, and the fold, which no configuration has by itself."""
    if name == "fold":
        raise ValueError(
            "folds are chosen by folds = [0, 1] in the file of a design, or by --folds, but fold "
            "was given."
        )
    if name not in FIELDS:
        raise ValueError(
            f"a degree of freedom must be one of {', '.join(FREEDOMS)}, or another field of a "
            f"recipe{_perhaps(name, FIELDS)}, but {name!r} was given."
        )


def configuration(recipe: Recipe) -> Configuration:
    """A recipe under the name that the paper's degrees of freedom give it."""
    words: list[str] = [recipe.noise, recipe.forward]
    moving = [what for what in ("mean", "std") if not getattr(recipe, f"static_{what}")]
    words += ["_".join(moving), recipe.interval, recipe.power] if moving else ["static"]
    return Configuration("-".join(words), recipe)


def _full(base: Recipe) -> Iterator[dict[str, Any]]:
    """CIFAR-10: every combination that differs from the others. Under static variance the
    expectation would never become a stair, and is left out; without movement neither interval nor
    power law matters."""
    still = (True, False)
    lists = (noises.names(), FORWARDS, still, still, INTERVALS, POWERS)
    for values in product(*lists):
        one = dict(zip(FREEDOMS, values, strict=True))
        if one["static_std"] and one["forward"] == "expectation":
            continue
        same = (one["interval"], one["power"]) == (base.interval, base.power)
        if not (one["static_mean"] and one["static_std"]) or same:
            yield one


def _small(base: Recipe) -> Iterator[dict[str, Any]]:
    """SVHN and Speech Commands: static noise of every family, and uniform noise whose variance
    alone is annealed."""
    for one in _full(base):
        if one["static_mean"] and (one["static_std"] or one["noise"] == "uniform"):
            yield one


def _designed(
    name: str, grid: Callable[[Recipe], Iterator[dict[str, Any]]], folds: int = 5
) -> Design:
    base = preset(name)
    made = tuple(configuration(replace(base, **one)) for one in grid(base))
    return Design(name, made, tuple(range(folds)), names_folds=False)


DESIGNS: dict[str, Design] = {
    "paper-cifar10": _designed("paper-cifar10", _full),
    "paper-svhn": _designed("paper-svhn", _small),
    "paper-speech": _designed("paper-speech", _small),
}


def named(name: str) -> Design:
    """The paper's design of that name."""
    if name in DESIGNS:
        return DESIGNS[name]
    raise ValueError(
        f"a design must be one of {', '.join(DESIGNS)}, or a TOML file, but {name!r} was given."
    )


def conditions(words: Sequence[str], flag: str) -> dict[str, list[str]]:
    """What a flag such as ``--where`` was given: field=value,value for each field.

    >>> conditions(["interval=partition,same_end", "forward=mode"], "--where")
    {'interval': ['partition', 'same_end'], 'forward': ['mode']}
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not values or not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{flag} must be given as field=value,value, but {word!r} was given.")
        found.setdefault(name.replace("-", "_"), []).extend(values.split(","))
    return found


def _like(value: str, values: Sequence[str]) -> str:
    """The one of the values that is the same number, or the value.

    >>> _like("4", ["0.5", "4.0"]), _like("mode", ["mode", "random"])
    ('4.0', 'mode')
    """
    with contextlib.suppress(ValueError):
        number = float(value)
        for one in values:
            if value not in values and float(one) == number:
                return one
    return value


def _perhaps(word: str, words: Sequence[str]) -> str:
    """The one of the words that may have been meant."""
    near = difflib.get_close_matches(word, words, n=1)
    return f", perhaps {near[0]}" if near else ""


def _or(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
