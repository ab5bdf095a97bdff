"""Timing under a fake clock, and memory compared with sums by hand."""

import time

import pytest
import torch
from torch import Tensor

from benchmarks.speed import Effort, Times, race
from benchmarks.speed.clock import peak_memory, tensor_bytes

CPU = torch.device("cpu")


class Clock:
    """Time that passes only while a worker works."""

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


def test_functions_run_in_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    functions = {"a": clock.worker("a", 50.0, 1.0), "b": clock.worker("b", 70.0, 2.0)}
    times = race(functions, CPU, effort(3))
    # Two calls each are not counted: the slow first one, and one to choose the number of calls.
    assert clock.log == "aabb" + "ab" * 3
    assert times["a"].samples == (1.0, 1.0, 1.0)
    assert times["b"].samples == (2.0, 2.0, 2.0)


def test_a_sample_lasts_as_long_as_required_without_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    prepare, work = clock.worker("-", 100.0), clock.worker("a", 0.25)
    times = race({"a": work}, CPU, effort(2, seconds=0.5), lambda name: prepare(), each=5)
    assert (clock.log, times["a"].samples) == ("-aa-aa-aa", (0.05, 0.05))


def test_times_in_json_have_median_and_range() -> None:
    expected = {"samples": [0.5, 0.1, 0.9, 0.2], "median": 0.35, "least": 0.1, "most": 0.9}
    assert Times((0.5, 0.1, 0.9, 0.2)).to_json() == expected


def test_peak_counts_tensors_that_live_at_the_same_time() -> None:
    x = torch.zeros(1000)

    def chain() -> Tensor:
        y = x + 1  # 4000 bytes
        for _ in range(5):
            y = y * 2  # 4000 more until the previous y is freed
        return y.add_(1)  # in place

    assert peak_memory(chain, CPU, [x]) == 8000


def test_peak_includes_the_backward_pass() -> None:
    x = torch.zeros(1000, requires_grad=True)
    # exp saves its result, 4000; the gradient of the sum is a scalar; that of x has 4000.
    assert 8000 <= peak_memory(lambda: x.exp().sum().backward(), CPU, [x]) <= 8016


def test_views_and_known_tensors_are_not_counted() -> None:
    x, known = torch.zeros(10, 10), torch.zeros(7)
    assert peak_memory(lambda: (x.t(), x[2:], known.add_(1)), CPU, [x, known]) == 0
    assert tensor_bytes([x, x.t(), known]) == 400 + 28
