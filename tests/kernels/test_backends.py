"""The CPU's kernels against the reference, which the oracles of test_regularise hold."""

import itertools

import pytest
import torch
from torch import Tensor

import softstair as ss
from softstair import kernels
from softstair.kernels import reference
from softstair.kernels.bound import BoundStair

pytestmark = pytest.mark.quick

STAIRS = {
    "heaviside": ss.Stair.heaviside(),
    "ternary": ss.Stair.ternary(0.3),
    "two bits": ss.Stair.linear(2, quantum=0.7, thresholds="floor"),
    "INT4": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "INT8": ss.Stair.linear(8, signed=True, thresholds="floor"),
    "uneven": ss.Stair((-1.5, 0.0, 0.25, 2.0), (-0.7, 0.1, 0.3)),
    "many uneven": ss.Stair(
        [k + 0.1 * (k % 3) for k in range(100)], [k - 0.2 * (k % 4) for k in range(1, 100)]
    ),
}


class Peaked(ss.Noise):
    """Symmetric and uni-modal but not log-concave: a thin peak on a wide bell."""

    peaked = True

    def cdf(self, z: Tensor) -> Tensor:
        normal = ss.noise.Normal()
        return 0.2 * normal.cdf(z / 0.02) + 0.8 * normal.cdf(z / 1.1179)

    def pdf(self, z: Tensor) -> Tensor:
        normal = ss.noise.Normal()
        return 10 * normal.pdf(z / 0.02) + 0.8 / 1.1179 * normal.pdf(z / 1.1179)


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize("name", STAIRS)
@pytest.mark.parametrize("family", [*ss.noise.names(), "peaked"])
def test_the_cpu_computes_what_the_reference_does(name, family):
    """Values and slopes in float64, narrow noise to wide."""
    stair = STAIRS[name]
    noise = Peaked() if family == "peaked" else ss.noise.get(family)
    low, high = stair.thresholds[0], stair.thresholds[-1]
    x = torch.linspace(low - 2, high + 2.1, 1501, dtype=torch.float64)
    for forward, std in itertools.product(("expectation", "mode", "hard"), (0.0, 0.02, 0.4, 6.0)):
        soft = kernels.SoftStair(stair, noise, 0.1, std)
        bound = BoundStair(soft, x)
        results = kernels.value(x, soft, forward), kernels.backward(torch.ones_like(x), x, soft)
        expected = reference.value(x, bound, forward, x), reference.slope(x, bound)
        torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STAIRS)
@pytest.mark.parametrize("family", ["uniform", "triangular"])
def test_there_is_no_slope_outside_of_the_support(name, family):
    """Exactly none: Adam scales whatever is left up to a step."""
    stair = STAIRS[name]
    x = torch.tensor([stair.thresholds[0] - 50.0, stair.thresholds[-1] + 50.0], requires_grad=True)
    for std in (0.1, 0.37, 3.0):
        x.grad = None
        ss.regularise(x, stair, family, 0.0, std, "mode").sum().backward()
        assert torch.equal(x.grad, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "quantum"), [(10, 0.07), (12, 0.07), (12, 1.0), (14, 0.003)])
def test_stairs_finer_than_the_dtype(bits, quantum, dtype):
    """Where thresholds collapse when rounded, the index still counts those not above x."""
    stair = ss.Stair.linear(bits, signed=True, quantum=quantum, thresholds="midpoint")
    thresholds = torch.tensor(stair.thresholds, dtype=torch.float64).to(dtype)
    levels = torch.tensor(stair.levels, dtype=torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, generator=generator) * quantum * 2 ** (bits - 2)
    x = torch.cat([thresholds, x.to(dtype)])
    wanted = torch.searchsorted(thresholds.double(), x.double(), right=True)
    assert torch.equal(kernels.index(x, stair), wanted)
    assert torch.equal(kernels.hard(x, stair), levels[wanted])


@pytest.mark.nightly
def test_a_stair_may_be_made_inside_a_compiled_function():
    function = torch.compile(lambda x: ss.Stair.ternary()(x), backend="aot_eager")
    assert torch.equal(function(torch.tensor([-0.7, 0.2])), torch.tensor([-1.0, 0.0]))


def test_tables_of_stairs_stay_until_they_are_freed():
    """A captured graph reads them at their addresses, however many stairs follow."""
    device, stair = torch.device("cpu"), ss.Stair.ternary(quantum=(0.5, 1.0), axis=1)
    assert kernels.triton.table.cache_info().maxsize is None
    assert kernels.bound.cached_quanta_tensor.cache_info().maxsize is None
    found = [
        (kernels.triton.table(stair, torch.float32, device), kernels.channel_quanta(stair, x))
        for x in (torch.zeros(3, 2), torch.ones(3, 2))
    ]
    assert all(a is b for a, b in zip(*found, strict=True))
    kernels.free_tables()
    assert kernels.triton.table(stair, torch.float32, device) is not found[0][0]
    assert kernels.channel_quanta(stair, torch.zeros(3, 2)) is not found[0][1]
