"""Multipliers and shifts: float32 gives the same levels as integers at every sum."""

from __future__ import annotations

import pytest
import torch

from softstair.deploy.nodes import Requantise
from softstair.deploy.requantise import Line, requantise


@pytest.mark.parametrize("sign", [1, -1])
def test_float32_gives_the_same_levels_at_every_sum(sign: int) -> None:
    draw = torch.Generator().manual_seed(0)
    for half in (2**8, 2**12, 2**17):
        slope = sign * 128 / half * (0.5 + torch.rand(40, generator=draw).double())
        line = Line(slope, 40 * torch.randn(40, generator=draw).double())
        least, greatest = torch.full((40,), -half), torch.full((40,), half)
        empty = Requantise("a", ("x",), -128, 127, *[torch.zeros(40, dtype=torch.int32)] * 4)
        node = requantise(empty, line, least, greatest)
        sums = torch.arange(-half, half + 1).expand(1, 40, -1)
        value = sums[0] * node.factor[:, None] + node.bias[:, None]
        scale = (node.multiplier.double() * 2.0 ** -node.shift.double()).float()
        levels = (value.float() * scale[:, None]).round().clamp(-128, 127)
        assert torch.equal(levels.int(), node.run(sums)[0])
        exact = (sums[0] * slope[:, None] + line.offset[:, None]).clamp(-128, 127)
        assert float((levels - exact).abs().max()) < 0.8
