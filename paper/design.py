"""Designs: which configurations are trained, and on which folds.

The paper's three are :data:`DESIGNS`; :func:`read_design` reads one from a TOML file. A
configuration is a recipe with a name; on a fold it is a unit, which has a run directory.

>>> {name: len(design.configurations) for name, design in DESIGNS.items()}
{'paper-cifar10': 264, 'paper-svhn': 32, 'paper-speech': 32}
"""

import contextlib
import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper.rows import cell_of, to_row
from paper.tables import Fold
from softstair import noise as noises
from softstair._check import choice, ending, invalid, shortened, suggestion, wrong
from softstair._errors import SoftstairError
from softstair.schedule import INTERVALS, POWERS
from softstair.train import Recipe, preset
from softstair.train.groups import REPLACED
from softstair.train.recipe import OPTIONS

FREEDOMS = ("noise", "forward", "static_mean", "static_std", "interval", "power")
"""The paper's degrees of freedom."""
FORWARDS = ("expectation", "mode", "random")
KEYS: dict[str, type] = {
    "name": str, "preset": str, "folds": list,
    "recipe": dict, "rows": list, "vary": dict, "without": list,
}  # fmt: skip
EVERYTHING = "all"
"""The name of the only configuration of a design in which nothing varies."""
LARGEST_FILE = 1 << 20
MOST_CONFIGURATIONS = 10_000


@dataclass(frozen=True)
class Configuration:
    """A recipe with a name, which is the name of its directory; its folds are units."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Unit:
    """One training: a configuration on one fold."""

    configuration: str
    recipe: Recipe

    @property
    def name(self) -> str:
        """Such as uniform-mode-static/fold-0."""
        return f"{self.configuration}/fold-{self.recipe.data.fold}"

    def path(self, folder: Path) -> Path:
        """Its run directory, in the grid's."""
        return folder / self.name


@dataclass(frozen=True)
class Design:
    """Configurations, and the folds on which each is trained; ("all",) trains on every example.

    Raises:
        SoftstairError: If there is no configuration, a name is repeated, or a fold is invalid.

    >>> few = DESIGNS["paper-svhn"].where({"interval": ["partition"], "power": ["progressive"]})
    >>> len(few), next(few.units()).name
    (15, 'uniform-expectation-std-partition-progressive/fold-0')
    """

    name: str
    configurations: tuple[Configuration, ...]
    folds: tuple[Fold, ...]
    names_folds: bool = True
    """Whether the folds were listed; else they are all folds of the recipes."""

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in self.configurations]
        if not names:
            raise SoftstairError("a design must have at least one configuration.")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise SoftstairError(f"two configurations have the same name, {twice[0]!r}.")
        most = min(configuration.recipe.data.folds for configuration in self.configurations)
        valid = all(type(fold) is int and 0 <= fold < most for fold in self.folds)
        valid = (valid and len(self.folds) > 0) or self.folds == ("all",)
        if not valid or len(set(self.folds)) != len(self.folds):
            allowed = f"different integers from 0 to {most - 1}, or 'all'"
            raise wrong("folds", list(self.folds), allowed)

    def __len__(self) -> int:
        """The number of units."""
        return len(self.configurations) * len(self.folds)

    def units(self) -> Iterator[Unit]:
        """Every configuration on every fold; the folds of one configuration lie together."""
        for configuration in self.configurations:
            for fold in self.folds:
                yield Unit(configuration.name, configuration.recipe.replace(fold=fold))

    def where(self, wanted: Mapping[str, Sequence[str]]) -> "Design":
        """The configurations in which each of these fields has one of these values, as text.

        Raises:
            SoftstairError: If no configuration has that value, or all of them together.
        """
        left = self.configurations
        for name, values in wanted.items():
            check_field(name)
            there = list(
                dict.fromkeys(cell_of(entry.recipe, name) for entry in self.configurations)
            )
            allowed = [_same_number(value, there) for value in values]
            for value in allowed:
                if value not in there:
                    raise SoftstairError(
                        f"{name} must be one of {', '.join(there)} in {self.name}, but {value!r} "
                        f"was given{ending(value, there)}",
                        field="where",
                    )
            left = tuple(entry for entry in left if cell_of(entry.recipe, name) in allowed)
        if not left:
            asked = " ".join(f"{name}={','.join(values)}" for name, values in wanted.items())
            raise SoftstairError(
                f"{self.name} has no configuration with {asked}: leave one of them out.",
                field="where",
            )
        return replace(self, configurations=left)

    def rescaled(self, epochs: int) -> "Design":
        """The same over another number of epochs; periods and drops scale in proportion."""
        entries = self.configurations
        rescaled = [replace(entry, recipe=entry.recipe.rescaled(epochs)) for entry in entries]
        return replace(self, configurations=tuple(rescaled))

    def with_bits(self, names: Sequence[str]) -> "Design":
        """Every configuration with each of these bits, named as for ``Recipe.bits``.

        Raises:
            SoftstairError: If a name is wrong, or if stairs vary, which bits replace.
        """
        if taken := [name for name in self.varied() if name in ("bits", *REPLACED)]:
            problem = f"need the same {taken[0]} in all of {self.name}"
            raise invalid("bits", f"{problem}: choose configurations with `where`")
        entries = []
        for entry, name in itertools.product(self.configurations, names):
            recipe = changed(entry.recipe, {"bits": name})
            row = None if entry.name == EVERYTHING else entry.name
            entries.append(Configuration(_name(row, recipe, ["bits"]), recipe))
        return replace(self, configurations=tuple(entries))

    def varied(self) -> tuple[str, ...]:
        """The fields in which its configurations differ."""
        rows = [to_row(configuration.recipe) for configuration in self.configurations]
        return tuple(name for name in OPTIONS if len({row[name] for row in rows}) > 1)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for :func:`json.dumps`."""
        recipes = [{"name": entry.name, **entry.recipe.to_flat()} for entry in self.configurations]
        return {"name": self.name, "folds": list(self.folds), "configurations": recipes}


def configuration(recipe: Recipe) -> Configuration:
    """Return a recipe, named after the values of the paper's degrees of freedom."""
    words: list[str] = [recipe.noise.name, recipe.noise.forward]
    moving = [what for what in ("mean", "std") if not recipe[f"static_{what}"]]
    words += ["_".join(moving), recipe.noise.interval, recipe.noise.power] if moving else ["static"]
    return Configuration("-".join(words), recipe)


def _paper(name: str, is_full: bool) -> Design:
    """Return every distinct combination.

    The expectation under static variance would never become a stair, and is left out. Static noise
    has neither interval nor power law. If not ``is_full``: static noise of every family, and
    uniform noise with annealed variance and static mean.
    """
    base = preset(name)
    configurations = []
    static = (True, False)
    axes = (noises.names(), FORWARDS, static, static, INTERVALS, POWERS)
    for values in itertools.product(*axes):
        freedoms: dict[str, Any] = dict(zip(FREEDOMS, values, strict=True))
        is_static = freedoms["static_mean"] and freedoms["static_std"]
        is_first = (freedoms["interval"], freedoms["power"]) == (
            base.noise.interval,
            base.noise.power,
        )
        is_stair = not freedoms["static_std"] or freedoms["forward"] != "expectation"
        is_small = freedoms["static_mean"] and (is_static or freedoms["noise"] == "uniform")
        if is_stair and (is_first or not is_static) and (is_full or is_small):
            configurations.append(configuration(base.replace(**freedoms)))
    return Design(name, tuple(configurations), tuple(range(base.data.folds)), names_folds=False)


DESIGNS = {
    name: _paper(name, is_full=name == "paper-cifar10")
    for name in ("paper-cifar10", "paper-svhn", "paper-speech")
}


def check_field(name: str) -> None:
    """Raise SoftstairError if there is no such field, or if it is the fold, which a design has."""
    if name == "fold":
        raise SoftstairError(
            "folds are chosen by folds = [0, 1] or ['all'] in the file of a design, or by `folds`, "
            "but fold was given.",
            field="fold",
        )
    if name not in OPTIONS:
        raise SoftstairError(
            f"a field must be one of {', '.join(FREEDOMS)}, or another field of a recipe, but "
            f"{name!r} was given{ending(name, OPTIONS)}",
            field=name,
        )


# A design in a TOML file


def read_design(path: Path | str) -> Design:
    """Return the paper's design of that name, or read one from a TOML file.

    Raises:
        SoftstairError: If the file cannot be read, or describes no design.
    """
    path = Path(path)
    if str(path) in DESIGNS:
        return DESIGNS[str(path)]
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)  # a pipe has no length to ask for
        if len(data) > LARGEST_FILE:
            raise SoftstairError("the file is too long.")
        return parse(tomllib.loads(data.decode("utf-8")), path.stem)
    except FileNotFoundError:
        allowed = f"one of {', '.join(DESIGNS)}, or an existing TOML file"
        files = [file.name for file in path.parent.glob("*.toml")]
        word = path.name if path.suffix else f"{path.name}.toml"
        hint = suggestion(path, DESIGNS) or suggestion(word, files)
        end = f"; {hint}" if hint else "."
        message = f"a design must be {allowed}, but {str(path)!r} was given{end}"
        raise SoftstairError(message, field="design") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = " ".join(str(reason).split()).rstrip(".")[:300]
        raise SoftstairError(
            f"invalid design in {str(path)!r} ({reason}): see docs/experiments.md.",
            field="design",
        ) from None


def parse(table: Mapping[str, Any], name: str = "design") -> Design:
    """Return the design that the table of a TOML file describes.

    >>> design = parse({"vary": {"forward": ["mode", "random"], "seed": [0, 1]}, "folds": [0]})
    >>> [entry.name for entry in design.configurations]
    ['forward=mode,seed=0', 'forward=mode,seed=1', 'forward=random,seed=0', 'forward=random,seed=1']
    """
    for key, value in table.items():
        choice("a key", key, KEYS)
        if not isinstance(value, KEYS[key]):
            raise wrong(key, value, f"a {KEYS[key].__name__}")
    name = table.get("name", name)
    rows, without = table.get("rows", [{}]), table.get("without", [])
    if not all(isinstance(row, Mapping) for row in rows):
        raise SoftstairError("rows must be tables.")
    if not all(isinstance(entry, Mapping) and entry for entry in without):
        raise SoftstairError("without must be tables, each with a field.")
    for given in (name, *(row["name"] for row in rows if "name" in row)):
        if not isinstance(given, str) or not re.fullmatch(r"\w[\w.-]{0,63}", given):
            raise SoftstairError(
                f"name must be of letters, digits, '.', '-' and '_', but {shortened(given)} was "
                "given: give name = in the file."
            )
    base = changed(preset(table.get("preset", "digits")), table.get("recipe", {}))
    folds = tuple(table.get("folds", range(base.data.folds)))
    configurations = _configurations(base, rows, table.get("vary", {}), without)
    return Design(name, tuple(configurations), folds, "folds" in table)


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values in these fields, as TOML has them.

    Epochs scale period and drop, unless these are given too.
    """
    for name in fields:
        check_field(name)
    values = {name: _from_toml(name, value) for name, value in fields.items()}
    recipe = replace(recipe, network=recipe.network.for_changes(values))
    if "epochs" in values:
        recipe = recipe.rescaled(values["epochs"])
    return recipe.replace(**values)


def _check_varied(rows: Sequence[Mapping[str, Any]], vary: Mapping[str, Any]) -> None:
    """Raise SoftstairError unless these are fields of configurations, and not too many."""
    for field in itertools.chain(vary, *rows):
        check_field(field)
        if field == "folds":
            raise SoftstairError("folds are given by folds = [0, 1], not in rows or vary.")
    for field, values in vary.items():
        if any(field in row for row in rows):
            raise SoftstairError(f"{field} must be in rows or in vary, but is in both.")
        if not isinstance(values, list) or not values:
            raise invalid(
                field, f"must vary over a list of values, but {shortened(values)} was given"
            )
    if len(rows) * math.prod(map(len, vary.values())) > MOST_CONFIGURATIONS:
        raise SoftstairError(f"a design must have at most {MOST_CONFIGURATIONS:,} configurations.")


def _configurations(
    base: Recipe,
    rows: Sequence[Mapping[str, Any]],
    vary: Mapping[str, Any],
    without: Sequence[Mapping[str, Any]],
) -> Iterable[Configuration]:
    """Return each row with every combination, except those in ``without``."""
    fields = [{field: row[field] for field in row if field != "name"} for row in rows]
    _check_varied(fields, vary)
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    every: list[Configuration] = []
    for row, of_row in zip(rows, fields, strict=True):
        shown = vary if "name" in row else {**of_row, **vary}
        for values in chosen:
            recipe = changed(base, {**of_row, **values}).replace(fold=0)
            every.append(Configuration(_name(row.get("name"), recipe, shown), recipe))
    for field, values in vary.items():
        if len({_from_toml(field, value) for value in values}) < len(values):
            raise SoftstairError(f"{field} must vary over different values, but one is repeated.")
    unwanted = [_alternatives(entry, [each.recipe for each in every]) for entry in without]
    kept: dict[tuple[str, ...], Configuration] = {}
    for each in every:
        if not any(
            all(each.recipe[field] in values for field, values in entry.items())
            for entry in unwanted
        ):
            # Where nothing moves, interval and power do not matter: the first stands for all.
            kept.setdefault((each.name, *to_row(each.recipe).values()), each)
    return kept.values()


def _name(row: str | None, recipe: Recipe, fields: Collection[str]) -> str:
    """Return the name of a configuration: that of its row, if any, and these fields."""
    words = [] if row is None else [row]
    words += [f"{field}={cell_of(recipe, field)}" for field in OPTIONS if field in fields]
    name = re.sub(r"[^\w.,=+-]", "_", ",".join(words))
    return name.encode()[:200].decode(errors="ignore") or EVERYTHING


def _alternatives(entry: Mapping[str, Any], recipes: Sequence[Recipe]) -> dict[str, list[Any]]:
    """Return the values of each field of an entry of ``without``."""
    wanted = {}
    for field, value in entry.items():
        check_field(field)
        # The value of skip is a list itself.
        is_list = isinstance(value, list)
        several = is_list and (field != "skip" or any(isinstance(entry, list) for entry in value))
        values = [_from_toml(field, entry) for entry in (value if several else [value])]
        there = [recipe[field] for recipe in recipes]
        absent = [entry for entry in values if entry not in there]
        if absent or not values:
            raise SoftstairError(
                f"{field} in without must be a value that a configuration has, or a list of such, "
                f"but {shortened(absent[0] if absent else values)} was given."
            )
        wanted[field] = values
    return wanted


def _from_toml(field: str, value: Any) -> Any:
    """Convert a value from TOML, which has no null."""
    if value == "None" and OPTIONS[field].is_optional:
        return None
    return tuple(value) if isinstance(value, list) else value


def _same_number(value: str, values: Sequence[str]) -> str:
    """Return the element of ``values`` that is the same number, else ``value``.

    >>> _same_number("4", ["0.5", "4.0"]), _same_number("mode", ["mode", "random"])
    ('4.0', 'mode')
    """
    with contextlib.suppress(ValueError):
        if value not in values:
            return next((other for other in values if float(other) == float(value)), value)
    return value
