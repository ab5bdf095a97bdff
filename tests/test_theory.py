"""Theorem 2 and Proposition 1: every verdict is held against the limit that it speaks of."""

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import special, stats

import softstair as ss
from softstair import noise as noises
from softstair.nn import StairActivation, StairLinear, StairWeight
from softstair.schedule import INTERVALS, POWERS, Schedule
from softstair.theory import (
    HYPOTHESES,
    Verdict,
    conclusion,
    distances_on_network,
    distances_on_random_networks,
    hypotheses,
    proposition,
    synchronisation,
    times_to_watch,
)

LAMBDAS = np.array([1e-4, 1e-5, 1e-6])
EPSILONS = (0.1, 1.0, 10.0)
SUPPORT = {"uniform": math.sqrt(3), "triangular": math.sqrt(6)}
RATE = math.pi / math.sqrt(3)


# An oracle of its own: quantiles and tails in logarithms, from scipy and closed forms.


def quantile(noise: str, log_u: np.ndarray) -> np.ndarray:
    """F⁻¹(u) for u = exp(log_u) below 1/2; F⁻¹(1 − u) is its negative."""
    if noise == "uniform":
        return math.sqrt(3) * (2 * np.exp(log_u) - 1)
    if noise == "triangular":
        return math.sqrt(6) * (np.sqrt(2 * np.exp(log_u)) - 1)
    if noise == "normal":
        return special.ndtri_exp(log_u)
    return (log_u - np.log1p(-np.exp(log_u))) / RATE


def log_cdf(noise: str, z: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        if noise == "uniform":
            return np.log(np.clip(z / (2 * math.sqrt(3)) + 0.5, 0, 1))
        if noise == "triangular":
            c = np.clip(z / math.sqrt(6), -1, 1)
            return np.log(np.where(c < 0, 0.5 * (1 + c) ** 2, 1 - 0.5 * (1 - c) ** 2))
    return special.log_ndtr(z) if noise == "normal" else special.log_expit(RATE * z)


class Layer:
    """α, β and the three ingredients of the hypotheses at λ = 10⁻⁴, 10⁻⁵ and 10⁻⁶."""

    def __init__(self, schedule: Schedule, noise: str, layer: int) -> None:
        self.noise = noise
        pairs = [schedule(layer, schedule.end * (1 - one)) for one in LAMBDAS]
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
        found = re.fullmatch(r"λ\^([\d.]+)", rate)
        assert found is not None, rate
        return float(found.group(1)) * np.log(LAMBDAS)


def some_rates(n: int) -> list[np.ndarray]:
    """Slow and fast ones, for statements about every rate."""
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
    """One verdict against the numbers."""
    layer, n = Layer(schedule, noise, verdict.layer), schedule.layers
    if verdict.holds == "exact":
        through_input = verdict.name == "convergence iv" and (layer.mean.any() or layer.std.any())
        zero = Layer(schedule, noise, verdict.layer - 1) if through_input else layer
        assert not np.concatenate([zero.mean, zero.std]).any()
        return
    holds = verdict.holds == "holds"
    if verdict.name == "regparam ii":
        points = [-1.0, -0.49, -0.1, -0.01, 0.0, 0.01, 0.1, 0.49, 1.0]
        far = [np.abs(layer.sigma(s) - (s >= 0)) for s in points]
        assert all(vanishes(one) for one in far) if holds else any(stays_away(one) for one in far)
        if "at s = 0 only" in verdict.reason:
            assert [s for s, one in zip(points, far, strict=True) if stays_away(one)] == [0.0]
    elif verdict.name == "regparam iii":
        assert holds == (noise not in SUPPORT and bool(layer.std.all()))
    elif verdict.name in ("convergence i", "convergence ii"):
        side = -1 if verdict.name == "convergence i" else 1
        # With a constant β slow rates are not yet where they are going at λ = 10⁻⁶.
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
    found = {(verdict.name, verdict.layer): verdict for verdict in verdicts}
    assert len(found) == 8 * schedule.layers - 1
    for (_, layer), verdict in found.items():
        check(verdict, schedule, noise, found.get(("convergence iii", layer - 1)))
    return verdicts


def schedules(n: int, **settings: object) -> Iterator[Schedule]:
    for interval, power, mean, std in itertools.product(
        INTERVALS, POWERS, (True, False), (True, False)
    ):
        yield Schedule(
            layers=n, period=50, interval=interval, power=power,
            static_mean=mean, static_std=std, **settings,
        )  # fmt: skip


@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize("n", range(2, 10))
def test_every_verdict_is_what_the_numbers_say(noise: str, n: int) -> None:
    for schedule in schedules(n, std0=noises.get(noise).std_within(0.5)):
        verdicts = check_all(schedule, noise)
        proved = conclusion(verdicts).proved
        if schedule.static_std:
            assert proved == "none"
        else:
            assert proved == ("off thresholds" if schedule.static_mean else "every input")


@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize(("mean0", "std0"), [(-0.5, 0.1), (0.5, 0.1), (-0.4, 0.0), (0.4, 0.0)])
def test_verdicts_for_other_means_and_for_no_spread(noise: str, mean0: float, std0: float) -> None:
    for schedule in schedules(4, mean0=mean0, std0=std0):
        verdicts = check_all(schedule, noise)
        if mean0 > 0:
            assert conclusion(verdicts).proved != "every input"


def by_name(verdicts: tuple[Verdict, ...], layer: int) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in verdicts if verdict.layer == layer}


@pytest.mark.parametrize("interval", ["same_end", "overlapped"])
@pytest.mark.parametrize("power", POWERS)
def test_zero_mean_fails_at_the_threshold_alone(interval: str, power: str) -> None:
    found = hypotheses(Schedule(5, 10, interval, power), "normal")
    for layer in range(5):
        here = by_name(found, layer)
        assert here["regparam ii"].reason.startswith("at s = 0 only")
        assert (here["convergence iii"].holds, here["convergence iii"].rate) == ("fails", "none")
        assert here["convergence i"].holds == here["convergence ii"].holds == "holds"


@pytest.mark.parametrize("interval", ["partition", "same_start"])
@pytest.mark.parametrize("static_mean", [True, False])
def test_layers_that_arrive_early_are_exact_and_never_a_silent_pass(
    interval: str, static_mean: bool
) -> None:
    found = hypotheses(Schedule(5, 10, interval, static_mean=static_mean), "uniform")
    for layer in range(4):
        here = by_name(found, layer)
        assert {v.holds for name, v in here.items() if name != "regparam iv"} == {"exact"}
    last = by_name(found, 4)
    assert last["convergence iii"].holds == ("fails" if static_mean else "holds")
    # Its input is exact, so that s never moves, whatever the sign in convergence iv.
    assert last["convergence iv"].holds == ("exact" if static_mean else "holds")


def test_the_sign_that_the_text_gives_to_the_mean_is_the_wrong_one() -> None:
    settings = dict(layers=4, period=10, interval="same_end", static_mean=False)
    right, wrong = (hypotheses(Schedule(**settings, mean0=m), "logistic") for m in (-0.5, 0.5))
    assert {verdict.holds for verdict in right} == {"holds"}
    failing = {verdict.name for verdict in wrong if verdict.holds == "fails"}
    assert failing == {"regparam ii", "convergence iii", "convergence iv"}


def test_static_noise_whose_support_ends_at_zero() -> None:
    # The clipped ReLU: uniform on [0, 1); convergence i holds for any rate, ii for none.
    std = 0.5 / math.sqrt(3)
    static = dict(layers=3, period=1, static_std=True, std0=std)
    relu = by_name(hypotheses(Schedule(**static, mean0=0.5), "uniform"), 1)
    assert (relu["convergence i"].holds, relu["convergence ii"].holds) == ("holds", "fails")
    # Uniform on [−1, 0): 1 − σ(0) = 0, and −σ⁻¹(1 − εr_ℓ) = εr_ℓ asks r of ℓ−1 to beat r of ℓ.
    for noise, support in SUPPORT.items():
        schedule = Schedule(**(static | {"std0": 0.5 / support}), mean0=-0.5)
        found = hypotheses(schedule, noise)
        assert [by_name(found, k)["convergence iv"].rate for k in (1, 2)] == ["λ^2", "λ^1"]
        for layer in range(3):
            here = by_name(found, layer)
            expected = {"i": "fails", "ii": "holds", "iii": "holds"}
            assert {k: here[f"convergence {k}"].holds for k in expected} == expected
            for verdict in (here["convergence ii"], here["convergence iii"]):
                assert verdict.rate == "any"
        # β·(support − F⁻¹(1 − u)), in logarithms: 1 − u would round.
        share = {"uniform": 1.0, "triangular": 0.5}[noise]
        for layer in (1, 2):
            log_u = (3 - layer) * np.log(LAMBDAS)
            gap = np.log(schedule.std0 * support * 2**share) + share * log_u
            ratio = (4 - layer) * np.log(LAMBDAS) - gap
            assert ratio[2] < ratio[1] < ratio[0] < 0


class Student(noises.Noise):
    """Five degrees of freedom, std 1: tails like z⁻⁵, heavier than any of ours."""

    SCALE = math.sqrt(5 / 3)

    def cdf(self, z: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(stats.t.cdf(z.numpy() * self.SCALE, 5)))

    def pdf(self, z: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(stats.t.pdf(z.numpy() * self.SCALE, 5) * self.SCALE))


@pytest.mark.parametrize("interval", ["same_end", "overlapped"])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("n", [2, 5])
def test_chebyshev_gives_rates_for_any_family(interval: str, power: str, n: int) -> None:
    schedule = Schedule(n, 10, interval, power, static_mean=False)
    found = hypotheses(schedule, Student())
    assert conclusion(found).proved == "every input"
    for layer in range(n):
        here = by_name(found, layer)
        assert here["convergence iii"].rate == f"λ^{1.5 * schedule.exponent(layer):g}"
        one = Layer(schedule, "normal", layer)
        log_rate = one.log_rate(here["convergence iii"].rate)
        tail = stats.t.logcdf(one.mean / one.std * Student.SCALE, 5)
        assert tail[-1] - log_rate[-1] < tail[0] - log_rate[0] < 0
        reach = stats.t.isf(np.exp(log_rate), 5) / Student.SCALE
        assert vanishes(one.mean + one.std * reach)
        assert vanishes(one.mean - one.std * reach)
        if layer:
            before = one.log_rate(by_name(found, layer - 1)["convergence iii"].rate)
            denominator = -(one.mean + one.std * reach)
            assert (denominator > 0).all()
            ratio = np.exp(before - np.log(denominator))  # √λ at the slowest
            assert ratio[2] < 0.4 * ratio[1] < 0.16 * ratio[0]


def test_hypotheses_have_the_papers_names_and_refuse_what_is_no_measure() -> None:
    assert HYPOTHESES[0] == "regparam i"
    assert HYPOTHESES[-1] == "convergence iv"

    class Slope(noises.Normal):
        proper = False

    with pytest.raises(ValueError, match=r"noise must be a probability measure"):
        hypotheses(Schedule(2, 1), Slope())


# Synchronisation


def expected_order(schedule: Schedule) -> str:
    if schedule.is_static:
        return "weakly"
    if schedule.interval == "same_end":
        return "broken"
    if schedule.interval == "overlapped" and schedule.power == "homogeneous":
        return "weakly"
    return "strictly"


@pytest.mark.parametrize("n", range(2, 10))
def test_order_of_the_papers_schedules_exactly_and_on_a_grid(n: int) -> None:
    for schedule in schedules(n):
        exact = synchronisation(schedule)
        grid = synchronisation(lambda *at, s=schedule: s(*at), n, schedule.end, points=40 * n + 1)
        assert exact.order == expected_order(schedule)
        # On a grid (λ)^2(n−ℓ) may only tell less apart.
        assert grid.order == exact.order
        for one, other in zip(exact.breaks, grid.breaks, strict=True):
            assert (one.earlier, one.later) == (other.earlier, other.later)
            assert abs(one.start - other.start) <= 1.001 * grid.resolution
            assert abs(one.end - other.end) <= 1.001 * grid.resolution


@pytest.mark.parametrize("n", range(2, 10))
def test_where_same_end_breaks_and_under_progressive_recovers(n: int) -> None:
    period = 50.0
    homogeneous = synchronisation(Schedule(n, period, "same_end")).first
    assert homogeneous is not None
    assert (homogeneous.earlier, homogeneous.later) == (n - 2, n - 1)
    assert (homogeneous.start, homogeneous.end) == (0.0, n * period)
    # (u/Pk)^d = (u/P(k+1))^(d−1) at u = P·k^d/(k+1)^(d−1), with k = ℓ+1 and d = n−ℓ.
    for one in synchronisation(Schedule(n, period, "same_end", "progressive")).breaks:
        k, d = one.earlier + 1, n - one.earlier
        assert one.start == pytest.approx(period * (n - one.earlier - 2))
        assert one.end == pytest.approx(period * (n - k**d / (k + 1) ** (d - 1)))


def test_static_and_single_layers_are_weakly_in_order_and_said_so() -> None:
    assert "nothing moves" in synchronisation(Schedule(3, 1, static_std=True)).reason
    assert "nothing moves" in synchronisation(lambda layer, t: (0.0, 1.0), 3, 1.0).reason
    assert "one layer" in synchronisation(Schedule(1, 1)).reason
    assert synchronisation(Schedule(3, 1, static_std=True)).order == "weakly"


def test_the_mean_is_the_measure_where_the_std_is_static() -> None:
    late = Schedule(3, 10, "same_end", static_mean=False, static_std=True)
    assert synchronisation(late).order == "broken"
    assert synchronisation(lambda *at: late(*at), 3, 30.0).order == "broken"


def test_a_function_of_ones_own_is_judged_on_a_grid() -> None:
    def crossing(layer: int, t: float) -> tuple[float, float]:
        return 0.0, max(0.0, 1 - t) if layer == 0 else max(0.0, 1 - 2 * t * t)

    found = synchronisation(crossing, layers=2, end=1.0, points=1001)
    # 1 − t ≤ 1 − 2t² until t = 1/2, and not after it.
    assert found.first is not None
    assert found.first.start == pytest.approx(0.5, abs=2e-3)
    assert found.resolution == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        (lambda layer, t: (0.0, 1.0), {}, "layers=None"),
        (lambda layer, t: (0.0, -1.0), {"layers": 2, "end": 1.0}, "layer 0 at t = 0"),
        (lambda layer, t: (math.nan, 1.0), {"layers": 2, "end": 1.0}, "finite mean"),
        (lambda layer, t: (0.0, 1.0), {"layers": 2, "end": 0.0}, "end=0.0"),
    ],
)
def test_functions_that_are_no_schedule_are_refused(path, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        synchronisation(path, **settings)


# Proposition 1

STAIRS = [
    ss.Stair.heaviside(),
    ss.Stair.ternary(),
    ss.Stair.sign(quantum=0.3),
    ss.Stair.linear(4, quantum=0.07),
    ss.Stair.linear(3, signed=True, thresholds="midpoint"),
    ss.Stair((-2.0, 0.5, 0.75, 7.0), (-1.0, 0.2, 5.0)),
]


@pytest.mark.parametrize("noise", [*map(noises.get, noises.names()), Student()], ids=repr)
@pytest.mark.parametrize("stair", STAIRS, ids=repr)
def test_expectation_is_the_convolution_and_its_slope_is_bounded(noise, stair) -> None:
    for mean, std in [(0.0, 0.3), (-0.5, 0.02), (0.7, 4.0)]:
        found = proposition(stair, noise, mean, std, points=31)
        assert found.error < 1e-9 * found.norm
        assert 0 < found.largest_derivative <= found.bound * (1 + 1e-6)
        assert found.largest_derivative <= found.tight_bound * (1 + 1e-6)
        assert found.holds


def test_the_paper_bound_is_twice_the_slope_on_a_heaviside_and_the_tight_one_is_met() -> None:
    for noise in noises.names():
        found = proposition(ss.Stair.heaviside(), noise, std=0.4)
        assert found.bound == pytest.approx(2 * found.largest_derivative, rel=1e-6)
        assert found.tight_bound == pytest.approx(found.largest_derivative, rel=1e-6)


def test_the_slope_is_the_difference_quotient() -> None:
    # A wrong derivative would pass a bound; the steepest difference quotient would not lie.
    stair, noise = ss.Stair.ternary(), noises.Logistic()
    x = torch.linspace(-3, 3, 20001, dtype=torch.float64)
    y = ss.regularise(x, stair, noise, 0.1, 0.4, forward="expectation")
    steepest = float((y.diff() / x.diff()).max())
    found = proposition(stair, noise, 0.1, 0.4)
    assert found.largest_derivative == pytest.approx(steepest, rel=1e-4)


@pytest.mark.parametrize(
    ("stair", "std", "message"),
    [
        (ss.Stair.ternary(), 0.0, "std above 0"),
        (ss.Stair.ternary(), math.inf, "std above 0"),
        (ss.Stair.ternary(quantum=(0.1, 0.2)), 1.0, "one quantum"),
    ],
)
def test_proposition_refuses_what_it_is_not_about(stair, std, message) -> None:
    with pytest.raises(ValueError, match=message):
        proposition(stair, "normal", 0.0, std)


# What happens


def test_distances_vanish_off_thresholds_with_zero_mean_and_not_at_ties() -> None:
    for interval in INTERVALS:
        schedule = Schedule(4, 10.0, interval)
        real = distances_on_random_networks(schedule, "triangular", times=times_to_watch(schedule))
        ties = distances_on_random_networks(schedule, "triangular", weights="integer")
        assert all(values[-2] < 1e-3 and values[-1] == 0 for values in real.values)
        assert all(values[0] > 0.1 for values in real.values)
        # σ(0) = 1/2 up to the end: the last layer always keeps a distance.
        assert ties.values[-1][-2] > 0.5
        assert ties.values[-1][-1] == 0


@pytest.mark.parametrize("noise", noises.names())
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("interval", INTERVALS)
def test_the_theorem_at_ties_with_the_rates_that_are_claimed(interval, power, noise) -> None:
    n = 4
    std0 = noises.get(noise).std_within(0.5)
    schedule = Schedule(n, 10.0, interval, power, static_mean=False, std0=std0)
    lambdas = (1e-2, 1e-3)
    found = distances_on_random_networks(
        schedule, noise, times=[schedule.end * (1 - one) for one in lambdas], weights="integer"
    )
    for values in found.values:
        for value, one in zip(values, lambdas, strict=True):
            assert value <= one ** (n + 1)


def test_distances_are_seeded_and_arrive_in_order() -> None:
    schedule = Schedule(3, 10.0)
    first, again, other = (
        distances_on_random_networks(schedule, "uniform", seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    for layer, values in enumerate(first.values):
        for t, value in zip(first.times, values, strict=True):
            assert (value == 0) == (t >= 10 * (layer + 1)) or t > 29.9


def test_distances_refuse_what_they_cannot_measure() -> None:
    with pytest.raises(ValueError, match="layers=None"):
        distances_on_random_networks(lambda layer, t: (0.0, 1.0), "uniform")
    with pytest.raises(ValueError, match="weights must be real or integer"):
        distances_on_random_networks(Schedule(2, 1), "uniform", weights="complex")  # type: ignore[arg-type]


def a_network(weights: ss.Stair | None = None) -> torch.nn.Module:
    """Two quantised layers by hand, one with an annealed past and both with a batch-norm."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for layer, (a, b) in enumerate([(6, 10), (10, 8)]):
        linear = torch.nn.Linear(a, b)
        if weights is not None:
            linear = StairLinear.from_float(linear, StairWeight(weights, "normal", layer=layer))
        activation = StairActivation(ss.Stair.linear(2, quantum=0.4), "normal", layer=layer)
        layers += [linear, torch.nn.BatchNorm1d(b), activation]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))


@pytest.mark.parametrize("weights", [None, ss.Stair.ternary(quantum=0.3)])
@pytest.mark.parametrize("soft_weights", [True, False])
def test_distances_on_a_network_are_those_done_by_hand(weights, soft_weights) -> None:
    net, x = a_network(weights), torch.randn(16, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    schedule = Schedule(2, 10.0, "overlapped", static_mean=False, std0=0.3)
    found = distances_on_network(net, x, schedule, times=[4.0, 20.0], soft_weights=soft_weights)
    hard = soft = x.double()
    for layer in range(2):
        linear, norm, activation = net[3 * layer : 3 * layer + 3]
        mean, std = schedule(layer, 4.0)

        def expectation(s, stair, mean=mean, std=std):
            rises = np.diff(stair.levels)
            cdf = stats.norm.cdf(
                (s.numpy()[..., None] - stair.thresholds) / stair.quantum, mean, std
            )
            return torch.from_numpy(stair.levels[0] + (rises * cdf).sum(-1))

        weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
        heavy = weight if weights is None else weights(weight)
        light = expectation(weight, weights) if weights is not None and soft_weights else heavy
        root = math.sqrt(1 + norm.eps)
        hard = activation.stair((hard @ heavy.T + bias) / root)
        soft = expectation((soft @ light.T + bias) / root, activation.stair)
        assert found.values[layer][0] == pytest.approx(float((soft - hard).norm(dim=1).mean()))
        assert found.values[layer][1] == 0
        assert found.values[layer][0] <= found.largest[layer]
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_distances_on_a_network_refuse_a_schedule_too_short_and_a_net_without_stairs() -> None:
    with pytest.raises(ValueError, match=r"as many layers as the network, 2, but it has 1"):
        distances_on_network(a_network(), torch.zeros(2, 6), Schedule(1, 1.0))
    with pytest.raises(ValueError, match="times must be given"):
        distances_on_network(a_network(), torch.zeros(2, 6), lambda layer, t: (0.0, 1.0))
    with pytest.raises(ValueError, match="has no stair in it"):
        distances_on_network(torch.nn.Linear(2, 2), torch.zeros(2, 2), Schedule(1, 1.0))
