"""Backward products in FP8 against float64, given the same rounded gradient; interpreted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import batch, distance, learn, model, pair

import softstair as ss
from softstair import _accelerate
from softstair._accelerate import batchnorm, batchnorm_backward, fused, gradients
from softstair._accelerate.moments import zeros_for
from softstair.train.execution import choose_execution
from softstair.train.recipe import Recipe

NEEDS_INTERPRETER = True
E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn


def test_under_the_interpreter(run_interpreted):
    run_interpreted()


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("few", [0, 99])
@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "height", "width", "taps", "padding"),
    [(16, 32, 16, 2, 3, 3, 1), (32, 16, 32, 2, 3, 1, 0), (16, 48, 32, 5, 5, 3, 0),
     (48, 16, 16, 4, 4, 5, 2)],
)  # fmt: skip
def test_products_are_those_of_float64(
    images, inputs, outputs, height, width, taps, padding, few, monkeypatch
):
    """Features up to 15, weights up to 8, both formats; odd sides, kernels of three sizes; parts
    are added by torch or by the last program of a tile, which leaves zeros for the next call."""
    monkeypatch.setattr(gradients, "FEW_PARTS", few)
    torch.manual_seed(0)
    x = torch.randint(16, (images, inputs, height, width)).double().requires_grad_()
    w = torch.randint(-8, 9, (outputs, inputs, taps, taps)).double().requires_grad_()
    sums = F.conv2d(x, w, padding=padding)
    dc = torch.randn_like(sums).to(E5M2).contiguous(memory_format=torch.channels_last)
    sums.backward(dc.double() * 0.25)
    features, weights = x.detach().permute(1, 2, 3, 0), w.detach().permute(1, 2, 3, 0)
    factor, dtype = torch.tensor(0.25), torch.float32
    dx = gradients.feature_gradient(dc, weights.contiguous().to(E5M2), factor, padding, dtype, 0.5)
    zeros = zeros_for(1, outputs, dx.device)[0]
    given = dc.permute(1, 2, 3, 0).contiguous(), features.contiguous().to(E4M3), factor
    dw, again = (
        gradients.weight_gradient(*given, (taps, taps), padding, 3.0, zeros) for _ in range(2)
    )
    assert distance(dx, 0.5 * x.grad) < 1e-6
    assert distance(dw.permute(0, 3, 1, 2), 3 * w.grad) < 1e-6
    assert torch.equal(dw, again)
    assert int(zeros.count_nonzero()) == 0


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("stairs", "forward"),
    [("ternary", "mode"), ("INT4", "mode"), ("ternary", "random"), ("by channel", "mode")],
)
def test_layers_keep_their_values_and_round_their_gradients(stairs, forward, monkeypatch):
    net, _ = pair(stairs, "uniform", forward, side=4, channels=1)
    twin, (x, y) = copy.deepcopy(net), batch(side=4, images=16, channels=1)
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


class Branches(nn.Module):
    """The features of the first convolution go to two others, of which the first cannot be in FP8,
    and to a sum; those of the third go to one that can."""

    def __init__(self, second: int = 24, third: int = 32) -> None:
        super().__init__()
        layers = [(1, 16), (16, second), (16, third), (second, 16), (third, 16)]
        self.convs = nn.ModuleList(nn.Conv2d(*c, 3, padding=1, bias=False) for c in layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _, outputs in layers)
        self.activations = nn.ModuleList(nn.ReLU() for _ in layers)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        convs, norms, relus = self.convs, self.norms, self.activations
        first = relus[0](norms[0](convs[0](x)))
        second = relus[1](norms[1](convs[1](first)))
        third = relus[2](norms[2](convs[2](first)))
        second = relus[3](norms[3](convs[3](second)) + first)
        third = relus[4](norms[4](convs[4](third)))
        return self.fc((second + third).mean((2, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["none", "annealed", "no gradients", "norm in eval", "learned"])
def test_networks_with_branches_keep_their_values(change):
    """What is not stored is not read: in no branch, and whatever part does not take FP8."""
    learned = "learned" if change == "learned" else "fixed"
    net, _ = pair("ternary", "uniform", "mode", make=Branches, quanta=learned)
    if change == "annealed":
        net.activations[4].std.zero_()
        net.convs[4].weight_stair.std.zero_()
    if change == "norm in eval":
        net.norms[4].eval()
    twin, (x, y) = copy.deepcopy(net), batch(side=2, images=16, channels=1)
    runs = fused(net, float8=True), fused(twin)
    assert [layer.read_once for layer in runs[0].layers] == [False, False, True, False, False]
    for layer in runs[0].layers:  # what must not be read is no number
        layer.register_forward_hook(_spoil)
    with torch.set_grad_enabled(change != "no gradients"):
        scores = [run(x) for run in runs]
    assert torch.equal(*scores)
    if change != "no gradients":
        for score in scores:
            F.cross_entropy(score, y).backward()
        assert torch.equal(net.fc.weight.grad, twin.fc.weight.grad)
        weights = [layer.sums.weight.grad for layer in runs[0].layers]
        assert all(weight is None or bool(weight.isfinite().all()) for weight in weights)


@pytest.mark.nightly
@pytest.mark.parametrize("channels", [(24, 32), (32, 24), (32, 48)])
def test_both_readers_of_features_have_their_own_gradients(channels):
    """In FP8 if they can; the integers are those of both."""
    net, _ = pair("ternary", "uniform", "mode", make=lambda: Branches(*channels))
    twin, (x, y) = copy.deepcopy(net), batch(side=2, images=16, channels=1)
    run = fused(net, float8=True)
    assert [len(layer.readers) for layer in run.layers] == [
        2,
        channels[0] != 24,
        channels[1] != 24,
        0,
        0,
    ]
    learn(run, x, y), learn(fused(twin), x, y)
    for conv, other in zip(net.convs, twin.convs, strict=True):
        assert distance(conv.weight.grad, other.weight.grad) < 0.25  # E5M2 has three bits


class Interleaved(Branches):
    """The convolution that is called first has its stair last."""

    def forward(self, x):
        convs, norms, relus = self.convs, self.norms, self.activations
        first = relus[0](norms[0](convs[0](x)))
        second = convs[1](first)
        third = relus[2](norms[2](convs[2](first)))
        second = relus[1](norms[1](second) + relus[4](norms[4](convs[4](third))))
        return self.fc(relus[3](norms[3](convs[3](second))).mean((2, 3)))


@pytest.mark.nightly
def test_the_reader_that_runs_last_takes_integers_too(monkeypatch):
    net, _ = pair("ternary", "uniform", "mode", make=lambda: Interleaved(16, 16))
    run, (x, y) = fused(net, float8=True), batch(side=2, images=16, channels=1)
    multiplied, multiply = [], gradients.weight_gradient
    count = lambda *given: multiplied.append(given[0].shape) or multiply(*given)
    monkeypatch.setattr(gradients, "weight_gradient", count)
    learn(run, x, y)
    assert len(multiplied) == len(net.convs[1:])


def test_unequal_paddings_are_not_multiplied_in_float8():
    net, _ = pair("ternary", "uniform", "mode")
    for padding, multiplies in (((1, 1), True), ((1, 0), False)):
        net[4].padding = net[7].padding = padding
        assert fused(net, float8=True).multiplies_float8(16) == multiplies


def test_expected_features_are_not_multiplied_in_float8():
    net, _ = pair("ternary", "uniform", "mode")
    stairs = [module for module in net.modules() if isinstance(module, ss.nn.StairActivation)]
    for stair in stairs:
        stair.strategy = "expectation"
    assert not fused(net, float8=True).multiplies_float8(16)


def _spoil(layer, inputs, y):
    if y.stride()[0] == 0:
        y.detach().as_strided((1,), (1,)).numpy().fill(float("nan"))  # unseen by autograd


class Halved(nn.Module):
    def forward(self, x):
        return x.mul_(0.5)


def test_features_may_be_changed_in_place():
    layers = list(model(side=4, channels=1))
    layers[2] = nn.Sequential(layers[2], Halved())
    net = ss.quantise(nn.Sequential(*layers), "ternary", skip="15")
    x, y = batch(side=4, images=2, channels=1)
    assert torch.isfinite(learn(fused(net), x, y)).all()


def test_a_network_without_integers_has_no_product_in_float8():
    """The second of two linear layers takes the features of the first unchanged."""
    layers: list[nn.Module] = []
    for inputs in (8, 16):
        layers += [nn.Linear(inputs, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()]
    ternary = ss.Stair.ternary()
    net = ss.quantise(nn.Sequential(*layers, nn.Linear(16, 5)), ternary, ternary, skip="6")
    assert not fused(net, float8=True).multiplies_float8(16)


def convolutions(channels: int) -> nn.Module:
    layers = [(16, channels), (channels, channels)]
    parts = [(nn.Conv2d(*c, 1, bias=False), nn.BatchNorm2d(c[1]), nn.ReLU()) for c in layers]
    ternary = ss.Stair.ternary()
    return ss.quantise(nn.Sequential(*parts[0], *parts[1]), ternary, ternary)


@pytest.mark.parametrize(
    ("channels", "capability", "settings", "precision"),
    [
        (128, (9, 0), {}, "float8"),
        (112, (9, 0), {}, "bfloat16"),
        (128, (10, 0), {}, "bfloat16"),
        (128, (9, 0), {"precision": "auto"}, "bfloat16"),
        (128, (9, 0), {"forward": "expectation"}, "bfloat16"),
        (112, (9, 0), {"precision": "float8"}, "float8"),
    ],
)
def test_fast_steps_round_gradients_where_that_was_measured(
    channels, capability, settings, precision, monkeypatch
):
    recipe = Recipe.from_flat(**{"batch": 16, "precision": "fast", **settings})
    net = convolutions(channels)
    for _, stair in ss.nn.stair_modules(net):
        stair.strategy = recipe.noise.forward
    monkeypatch.setattr(_accelerate, "can_fuse", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *given: True)
    given = recipe, net, ss.Annealer(net, recipe.schedule(2)), torch.device("cuda"), 1, False
    chosen = choose_execution(*given)
    assert chosen.fused
    assert chosen.precision == precision
    assert choose_execution(*given, processes=2).precision == "bfloat16"  # eight images each


@pytest.mark.nightly
def test_batches_and_stairs_that_do_not_fit_are_multiplied_in_bfloat16():
    assert gradients.float8_for(tuple(range(-8, 8))) == E5M2
    assert gradients.float8_for(tuple(range(16))) == E4M3
    assert gradients.float8_for((-16, 0, 16)) == E4M3
    assert gradients.float8_for((0, 17)) is None
    net, _ = pair("ternary", "uniform", "mode", side=4)
    twin, (x, y) = copy.deepcopy(net), batch(side=4, images=6)
    assert torch.equal(learn(fused(net, float8=True), x, y), learn(fused(twin), x, y))
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
