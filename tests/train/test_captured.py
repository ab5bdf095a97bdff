"""What a capture does besides capturing, for which no GPU is needed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from short import begun, recipe
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import softstair as ss
from softstair.train.captured import preserve
from softstair.train.checkpoint import state_dict
from softstair.train.metrics import stair_health
from softstair.train.state import State


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
    mixed, y, share = examples.batch(state.order[:32], state.recipe.data.augmentation)
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


def test_stairs_that_are_not_called_are_not_measured() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = (ss.nn.StairActivation(ss.Stair.ternary()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert [health.name for health in stair_health(Net(), torch.zeros(2, 3))] == ["used"]
    assert stair_health(nn.Linear(3, 2), torch.zeros(2, 3)) == []
