"""Schedules against the tables of PAPER.md section 2."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from torch import nn

import oracle
import softstair as ss
from softstair import Schedule

pytestmark = pytest.mark.quick

INTERVALS = ("same_start", "same_end", "partition", "overlapped")
POWERS = ("homogeneous", "progressive")
EVERY = list(itertools.product(INTERVALS, POWERS, (True, False), (True, False)))
STD0 = 0.288675


def window(interval, layer, layers, period):
    """(t_start, t_end) by the table."""
    return {
        "same_start": (0, period * (layer + 1)),
        "same_end": (period * (layers - layer - 1), period * layers),
        "partition": (period * layer, period * (layer + 1)),
        "overlapped": (0, period * layers),
    }[interval]


def truth(interval, power, static_mean, static_std, layers, period, mean0, std0, layer, t):
    """c lambda^d, term by term."""
    start, end = window(interval, layer, layers, period)
    fraction = min(max((end - t) / (end - start), 0.0), 1.0)
    degree = 1 if power == "homogeneous" else layers - layer
    mean = mean0 if static_mean else mean0 * fraction**degree
    return mean, std0 if static_std else std0 * fraction ** (2 * degree)


def make(interval, power, static_mean, static_std, **options):
    return Schedule(
        interval=interval, power=power, static_mean=static_mean, static_std=static_std, **options
    )


@pytest.mark.parametrize(("interval", "power", "static_mean", "static_std"), EVERY)
@pytest.mark.parametrize(("layers", "period"), [(7, 50), (9, 10), (1, 3), (3, 0.75)])
def test_equals_the_tables(interval, power, static_mean, static_std, layers, period):
    """Every interval, law and kind of mean and variance, over all layers and times."""
    kind = (interval, power, static_mean, static_std)
    schedule = make(*kind, layers=layers, period=period, std0=STD0)
    mean0 = 0.0 if static_mean else -0.5
    for layer in range(layers):
        times = [step * period / 6 for step in range(6 * layers + 7)]
        noise = [schedule(layer, t) for t in times]
        expected = [truth(*kind, layers, period, mean0, STD0, layer, t) for t in times]
        np.testing.assert_allclose(noise, expected, rtol=1e-12, atol=1e-15)
        assert all(isinstance(value, float) for pair in noise for value in pair)
        start, end = window(interval, layer, layers, period)
        ends = mean0 if static_mean else 0.0, STD0 if static_std else 0.0
        assert {schedule(layer, t) for t in (0, start / 2, start)} == {(mean0, STD0)}
        assert {schedule(layer, t) for t in (end, end + 1, schedule.end, 10**6)} == {ends}
    assert schedule.end == period * layers


def test_defaults_and_start_values():
    """Partition, homogeneous, static mean, dynamic variance; mean0 is kept or decays."""
    default = Schedule(layers=7, period=50, std0=STD0)
    spelt = make("partition", "homogeneous", True, False, layers=7, period=50, std0=STD0)
    assert default == spelt
    assert hash(default) == hash(spelt)
    assert Schedule(3, 2, static_mean=True, mean0=0.25, std0=1.0)(0, 99)[0] == 0.25
    moving = Schedule(3, 2, static_mean=False, mean0=0.25, std0=1.0)
    assert moving(0, 0)[0] == 0.25
    assert moving(0, 1)[0] == 0.125
    assert moving(0, 2)[0] == 0
    assert Schedule(3, 2, static_mean=False, std0=1.0)(0, 0)[0] == -0.5


def test_through_json_it_is_the_same_schedule():
    schedule = make("same_end", "progressive", False, True, layers=4, period=2.5, mean0=0.125)
    text = json.dumps(schedule.to_json(), allow_nan=False)
    assert Schedule.from_json(json.loads(text)) == Schedule.from_json(text) == schedule


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, ["layers", "0"]),
        ({"layers": 2.5}, ["layers", "2.5"]),
        ({"period": 0}, ["period", "0"]),
        ({"period": math.nan}, ["period", "nan"]),
        ({"interval": "sametime"}, ["interval", "sametime", *INTERVALS]),
        ({"power": "cubic"}, ["power", "cubic", *POWERS]),
        ({"std0": -0.1}, ["std0", "-0.1"]),
        ({"std0": 1e31}, ["std0", "0 to 1e+30", "1e+31"]),
        ({"mean0": -1e31}, ["mean0", "-1e+30 to 1e+30", "-1e+31"]),
        ({"mean0": math.inf}, ["mean0", "inf"]),
        ({"start": -1.0}, ["start", "-1"]),
    ],
    ids=str,
)
def test_nonsense_is_refused_in_a_sentence(change, words):
    """Every bad parameter is named with what was given and what is allowed."""
    oracle.refuses(lambda: Schedule(**{"layers": 3, "period": 5, "std0": 0.3, **change}), *words)


@pytest.mark.parametrize(("interval", "power", "static_mean", "static_std"), EVERY)
def test_a_start_delays_every_range(interval, power, static_mean, static_std):
    """Before it the noise is static; from then on it is that of a schedule without it."""
    kind = (interval, power, static_mean, static_std)
    plain, late = (make(*kind, layers=3, period=2.0, std0=STD0, start=s) for s in (0.0, 16.0))
    for layer in range(3):
        assert {late(layer, t) for t in (0.0, 8.0, 16.0)} == {plain(layer, 0.0)}
        for step in range(30):
            assert late(layer, 16 + step / 4) == plain(layer, step / 4)
    assert late.end == 22.0
    assert Schedule.from_json(late.to_json()) == late


@pytest.mark.parametrize("noise", ["uniform", "normal", ["logistic", ss.ste.identity()]], ids=str)
def test_the_first_std_of_a_network_is_that_of_its_noise(noise):
    """Annealing begins at the noise with which the network was made."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), noise=noise)
    before = net[1].std.clone()
    schedule = Schedule.for_network(net, period=2)
    ss.Annealer(net, schedule).step()
    assert net[1].std == before
    assert Schedule.for_network(net, period=2, std0=0.1).std0 == 0.1


def test_networks_with_several_families_need_a_first_std():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    noise = {0: "normal", 1: "uniform"}
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), noise=noise)
    with pytest.raises(ValueError, match=r"std0 must be given.*Normal\(\) and Uniform\(\)"):
        Schedule.for_network(net, period=2)
    assert Schedule.for_network(net, period=2, std0=0.25).std0 == 0.25


@pytest.mark.parametrize("layer", [-1, 3, 99])
def test_a_layer_it_does_not_have_is_refused(layer):
    """Layers count from 0 to n - 1."""
    schedule = Schedule(3, 5, std0=0.3)
    with pytest.raises((ValueError, IndexError), match=str(layer)):
        schedule(layer, 0)
    with pytest.raises((ValueError, TypeError, KeyError)):
        Schedule.from_json({"layers": 3, "period": 5, "std0": 0.3, "interval": "never"})
