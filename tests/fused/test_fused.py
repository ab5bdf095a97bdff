"""Fused layers against the network as it is, in float64; under Triton's interpreter."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import STAIRS, batch, differences, distance, learn, model, pair

import softstair as ss
from softstair.models import build
from softstair.train.execution import Execution

NEEDS_INTERPRETER = True
# numpy, which stands for the device, says so where e^x is ∞ and 1/(1 + ∞) is the answer.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def test_under_the_interpreter(run_interpreted):
    run_interpreted(__file__)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("forward", ["mode", "expectation", "hard"])
@pytest.mark.parametrize("noise", ss.noise.names())
def test_values_gradients_and_statistics_are_the_networks(noise, forward):
    """Every family and forward with ternary stairs; the mode with the paper's INT4."""
    from softstair.fused import fused

    # The interpreter is slow, and a line of thresholds is climbed alike by every forward.
    for stairs in ("ternary", "INT4") if forward == "mode" else ("ternary",):
        net, twin = pair(stairs, noise, forward)
        x, y = batch(images=4)
        run = fused(net)
        assert len(run.layers) == 4
        scores, wanted = learn(run, x, y), learn(twin, x.double(), y)
        assert distance(scores, wanted) < 1e-4, stairs
        worst = max(differences(net, twin).items(), key=lambda item: item[1])
        # Expectations pass every rounding on; the network as it is, in float32, is no nearer.
        assert worst[1] < (5e-3 if forward == "expectation" else 1e-3), (stairs, worst)
        alive = [p.grad.count_nonzero() > 0 for n, p in net.named_parameters() if "weight" in n]
        assert all(alive)


@pytest.mark.parametrize("stairs", ["heaviside", "ternary weights"])
def test_other_stairs(stairs):
    from softstair.fused import fused

    for std in (0.0, 0.9):  # none, and so wide that the ends win
        net, twin = pair(stairs, "normal", "mode")
        for part in (net, twin):
            for _, stair in ss.nn.stair_modules(part):
                stair.std.fill_(std)
                stair.mean.fill_(-0.1)
        x, y = batch()
        scores, wanted = learn(fused(net), x, y), learn(twin, x.double(), y)
        assert distance(scores, wanted) < 1e-4, std
        assert max(differences(net, twin).values()) < 1e-3, std
        assert (net[0].weight.grad.count_nonzero() == 0) == (std == 0)


def test_a_mean_that_was_seen_makes_the_variance_as_exact_as_torch_does():
    """Statistics are sums about the running mean; far from it, float32 loses some digits."""
    from softstair.fused import fused

    net, twin = pair("INT4", "triangular", "mode")
    run, (x, y) = fused(net), batch()
    for part in (net, twin):
        for module in part.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.momentum = 1.0
    with torch.no_grad():
        run(x), twin(x.double())
    learn(run, x, y), learn(twin, x.double(), y)
    assert max(differences(net, twin).values()) < 1e-4


def test_pictures_that_windows_do_not_tile():
    """Seven pixels: the pooling that leaves some out is torch's own."""
    from softstair.fused import fused

    net, twin = pair("ternary", "uniform", "mode", side=7)
    x, y = batch(side=7)
    scores, wanted = learn(fused(net), x, y), learn(twin, x.double(), y)
    assert distance(scores, wanted) < 1e-4
    assert max(differences(net, twin).values()) < 2e-4


def test_random_is_drawn_anew_from_the_generator_and_rightly():
    """Reproducible, different from draw to draw, on the levels, and the expectation on average."""
    from softstair.fused import fused

    for noise in ss.noise.names():
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        net = ss.quantise(layer, None, ss.Stair.ternary(), noise=noise, forward="random")
        run, x = fused(net), torch.randn(64, 8)
        torch.manual_seed(1)
        first, second = run(x), run(x)
        torch.manual_seed(1)
        assert torch.equal(run(x), first)
        assert not torch.equal(first, second)
        assert set(first.unique().tolist()) == {-1.0, 0.0, 1.0}
        inside = F.batch_norm(x @ net[0].weight.detach().t(), None, None, training=True)
        mean = ss.regularise(inside.double(), ss.Stair.ternary(), noise, 0.0, float(net[2].std),
                             "expectation")  # fmt: skip
        draws = torch.stack([run(x) for _ in range(12)]).detach().double()
        # 1,024 elements, twelve draws each of a variance below ¼: five standard errors.
        gap = draws.mean(0) - mean
        assert abs(float(gap.mean())) < 5 * 0.5 / (12 * 1024) ** 0.5
        assert float(gap.square().mean()) < 0.25 / 12


def test_the_backward_pass_ends_at_annealed_layers():
    """Values as before, gradients as far as the last annealed layer, and none behind it."""
    from softstair.fused import fused

    for forward in ("mode", "expectation"):
        net, twin = pair("ternary", "uniform", forward)
        run = fused(net)
        for part in (net, twin):
            annealer = ss.Annealer(part, ss.Schedule.for_network(part, period=1), steps_per_unit=2)
            for _ in range(5):
                annealer.step()
            assert annealer.annealed == (0, 1)
        x, y = batch()
        scores, wanted = learn(run, x, y), learn(twin, x.double(), y)
        assert distance(scores, wanted) < 1e-4
        behind = ("0.", "1.", "4.", "5.")
        for name, parameter in net.named_parameters():
            other = twin.get_parameter(name).grad
            if name.startswith(behind):
                assert parameter.grad is None
                assert other.count_nonzero() == 0  # which the training step fills in
            else:
                assert distance(parameter.grad, other) < 2e-4, name


def test_whole_numbers_are_summed_exactly():
    """Against float64, bit for bit: odd shapes, every tap, sums that fill int16 and int32."""
    from softstair.kernels.triton import convolution

    torch.manual_seed(0)
    shapes = [(3, 16, 32, 8, 8, 3, 1), (2, 48, 20, 5, 7, 3, 1), (1, 32, 130, 9, 3, 1, 0),
              (5, 16, 16, 12, 5, 3, 0), (1, 16, 16, 6, 6, 5, 2)]  # fmt: skip
    for (images, inputs, outputs, height, width, taps, padding), (dtype, low, high) in zip(
        shapes,
        itertools.cycle([(torch.int16, -8, 8), (torch.int32, -128, 128)]),
        strict=False,
    ):
        x = torch.randint(low, high, (images, inputs, height, width)).to(torch.int8)
        w = torch.randint(low, high, (outputs, inputs, taps, taps)).to(torch.int8)
        x, w = (one.contiguous(memory_format=torch.channels_last) for one in (x, w))
        shift = torch.randn(outputs)
        sums, partial = convolution.convolve_int8(x, w, padding, dtype, shift)
        wanted = F.conv2d(x.double(), w.double(), padding=padding)
        assert sums.dtype == dtype
        assert torch.equal(sums.double(), wanted)
        moments = partial.double().sum(0)
        beyond = wanted - shift.double()[:, None, None]
        assert distance(moments[0], beyond.sum((0, 2, 3))) < 1e-5
        assert distance(moments[1], beyond.square().sum((0, 2, 3))) < 1e-5


def test_what_is_not_fused_runs_as_it_is():
    """Biases, hooks, shared modules, other noise: left alone; nothing to fuse: None."""
    from softstair.fused import fused

    def layers(float_model: nn.Module, **settings) -> int:
        net = ss.quantise(float_model, ss.Stair.ternary(), ss.Stair.ternary(), **settings)
        found = fused(net)
        return 0 if found is None else len(found.layers)

    assert layers(model(), skip="15") == 4
    biased = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    assert layers(biased) == 0
    assert layers(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())) == 0
    watched = model()
    net = ss.quantise(watched, ss.Stair.ternary(), ss.Stair.ternary(), skip="15")
    net[1].register_forward_hook(lambda *_: None)
    assert len(fused(net).layers) == 3
    bare = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU()
    )
    assert layers(bare) == 0
    uneven = ss.Stair((-1.5, 0.0, 0.25, 2.0), (-0.7, 0.1, 0.3))
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
    assert fused(ss.quantise(plain, None, uneven, forward="mode")) is None


def test_however_tensors_lie_in_memory():
    """Pictures made of a flat batch, and weights that were transposed: copied, not misread."""
    from softstair.fused import fused

    torch.manual_seed(0)
    pictures = nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8, bias=False),
        nn.BatchNorm1d(8), nn.ReLU(),
    )  # fmt: skip
    net = ss.quantise(pictures, ss.Stair.ternary(), ss.Stair.ternary())
    with torch.no_grad():
        net[5].weight.data = net[5].weight.t().contiguous().t()
    run, x = fused(net), torch.randn(6, 48)
    assert len(run.layers) == 2
    wanted = net(x)
    assert torch.equal(run(x).detach(), wanted.detach())


def test_half_precision():
    """float16 (numpy has no bfloat16 to multiply): of whole numbers every sum is exact, and only
    gradients are rounded."""
    from softstair.fused import fused

    whole, _ = pair("ternary", "uniform", "mode")
    net = ss.quantise(model()[:11], ss.Stair.ternary(), ss.Stair.ternary())
    net.load_state_dict({k: v for k, v in whole.state_dict().items() if k in net.state_dict()})
    twin = copy.deepcopy(net).double()
    x = torch.randint(-1, 2, (6, 3, 8, 8)).half()
    y, wanted = fused(net)(x), twin(x.double())
    assert y.dtype == torch.float16
    assert torch.equal(y.detach().double(), wanted.detach())
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    y.backward(gradient.half())
    for name, parameter in net.named_parameters():
        other = twin.get_parameter(name).grad
        gap = (parameter.grad.double() - other).norm() / other.norm()
        assert float(gap) < 0.02, (name, float(gap))


def test_modules_that_do_otherwise_are_left_to_themselves():
    """A normalisation kept in eval(), features of three dimensions, pooling with holes, a quantum
    that was loaded: each as without fusing."""
    from softstair.fused import fused

    net, _ = pair("ternary", "uniform", "mode")
    run, (x, _) = fused(net), batch()
    net[1].eval()
    before = net[1].running_mean.clone()
    other = copy.deepcopy(net)
    assert distance(run(x), other(x).double()) < 1e-4
    assert torch.equal(net[1].running_mean, before)

    rows = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU())
    flat = ss.quantise(rows, ss.Stair.ternary(), ss.Stair.ternary())
    x = torch.randn(4, 5, 6)
    assert torch.equal(fused(flat)(x).detach(), copy.deepcopy(flat)(x).detach())

    holes = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2, 2, dilation=2),
    )  # fmt: skip
    net = ss.quantise(holes, ss.Stair.ternary(), ss.Stair.ternary())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(fused(net)(x).detach(), copy.deepcopy(net)(x).detach())

    plain = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
    net = ss.quantise(plain, ss.Stair.ternary(0.5), ss.Stair.ternary())
    run = fused(net)
    net.load_state_dict(ss.quantise(plain, ss.Stair.ternary(0.1), ss.Stair.ternary()).state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(run(x).detach(), copy.deepcopy(net)(x).detach())


@pytest.mark.nightly
def test_the_network_for_speech():
    """DSCNN: strides, a convolution for each channel, sixteen levels, and int8 between."""
    from softstair.fused import fused

    torch.manual_seed(0)
    net = ss.quantise(build("dscnn", 12, (1, 49, 10)), *STAIRS["INT4"])
    twin = copy.deepcopy(net).double()
    run = fused(net)
    assert [layer.makes_integers for layer in run.layers] == [False, True] * 4 + [False]
    x, y = torch.randn(2, 1, 49, 10), torch.randint(12, (2,))
    assert distance(learn(run, x, y), learn(twin, x.double(), y)) < 1e-4
    assert max(differences(net, twin).values()) < 1e-4


def test_exact_sums_of_evaluation_are_those_of_float32():
    from softstair import kernels

    torch.manual_seed(0)
    x, w = torch.randint(-1, 2, (2, 16, 5, 5)).float(), torch.randint(-1, 2, (8, 16, 3, 3)).float()
    assert torch.equal(kernels.convolve_int8(x, w, 1), F.conv2d(x, w, padding=1))


@pytest.mark.parametrize("stairs", ["ternary", "INT4", "heaviside"])
def test_evaluation_has_the_features_of_the_network(stairs, monkeypatch):
    """Batches have been seen; noise, and its forward, are of no account."""
    from softstair.fused import fused, layer

    sums, units = layer._evaluated_sums, []
    keep = lambda *given: (units.append((found := sums(*given))[0].dtype), found)[1]
    monkeypatch.setattr(layer, "_evaluated_sums", keep)

    net, _ = pair(stairs, "uniform", "random" if stairs == "ternary" else "expectation")
    with torch.no_grad():
        net(batch()[0])
        net.eval()
        x = batch(images=4)[0]
        run = fused(net)
        before = torch.get_rng_state()
        scores, wanted = run(x), net(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert units == [torch.float32, torch.int16, torch.int16]  # a picture, then whole numbers
    assert distance(scores, wanted) < 1e-5
    assert distance(run(x).detach(), wanted) < 1e-5  # with a gradient: the network as it is


class Writes(nn.Module):
    """Features that are changed in place before the next layer takes them."""

    def __init__(self, write) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.act1, self.act2, self.write = nn.ReLU(), nn.ReLU(), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act1(self.norm1(self.conv1(x)))
        self.write(h)
        return self.act2(self.norm2(self.conv2(h)))


def _shift(x: torch.Tensor) -> None:
    x += 0.375


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("write", [_shift, lambda h: h[:, :4].mul_(0.5), lambda h: None])
def test_features_changed_in_place_are_taken_as_they_are_then(write, training):
    from softstair.fused import fused

    torch.manual_seed(0)
    net = ss.quantise(Writes(write), ss.Stair.ternary(), ss.Stair.ternary()).train(training)
    twin, (x, _) = copy.deepcopy(net), batch(images=4)
    run = fused(net)
    assert len(run.layers) == 2
    with torch.no_grad():
        wanted, given = twin(x), run(x)
    # A sum beside a threshold may be rounded to the other side of it.
    assert float((given != wanted).float().mean()) < 0.002


class Asks(nn.Module):
    """Does otherwise in training, in one of two ways."""

    def __init__(self, net: nn.Module, by_argument: bool) -> None:
        super().__init__()
        self.net, self.by_argument = net, by_argument

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_argument:
            return self.net(F.dropout(x, 0.5, training=self.training))
        return self.net(x * 0.5) if self.training else self.net(x)


@pytest.mark.parametrize("by_argument", [False, True])
def test_what_asks_whether_it_is_in_training_is_evaluated_as_it_is(by_argument):
    from softstair.fused import fused

    net, _ = pair("ternary", "uniform", "mode")
    assert fused(net).evaluates
    assert not fused(Asks(net, by_argument)).evaluates
    execution = lambda network: Execution(fused(network), "float32", fused=True)
    assert execution(net).eval_forward is not None
    assert execution(Asks(net, by_argument)).eval_forward is None


def test_evaluation_of_pictures_that_windows_do_not_tile():
    """Seven pixels a side: pooled by torch, and then no whole numbers are handed on."""
    from softstair.fused import fused

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    net = ss.quantise(model, *STAIRS["INT4"], skip="11")
    with torch.no_grad():
        net(torch.randn(8, 3, 7, 7))
        net.eval()
        run, x = fused(net), torch.randn(4, 3, 7, 7)
        assert len(run.layers) == 3
        assert distance(run(x), net(x)) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(run(x), net(x)) < 1e-5
