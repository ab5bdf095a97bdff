"""Rows of the operator: bytes counted by hand, and saved tensors as autograd reports them."""

import pytest
import torch

from benchmarks.speed import Effort, Times, measure_operator
from benchmarks.speed.operators import OperatorRow, bench_stair
from softstair.noise import names
from softstair.regularise import FORWARDS

SMALL = Effort(repeats=2, calls=1, seconds=0.0, elements=96)


def test_shares_are_bandwidths_relative_to_a_copy() -> None:
    row = OperatorRow(
        stair="ternary", noise="uniform", how="mode", dtype="bfloat16", elements=100,
        forward=Times((2.5,)), backward=Times((5.0,)), copy=Times((2.0,)), relu=3.0,
        forward_bytes=500, backward_bytes=500, copy_bytes=400, kept=1.0, memory=2.5,
    )  # fmt: skip
    # 500 bytes in 2.5 s are as fast as 400 in 2 s; in 5 s, half as fast.
    figures = row.to_json()
    assert (figures["forward_share"], figures["backward_share"]) == (1.0, 0.5)
    assert (figures["copy_bandwidth"], figures["times_relu"]) == (200, 2.5)
    assert (figures["how"], figures["copy"]["samples"]) == ("mode", [2.0])


def test_every_family_and_forward_has_a_row() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    rows = measure_operator("cpu", SMALL, stairs=["heaviside"])
    assert torch.equal(torch.get_rng_state(), before)
    assert [(row.noise, row.how) for row in rows] == [(n, how) for n in names() for how in FORWARDS]
    for row in rows:
        assert (row.elements, row.dtype) == (96, "float32")
        # On a CPU x is saved: forward writes only y, and backward moves three tensors.
        assert (row.forward_bytes, row.backward_bytes, row.copy_bytes) == (768, 1152, 768)
        assert row.kept == 4
        assert len(row.forward.samples) == len(row.copy.samples) == 2
        assert row.memory >= 2  # the result and the gradient at least


def test_inputs_reach_most_levels_of_a_stair() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for name in ("heaviside", "ternary", "int4", "int8"):
        stair = bench_stair(name)
        assert stair(x).unique().numel() >= 0.75 * len(stair.levels)


@pytest.mark.parametrize("name", ["int99", "int4@half", "int4@0", "int4@nan", "int4@inf"])
def test_unknown_stairs_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' was given"):
        measure_operator("cpu", SMALL, stairs=[name])
