"""The layers of a stair network against plain tensor arithmetic and int64 sums."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
import softstair as ss

pytestmark = pytest.mark.quick

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "bias": {"kernel_size": 3, "bias": True},
    "groups": {"kernel_size": 3, "groups": 4, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 8, "padding": 1, "bias": True},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilation": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
}


def naive_index(x: Tensor, thresholds: list[float]) -> Tensor:
    """How many thresholds lie at or below x, in float32, one at a time."""
    total = torch.zeros(x.shape, dtype=torch.int64)
    for threshold in thresholds:
        total += x >= torch.tensor(threshold, dtype=x.dtype)
    return total


def per_channel(stair: ss.Stair, channels: int) -> ss.Stair:
    return stair.with_quantum([0.03 + 0.02 * c for c in range(channels)], axis=0)


def features(shape: tuple[int, ...], stair: ss.Stair) -> tuple[Tensor, Tensor]:
    """Random features on the stair's levels, and the whole numbers behind them."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(len(stair), shape, generator=generator)
    whole = torch.tensor([round(level / stair.quantum) for level in stair.levels])
    return torch.tensor(stair.levels, dtype=torch.float64).float()[index], whole[index]


def assert_exact(got: Tensor, sums: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Every output is its integer sum times the quanta: one float for one integer, per channel."""
    behind = [1] * (got.dim() - 2)
    wanted = sums.double() * scale.double().reshape(-1, *behind)
    if bias is not None:
        wanted = wanted + bias.double().reshape(-1, *behind)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    for channel in range(got.shape[1]):
        pairs = {}
        whole, values = sums[:, channel].flatten(), got[:, channel].flatten()
        for n, y in zip(whole.tolist(), values.tolist(), strict=True):
            assert pairs.setdefault(n, y) == y


@pytest.mark.parametrize("channelwise", [False, True])
@pytest.mark.parametrize("kind", ["ternary", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_sums_integers_in_eval(kind, channelwise, bias):
    """Sums run over int64's own values, whatever the quanta."""
    weights, inputs = (TERNARY, TERNARY) if kind == "ternary" else (INT4, UINT4)
    weights = per_channel(weights, 5) if channelwise else weights
    torch.manual_seed(0)
    layer = ss.nn.StairLinear(
        257, 5, bias=bias, weight_stair=ss.nn.StairWeight(weights), input_quantum=inputs.quantum
    )
    with torch.no_grad():
        layer.weight.copy_(torch.randn(5, 257) * 0.2)
    layer.eval()
    x, whole = features((64, 257), inputs)
    quanta = torch.tensor(weights.quantum, dtype=torch.float64).expand(5)
    rows = [
        naive_index(
            layer.weight[c].detach(),
            [t if not channelwise else t * weights.quantum[c] for t in weights.thresholds],
        )
        for c in range(5)
    ]
    lowest = {"ternary": -1, "int4": -8}[kind]
    sums = whole @ (torch.stack(rows) + lowest).T
    assert_exact(layer(x).detach(), sums, quanta * inputs.quantum, layer.bias)


@pytest.mark.parametrize("channelwise", [False, True])
@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolution_sums_integers_in_eval(settings, channelwise):
    """INT4 at ε = 0.07 with strides, groups, dilation, padding and bias."""
    settings = {"bias": False, **settings}
    weights = per_channel(INT4, 8) if channelwise else INT4
    torch.manual_seed(1)
    plain = nn.Conv2d(8, 8, **settings)
    with torch.no_grad():
        plain.weight.normal_(0, 0.2)
    layer = ss.nn.StairConv2d(
        8, 8, **settings, weight_stair=ss.nn.StairWeight(weights), input_quantum=0.07
    ).eval()
    layer.load_state_dict(plain.state_dict())
    x, whole = features((4, 8, 9, 9), UINT4)
    quanta = torch.tensor(weights.quantum, dtype=torch.float64).expand(8)
    index = torch.stack(
        [
            (plain.weight[c].detach().double() / quanta[c] + 0.5).floor().clamp(-8, 7)
            for c in range(8)
        ]
    )
    exact = copy.deepcopy(plain).double()
    exact.weight.data, exact.bias = index, None
    sums = exact(whole.double()).detach()
    assert torch.equal(sums, sums.round())
    assert_exact(layer(x).detach(), sums.long(), quanta * 0.07, plain.bias)


def test_sums_beyond_float32_are_exact_integers_too():
    """INT8 times UINT8 over 4,096 inputs passes 2²⁴, from where float32 skips odd numbers."""
    weights = ss.Stair.linear(8, signed=True, thresholds="midpoint")
    layer = ss.nn.StairLinear(
        4096, 2, bias=False, weight_stair=ss.nn.StairWeight(weights), input_quantum=1.0
    ).eval()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(120, 128, (2, 4096), generator=generator)
    x = torch.randint(200, 256, (64, 4096), generator=generator)
    with torch.no_grad():
        layer.weight.copy_(whole)
    # The nearest float32 to the exact sum, which no wrong sum has any business to reach.
    assert torch.equal(layer(x.float()), (x @ whole.T).float())


@pytest.mark.parametrize("forward", ["expectation", "mode", "random", "hard"])
def test_eval_is_the_hard_stair_and_deterministic(forward):
    activation = ss.nn.StairActivation(TERNARY, "normal", forward, mean=0.3, std=2.0).eval()
    x = torch.linspace(-2, 2, 101)
    wanted = (x >= 0.5).float() - (x < -0.5).float()
    state = torch.get_rng_state()
    assert torch.equal(activation(x), wanted)
    assert torch.equal(torch.get_rng_state(), state)
    layer = ss.nn.StairLinear(
        9, 3, weight_stair=ss.nn.StairWeight(INT4, "normal", forward, mean=-0.5)
    ).eval()
    x = torch.randn(4, 9)
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("forward", ["expectation", "mode", "hard"])
def test_noise_is_in_quanta(forward):
    """A quantum of 0.07 takes a mean and std of 0.07 times the buffers', per channel too."""
    x = torch.randn(5, 11) * 0.3
    one = ss.nn.StairActivation(INT4, "normal", forward, mean=-0.5, std=0.4)
    wanted = ss.regularise(x, INT4, "normal", -0.5 * 0.07, 0.4 * 0.07, forward)
    torch.testing.assert_close(one(x), wanted, rtol=0, atol=1e-6)
    stair = per_channel(INT4, 5)
    many = ss.nn.StairWeight(stair, "normal", forward, mean=-0.5, std=0.4)
    rows = []
    for c, quantum in enumerate(stair.quantum):
        single = INT4.with_quantum(quantum)
        rows.append(ss.regularise(x[c], single, "normal", -0.5 * quantum, 0.4 * quantum, forward))
    torch.testing.assert_close(many(x), torch.stack(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stair", [TERNARY, INT4, ss.Stair([-1.0, 0.0, 3.0], [-0.5, 2.0])])
def test_weights_start_at_thresholds(stair, groups):
    """ε·(θ + U(−s, s)), θ uniform over thresholds, s not divided by the groups."""
    torch.manual_seed(0)
    layer = ss.nn.StairConv2d(
        64, 256, 3, groups=groups, weight_stair=ss.nn.StairWeight(stair), bias=False
    )
    layer.start_at_thresholds()
    weight = layer.weight.detach().double().flatten() / stair.quantum
    thresholds = torch.tensor(stair.thresholds, dtype=torch.float64) / stair.quantum
    distance, nearest = (weight[:, None] - thresholds).abs().min(dim=1)
    spread = 1 / math.sqrt(64 * 3 * 3)
    assert distance.max() <= spread * (1 + 1e-4) + 1e-6
    assert distance.max() > 0.99 * spread
    count, share = weight.numel(), torch.bincount(nearest).double()
    wanted = count / len(thresholds)
    assert len(share) == len(thresholds)
    assert ((share - wanted).abs() < 5 * math.sqrt(wanted)).all()
    offset = (weight - thresholds[nearest]) / spread
    assert abs(float(offset.mean())) < 5 / math.sqrt(3 * count)
    assert abs(float(offset.square().mean()) - 1 / 3) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_noise_stays_float32(dtype):
    layer = ss.nn.StairLinear(4, 3, weight_stair=ss.nn.StairWeight(TERNARY, mean=0.1, std=0.123))
    layer = nn.Sequential(layer, ss.nn.StairActivation(TERNARY, std=0.123)).to(dtype)
    assert layer[0].weight.dtype == dtype
    for _, stair in ss.nn.stair_modules(layer):
        assert stair.mean.dtype == stair.std.dtype == torch.float32
        assert float(stair.std) == pytest.approx(0.123, rel=1e-7)
    layer(torch.randn(2, 4, dtype=dtype)).sum().backward()
    assert layer[0].weight.grad.dtype == dtype


def test_the_default_noise_passes_the_gradient_everywhere_inside():
    """Uniform noise that fills a quantum: slope 1 between the outermost levels, 0 included."""
    stair = ss.Stair.linear(4, signed=True, thresholds="midpoint")
    activation = ss.nn.StairActivation(stair)
    x = torch.arange(-7, 7, 0.25).requires_grad_()
    activation(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=1e-5, atol=0)


def test_a_dirac_gives_no_gradient_and_saves_nothing():
    saved = []
    activation = ss.nn.StairActivation(TERNARY, std=0.3)
    activation.annealed = True
    x = torch.randn(7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        y = activation(x)
    assert not saved
    assert not y.requires_grad


@pytest.mark.parametrize("forward", ["expectation", "mode", "random", "hard"])
@pytest.mark.parametrize("mean", [0.0, -0.5, 0.4])
def test_an_annealed_stair_computes_what_it_did_at_std_0(forward, mean):
    """σ(x − α) for the first three, σ(x) for hard, whatever the mean."""
    activation = ss.nn.StairActivation(TERNARY, "uniform", forward, mean=mean, std=0.0)
    x = torch.linspace(-2, 2, 81)
    before = activation(x)
    activation.annealed = True
    shifted = x if forward == "hard" else x - mean
    assert torch.equal(before, (shifted >= 0.5).float() - (shifted < -0.5).float())
    assert torch.equal(activation(x), before)


def test_layer_count_refuses_a_float_network():
    with pytest.raises(ValueError, match="net must be"):
        ss.nn.layer_count(nn.Linear(2, 2))


def test_a_new_quantum_keeps_the_levels_in_quanta_and_the_buffer():
    """Rounded to float32, in which it is saved; the buffer stays where a captured step reads it."""
    activation = ss.nn.StairActivation(ss.Stair.linear(4, quantum=0.1))
    pointer = activation.quantum.data_ptr()
    activation.set_quantum(0.3)
    assert activation.stair.integers == tuple(range(16))
    assert activation.stair.quantum == float(torch.tensor(0.3)) == float(activation.quantum)
    assert activation.quantum.data_ptr() == pointer
    weight = ss.nn.StairWeight(TERNARY)
    weight.set_quantum([0.25, 0.5])
    assert weight.stair == ss.Stair.ternary([0.25, 0.5], axis=0)
    assert weight.quantum.tolist() == [0.25, 0.5]
    weight.set_quantum(2.0)
    assert weight.stair == ss.Stair.ternary(2.0)
    for wrong in (0.0, math.nan, 1e-50):
        with pytest.raises(ValueError, match="quantum"):
            activation.set_quantum(wrong)


def test_quanta_along_another_axis_than_outputs_raise():
    """A quantum for each input cannot come after the sum."""
    stair = ss.Stair.ternary(quantum=(1.0, 2.0, 3.0, 4.0), axis=1)
    with pytest.raises(ValueError, match="axis"):
        ss.quantise(nn.Sequential(nn.Linear(4, 4, bias=False)), stair)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"std": -0.1}, "std"),
        ({"std": 2e38}, "std"),
        ({"mean": math.nan}, "mean"),
        ({"layer": 0.5}, "layer"),
        ({"noise": "unifrom"}, "noise"),
        ({"forward": "mod"}, "forward"),
        ({"stair": "ternary"}, "stair"),
    ],
)
@pytest.mark.parametrize("kind", [ss.nn.StairActivation, ss.nn.StairWeight])
def test_a_wrong_argument_is_named(kind, settings, field):
    with pytest.raises(ValueError, match=field):
        kind(**{"stair": TERNARY, **settings})


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("forward", ["mode", "hard", "random", "expectation"])
@pytest.mark.parametrize("name", oracle.NAMES)
def test_levels_beyond_the_ends_are_in_the_gradient_alone(name, forward, learned):
    """Values are those of the stair; the gradient is the oracle's for a stair of five levels."""
    plain = ss.nn.StairActivation(ss.Stair.ternary(0.3), name, forward)
    longer = ss.nn.StairActivation(ss.Stair.ternary(0.3), name, forward, gradient_margin=1)
    x = (0.3 * torch.linspace(-2.97, 2.97, 200)).requires_grad_()
    values = []
    for module in (plain, longer):
        if learned:
            module.learn_quantum()
        torch.manual_seed(0)
        values.append(module(x))
    assert torch.equal(*values)
    values[1].sum().backward()
    ends = 1 if forward == "expectation" else 2
    levels = 0.3 * np.arange(-ends, ends + 1)
    thresholds, std = (levels[1:] + levels[:-1]) / 2, 0.3 * plain.std.double().item()
    expected = oracle.gradient(oracle.numpy(x.detach()), levels, thresholds, name, 0.0, std)
    np.testing.assert_allclose(x.grad.double().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_levels_beyond_two_levels_are_an_error():
    with pytest.raises(ValueError, match="gradient_margin must be 0 for a stair of two levels"):
        ss.nn.StairActivation(ss.Stair.sign(), gradient_margin=1)


@pytest.mark.parametrize("stair", [TERNARY, INT4, ss.Stair((-3, 0, 1), (-1, 0.5))], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_nan_among_quantised_weights_stays_nan(stair, training):
    """A diverged network looks like one. Infinity is at an end level."""
    weight_stair = ss.nn.StairWeight(stair)
    layer = ss.nn.StairLinear(5, 3, bias=False, weight_stair=weight_stair).train(training)
    layer.weight.data[0, 2], layer.weight.data[1, 1] = math.nan, math.inf
    y = layer(torch.ones(2, 5))
    assert y[:, 0].isnan().all()
    assert y[:, 1:].isfinite().all()
    integers = weight_stair.integers(layer.weight)
    assert torch.equal(integers.isnan(), layer.weight.isnan())
    assert integers[1, 1] == stair.integers[-1]
