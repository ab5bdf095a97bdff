"""Theorem 2 and Proposition 1: every verdict is compared with the limit that it is about."""

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import special, stats

import softstair as ss
from paper.theory import (
    HYPOTHESES,
    Verdict,
    conclusion,
    distances_on_network,
    distances_on_random_networks,
    examine,
    hypotheses,
    proposition,
    synchronisation,
    times_to_watch,
)
from softstair import noise as noises
from softstair._errors import SoftstairError
from softstair.nn import StairActivation, StairLinear, StairWeight
from softstair.schedule import INTERVALS, POWERS, Schedule

LAMBDAS = np.array([1e-4, 1e-5, 1e-6])
EPSILONS = (0.1, 1.0, 10.0)
SUPPORT = {"uniform": math.sqrt(3), "triangular": math.sqrt(6)}
LOGISTIC = math.pi / math.sqrt(3)


# The oracle: quantiles and tails in logarithms, from scipy and closed forms.


def quantile(noise: str, log_u: np.ndarray) -> np.ndarray:
    """F⁻¹(u) for u = exp(log_u) below 1/2; F⁻¹(1 − u) is its negative."""
    if noise == "uniform":
        return math.sqrt(3) * (2 * np.exp(log_u) - 1)
    if noise == "triangular":
        return math.sqrt(6) * (np.sqrt(2 * np.exp(log_u)) - 1)
    if noise == "normal":
        return special.ndtri_exp(log_u)
    return (log_u - np.log1p(-np.exp(log_u))) / LOGISTIC


def log_cdf(noise: str, z: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        if noise == "uniform":
            return np.log(np.clip(z / (2 * math.sqrt(3)) + 0.5, 0, 1))
        if noise == "triangular":
            c = np.clip(z / math.sqrt(6), -1, 1)
            return np.log(np.where(c < 0, 0.5 * (1 + c) ** 2, 1 - 0.5 * (1 - c) ** 2))
    return special.log_ndtr(z) if noise == "normal" else special.log_expit(LOGISTIC * z)


class Layer:
    """α, β and the three ingredients of the hypotheses at λ = 10⁻⁴, 10⁻⁵ and 10⁻⁶."""

    def __init__(self, schedule: Schedule, noise: str, layer: int) -> None:
        self.noise = noise
        pairs = [schedule(layer, schedule.end * (1 - value)) for value in LAMBDAS]
        self.mean, self.std = (np.array(values) for values in zip(*pairs, strict=True))

    def standardise(self, s: float) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (s - self.mean) / self.std
        return np.where(np.isnan(z), np.inf, z)  # 0/0: β = 0, and H(0) = 1

    def sigma(self, s: float) -> np.ndarray:
        return np.exp(log_cdf(self.noise, self.standardise(s)))

    def log_missing(self) -> np.ndarray:
        """log(1 − σ(0)), by the symmetry of all four families."""
        return log_cdf(self.noise, -self.standardise(0.0))

    def inverse(self, log_u: np.ndarray, side: int) -> np.ndarray:
        """σ⁻¹(u) for side −1, σ⁻¹(1 − u) for side +1."""
        return self.mean - side * self.std * quantile(self.noise, log_u)

    def log_rate(self, rate: str) -> np.ndarray:
        if rate == "F(−|α|/β)":
            return log_cdf(self.noise, -np.abs(self.mean) / self.std)
        power = re.fullmatch(r"λ\^([\d.]+)", rate)
        assert power is not None, rate
        return float(power.group(1)) * np.log(LAMBDAS)


def some_rates(n: int) -> list[np.ndarray]:
    """Slow and fast rates, for statements about every rate."""
    logs = np.log(LAMBDAS)
    return [-np.log(-logs), 0.5 * logs, logs, (n + 1) * logs, (2 * n + 3) * logs]


def rates_of(layer: Layer, verdict: Verdict, n: int) -> list[np.ndarray]:
    return some_rates(n) if verdict.rate == "any" else [layer.log_rate(verdict.rate)]


def vanishes(values: np.ndarray) -> bool:
    sizes = np.abs(values)
    # Below 10⁻⁹ it is rounding that no longer halves.
    return bool(sizes[-1] < 1e-3 and (sizes[2] < 0.5 * sizes[1] or sizes[2] < 1e-9))


def stays_away(values: np.ndarray) -> bool:
    sizes = np.abs(values)
    return bool(sizes[-1] > 1e-3 and sizes[-1] > 0.7 * sizes[0])


def check(verdict: Verdict, schedule: Schedule, noise: str, before: Verdict | None) -> None:
    """Compare a verdict with the numbers."""
    layer, n = Layer(schedule, noise, verdict.layer), schedule.layers
    if verdict.holds == "exact":
        through_input = verdict.name == "convergence iv" and (layer.mean.any() or layer.std.any())
        zero = Layer(schedule, noise, verdict.layer - 1) if through_input else layer
        assert not np.concatenate([zero.mean, zero.std]).any()
        return
    holds = verdict.holds == "holds"
    if verdict.name == "regparam ii":
        points = [-1.0, -0.49, -0.1, -0.01, 0.0, 0.01, 0.1, 0.49, 1.0]
        errors = {s: np.abs(layer.sigma(s) - (s >= 0)) for s in points}
        assert all(map(vanishes, errors.values())) == holds
        wrong = [s for s, error in errors.items() if stays_away(error)]
        assert wrong == [0.0] if "at s = 0 only" in verdict.reason else bool(wrong) != holds
    elif verdict.name == "regparam iii":
        assert holds == (noise not in SUPPORT and bool(layer.std.all()))
    elif verdict.name in ("convergence i", "convergence ii"):
        side = -1 if verdict.name == "convergence i" else 1
        # With a constant β slow rates are not near their limit at λ = 10⁻⁶.
        every = some_rates(n)[3 if (layer.std == layer.std[0]).all() else 0 :]
        for rate, epsilon in itertools.product(
            rates_of(layer, verdict, n) if holds else every, EPSILONS if holds else (0.1,)
        ):
            inverse = layer.inverse(math.log(epsilon) + rate, side)
            assert vanishes(inverse) if holds else stays_away(inverse)
    elif verdict.name == "convergence iii":
        missing = layer.log_missing()
        for rate in rates_of(layer, verdict, n) if holds else some_rates(n):
            if holds:
                assert missing[-1] - rate[-1] < -5
                assert missing[-1] == -np.inf or missing[-1] - rate[-1] < missing[0] - rate[0]
            else:
                assert missing[-1] - rate[-1] > missing[0] - rate[0]
                assert missing[-1] > -30
    elif verdict.name == "convergence iv":
        for epsilon in EPSILONS:
            if holds:
                assert before is not None
                rate = layer.log_rate(verdict.rate)
                known = before.rate if before.rate.startswith("λ") else verdict.rate
                denominator = -layer.inverse(math.log(epsilon) + rate, +1)
                assert (denominator > 0).all()
                ratio = layer.log_rate(known) - np.log(denominator)
                assert ratio[-1] < ratio[0] < 0
                assert ratio[-1] < -5
            else:
                for rate in some_rates(n)[3:]:
                    assert (layer.inverse(math.log(epsilon) + rate, +1)[1:] > 0).all()
                printed = layer.log_rate(f"λ^{2 * n + 1}")
                inverse = layer.inverse(math.log(epsilon) + printed, +1)
                assert (printed - np.log(inverse))[-1] < -5


def check_all(schedule: Schedule, noise: str) -> tuple[Verdict, ...]:
    verdicts = hypotheses(schedule, noise)
    by_place = {(verdict.name, verdict.layer): verdict for verdict in verdicts}
    assert len(by_place) == 8 * schedule.layers - 1
    for (_, layer), verdict in by_place.items():
        check(verdict, schedule, noise, by_place.get(("convergence iii", layer - 1)))
    return verdicts


def schedules(n: int, **settings: object) -> Iterator[Schedule]:
    for interval, power, mean, std in itertools.product(
        INTERVALS, POWERS, (True, False), (True, False)
    ):
        yield Schedule(n, 50, interval, power, static_mean=mean, static_std=std, **settings)


@pytest.mark.nightly(keep=5)  # each family at least once
@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize("n", [2, 9, 3, 4, 5, 6, 7, 8])
def test_every_verdict_agrees_with_the_limit(noise: str, n: int) -> None:
    for schedule in schedules(n, std0=noises.get(noise).std_within(0.5)):
        proved = conclusion(check_all(schedule, noise)).proved
        if schedule.static_std:
            assert proved == "none"
        else:
            assert proved == ("off thresholds" if schedule.static_mean else "every input")


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize(("mean0", "std0"), [(-0.5, 0.1), (0.5, 0.1), (-0.4, 0.0), (0.4, 0.0)])
def test_verdicts_agree_for_other_means_and_for_std_0(
    noise: str, mean0: float, std0: float
) -> None:
    for schedule in schedules(4, mean0=mean0, std0=std0):
        verdicts = check_all(schedule, noise)
        if mean0 > 0:
            assert conclusion(verdicts).proved != "every input"


def by_name(verdicts: tuple[Verdict, ...], layer: int) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in verdicts if verdict.layer == layer}


@pytest.mark.parametrize("interval", ["partition", "same_start"])
@pytest.mark.parametrize("static_mean", [True, False])
def test_layers_annealed_before_the_end_are_exact(interval: str, static_mean: bool) -> None:
    verdicts = hypotheses(Schedule(5, 10, interval, static_mean=static_mean), "uniform")
    for layer in range(4):
        layer_verdicts = by_name(verdicts, layer)
        assert layer_verdicts.pop("regparam iv").holds == "holds"
        assert {verdict.holds for verdict in layer_verdicts.values()} == {"exact"}
    last = by_name(verdicts, 4)
    assert last["convergence iii"].holds == ("fails" if static_mean else "holds")
    # Its input is exact, so that s does not change and convergence iv is not needed.
    assert last["convergence iv"].holds == ("exact" if static_mean else "holds")


def test_static_noise_whose_support_ends_at_0() -> None:
    # The clipped ReLU: uniform on [0, 1); convergence i holds for any rate, ii for none.
    static = dict(layers=3, period=1, static_std=True)
    std = 0.5 / math.sqrt(3)
    relu = by_name(hypotheses(Schedule(**static, mean0=0.5, std0=std), "uniform"), 1)
    assert (relu["convergence i"].holds, relu["convergence ii"].holds) == ("holds", "fails")
    # Support [−1, 0): 1 − σ(0) = 0, and −σ⁻¹(1 − εr_ℓ) → 0 requires r_{ℓ−1} to vanish faster.
    for noise, support in SUPPORT.items():
        schedule = Schedule(**static, mean0=-0.5, std0=0.5 / support)
        verdicts = hypotheses(schedule, noise)
        assert [by_name(verdicts, k)["convergence iv"].rate for k in (1, 2)] == ["λ^2", "λ^1"]
        for layer in range(3):
            i, ii, iii = (by_name(verdicts, layer)[f"convergence {k}"] for k in ("i", "ii", "iii"))
            assert (i.holds, ii.holds, iii.holds) == ("fails", "holds", "holds")
            assert (ii.rate, iii.rate) == ("any", "any")
        # β·(support − F⁻¹(1 − u)), in logarithms: 1 − u would round.
        power = {"uniform": 1.0, "triangular": 0.5}[noise]
        for layer in (1, 2):
            log_u = (3 - layer) * np.log(LAMBDAS)
            gap = np.log(schedule.std0 * support * 2**power) + power * log_u
            ratio = (4 - layer) * np.log(LAMBDAS) - gap
            assert ratio[2] < ratio[1] < ratio[0] < 0


class Student(noises.Noise):
    """Five degrees of freedom, std 1: tails like z⁻⁵, heavier than the library's families."""

    SCALE = math.sqrt(5 / 3)

    def cdf(self, z: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(stats.t.cdf(z.numpy() * self.SCALE, 5)))

    def pdf(self, z: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(stats.t.pdf(z.numpy() * self.SCALE, 5) * self.SCALE))


@pytest.mark.parametrize("interval", ["same_end", "overlapped"])
@pytest.mark.parametrize("power", POWERS)
def test_chebyshev_gives_rates_for_any_family(interval: str, power: str) -> None:
    n = 5
    schedule = Schedule(n, 10, interval, power, static_mean=False)
    verdicts = hypotheses(schedule, Student())
    assert conclusion(verdicts).proved == "every input"
    for index in range(n):
        rate = by_name(verdicts, index)["convergence iii"].rate
        assert rate == f"λ^{1.5 * schedule.exponent(index):g}"
        layer = Layer(schedule, "normal", index)
        log_rate = layer.log_rate(rate)
        tail = stats.t.logcdf(layer.mean / layer.std * Student.SCALE, 5)
        assert tail[-1] - log_rate[-1] < tail[0] - log_rate[0] < 0
        reach = stats.t.isf(np.exp(log_rate), 5) / Student.SCALE
        assert vanishes(layer.mean + layer.std * reach)
        assert vanishes(layer.mean - layer.std * reach)
        if index:
            before = layer.log_rate(by_name(verdicts, index - 1)["convergence iii"].rate)
            denominator = -(layer.mean + layer.std * reach)
            assert (denominator > 0).all()
            ratio = np.exp(before - np.log(denominator))  # √λ at the slowest
            assert ratio[2] < 0.4 * ratio[1] < 0.16 * ratio[0]


def test_hypotheses_need_a_probability_measure() -> None:
    class Slope(noises.Normal):
        proper = False

    with pytest.raises(ValueError, match="noise must be a probability measure"):
        hypotheses(Schedule(2, 1), Slope())


# The order of the layers


def expected_order(schedule: Schedule) -> str:
    if schedule.is_static:
        return "weakly"
    if schedule.interval == "same_end":
        return "broken"
    if schedule.interval == "overlapped" and schedule.power == "homogeneous":
        return "weakly"
    return "strictly"


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("n", [2, 5, 3, 4, 6, 7, 8, 9])
def test_exact_order_agrees_with_a_grid(n: int) -> None:
    for schedule in schedules(n):
        exact = synchronisation(schedule)
        grid = synchronisation(lambda *at, s=schedule: s(*at), n, schedule.end, points=40 * n + 1)
        assert exact.order == grid.order == expected_order(schedule)
        for pair, other in zip(exact.breaks, grid.breaks, strict=True):
            assert (pair.earlier, pair.later) == (other.earlier, other.later)
            assert abs(pair.start - other.start) <= 1.001 * grid.resolution
            assert abs(pair.end - other.end) <= 1.001 * grid.resolution


def test_breaks_begin_after_the_start() -> None:
    plain, late = (Schedule(4, 10, interval="same_end", start=start) for start in (0, 25))
    for first, second in zip(*(synchronisation(s).breaks for s in (plain, late)), strict=True):
        assert (second.start, second.end) == (first.start + 25, first.end + 25)


def test_a_users_function_is_judged_on_a_grid() -> None:
    def crossing(layer: int, t: float) -> tuple[float, float]:
        return 0.0, max(0.0, 1 - t) if layer == 0 else max(0.0, 1 - 2 * t * t)

    result = synchronisation(crossing, layers=2, end=1.0, points=1001)
    # 1 − t ≤ 1 − 2t² until t = 1/2.
    assert result.first is not None
    assert result.first.start == pytest.approx(0.5, abs=2e-3)
    assert result.resolution == pytest.approx(1e-3)
    assert synchronisation(lambda layer, t: (0.0, 1.0), 3, 1.0).order == "weakly"
    assert synchronisation(Schedule(1, 1)).order == "weakly"


@pytest.mark.parametrize(
    ("noise", "settings", "field"),
    [
        ((0.0, 1.0), {}, "layers"),
        ((0.0, 1.0), {"layers": 2, "end": 0.0}, "end"),
        ((0.0, -1.0), {"layers": 2, "end": 1.0}, "path"),
        ((math.nan, 1.0), {"layers": 2, "end": 1.0}, "path"),
    ],
)
def test_invalid_functions_are_rejected(noise, settings, field) -> None:
    with pytest.raises(SoftstairError, match=f"{field} must") as info:
        synchronisation(lambda layer, t: noise, **settings)
    assert info.value.field == field


# Proposition 1

STAIRS = [
    ss.Stair.heaviside(),
    ss.Stair.ternary(),
    ss.Stair.sign(quantum=0.3),
    ss.Stair.linear(4, quantum=0.07, thresholds="floor"),
    ss.Stair.linear(3, signed=True, thresholds="midpoint"),
    ss.Stair((-2.0, 0.5, 0.75, 7.0), (-1.0, 0.2, 5.0)),
]


@pytest.mark.nightly(keep=10)  # each family twice, each stair at least once
@pytest.mark.parametrize("noise", [*map(noises.get, noises.names()), Student()], ids=repr)
@pytest.mark.parametrize("stair", STAIRS, ids=repr)
def test_expectation_is_the_convolution_and_its_derivative_is_bounded(noise, stair) -> None:
    for mean, std in [(0.0, 0.3), (-0.5, 0.02), (0.7, 4.0)]:
        result = proposition(stair, noise, mean, std, points=31)
        assert result.error < 1e-9 * result.norm
        bound = min(result.bound, result.tight_bound)
        assert 0 < result.largest_derivative <= bound * (1 + 1e-6)
        assert result.holds


def test_one_threshold_and_unimodal_noise_attain_the_tight_bound() -> None:
    for noise in noises.names():
        result = proposition(ss.Stair.heaviside(), noise, std=0.4)
        assert result.bound == pytest.approx(2 * result.largest_derivative, rel=1e-6)
        assert result.tight_bound == pytest.approx(result.largest_derivative, rel=1e-6)


@pytest.mark.parametrize(
    ("quantum", "std", "field"), [(1.0, 0.0, "std"), (1.0, math.inf, "std"), ((1, 2), 1.0, "stair")]
)
def test_proposition_needs_a_density_and_one_quantum(quantum, std, field) -> None:
    with pytest.raises(ValueError, match=f"{field} must"):
        proposition(ss.Stair.ternary(quantum=quantum), "normal", 0.0, std)


# Distances


def test_distances_vanish_with_zero_mean_except_at_ties() -> None:
    for interval in INTERVALS:
        schedule = Schedule(4, 10.0, interval)
        times = times_to_watch(schedule, points=3)
        real = distances_on_random_networks(schedule, "triangular", times=times)
        ties = distances_on_random_networks(schedule, "triangular", times=times, weights="integer")
        assert all(values[-2] < 1e-3 and values[-1] == 0 for values in real.values)
        assert all(values[0] > 0.1 for values in real.values)
        # σ(0) = 1/2 up to the end: the last layer keeps a distance.
        assert ties.values[-1][-2] > 0.5
        assert ties.values[-1][-1] == 0


@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("interval", INTERVALS)
def test_distances_at_ties_vanish_at_the_rate_of_the_theorem(interval, power, noise) -> None:
    n = 4
    std0 = noises.get(noise).std_within(0.5)
    schedule = Schedule(n, 10.0, interval, power, static_mean=False, std0=std0)
    lambdas = (1e-2, 1e-3)
    distances = distances_on_random_networks(
        schedule, noise, times=[schedule.end * (1 - value) for value in lambdas], weights="integer"
    )
    for values in distances.values:
        for value, remaining in zip(values, lambdas, strict=True):
            assert value <= remaining ** (n + 1)


def test_distances_are_seeded_and_vanish_layer_by_layer() -> None:
    schedule = Schedule(3, 10.0)
    first, other = (distances_on_random_networks(schedule, "uniform", seed=s) for s in (1, 2))
    assert first == distances_on_random_networks(schedule, "uniform", seed=1) != other
    for layer, values in enumerate(first.values):
        for t, value in zip(first.times, values, strict=True):
            assert (value == 0) == (t >= 10 * (layer + 1)) or t > 29.9


def two_layers(weights: ss.Stair | None = None) -> torch.nn.Module:
    """Two quantised layers, each with a batch-norm."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for layer, (a, b) in enumerate([(6, 10), (10, 8)]):
        linear = torch.nn.Linear(a, b)
        if weights is not None:
            linear = StairLinear.from_float(linear, StairWeight(weights, "normal", layer=layer))
        activation = StairActivation(
            ss.Stair.linear(2, quantum=0.4, thresholds="floor"), "normal", layer=layer
        )
        layers += [linear, torch.nn.BatchNorm1d(b), activation]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))


@pytest.mark.parametrize("weights", [None, ss.Stair.ternary(quantum=0.3)])
@pytest.mark.parametrize("soft_weights", [True, False])
def test_distances_on_a_network_agree_with_scipy(weights, soft_weights) -> None:
    net, x = two_layers(weights), torch.randn(16, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    schedule = Schedule(2, 10.0, "overlapped", static_mean=False, std0=0.3)
    distances = distances_on_network(net, x, schedule, times=[4.0, 20.0], soft_weights=soft_weights)
    hard = soft = x.double()
    for layer in range(2):
        linear, norm, activation = net[3 * layer : 3 * layer + 3]
        mean, std = schedule(layer, 4.0)

        def expectation(s, stair, mean=mean, std=std):
            rises = np.diff(stair.levels)
            z = (s.numpy()[..., None] - stair.thresholds) / stair.quantum
            return torch.from_numpy(
                stair.levels[0] + (rises * stats.norm.cdf(z, mean, std)).sum(-1)
            )

        weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
        hard_weight = weight if weights is None else weights(weight)
        has_noise = weights is not None and soft_weights
        soft_weight = expectation(weight, weights) if has_noise else hard_weight
        root = math.sqrt(1 + norm.eps)
        hard = activation.stair((hard @ hard_weight.T + bias) / root)
        soft = expectation((soft @ soft_weight.T + bias) / root, activation.stair)
        expected = float((soft - hard).norm(dim=1).mean())
        assert distances.values[layer][0] == pytest.approx(expected)
        assert distances.values[layer][1] == 0
        assert distances.values[layer][0] <= distances.largest[layer]
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_distances_reject_missing_and_mismatched_arguments() -> None:
    x, constant = torch.zeros(2, 6), lambda layer, t: (0.0, 1.0)
    with pytest.raises(ValueError, match="layers must"):
        distances_on_random_networks(constant, "uniform")
    with pytest.raises(ValueError, match="weights must"):
        distances_on_random_networks(Schedule(2, 1), "uniform", weights="complex")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have 2 layers, as the network, but has 1"):
        distances_on_network(two_layers(), x, Schedule(1, 1.0))
    with pytest.raises(ValueError, match="times must"):
        distances_on_network(two_layers(), x, constant)


# examine()


def test_examine_combines_the_parts() -> None:
    schedule, stair = (
        Schedule(2, 10.0, "same_end", std0=0.4),
        ss.Stair.linear(4, quantum=0.5, thresholds="floor"),
    )
    examination = examine(schedule, "normal", stair, seed=3)
    assert examination.verdicts == hypotheses(schedule, "normal")
    assert [verdict.name for verdict in examination.verdicts[:7]] == list(HYPOTHESES[:7])
    assert examination.conclusion == conclusion(examination.verdicts)
    assert examination.synchronisation == synchronisation(schedule)
    # Means and stds are in quanta; λ of the last layer is 1, 1/2 and 1/10.
    stds = [0.4 * 0.5 * left**2 for left in (1, 0.5, 0.1)]
    assert [part.std for part in examination.propositions] == pytest.approx(stds)
    assert examination.propositions[0] == proposition(stair, "normal", 0.0, stds[0])
    assert examination.distances == distances_on_random_networks(schedule, "normal", seed=3)
    ties = distances_on_random_networks(schedule, "normal", weights="integer", seed=3)
    assert examination.distances_at_ties == ties
    assert examine(Schedule(2, 1.0, std0=0.0)).propositions == ()  # there is no density
