"""Recurrent cells of quantised Linear layers, whose state is carried between calls."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled import needs_compiler
from freezes import formats
from torch import Tensor, nn

import softstair as ss
from softstair.deploy.c import LANGUAGE, write

INPUTS, SIZE, CLASSES, STEPS = 4, 8, 3, 12


class GRU(nn.Module):
    """The next state of a gated recurrent unit, and scores; x and the state are one vector."""

    states = 1

    def __init__(self) -> None:
        super().__init__()
        self.z, self.r = (nn.Linear(INPUTS + SIZE, SIZE) for _ in range(2))
        self.x, self.h = nn.Linear(INPUTS, SIZE), nn.Linear(SIZE, SIZE)
        self.gate_z, self.gate_r, self.tanh = nn.Sigmoid(), nn.Sigmoid(), nn.Tanh()
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, xh: Tensor) -> tuple[Tensor, Tensor]:
        x, h = xh[:, :INPUTS], xh[:, INPUTS:]
        z, r = self.gate_z(self.z(xh)), self.gate_r(self.r(xh))
        n = self.tanh(self.x(x) + self.h(r * h))
        h = n + z * (h - n)
        return self.head(h), h


class LSTM(nn.Module):
    """The same of a long short-term memory, with two states."""

    states = 2

    def __init__(self) -> None:
        super().__init__()
        gates = [nn.Linear(INPUTS + SIZE, SIZE) for _ in range(4)]
        self.i, self.f, self.o, self.g = gates
        self.gate_i, self.gate_f, self.gate_o = (nn.Sigmoid() for _ in range(3))
        self.tanh, self.after = nn.Tanh(), nn.Tanh()
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, xhc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        xh, c = xhc[:, : INPUTS + SIZE], xhc[:, INPUTS + SIZE :]
        i, f, o = self.gate_i(self.i(xh)), self.gate_f(self.f(xh)), self.gate_o(self.o(xh))
        c = f * c + i * self.tanh(self.g(xh))
        h = o * self.after(c)
        return self.head(h), h, c


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, STEPS, INPUTS, generator=torch.Generator().manual_seed(seed))
    x = x.clamp(-2, 2)
    return x, x[:, :, :CLASSES].sum(1).argmax(1)


def unrolled(net: nn.Module, x: Tensor, states: int) -> tuple[Tensor, list[Tensor]]:
    """Return the scores after the last step, and the input of each step."""
    seen, state = [], torch.zeros(len(x), states * SIZE)
    for step in range(STEPS):
        seen.append(torch.cat([x[:, step], state], 1))
        scores, *parts = net(seen[-1])
        state = torch.cat(parts, 1)
    return scores, seen


def trained(cell: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net, (x, y) = cell(), sequences(512, 0)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(150):
        part = slice(step * 64 % 512, step * 64 % 512 + 64)
        scores, _ = unrolled(net, x[part], net.states)
        loss = F.cross_entropy(scores, y[part])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


MAIN = """
#include <stdio.h>
#include "network.h"
int main(void) {
    int16_t input[NETWORK_INPUTS] = {0};
    int32_t outputs[NETWORK_OUTPUTS];
    while (fread(input, sizeof *input, INPUTS, stdin) == INPUTS) {
        network_run(input, outputs);
        for (int i = INPUTS; i < NETWORK_INPUTS; i++) {
            input[i] = (int16_t)outputs[NETWORK_OUTPUT_1 + i - INPUTS];
        }
    }
    for (int i = 0; i < NETWORK_OUTPUTS; i++) {
        printf("%ld ", (long)outputs[i]);
    }
    return 0;
}
"""


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("cell", [GRU, LSTM])
def test_cells_carry_their_state_between_calls(cell: type[nn.Module], tmp_path: Path) -> None:
    model, (x, _) = trained(cell), sequences(300, 1)
    with torch.no_grad():
        expected, seen = unrolled(model, x, model.states)
    net = ss.quantise(model, "int8").eval()
    ss.calibrate(net, [torch.cat(seen)], outputs="values")
    scale = 1 / float(net.tanh.stair.quantum)  # of the input: that of the state
    count = INPUTS + model.states * SIZE
    frozen = ss.freeze(net, (count,), scale=scale, dtype=torch.int16)
    bytes_of = lambda y: (y * scale).round().to(torch.int16)
    state, steps = torch.zeros(len(x), model.states * SIZE, dtype=torch.int16), []
    for step in range(STEPS):
        steps.append(torch.cat([bytes_of(x[:, step]), state], 1))
        scores, *parts = frozen.values(steps[-1])
        state = torch.cat([bytes_of(part) for part in parts], 1)
        if cell is GRU:  # in units of the input, so that the integers are the next input
            assert torch.equal(state.int(), frozen(steps[-1])[1])
    assert float((scores.argmax(1) == expected.argmax(1)).double().mean()) >= 0.97
    folder = tmp_path / "nodes"
    folder.mkdir()
    assert formats(frozen, torch.cat(steps)[::40], folder) == [True, False, True]
    if cell is not GRU:
        return
    write(frozen, tmp_path)
    (tmp_path / "carry.c").write_text(MAIN)
    command = ["cc", *LANGUAGE, "-O1", f"-DINPUTS={INPUTS}", "carry.c", "network.c", "-o", "carry"]
    subprocess.run(command, cwd=tmp_path, check=True)
    for number in range(5):
        data = bytes_of(x[number]).numpy().tobytes()
        done = subprocess.run([tmp_path / "carry"], input=data, capture_output=True, check=True)
        found = np.array(done.stdout.split(), int)
        last = [part[number].numpy() for part in frozen(steps[-1])]
        np.testing.assert_array_equal(found, np.concatenate(last))
