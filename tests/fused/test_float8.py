"""Backward products in FP8 against float64, given the same rounded gradient; interpreted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from twins import batch, distance, learn, pair

from softstair.fused import fused
from softstair.kernels.triton import batchnorm, batchnorm_backward, gradients

NEEDS_INTERPRETER = True
E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn


def test_under_the_interpreter(run_interpreted):
    run_interpreted()


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "height", "width", "taps", "padding"),
    [(16, 32, 16, 2, 3, 3, 1), (32, 16, 32, 2, 3, 1, 0), (16, 48, 32, 5, 5, 3, 0),
     (48, 16, 16, 4, 4, 5, 2)],
)  # fmt: skip
def test_products_are_those_of_float64(images, inputs, outputs, height, width, taps, padding):
    """Features up to 15, weights up to 8, both formats; odd sides, kernels of three sizes."""
    torch.manual_seed(0)
    x = torch.randint(16, (images, inputs, height, width)).double().requires_grad_()
    w = torch.randint(-8, 9, (outputs, inputs, taps, taps)).double().requires_grad_()
    sums = F.conv2d(x, w, padding=padding)
    dc = torch.randn_like(sums).to(E5M2).contiguous(memory_format=torch.channels_last)
    sums.backward(dc.double() * 0.25)
    features, weights = x.detach().permute(1, 2, 3, 0), w.detach().permute(1, 2, 3, 0)
    factor, dtype = torch.tensor(0.25), torch.float32
    dx = gradients.feature_gradient(dc, weights.contiguous().to(E5M2), factor, padding, dtype, 0.5)
    dw = gradients.weight_gradient(
        dc.permute(1, 2, 3, 0).contiguous(), features.contiguous().to(E4M3), factor, (taps, taps),
        padding, 3.0,
    )  # fmt: skip
    assert distance(dx, 0.5 * x.grad) < 1e-6
    assert distance(dw.sum(0).permute(0, 3, 1, 2), 3 * w.grad) < 1e-6


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("stairs", "forward"), [("ternary", "mode"), ("INT4", "mode"), ("ternary", "random")]
)
def test_layers_keep_their_values_and_round_their_gradients(stairs, forward, monkeypatch):
    net, _ = pair(stairs, "uniform", forward, side=4)
    twin, (x, y) = copy.deepcopy(net), batch(side=4, images=16)
    rounded, transposed = [], []
    forward_pass, backward_pass = batchnorm.forward, batchnorm_backward.backward

    def forwards(*args, **settings):
        result = forward_pass(*args, **settings)
        transposed.append((result.transposed, result.integers))
        return result

    def backwards(dy, sums, stats, stair, argmax, coefficients, shortcut=None):
        result = backward_pass(dy, sums, stats, stair, argmax, coefficients, shortcut)
        if result.factor is not None:
            transposed.append((result.transposed, result.dc))
            exact = backward_pass(dy, sums, stats, stair, argmax, coefficients[:5], shortcut).dc
            rounded.append((result.dc.float() * result.factor, exact, float(result.factor)))
        return result

    monkeypatch.setattr(batchnorm, "forward", forwards)
    monkeypatch.setattr(batchnorm_backward, "backward", backwards)
    scores = learn(fused(net, float8=True), x, y)
    pairs = [pair for pair in transposed if pair[0] is not None]
    assert len(pairs) == 6  # features, weights and gradients of two layers
    for values, others in pairs:
        assert torch.equal(values.float(), others.permute(1, 2, 3, 0).float())
    for values, exact, factor in rounded:
        # On a GPU an eighth at most; the interpreter loses the carry of a rounding, which halves.
        assert bool(((values - exact).abs() <= 0.51 * exact.abs() + 2**-14 * factor).all())
        size = float((exact / factor).square().mean((0, 2, 3)).max().sqrt())
        assert 0.5 <= size <= 2.5  # of the largest channel; that of s·dz is in [1, 2)
    if forward == "mode":  # otherwise other elements share a counter of random numbers
        assert torch.equal(scores, learn(fused(twin), x, y))
        for name in ("8.weight", "12.weight", "15.weight"):  # behind the layers in FP8
            assert torch.equal(net.get_parameter(name).grad, twin.get_parameter(name).grad)


@pytest.mark.nightly
def test_batches_and_stairs_that_do_not_fit_are_multiplied_in_bfloat16():
    assert gradients.float8_for(tuple(range(-8, 8))) == E5M2
    assert gradients.float8_for(tuple(range(16))) == E4M3
    assert gradients.float8_for(tuple(range(-128, 128))) is None
    net, _ = pair("ternary", "uniform", "mode", side=4)
    twin, (x, y) = copy.deepcopy(net), batch(side=4, images=6)
    assert torch.equal(learn(fused(net, float8=True), x, y), learn(fused(twin), x, y))
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
