"""The optimiser's step for latent weights in one pass, against torch's; interpreted."""

import copy
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from twins import batch, distance, pair

from softstair import _accelerate
from softstair._accelerate import fused, update
from softstair._accelerate.update import LatentSteps, supports_update
from softstair.data.batches import Examples
from softstair.train.fit import Step
from softstair.train.recipe import Recipe
from softstair.train.state import State
from softstair.train.updates import Rates

NEEDS_INTERPRETER = True


def test_under_the_interpreter(run_interpreted):
    run_interpreted()


def small() -> nn.Module:
    """A first convolution and a linear layer; each launch of a kernel costs the interpreter."""
    names = ("conv", "norm", "relu", "flat", "linear", "norm_2", "relu_2", "fc")
    layers = [
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5),
    ]  # fmt: skip
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("kind", "decay", "float8"),
    [
        (torch.optim.AdamW, 0.1, False),
        (torch.optim.Adam, 0.0, False),
        (torch.optim.AdamW, 0.0, True),
    ],
)
def test_weights_and_moments_are_those_of_torch(kind, decay, float8):
    """Two steps with a rate that changes, decay and bounds."""
    side, make = (4, None) if float8 else (2, small)
    net, _ = pair("ternary", "uniform", "mode", side, make=make, channels=1)
    twin, bound = copy.deepcopy(net), 0.05
    runs = [fused(each, float8) for each in (net, twin)]
    optimisers = [kind(each.parameters(), lr=1e-2, weight_decay=decay) for each in (net, twin)]
    weights = [layer.sums.weight for layer in runs[0].layers]
    steps = runs[0].attach_latent_steps()
    for rate in (1e-2, 3e-3):
        x, y = batch(side, 16 if float8 else 2, channels=1)
        steps.begin(optimisers[0], {weights[1]: (-bound, bound)})
        for run, optimiser in zip(runs, optimisers, strict=True):
            optimiser.zero_grad()
            optimiser.param_groups[0]["lr"] = torch.tensor(rate)
            torch.nn.functional.cross_entropy(run(x), y).backward()
        assert all(weight.grad is None for weight in weights)
        assert steps.finish() == set(weights)
        steps.join()
        assert steps.finish() == set()
        optimisers[0].step()
        optimisers[1].step()
        with torch.no_grad():
            runs[1].layers[1].sums.weight.clamp_(-bound, bound)
    for (name, weight), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert distance(weight, other) < 1e-6, name
        for key, value in optimisers[1].state[other].items():
            assert distance(optimisers[0].state[weight][key], value) < 1e-5, (name, key)
    assert float(weights[1].detach().abs().max()) == pytest.approx(bound)


@pytest.mark.nightly
def test_layers_with_one_kind_of_stair_are_updated_in_one_launch(monkeypatch):
    """The first layer is INT8, the three others are ternary. With two at most in a launch, or one
    as soon as its gradient is known, the weights have the same bits."""
    launch, weights, counts = update._launch, [], []
    record = lambda layers: (counts.append(len(layers)), launch(layers))
    monkeypatch.setattr(update, "_launch", record)
    together = update.LEAST_WEIGHTS
    for most, few, expected in ((24, together, [3, 1]), (2, together, [2, 1, 1]), (24, 1, [1] * 4)):
        counts.clear()
        monkeypatch.setattr(update, "LAYERS", most)
        monkeypatch.setattr(update, "LEAST_WEIGHTS", few)
        net, _ = pair("INT8 first", "uniform", "mode", side=4, channels=1)
        run, optimiser = fused(net), torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2))
        steps = run.attach_latent_steps()
        before = [layer.sums.weight.detach().clone() for layer in run.layers]
        steps.begin(optimiser, {})
        x, y = batch(side=4, images=2, channels=1)
        torch.nn.functional.cross_entropy(run(x), y).backward()
        steps.finish()
        weights.append([layer.sums.weight.detach() for layer in run.layers])
        assert counts == expected
        for weight, old in zip(weights[-1], before, strict=True):
            assert 0.009 < float((weight - old).abs().max()) < 0.011  # Adam's first step: the rate
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*weights, strict=True))


def test_a_weight_that_is_no_number_stays_so():
    net, _ = pair("ternary", "uniform", "mode", make=small)
    run, optimiser = fused(net), torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2))
    layer = run.layers[-1]
    steps = layer.steps = LatentSteps()
    steps.begin(optimiser, {layer.sums.weight: (-1.0, 1.0)})
    x, y = batch(side=2, images=2, channels=1)
    torch.nn.functional.cross_entropy(run(x), y).backward()
    [(_, gradient, _)] = steps._pending
    gradient[0, 0] = torch.nan
    steps.finish()
    assert int(layer.sums.weight.isnan().sum()) == 1


def test_other_optimisers_take_their_own_step():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert supports_update(torch.optim.AdamW(parameters, weight_decay=0.1))
    assert not supports_update(torch.optim.Adam(parameters, weight_decay=0.1))
    assert supports_update(torch.optim.Adam(parameters, 0.1, decoupled_weight_decay=True))
    for settings in ({"amsgrad": True}, {"maximize": True}, {"betas": (0.0, 0.999)}):
        assert not supports_update(torch.optim.AdamW(parameters, **settings))
    assert not supports_update(torch.optim.SGD(parameters, lr=0.1))


def test_a_weight_that_two_layers_share_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(_accelerate, "can_fuse", lambda device: True)
    net, _ = pair("ternary", "uniform", "mode", side=4)
    net[0].weight = nn.Parameter(net[0].weight.detach())
    net[11].register_parameter("other", net[0].weight)
    state = State(
        Recipe.from_flat(batch=4, precision="float32"), net, 4, torch.device("cpu"), own=False
    )
    run: Any = state.execution.forward
    assert [layer.number for layer in run.layers if layer.steps] == [1, 2, 3]


class Twice(nn.Module):
    """A network that reads the weights of a layer by name too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.again, self.norm_2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.relu_2, self.fc = nn.ReLU(), nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        x = x + nn.functional.conv2d(x, self.again.weight, padding=1)
        return self.fc(self.relu_2(self.norm_2(self.again(x))).mean((2, 3)))


def test_a_weight_that_is_read_by_name_is_left_to_torch():
    run = fused(pair("ternary", "uniform", "mode", side=4, make=Twice, channels=1)[0])
    assert len(run.layers) == 2
    run.attach_latent_steps()
    assert [layer.number for layer in run.layers if layer.steps] == [0]


class FakeStream:
    """A CUDA stream or event that records what waits for it."""

    device_index = cuda_stream = device = 0

    def __init__(self, *_: object) -> None:
        self.waited_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)
        self.at_wait()

    def at_wait(self) -> None: ...

    wait_stream = wait_event

    def record(self) -> None: ...


def test_what_the_second_stream_reads_is_held_until_it_is_waited_for(monkeypatch):
    current, second = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", FakeStream)
    monkeypatch.setattr(update, "_stream_beside", lambda *_: second)
    steps, tensors, device = LatentSteps(), [torch.zeros(1) for _ in range(6)], torch.device("cuda")
    alive = [weakref.ref(tensor) for tensor in tensors]
    count = lambda: [tensor() is not None for tensor in alive]
    alive_then: list[int] = []
    monkeypatch.setattr(current, "at_wait", lambda: alive_then.append(sum(count())))
    for number in range(4):
        with steps.stream.beside(device, tensors.pop(0)):
            if number == 1:  # the optimiser's step of an earlier layer, with its gradient
                steps.stream.hold(tensors.pop(0))
        with steps.stream.beside(device):  # reads nothing
            pass
        waits = [event for event in current.waited_for if event is not second]
        assert len(waits) == max(0, number - 1)
    assert count() == [False, False, False, True, True, True]
    assert alive_then == [6, 5]  # nothing is freed before the wait
    optimiser = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(1e-2))
    steps.begin(optimiser, {})  # joins a step that failed
    assert current.waited_for[-1] is second
    assert count() == [False] * 5 + [True]


@pytest.mark.nightly
def test_training_steps_are_those_of_torchs_optimiser(monkeypatch):
    """Clipped latent weights, static noise, then a layer without noise, which momentum moves on."""
    weights = []
    monkeypatch.setattr(_accelerate, "can_fuse", lambda device: True)
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(update, "supports_update", lambda optimiser: False)
        recipe = Recipe.from_flat(
            data="cifar10", model="vgg8", batch=4, epochs=3, optimiser="adamw", learning_rate=1e-2,
            latent_rate=0.3, clip_latent=True, period=1.0, precision="float32", compile="never",
        )  # fmt: skip
        net, _ = pair("ternary", "uniform", "mode", side=4)
        state = State(recipe, net, 4, torch.device("cpu"))
        assert (state.updates._latent is not None) == kept
        state.updates.rates = Rates(state.optimiser, state.device)  # as tensors, as on a GPU
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8, generator=draw)
        step = Step(state, Examples(x, torch.arange(4), 128.0, 64.0, "cpu"))
        for _ in range(3):
            state.begin_epoch()
            step()
            state.end_epoch({})
        assert state.truncated_layers
        weights.append([parameter.detach() for parameter in net.parameters()])
        moments = state.optimiser.state_dict()["state"]
        assert {int(each["step"]) for each in moments.values()} == {3}
    for weight, other in zip(*weights, strict=True):
        assert distance(weight, other) < 1e-5
