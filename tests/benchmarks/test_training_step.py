"""The training step, its baselines and the phases of a schedule, with arithmetic by hand."""

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.speed import Effort, Times, measure_partition, measure_step, training_step
from benchmarks.speed.training_step import PartitionReport, Phase, StepReport, spans
from benchmarks.speed.workload import (
    WORKLOADS,
    StepRunner,
    brevitas_network,
    naive_network,
    workload,
)
from softstair import Stair
from softstair._errors import SoftstairError
from softstair.anneal import Annealer
from softstair.models import build, last_layer
from softstair.nn import layer_count
from softstair.train.network import stair_network
from softstair.train.recipe import preset

CPU = torch.device("cpu")
SMALL = Effort(repeats=1, calls=1, seconds=0.0, elements=1)


@pytest.fixture(scope="module")
def report() -> StepReport:
    return measure_step("cpu", "digits", batch=8, effort=SMALL)


def test_every_forward_stands_beside_the_float_twin(report: StepReport) -> None:
    names = [row.name for row in report.rows]
    assert names[:6] == ["float", "expectation", "mode", "random", "hard", "naive"]
    assert (report.model, report.batch, report.precision) == ("digits", 8, "float32")
    twin = report.rows[0]
    parameters = sum(p.numel() for p in build("digits", 10, (1, 8, 8)).parameters())
    assert (twin.ratio, twin.memory_ratio) == (1.0, 1.0)
    for row in report.rows:
        assert row.images_per_second == pytest.approx(8 / row.times.median)
        assert row.ratio == pytest.approx(row.twin_times.median / row.times.median)
        assert (row.twin_memory, row.treatment) == (twin.memory, "eager")
        # Parameters, two moments of the optimiser and gradients.
        assert 4 * 4 * parameters < row.memory < 10 * 4 * parameters


@pytest.mark.nightly
def test_a_baseline_that_fails_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TypeError("no such layer.\nDetails follow.")
    monkeypatch.setattr(training_step, "naive_network", mock.Mock(side_effect=error))
    report = measure_step("cpu", "digits", batch=8, effort=SMALL)
    assert report.skipped["naive"] == "TypeError: no such layer"
    assert "naive" not in [row.name for row in report.rows]


@pytest.mark.nightly
def test_out_of_memory_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "naive_network", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        measure_step("cpu", "digits", batch=8, effort=SMALL)


@pytest.mark.parametrize(("bits", "quantum"), [(2, 0.5), (4, 0.07)])
def test_naive_rounding_is_fake_quantisation(bits: int, quantum: float) -> None:
    stair = Stair.linear(bits, signed=True, quantum=quantum, thresholds="midpoint")
    net = naive_network(nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), stair, stair)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    levels = stair.integers
    assert levels is not None
    expected = torch.fake_quantize_per_tensor_affine(x, quantum, 0, min(levels), max(levels))
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    rounded = net[0](x)
    (gradient,) = torch.autograd.grad(rounded.square().sum(), x)
    assert torch.allclose(rounded, expected, atol=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-5)
    assert 0 < (gradient == 0).float().mean() < 1


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("model", [*reversed(WORKLOADS)])
def test_the_naive_network_has_the_same_topology(model: str) -> None:
    load, stair = workload(model), Stair.ternary()
    naive, twin = naive_network(load.network(), stair, stair), load.network()
    last = last_layer(twin)
    quantised = 0
    for name, module in twin.named_modules():
        other = naive.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = other.weight.detach().abs()
            ternary = bool(((weight == 0) | (weight == 1)).all())
            assert ternary == (name != last)
            quantised += ternary
        assert not isinstance(other, nn.ReLU)
    assert quantised == {"vgg8": 7, "resnet20": 21, "dscnn": 9, "digits": 3}[model]
    assert naive(torch.randn(2, *load.shape)).shape == (2, load.classes)


@pytest.mark.skipif(importlib.util.find_spec("brevitas") is None, reason="needs Brevitas")
@pytest.mark.parametrize("model", WORKLOADS)
def test_the_brevitas_network_has_the_same_topology(model: str) -> None:
    load = workload(model)
    recipe = load.recipe(8)
    net = brevitas_network(
        load.network(), recipe.network.stair("weights"), recipe.network.stair("features")
    )
    assert net(torch.randn(2, *load.shape)).shape == (2, load.classes)
    names = [type(module).__name__ for module in net.modules()]
    activations = [m for m in load.network().modules() if isinstance(m, nn.ReLU)]
    assert names.count("QuantConv2d") + names.count("QuantLinear") == len(activations)


def runner(**settings: Any) -> StepRunner:
    load = workload("digits")
    recipe = load.recipe(8, **settings)
    network = stair_network(load.network(), recipe, torch.zeros(2, *load.shape))
    return StepRunner(recipe, network, load.examples(8, 1, CPU), CPU)


@pytest.mark.nightly
def test_the_epoch_does_not_advance_while_steps_are_timed() -> None:
    run_step = runner(static_std=False, anneal_from=0.0, period=2.0)
    run_step.go_to(3)
    annealer = run_step.state.annealer
    for _ in range(3 * run_step.state.steps):
        run_step()
        assert annealer.annealed == (0,)
        assert annealer.t - 3 <= 1
    for epoch, annealed in ((6, (0, 1, 2)), (0, ())):
        run_step.go_to(epoch)
        assert annealer.annealed == annealed


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("model", [*reversed(WORKLOADS)])
def test_spans_are_those_of_an_annealer(model: str) -> None:
    load = workload(model)
    recipe = preset(load.preset).replace(static_std=False)
    network = stair_network(load.network(), recipe, torch.zeros(2, *load.shape))
    layers = layer_count(network)
    annealer = Annealer(network, recipe.schedule(layers), steps_per_unit=1, update="epoch")
    annealed = []
    for _ in range(recipe.run.epochs):
        annealer.step()
        annealed.append(annealer.annealed)
    epochs = spans(recipe, layers)
    assert [layers for layers, span in epochs.items() for _ in span] == annealed
    assert [epoch for span in epochs.values() for epoch in span] == [*range(recipe.run.epochs)]
    assert spans(recipe.replace(static_std=True), layers) == {(): range(recipe.run.epochs)}


def test_seconds_and_images_add_up() -> None:
    once = lambda seconds: Times((seconds,))
    phases = [
        Phase((), 3, once(2.0), once(2.0), capture=7.0),
        Phase((0,), 5, once(1.0), once(2.0), capture=4.0),
    ]
    report = PartitionReport(
        model="m", preset="p", forward="mode", batch=16, precision="float32", augment="none",
        treatment="captured", threads=1, epochs=8, steps=10, phases=phases, static_capture=5.0,
    )  # fmt: skip
    assert report.images == 8 * 10 * 16
    assert report.seconds == 3 * 10 * 2.0 + 7.0 + 5 * 10 * 1.0 + 4.0
    assert report.static_seconds == 8 * 10 * 2.0 + 5.0
    figures = report.to_json()
    assert figures["speed_up"] == pytest.approx(165 / 121)
    assert figures["images_per_second"] == pytest.approx(1280 / 121)
    assert [phase["speed_up"] for phase in figures["phases"]] == [1.0, 2.0]


def test_partition_measures_every_phase_and_restores_settings() -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    report = measure_partition("cpu", "digits", batch=8, forward="expectation", effort=SMALL)
    # The last layer is annealed within the last epoch.
    assert [phase.annealed for phase in report.phases] == [(), (0,), (0, 1)]
    assert (report.epochs, report.steps, report.forward) == (20, 1437 // 8, "expectation")
    assert [phase.capture for phase in report.phases] == [0.0] * 3  # a CPU captures nothing
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)


def test_invalid_arguments_are_rejected() -> None:
    for settings, field in (({"model": "vgg9"}, "model"), ({"batch": 1}, "batch")):
        with pytest.raises(SoftstairError, match=f"{field} must be") as info:
            measure_step("cpu", **{"model": "digits", "effort": SMALL, **settings})
        assert info.value.field == field
    with pytest.raises(ValueError, match="augment must be"):
        measure_partition("cpu", "dscnn", augment="crop", effort=SMALL)
