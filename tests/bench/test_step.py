"""The step's rows and the schedule's phases: what ran, and arithmetic done again by hand."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from softstair.anneal import Annealer
from softstair.bench import Effort, Times, measure_partition, measure_step
from softstair.bench import step as steps
from softstair.bench.contestant import Contestant
from softstair.bench.partition import Phase, Report, Span, spans
from softstair.bench.subject import subject
from softstair.models import build
from softstair.nn import layer_count
from softstair.train.network import stair_network
from softstair.train.presets import preset

CPU = torch.device("cpu")
SMALL = Effort(repeats=1, calls=1, seconds=0.0, elements=1)


def contestant(**settings: Any) -> Contestant:
    one = subject("digits")
    recipe = one.recipe(8, **settings)
    network = stair_network(one.network(), recipe, torch.zeros(2, *one.shape))
    return Contestant(recipe, network, one.examples(8, 1, CPU), CPU)


@pytest.fixture(scope="module")
def report() -> steps.Report:
    return measure_step("cpu", "digits", batch=8, effort=SMALL)


def test_every_forward_stands_beside_the_twin(report: steps.Report) -> None:
    names = [row.name for row in report.rows]
    assert names[:6] == ["float", "expectation", "mode", "random", "hard", "naive"]
    assert (report.model, report.batch, report.precision) == ("digits", 8, "float32")
    twin = report.rows[0]
    assert (twin.ratio, twin.memory_ratio) == (1.0, 1.0)
    for row in report.rows:
        assert row.images_per_second == pytest.approx(8 / row.times.median)
        assert row.ratio == pytest.approx(row.twin.median / row.times.median)
        assert row.twin_memory == twin.memory
        assert row.treatment == "eager"


def test_memory_holds_parameters_optimiser_and_gradients_at_least(report: steps.Report) -> None:
    parameters = sum(one.numel() for one in build("digits", 10, (1, 8, 8)).parameters())
    for row in report.rows:
        assert 4 * 4 * parameters < row.memory < 10 * 4 * parameters


def test_what_fails_is_named_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("no such\nlayer.")

    monkeypatch.setattr(steps, "naive_network", broken)
    found = measure_step("cpu", "digits", batch=8, effort=SMALL)
    assert found.skipped["naive"] == "TypeError: no such layer"
    assert "naive" not in [row.name for row in found.rows]


@pytest.mark.nightly
def test_too_little_memory_is_not_a_rival_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(steps, "naive_network", large)
    with pytest.raises(MemoryError):
        measure_step("cpu", "digits", batch=8, effort=SMALL)


@pytest.mark.nightly
def test_threads_and_random_numbers_are_given_back() -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    measure_partition("cpu", "digits", batch=8, effort=SMALL)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)


# A contestant


def test_a_call_is_a_training_step() -> None:
    one = contestant(forward="mode")
    before = {name: value.clone() for name, value in one.state.network.named_parameters()}
    one()
    moved = [
        name
        for name, value in one.state.network.named_parameters()
        if not torch.equal(value, before[name])
    ]
    assert moved == list(before)


@pytest.mark.nightly
def test_the_schedule_stands_still_while_steps_are_timed() -> None:
    one = contestant(static_std=False, period=2.0)
    one.go_to(3)
    for _ in range(3 * one.state.steps):
        one()
        assert one.annealed == (0,)
        assert one.state.annealer.t - 3 <= 1
    one.go_to(6)
    assert one.annealed == (0, 1, 2)
    one.go_to(0)
    assert one.annealed == ()


def test_no_gradient_reaches_annealed_layers() -> None:
    one = contestant(static_std=False, period=2.0, freeze=True)
    weights = [module.weight for module in one.state.network.features if hasattr(module, "weight")]
    one.go_to(4)
    one.state.optimiser.zero_grad()
    one()
    first, later = weights[0], weights[4]
    assert first.grad is None or not first.grad.any()
    assert later.grad is not None
    assert later.grad.any()


# The schedule


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["digits", "paper-cifar10", "paper-speech"])
def test_spans_are_what_an_annealer_goes_through(name: str) -> None:
    recipe = replace(preset(name), static_std=False)
    one = next(one for one in map(subject, ("vgg8", "dscnn", "digits")) if one.preset == name)
    network = stair_network(one.network(), recipe, torch.zeros(2, *one.shape))
    layers = layer_count(network)
    annealer = Annealer(network, recipe.schedule(layers), steps_per_unit=1, update="epoch")
    seen = []
    for _ in range(recipe.epochs):
        annealer.step()
        seen.append(annealer.annealed)
    found = spans(recipe, layers)
    assert [span.annealed for span in found for _ in range(span.epochs)] == seen
    assert [span.first for span in found] == [seen.index(span.annealed) for span in found]
    assert sum(span.rates - 1 for span in found) == 1 - (recipe.drop in [s.first for s in found])


def test_a_static_schedule_is_one_span() -> None:
    (span,) = spans(preset("paper-cifar10"), 7)
    assert (span.annealed, span.epochs, span.rates) == ((), 500, 2)


def test_seconds_and_images_add_up() -> None:
    once = lambda seconds: Times((seconds,))
    phases = [
        Phase(Span((), 0, 3, 1), once(2.0), once(2.0), capture=7.0),
        Phase(Span((0,), 3, 5, 2), once(1.0), once(2.0), capture=4.0),
    ]
    report = Report(
        model="m", preset="p", forward="mode", batch=16, precision="float32", augment="none",
        treatment="captured", threads=1, epochs=8, steps=10, phases=phases, static_capture=5.0,
        static_rates=2,
    )  # fmt: skip
    assert report.images == 8 * 10 * 16
    assert report.seconds == 3 * 10 * 2.0 + 7.0 + 5 * 10 * 1.0 + 2 * 4.0
    assert report.static_seconds == 8 * 10 * 2.0 + 2 * 5.0
    found = report.to_json()
    assert found["speed_up"] == pytest.approx(170 / 125)
    assert found["images_per_second"] == pytest.approx(1280 / 125)
    assert [phase["speed_up"] for phase in found["phases"]] == [1.0, 2.0]


def test_partition_measures_every_phase() -> None:
    found = measure_partition("cpu", "digits", batch=8, forward="expectation", effort=SMALL)
    assert [phase.span.annealed for phase in found.phases] == [(), (0,), (0, 1), (0, 1, 2)]
    assert (found.epochs, found.steps) == (40, 1437 // 8)
    assert found.forward == "expectation"
    assert [phase.capture for phase in found.phases] == [0.0] * 4  # a CPU captures nothing


# What it refuses, and needs


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="one of vgg8, dscnn, digits, but 'vgg9' was given"):
        measure_step("cpu", "vgg9", effort=SMALL)
    with pytest.raises(ValueError, match="from 2 to 4096, but 1 was given"):
        measure_step("cpu", "digits", batch=1, effort=SMALL)
    with pytest.raises(ValueError, match="augment must be one of none, shift for speech"):
        measure_partition("cpu", "dscnn", augment="crop", effort=SMALL)


@pytest.mark.nightly
def test_measuring_needs_no_terminal_packages() -> None:
    program = "import sys; sys.modules.update(rich=None, tyro=None); import softstair.bench"
    subprocess.run([sys.executable, "-c", program], check=True)
