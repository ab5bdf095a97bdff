"""How much of the variance of final accuracy each degree of freedom explains, on balanced blocks.

A block is a factorial design: every combination of some levels, each on the same folds. There the
sums of squares of main effects, two-way interactions and folds are orthogonal, whatever their
order, and with those of the rest they add up to the total:

    η²(term) = SS/SS_total        ω²(term) = (SS − df·MS_rest)/(SS_total + MS_rest), at least 0

The rest holds three-way interactions too.

ω² estimates the share of the variance that a term has in truth; η² lies above it by what chance
adds. Its 95 % interval inverts the distributions of the sums of squares, given normal errors:
SS/σ² of a term is χ² with df degrees of freedom and a non-centrality λ, that of the folds (σ² +
cells·σ_folds²)/σ² times a χ², that of the rest a χ². Draws of them (seeded) give draws of σ², λ and
the shares, whose 2.5 and 97.5 % points are the interval (a generalised confidence interval). It was
preferred to a bootstrap over five folds, which covered the truth in 83 to 97 % of simulated blocks
where this does in 90 to 97 %; and it has an answer where there is one fold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import numpy as np

from paper.design import FORWARDS
from paper.mean import CONFIDENCE, Numbers
from paper.studies import DYNAMIC, STATIC, select
from paper.tables import Fold, Training
from softstair import noise as noises
from softstair._errors import import_extra
from softstair.schedule import INTERVALS, POWERS

FOLDS, REST = "folds", "rest"
DRAWS, SEED = 4_000, 0
NEGLIGIBLE = 1e-12
"""A rest below this share of the total is rounding."""


@dataclass(frozen=True)
class Block:
    """A part of the grid: the settings that vary in it, that must vary, and that are fixed."""

    about: str
    factors: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, str]
    must: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Final accuracies: (levels of each factor …, repetitions)."""

    factors: Mapping[str, tuple[str, ...]]
    repetitions: tuple[tuple[Fold, int], ...]
    values: Numbers


@dataclass(frozen=True)
class Share:
    """What one term (factors, folds or rest) explains: η², ω² and the 95 % interval of ω².

    All but η² are None where there is no rest.
    """

    term: tuple[str, ...]
    freedom: int
    eta: float
    omega: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        """Such as forward × interval."""
        return " × ".join(self.term)

    def __str__(self) -> str:
        """Such as 94.2 % (87.5 to 95.6)."""
        if self.omega is None or self.low is None or self.high is None:
            return f"{100 * self.eta:.1f} %"
        return f"{100 * self.omega:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True)
class Variance:
    """The shares of a block: main effects, two-way interactions, folds, rest."""

    block: Block
    table: Table
    shares: tuple[Share, ...]

    @property
    def std(self) -> float:
        return float(self.table.values.std())


NOISES = tuple(noises.names())
BLOCKS: dict[str, Block] = {
    "static": Block("static noise", {"noise": NOISES, "forward": ("mode", "random")}, fixed=STATIC),
    "dynamic": Block(
        "uniform noise, static mean, dynamic std",
        {"forward": FORWARDS, "interval": INTERVALS, "power": POWERS},
        fixed={"noise": "uniform", **DYNAMIC},
    ),
    "dynamic-expectation": Block(
        "expectation, static mean, dynamic std",
        {"noise": NOISES, "interval": INTERVALS, "power": POWERS},
        fixed={"forward": "expectation", **DYNAMIC},
        must=("noise",),
    ),
}
"""Blocks of the paper's figures."""


def tabled(block: Block, trainings: Iterable[Training]) -> Table | None:
    """Return the table of a block, or None if combinations of its levels are missing.

    Levels are those of which a unit is done; each combination of them must be there, on a fold and
    seed that it shares with all others. Factors of one level explain nothing, and are left out.
    """
    done = [training for training in select(trainings, block.fixed) if training.is_done]
    there: dict[str, tuple[str, ...]] = {}
    for name, levels in block.factors.items():
        known = {training.settings[name] for training in done}
        there[name] = tuple(level for level in levels if level in known)
    cells: dict[tuple[str, ...], dict[tuple[Fold, int], float]]
    cells = {key: {} for key in product(*there.values())}
    for training in done:
        if (key := tuple(training.settings[name] for name in there)) in cells:
            cells[key][training.repetition] = training.accuracy
    varied = {name: levels for name, levels in there.items() if len(levels) > 1}
    shared = sorted(set.intersection(*map(set, cells.values()))) if cells else []
    if not shared or not varied or any(name not in varied for name in block.must):
        return None
    shape = [len(levels) for levels in varied.values()]
    values = np.array([[cell[run] for run in shared] for cell in cells.values()], np.float64)
    return Table(varied, tuple(shared), values.reshape(*shape, len(shared)))


def explained(block: Block, trainings: Iterable[Training]) -> Variance | None:
    """Return the shares of a block, or None if it has no table or all accuracies are the same."""
    table = tabled(block, trainings)
    if table is None or np.ptp(table.values) == 0:
        return None
    return Variance(block, table, tuple(shares(table.values, list(table.factors))))


def shares(values: Numbers, factors: Sequence[str]) -> list[Share]:
    """Return the analysis of variance of (levels of each factor …, folds)."""
    squares, freedoms = _squares(values)
    total = float(((values - values.mean()) ** 2).sum())
    rest, left = total - sum(squares.values()), values.size - 1 - sum(freedoms.values())
    rest = rest if rest > NEGLIGIBLE * total else 0.0
    names = [*factors, FOLDS]
    error = rest / left if left else 0.0
    spans = _intervals(squares, freedoms, rest, left, values)
    results = []
    for term, square in squares.items():
        omega = max(0.0, (square - freedoms[term] * error) / (total + error))
        estimates = (omega, *spans[term]) if left else ()
        term_names = tuple(names[axis] for axis in term)
        results.append(Share(term_names, freedoms[term], square / total, *estimates))
    return [*results, Share((REST,), left, rest / total)]


def _squares(values: Numbers) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], int]]:
    """Return sums of squares and degrees of freedom of each axis and each pair of factors."""
    last = values.ndim - 1
    terms: list[tuple[int, ...]] = [(axis,) for axis in range(last)]
    terms += combinations(range(last), 2)
    terms += [(last,)] if values.shape[last] > 1 else []
    effects: dict[tuple[int, ...], Numbers] = {(): values.mean(keepdims=True)}
    for term in sorted(terms, key=len):
        others = tuple(axis for axis in range(values.ndim) if axis not in term)
        within = [smaller for n in range(len(term)) for smaller in combinations(term, n)]
        effects[term] = values.mean(others, keepdims=True) - sum(
            effects[smaller] for smaller in within
        )
    squares = {t: float((effects[t] ** 2).sum() * values.size / effects[t].size) for t in terms}
    return squares, {term: prod(values.shape[axis] - 1 for axis in term) for term in terms}


def _intervals(
    squares: Mapping[tuple[int, ...], float],
    freedoms: Mapping[tuple[int, ...], int],
    rest: float,
    left: int,
    values: Numbers,
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return the interval of each term's share; the module's docstring describes it."""
    total = sum(squares.values()) + rest
    if not rest:
        return {term: (square / total, square / total) for term, square in squares.items()}
    folds = (values.ndim - 1,)
    random = np.random.default_rng(SEED)
    error = rest / random.chisquare(left, DRAWS)
    parts: dict[tuple[int, ...], Numbers] = {}
    for term, square in squares.items():
        if term == folds:
            spread = square / random.chisquare(freedoms[term], DRAWS) - error
            parts[term] = np.maximum(spread, 0) * values.shape[-1] / values.size
        else:
            chance = random.uniform(size=DRAWS)
            parts[term] = error * _centrality(square / error, freedoms[term], chance) / values.size
    total_draws = error + sum(parts.values())
    ends = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    spans = {term: np.percentile(part / total_draws, ends) for term, part in parts.items()}
    return {term: (float(low), float(high)) for term, (low, high) in spans.items()}


def _centrality(square: Numbers, freedom: int, chance: Numbers) -> Numbers:
    """Return λ such that P(χ²(freedom, λ) ≤ square) = chance."""
    special = import_extra("scipy.special")
    # Far out, where the series are long, √χ² is normal around √(λ + df − 1) to 3 figures.
    far = square > 1000
    near = special.chndtrinc(np.where(far, 1.0, square), freedom, chance)
    near = np.where(square > 0, near, 0.0)  # scipy's is nan for one degree of freedom
    root = np.sqrt(square) - special.ndtri(chance)
    return np.where(far, np.maximum(root**2 - (freedom - 1), 0.0), near)
