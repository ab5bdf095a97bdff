"""Noise of your own: a density, its integral, and nothing else.

    python examples/noise.py

The raised cosine is bounded like the uniform and smooth like the normal. It is checked by drawing
from it, then used to make a stair smooth, and to train a network.
"""

import math

import torch
import torch.nn.functional as F

import softstair as ss
from softstair.data import load
from softstair.models import digits as network


class RaisedCosine(ss.Noise):
    """(1 + cos(πz/s))/(2s) within ±s; s makes the standard deviation 1."""

    name = "raised cosine"
    support = 1 / math.sqrt(1 / 3 - 2 / math.pi**2)

    def cdf(self, z: torch.Tensor) -> torch.Tensor:
        u = (z / self.support).clamp(-1, 1)
        return (1 + u + torch.sin(math.pi * u) / math.pi) / 2

    def pdf(self, z: torch.Tensor) -> torch.Tensor:
        u = z / self.support
        return torch.where(u.abs() < 1, (1 + torch.cos(math.pi * u)) / (2 * self.support), 0.0)


noise, stair = RaisedCosine(), ss.Stair.ternary()
std = noise.std_within(0.5)
torch.manual_seed(0)

draws = noise.ppf(torch.rand(100_000, dtype=torch.float64))
print(f"mean {draws.mean():.3f}, std {draws.std():.3f} of 100,000 draws")

x = torch.tensor([-1.0, -0.5, 0.0, 0.3, 0.5, 0.7], requires_grad=True)
smooth = ss.regularise(x, stair, noise, 0.0, std, forward="expectation")
smooth.sum().backward()
print("x          ", *(f"{value:6.2f}" for value in x.tolist()))
print("expectation", *(f"{value:6.2f}" for value in smooth.tolist()))
print("slope      ", *(f"{value:6.2f}" for value in x.grad.tolist()))

data = load("digits")
inputs = (data.x - data.mean) / data.std
net = ss.quantise(network(), stair, stair, noise=noise, skip="classifier")
annealer = ss.Annealer(net, ss.Schedule.for_network(net, period=40, std0=std))
optimiser = torch.optim.Adam(net.parameters(), 1e-3)
for batch in torch.randint(1400, (150, 64)):
    annealer.step()
    optimiser.zero_grad()
    F.cross_entropy(net(inputs[batch]), data.y[batch]).backward()
    optimiser.step()
net.eval()
with torch.no_grad():
    right = (net(inputs[1400:]).argmax(1) == data.y[1400:]).double().mean()
print(f"layers annealed: {annealer.annealed}; {right:.1%} of the last 397 digits are right")
