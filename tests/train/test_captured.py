"""What a capture does besides capturing, for which no GPU is needed."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from short import begun, metrics_of, recipe, uninterrupted
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import softstair as ss
from softstair.data.batches import Examples
from softstair.nn import stair_modules
from softstair.train import metrics, step as steps, train
from softstair.train.checkpoint import state_dict
from softstair.train.metrics import evaluate, stair_health
from softstair.train.state import State
from softstair.train.step import Replay, Step, preserve


def tensors(state: State) -> list[Tensor]:
    held = state_dict(state)
    held.pop("step")
    return [one.clone() for one in tree_leaves(held) if isinstance(one, Tensor)]


@pytest.mark.parametrize(("optimiser", "before"), [("adam", 0), ("sgd", 3)])
def test_steps_that_are_undone_leave_no_trace(optimiser: str, before: int) -> None:
    """Weights, statistics, noise, momentum, sums and random numbers, also if a step fails; and the
    next step is the one that would have come."""
    states = [
        begun(recipe(optimiser=optimiser, forward="random", weight_decay=0.1), 200)
        for _ in range(2)
    ]
    for _, step in states:
        torch.manual_seed(1)  # both draw from torch's one generator
        for _ in range(before):
            step()
    (state, step), (_, other) = states
    kept = tensors(state)
    clock = state.step, copy.copy(state.annealer.steps)

    def fail() -> None:
        with preserve(state):
            for _ in range(2):
                step()
            assert not all(map(torch.equal, kept, tensors(state)))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    state.step, state.annealer.steps = clock
    if before:
        assert all(map(torch.equal, kept, tensors(state)))
    else:  # the optimiser has made its state meanwhile: all zeros, as it begins
        found = [one for held in state.optimiser.state.values() for one in held.values()]
        assert all(one.count_nonzero() == 0 for one in found if isinstance(one, Tensor))
    for one in (step, other):
        torch.manual_seed(2)
        one()
    assert all(map(torch.equal, tensors(states[0][0]), tensors(states[1][0])))


@pytest.mark.parametrize(("mixture", "smoothing"), [("mixup", 0.0), ("cutmix", 0.2)])
def test_a_mixture_has_the_losses_of_both_labels(mixture: str, smoothing: float) -> None:
    options = {mixture: 0.8, "augment": "crop", "cutout": 2, "label_smoothing": smoothing}
    state, step = begun(recipe(**options), 200)
    network, examples = copy.deepcopy(state.network), step.examples
    random_state = torch.get_rng_state()
    step()
    torch.set_rng_state(random_state)
    assert state.order is not None
    mixed, y, share = examples.batch(state.order[:32], state.recipe.augmentation)
    assert share is not None
    assert 0 < share < 0.8
    losses = -F.log_softmax(network(mixed), 1).double()
    first, second = (sum(losses[n, label[n]] for n in range(32)) / 32 for label in (y, y.flip(0)))
    expected = (1 - smoothing) * ((1 - share) * first + share * second)
    expected += smoothing * losses.mean()
    torch.testing.assert_close(state.loss, expected.detach(), rtol=1e-5, atol=0.0)


def test_values_of_gathered_noise_are_checked() -> None:
    """Layers then share tensors, which `named_buffers` lists under one name only."""
    state, _ = begun(recipe(), 200)
    state.annealer.gather()
    assert state.is_finite()
    next(state.network.parameters()).data.fill_(float("nan"))
    assert not state.is_finite()


# Replayed measurements


class Graph:
    """Stands for a CUDA graph: it knows the stairs and the tensors of its capture alone."""

    def __init__(self, network: nn.Module, compute: Callable[[], Tensor]) -> None:
        self._compute, self._stairs = compute, [(m, m.stair) for _, m in stair_modules(network)]
        self._buffers = [(m._buffers, dict(m._buffers)) for m in network.modules()]
        self.result = torch.full_like(compute(), torch.nan)

    def replay(self) -> None:
        with ExitStack() as stack:
            for module, stair in self._stairs:
                stack.enter_context(patch.object(module, "stair", stair))
                stack.enter_context(patch.object(module, "synchronise", lambda: None))
            for buffers, captured in self._buffers:
                stack.enter_context(patch.dict(buffers, captured))
            self.result.copy_(self._compute())

    def pool(self) -> "Graph":
        return self


class Captures(list[str]):
    """The names of what was captured of a network; nothing can be if it is ``waiting``."""

    network: nn.Module
    waiting = False

    def capture(
        self, name: str, compute: Callable[[], Tensor], stream: object, pool: Graph | None = None
    ) -> tuple[Graph, Tensor]:
        assert (pool is None) == (not self or self[-1] == "end")  # later graphs share memory
        self.append(name)
        graph = Graph(self.network, compute)
        return graph, graph.result


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures()
    monkeypatch.setattr(steps, "_captured", found.capture)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(steps, "_waits", lambda compute: found.waiting)
    monkeypatch.setattr(metrics, "CHUNK", 80)
    return found


def replay_of(state: State, captures: Captures) -> Replay:
    captures.network = state.network
    return Replay(state.network)


def measured(state: State, examples: Examples, replay: Replay | None) -> list[Any]:
    if replay is not None:
        replay.begin()
    x, _ = next(examples.chunks(16))
    health = stair_health(state.network, x, state.latent_bounds, replay)
    return [evaluate(state.network, examples, replay=replay), health]


def test_a_network_with_other_quanta_or_tensors_is_captured_again(captures: Captures) -> None:
    state, step = begun(recipe(), 200)
    replay = replay_of(state, captures)

    def go() -> int:
        captures.append("end")
        found = measured(state, step.examples, replay)
        assert found == measured(state, step.examples, None)
        count = len(captures) - 1
        captures.clear()
        return count

    assert [go(), go(), go()] == [0, 3, 0]
    _, stair = next(stair_modules(state.network))
    stair.set_quantum(0.5)
    assert [go(), go(), go()] == [0, 3, 0]
    norm: Any = next(m for m in state.network.modules() if isinstance(m, nn.BatchNorm1d))
    norm.running_mean = norm.running_mean + 0.5
    assert [go(), go(), go()] == [0, 3, 0]
    # Noise that is gone changes nothing without noise.
    stair.annealed = True
    stair.std.fill_(0.0)
    assert go() == 0


def test_learned_quanta_are_never_those_of_a_graph(captures: Captures) -> None:
    state, step = begun(recipe(quanta="learned"), 200)
    replay = replay_of(state, captures)
    for epoch in range(4):
        ratios = [m.log_ratio for _, m in stair_modules(state.network) if m.log_ratio is not None]
        with torch.no_grad():
            ratios[0].fill_(0.3 if epoch == 3 else 0.1)  # after an epoch in which it is the same
        assert measured(state, step.examples, replay) == measured(state, step.examples, None)
    assert captures


def test_what_waits_for_the_device_is_not_captured(captures: Captures) -> None:
    state, step = begun(recipe(), 200)
    captures.waiting, replay = True, replay_of(state, captures)
    for _ in range(3):
        assert measured(state, step.examples, replay) == measured(state, step.examples, None)
    assert not captures


def test_a_run_with_replayed_measurements_is_the_same_run(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(forward="random", clip_latent=True)
    wanted, _ = uninterrupted(tmp_path / "plain", chosen)

    class Replayed(Step):
        def __init__(self, state: State, examples: Examples) -> None:
            super().__init__(state, examples)
            self.replay = replay_of(state, captures)

    monkeypatch.setattr("softstair.train.loop.Step", Replayed)
    train(chosen, tmp_path / "replayed")
    assert metrics_of(tmp_path / "replayed") == wanted
    assert len(captures) == 2  # the stairs, and 40 examples


def test_stairs_that_are_not_called_are_not_measured() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = (ss.nn.StairActivation(ss.Stair.ternary()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert [health.name for health in stair_health(Net(), torch.zeros(2, 3))] == ["used"]
    assert stair_health(nn.Linear(3, 2), torch.zeros(2, 3)) == []
