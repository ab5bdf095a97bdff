"""The stopwatch under a clock of the test's own, and the memory it finds against sums by hand."""

import statistics
import time

import pytest
import torch
from torch import Tensor

from softstair.bench import Effort, Times, race
from softstair.bench.memory import peak, size

CPU = torch.device("cpu")


class Clock:
    """Time that passes only where somebody works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, ""
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def worker(self, name: str, *seconds: float):  # type: ignore[no-untyped-def]
        left = list(seconds)

        def work() -> None:
            self.log += name
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def effort(repeats: int, seconds: float = 0.0) -> Effort:
    return Effort(repeats=repeats, calls=1, seconds=seconds, elements=1)


def test_contestants_run_in_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # Two calls each before it counts: the slow first one, and one that is looked at.
    found = race(
        {"a": clock.worker("a", 50.0, 1.0), "b": clock.worker("b", 70.0, 2.0)}, CPU, effort(3)
    )
    assert clock.log == "aabb" + "ab" * 3
    assert found["a"].samples == (1.0, 1.0, 1.0)
    assert found["b"].samples == (2.0, 2.0, 2.0)


def test_a_sample_lasts_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = race({"a": clock.worker("a", 0.25)}, CPU, effort(2, seconds=2.0), each=5)
    assert clock.log == "a" * (2 + 2 * 8)
    assert found["a"].samples == (0.05, 0.05)


def test_what_comes_before_a_sample_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    before = clock.worker("-", 100.0)
    found = race({"a": clock.worker("a", 1.0)}, CPU, effort(2), before=lambda name: before())
    assert clock.log == "-aa-a-a"
    assert found["a"].samples == (1.0, 1.0)


def test_median_and_spread() -> None:
    samples = (0.5, 0.1, 0.9, 0.2)
    found = Times(samples).to_json()
    assert found["median"] == statistics.median(samples)
    assert (found["least"], found["most"], found["samples"]) == (0.1, 0.9, list(samples))


def test_effort_refuses_no_repeats() -> None:
    with pytest.raises(ValueError, match="from 1 to 1000, but 0 was given"):
        Effort.on(CPU, repeats=0)


def test_quick_is_less() -> None:
    for device in (CPU, torch.device("cuda")):
        whole, quick = Effort.on(device), Effort.on(device, quick=True)
        assert quick.quick
        assert (quick.repeats, quick.elements) < (whole.repeats, whole.elements)
        assert quick.elements < whole.elements
    assert Effort.on(torch.device("cuda")).calls >= 50


# Memory


def test_peak_counts_what_lives_at_once() -> None:
    x = torch.zeros(1000)

    def chain() -> Tensor:
        y = x + 1  # 4000 bytes, which live on
        for _ in range(5):
            y = y * 2  # each beside the one before, which then goes
        return y.add_(1)  # nothing new

    assert peak(chain, CPU, [x]) == 8000


def test_peak_sees_the_backward_pass() -> None:
    x = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        # exp keeps its result, 4000; backwards a seed for the sum's gradient, 4, and what it is
        # multiplied with, which expands to no memory; then the gradient of x, 4000.
        x.exp().sum().backward()

    assert 8000 <= peak(step, CPU, [x]) <= 8016


def test_views_and_known_tensors_are_free() -> None:
    x, known = torch.zeros(10, 10), torch.zeros(7)
    assert peak(lambda: (x.t(), x[2:], known.add_(1)), CPU, [x, known]) == 0
    assert size([x, x.t(), known]) == 400 + 28
