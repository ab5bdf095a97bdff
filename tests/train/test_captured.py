"""What a capture does besides capturing, for which no GPU is needed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short import recipe
from torch import Tensor
from torch.utils._pytree import tree_leaves

from softstair.data import load
from softstair.data.batches import Examples
from softstair.train.checkpoint import state_dict
from softstair.train.network import make_network
from softstair.train.state import State
from softstair.train.step import Step, preserve


def begun(**changes: Any) -> tuple[State, Step]:
    torch.manual_seed(0)
    data = load("digits").sample(200)
    chosen = recipe(**changes)
    state = State(chosen, make_network(chosen, data), 200, torch.device("cpu"))
    state.begin_epoch()
    return state, Step(state, Examples(data.x, data.y, data.mean, data.std))


def tensors(state: State) -> list[Tensor]:
    held = state_dict(state)
    held.pop("step")
    return [one.clone() for one in tree_leaves(held) if isinstance(one, Tensor)]


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("before", [0, 3])
def test_steps_that_are_undone_leave_no_trace(optimiser: str, before: int) -> None:
    """Weights, statistics, noise, momentum, sums and random numbers; and the next step is the one
    that would have come."""
    states = [begun(optimiser=optimiser, forward="random", weight_decay=0.1) for _ in range(2)]
    for _, step in states:
        torch.manual_seed(1)  # both draw from torch's one generator
        for _ in range(before):
            step()
    (state, step), (_, other) = states
    kept = tensors(state)
    clock = state.step, copy.copy(state.annealer.steps)
    with preserve(state):
        for _ in range(2):
            step()
        assert not all(map(torch.equal, kept, tensors(state)))
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


def test_steps_are_undone_when_one_fails() -> None:
    state, step = begun()
    kept = tensors(state)

    def fail() -> None:
        with preserve(state):
            step()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert torch.equal(tensors(state)[0], kept[0])


@pytest.mark.parametrize(("mixture", "smoothing"), [("mixup", 0.0), ("cutmix", 0.2)])
def test_a_mixture_has_the_losses_of_both_labels(mixture: str, smoothing: float) -> None:
    options = {mixture: 0.8, "augment": "crop", "cutout": 2, "label_smoothing": smoothing}
    state, step = begun(**options)
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
    state, _ = begun()
    state.annealer.gather()
    assert state.is_finite()
    next(state.network.parameters()).data.fill_(float("nan"))
    assert not state.is_finite()
