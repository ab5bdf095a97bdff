"""The operator's row: bytes counted by hand, and what is kept asked of autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from softstair.bench import Effort, Times, measure_operator
from softstair.bench.operator import Row, _kept, target
from softstair.noise import names

SMALL = Effort(repeats=2, calls=1, seconds=0.0, elements=96)


class ByteTrace(torch.autograd.Function):
    """Keeps a byte an element, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward((x > 0).to(torch.uint8), torch.tensor(1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_what_is_kept_is_asked_of_autograd() -> None:
    x = torch.zeros(50, requires_grad=True).clone()
    assert _kept(ByteTrace.apply, x) == (50, 50)
    assert _kept(torch.sin, x) == (0, 200)  # x itself: nothing is written
    assert _kept(torch.exp, x) == (200, 200)  # the result
    assert _kept(lambda x: x + 1, x) == (0, 0)


def row(**changes: Any) -> Row:
    values = {
        "stair": "ternary", "noise": "uniform", "how": "mode", "dtype": "bfloat16",
        "elements": 100, "forward": Times((2.5,)), "backward": Times((5.0,)),
        "copy": Times((2.0,)), "relu": 3.0, "forward_bytes": 500, "backward_bytes": 500,
        "copy_bytes": 400, "kept": 1.0, "memory": 2.5, **changes,
    }  # fmt: skip
    return Row(**values)


def test_shares_are_bandwidths_over_a_copys() -> None:
    # 500 bytes in 2.5 s are as fast as 400 in 2 s; in 5 s, half as fast.
    found = row().to_json()
    assert (found["forward_share"], found["backward_share"]) == (1.0, 0.5)
    assert found["copy_bandwidth"] == 200
    assert found["times_relu"] == 2.5


def test_every_family_and_forward_has_its_row() -> None:
    rows = measure_operator("cpu", SMALL, stairs=["heaviside"])
    expected = [
        (noise, how) for noise in names() for how in ("expectation", "mode", "random", "hard")
    ]
    assert [(one.noise, one.how) for one in rows] == expected
    for one in rows:
        assert (one.elements, one.dtype) == (96, "float32")
        # On a CPU x is kept: nothing is written forwards but y; backwards three tensors move.
        assert (one.forward_bytes, one.backward_bytes, one.copy_bytes) == (768, 1152, 768)
        assert one.kept == 4
        assert len(one.forward.samples) == len(one.copy.samples) == 2
        assert one.memory >= 2  # the result and the gradient at least


def test_stairs_are_spread_over_what_they_are_fed() -> None:
    for name in ("heaviside", "ternary", "int4", "int8"):
        chosen = target(name)
        assert chosen.stair.quantum == chosen.quantum
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
        met = chosen.stair(x).unique().numel()
        assert met >= 0.75 * len(chosen.stair.levels)
    with pytest.raises(ValueError, match="but 'int99' was given"):
        measure_operator("cpu", SMALL, stairs=["int99"])


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_operator("cpu", SMALL, stairs=["heaviside"], dtypes=[torch.bfloat16])
    assert torch.equal(torch.get_rng_state(), before)
