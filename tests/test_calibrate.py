"""Calibration of quanta, and which activations must share one."""

import pytest
import torch
from torch import Tensor, nn

import softstair as ss
from softstair.convert.sites import set_input_units, tied_stairs

pytestmark = pytest.mark.quick

TERNARY, UINT4 = ss.Stair.ternary(), ss.Stair.linear(4, quantum=0.25)


class Joined(nn.Module):
    """Features that are added, averaged and added, concatenated, or read by the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(6))
        self.stairs = nn.ModuleList(nn.ReLU() for _ in range(6))
        self.pool, self.shared, self.last = nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = (
            stair(layer(x)) for layer, stair in zip(self.layers, self.stairs, strict=True)
        )
        added = a + b
        smaller = self.pool(c) + d[..., ::2, ::2]  # multiples of a quarter of c's quantum
        last = self.last(torch.cat([added, e], 1))
        return last.mean() + smaller.mean() + self.shared(d).mean() + self.shared(f).mean()


def test_activations_whose_values_meet_are_tied():
    net = ss.quantise(Joined(), TERNARY, UINT4, sums=None)
    names = {module: name for name, module in ss.nn.stair_modules(net)}
    groups = [[names[stair][-1] for stair in group] for group in tied_stairs(net)]
    assert groups == [["0", "1", "4"], ["2"], ["3", "5"]]


def test_layers_learn_whether_their_inputs_still_have_one_quantum():
    net = ss.quantise(Joined(), TERNARY, UINT4, sums=None)
    assert (net.last.input_quantum, net.last.widest_input) == (0.25, 30)
    for number, expected in ((0, None), (1, None), (4, 0.5)):
        net.stairs[number].set_quantum(0.5)
        set_input_units(net)
        assert net.last.input_quantum == expected
