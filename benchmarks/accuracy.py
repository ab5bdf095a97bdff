"""What each option of a grid is worth, in points of validation accuracy.

    python -m paper grid benchmarks/accuracy.toml --out runs/accuracy --jobs 6 --device cuda
    python -m benchmarks.accuracy runs/accuracy/table.csv --out effects.csv

GRID is a table or a folder of run directories that python -m paper grid wrote. Options are the
fields of the recipe in which its configurations differ, except for seed and fold. Fields that
differ together are one option. The model is

    accuracy of the last epoch = block + sum of the effects of the options + error,

fitted by least squares; a block is a seed on a fold. The standard error comes from the scatter of
seeds and folds within configurations. Column aliased: the share of an interaction of two other
options that is part of the effect. Test accuracy is not used.
"""

import argparse
import csv
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.sentence import tell
from paper import Training, load
from paper.rows import to_text
from softstair.train.recipe import OPTIONS

OFF = ("None", "none", "false", "same")
LEAST = 0.05
"""Smaller shares of interactions are not reported."""
Values = tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """Fields that differ together, their values, and which of them each run has."""

    fields: Values
    levels: tuple[Values, ...]
    level: np.ndarray

    @property
    def name(self) -> str:
        return ", ".join(self.fields)

    @property
    def baseline(self) -> int:
        """Level to which the others are compared: of two the first, else the most frequent."""
        return 0 if len(self.levels) == 2 else int(np.bincount(self.level).argmax())

    def columns(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the levels except the baseline with their columns of the model."""
        for level in range(len(self.levels)):
            if level != self.baseline:
                yield level, (self.level == level) - 0.5 * (len(self.levels) == 2)

    def text(self, level: int) -> str:
        return ", ".join(self.levels[level])


@dataclass(frozen=True)
class Effect:
    """Difference in points that a level of an option makes, compared to the baseline."""

    option: Option
    level: int
    points: float
    error: float | None
    aliased: str

    def row(self) -> dict[str, str]:
        return {
            "option": self.option.name,
            "from": self.option.text(self.option.baseline),
            "to": self.option.text(self.level),
            "effect": f"{round(self.points, 2) + 0:+.2f}",  # + 0: not -0.00
            "standard_error": "" if self.error is None else f"{self.error:.2f}",
            "aliased": self.aliased,
        }


def cells(training: Training, names: Sequence[str]) -> Values:
    """Return fields of a recipe as text."""
    return tuple(to_text(name, training.recipe[name]) for name in names)


def _order(values: Values) -> tuple[bool, float]:
    """Sort what is off first, and numbers in ascending order."""
    try:
        return False, float(values[0])
    except ValueError:
        return values[0] not in OFF, 0.0


def find_options(trainings: Sequence[Training]) -> list[Option]:
    """Return the options in which trainings differ."""
    together: dict[Values, list[str]] = {}
    for name in OPTIONS:
        column = [cells(training, [name]) for training in trainings]
        if name not in ("seed", "fold") and len(set(column)) > 1:
            numbers = {value: str(number) for number, value in enumerate(dict.fromkeys(column))}
            together.setdefault(tuple(numbers[value] for value in column), []).append(name)
    options = []
    for fields in together.values():
        column = [cells(training, fields) for training in trainings]
        levels = tuple(sorted(dict.fromkeys(column), key=_order))
        options.append(Option(tuple(fields), levels, np.array([*map(levels.index, column)])))
    return options


def indicators(keys: Sequence[object]) -> np.ndarray:
    """Return a column for each different key, with 1 where it stands."""
    return np.array([[key == other for other in dict.fromkeys(keys)] for key in keys], float)


def fit(trainings: Sequence[Training], options: Sequence[Option]) -> tuple[list[Effect], float]:
    """Return the effects, largest first, and the accuracy at the baselines, both in points."""
    y = 100 * np.array([training.valid_accuracy for training in trainings])
    blocks = indicators([(training.recipe.run.seed, training.fold) for training in trainings])
    columns = [(option, level, x) for option in options for level, x in option.columns()]
    model = np.column_stack([blocks, *(x for *_, x in columns)])
    if np.linalg.matrix_rank(model) < model.shape[1]:
        names = [
            option.name
            for number, (option, *_) in enumerate(columns, start=blocks.shape[1])
            if np.linalg.matrix_rank(np.delete(model, number, 1)) == np.linalg.matrix_rank(model)
        ]
        raise ValueError(f"the grid does not separate {'; '.join(names)}: train more rows.")
    inverse = np.linalg.pinv(model)
    estimates = inverse @ y
    variance = error_variance(y, blocks, indicators([option_key(t) for t in trainings]), model)
    aliases = find_aliases(options, inverse)
    effects = []
    for number, (option, level, _) in enumerate(columns, start=blocks.shape[1]):
        length = float(np.linalg.norm(inverse[number]))
        error = None if variance is None else variance**0.5 * length
        aliased = describe_aliases({pair: shares[number] for pair, shares in aliases.items()})
        effects.append(Effect(option, level, float(estimates[number]), error, aliased))
    baseline = estimates[: blocks.shape[1]].mean() - sum(
        effect.points / 2 for effect in effects if len(effect.option.levels) == 2
    )
    return sorted(effects, key=lambda effect: -abs(effect.points)), float(baseline)


def option_key(training: Training) -> Values:
    """Return what trainings of one configuration have in common."""
    return cells(training, [name for name in OPTIONS if name not in ("seed", "fold")])


def error_variance(
    y: np.ndarray, blocks: np.ndarray, configurations: np.ndarray, model: np.ndarray
) -> float | None:
    """Return the variance within configurations; without replicates, that of the residuals."""
    for x in (np.column_stack([blocks, configurations]), model):
        freedom = len(y) - np.linalg.matrix_rank(x)
        if freedom:
            residual = y - x @ (np.linalg.pinv(x) @ y)
            return float(residual @ residual / freedom)
    return None


def find_aliases(options: Sequence[Option], inverse: np.ndarray) -> dict[str, np.ndarray]:
    """Return how much of each interaction of two options the estimates contain.

    An interaction is half the difference that one option makes to the effect of the other.
    """
    two_level = [option for option in options if len(option.levels) == 2]
    columns = {option.name: option.level - 0.5 for option in two_level}
    pairs = itertools.combinations(columns, 2)
    return {f"{a} × {b}": inverse @ (2 * columns[a] * columns[b]) for a, b in pairs}


def describe_aliases(shares: dict[str, float]) -> str:
    largest = max(map(abs, shares.values()), default=0.0)
    if largest < LEAST:
        return "none"
    pairs = [pair for pair, share in shares.items() if abs(share) > largest - LEAST]
    where = " and ".join(pairs) if len(pairs) < 3 else f"each of {len(pairs)} interactions"
    return f"{largest:.2f} of {where}"


def choose(effects: Sequence[Effect], options: Sequence[Option]) -> tuple[float, dict[str, str]]:
    """Return the sum of the best effect of each option, and the values that have it."""
    total, chosen = 0.0, {}
    for option in options:
        points = {e.level: e.points for e in effects if e.option is option}
        level = max({option.baseline: 0.0, **points}.items(), key=lambda pair: pair[1])
        total, chosen[option.name] = total + level[1], option.text(level[0])
    return total, chosen


def show(values: dict[str, str]) -> str:
    return "; ".join(f"{name} = {value}" for name, value in values.items())


def print_best(trainings: Sequence[Training], options: Sequence[Option]) -> None:
    """Print the configuration with the highest mean accuracy, of those that have most runs."""
    groups: dict[Values, list[int]] = {}
    for number, training in enumerate(trainings):
        groups.setdefault(option_key(training), []).append(number)
    most = max(map(len, groups.values()))
    accuracies = {
        key: [100 * trainings[number].valid_accuracy for number in numbers]
        for key, numbers in groups.items()
        if len(numbers) == most
    }
    best = max(accuracies, key=lambda key: statistics.mean(accuracies[key]))
    name = re.sub(r",?seed=\d+", "", trainings[groups[best][0]].configuration)
    spread = f", standard deviation {statistics.stdev(accuracies[best]):.2f}" if most > 1 else ""
    mean = statistics.mean(accuracies[best])
    print(f"best configuration: {name}, {most} runs, mean {mean:.2f} %{spread}")
    print(f"  {show({o.name: o.text(int(o.level[groups[best][0]])) for o in options})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, help="CSV of the effects to write")
    given = parser.parse_args()
    trainings = load(given.grid)
    done = [training for training in trainings if training.is_done and training.fold != "all"]
    options = find_options(done)
    if not options:
        raise ValueError(f"{str(given.grid)!r} must have finished runs that differ in an option.")
    if len(versions := {training.data_version for training in done}) > 1:
        raise ValueError(f"the runs must have one version of the data, not {sorted(versions)}.")
    effects, baseline = fit(done, options)
    rows = [effect.row() for effect in effects]
    print(f"{len(done)} runs, validation accuracy of the last epoch, effects in points")
    if len(done) < len(trainings):
        print(f"left out: {len(trainings) - len(done)} runs that are not finished or not validated")
    print(f"\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    print()
    print_best(done, options)
    total, chosen = choose(effects, options)
    print(f"by the effects: {baseline + total:.2f} % expected without interactions")
    print(f"  {show(chosen)}")
    if given.out is not None:
        with open(given.out, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    tell(main)
