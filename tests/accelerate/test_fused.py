"""Fused layers against the network as it is, in float64; under Triton's interpreter."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import STAIRS, batch, differences, distance, learn, model, pair

import networks
import softstair as ss
from softstair import kernels
from softstair._accelerate import fused, moments, products
from softstair._accelerate.fuse import not_fused
from softstair._accelerate.layer import Average
from softstair.kernels import triton
from softstair.models import build
from softstair.train.execution import Execution

NEEDS_INTERPRETER = True
# NumPy, which stands for the device, warns where e^x is ∞ and 1/(1 + ∞) is the answer.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
TERNARY = ss.Stair.ternary()


def test_under_the_interpreter(run_interpreted):
    run_interpreted()


def check(net, twin, x, y, gradients: float = 1e-3) -> None:
    """Compare scores, gradients and statistics of a training step."""
    run = fused(net)
    scores, expected = learn(run, x, y), learn(twin, x.double(), y)
    assert distance(scores, expected) < 1e-4
    name, worst = max(differences(net, twin).items(), key=lambda pair: pair[1])
    assert worst < gradients, name


CELLS = [
    ("ternary", "uniform", "mode"),
    ("ternary", "uniform", "hard"),
    *itertools.product(("ternary", "INT4"), ss.noise.names(), ("expectation", "mode")),
    ("ternary", "normal", "hard"),
    ("INT8 first", "uniform", "mode"),
    ("by channel", "normal", "expectation"),
    ("ternary by channel", "uniform", "mode"),
    ("float first", "uniform", "mode"),
]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("stairs", "noise", "forward"), dict.fromkeys(CELLS))
def test_values_gradients_and_statistics_are_the_networks(stairs, noise, forward):
    net, twin = pair(stairs, noise, forward, side=4)
    x, y = batch(side=4)
    # Expectations pass every rounding on; the network as it is, in float32, is no nearer.
    check(net, twin, x, y, 5e-3 if forward == "expectation" else 1e-3)
    assert all(p.grad.count_nonzero() > 0 for n, p in net.named_parameters() if "weight" in n)


@pytest.mark.nightly
def test_weights_with_quanta_by_channel_give_exact_sums():
    """Also where a channel's quantum is far from the others', and changes after fusing."""
    net, twin = pair("by channel", "uniform", "mode", side=4, channels=1)
    run, (x, y) = fused(net), batch(side=4, channels=1)
    for network in (net, twin):
        quanta = torch.linspace(0.5, 1.5, 32).double()
        quanta[0] = 1e-3
        network[4].weight_stair.set_quantum((0.07 * quanta).tolist())
    scores, expected = learn(run, x, y), learn(twin, x.double(), y)
    assert distance(scores, expected) < 1e-5
    name, worst = max(differences(net, twin).items(), key=lambda pair: pair[1])
    assert worst < 1e-4, name
    with torch.no_grad():
        assert distance(fused(net.eval())(x), twin.eval()(x.double())) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("quanta", ["fixed", "learned"])
def test_gradient_margin_are_in_the_gradients_of_fused_layers(quanta):
    """Gradients pass beyond the ends of the stair, by a table with more thresholds."""
    net, twin = pair("ternary by channel", "uniform", "mode", 4, quanta, None, 1, gradient_margin=1)
    assert not_fused(net) == ""
    x, y = batch(side=4, channels=1)
    check(net, twin, x, y)
    for _, stair in ss.nn.stair_modules(twin):
        stair.gradient_margin, stair._longer = 0, None
    twin.zero_grad()
    learn(twin, x.double(), y)
    found = differences(net, twin)
    assert max(found[name] for name, _ in net.named_parameters()) > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stairs", "noise", "forward"),
    [
        ("by channel", "uniform", "mode"),
        ("INT4", "uniform", "mode"),
        ("ternary", "normal", "expectation"),
        *CELLS[-4:],
    ],
)
def test_learned_quanta_have_the_gradients_of_the_network(stairs, noise, forward):
    net, twin = pair(stairs, noise, forward, side=4, quanta="learned")
    x, y = batch(side=4)
    for module in (*net.modules(), *twin.modules()):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():  # sums that are no integers need a running mean for an exact variance
        fused(net)(x), twin(x.double())
    check(net, twin, x, y, 5e-3 if forward == "expectation" else 1e-3)
    ratios = [p.grad for name, p in net.named_parameters() if name.endswith("log_ratio")]
    assert len(ratios) == (7 if stairs == "float first" else 8)
    assert all(bool((ratio != 0).any()) for ratio in ratios)
    with torch.no_grad():
        assert distance(fused(net.eval())(x), twin.eval()(x.double())) < 1e-4


def test_evaluations_with_learned_quanta_by_channel_keep_no_tables():
    """One row per channel would stay on the device for each evaluation."""
    net, _ = pair("by channel", "uniform", "mode", side=4, channels=1, quanta="learned")
    (x, _), counts = batch(side=4, channels=1), []
    for _ in range(2):
        with torch.no_grad(), kernels.use("triton"):
            for name, ratio in net.named_parameters():
                if name.endswith("weight_stair.log_ratio"):
                    ratio += 0.01
            net.train(), fused(net.eval())(x)
        counts.append(triton.table.cache_info().currsize)
    assert counts[0] == counts[1]


@pytest.mark.nightly
@pytest.mark.parametrize("std", [0.9, 0.0])  # so wide that the ends win the mode, and none
@pytest.mark.parametrize("stairs", ["heaviside", "ternary weights"])
def test_other_stairs_with_a_mean(stairs, std):
    net, twin = pair(stairs, "normal", "mode")
    for part in (net, twin):
        for _, stair in ss.nn.stair_modules(part):
            stair.std.fill_(std)
            stair.mean.fill_(-0.1)
    check(net, twin, *batch())
    assert (net[0].weight.grad.count_nonzero() == 0) == (std == 0)


@pytest.mark.nightly
def test_the_variance_about_the_running_mean_is_as_exact_as_torchs():
    """Statistics are sums about the running mean; far from it, float32 loses some digits."""
    net, twin = pair("INT4", "triangular", "mode")
    for module in (*net.modules(), *twin.modules()):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    x, y = batch()
    with torch.no_grad():
        fused(net)(x), twin(x.double())
    check(net, twin, x, y, 1e-4)


def test_noise_that_an_annealer_gathered_is_read_without_a_copy(monkeypatch):
    layers = [(8, 16), (16, 12), (12, 16)]
    modules = [(nn.Linear(*c, bias=False), nn.BatchNorm1d(c[1]), nn.ReLU()) for c in layers]
    net = ss.quantise(nn.Sequential(*itertools.chain(*modules)), TERNARY, TERNARY)
    annealer = ss.Annealer(net, lambda layer, t: (0.1 * layer, 1.0 / (1 + layer)))
    annealer.step()
    run, x = fused(net), torch.randn(4, 8)
    expected = run(x)
    annealer.gather()
    monkeypatch.setattr(torch, "stack", None)
    assert torch.equal(run(x), expected)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("noise", "draws"), [("uniform", 2), *((name, 12) for name in ss.noise.names())]
)
def test_random_is_drawn_from_the_generator_with_the_right_probabilities(noise, draws):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
    net = ss.quantise(layer, None, TERNARY, noise=noise, forward="random")
    run, x = fused(net), torch.randn(64, 8)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    torch.manual_seed(1)
    assert torch.equal(run(x), first)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {-1.0, 0.0, 1.0}
    z = F.batch_norm(x @ net[0].weight.detach().t(), None, None, training=True).double()
    expected = ss.regularise(z, TERNARY, noise, 0.0, float(net[2].std), "expectation")
    gap = torch.stack([run(x) for _ in range(draws)]).detach().double().mean(0) - expected
    # 1,024 elements, with draws of a variance below ¼: five standard errors.
    assert abs(float(gap.mean())) < 5 * 0.5 / (draws * 1024) ** 0.5
    assert float(gap.square().mean()) < 0.25 / draws


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("forward", ["mode", "expectation"])
def test_the_backward_pass_ends_at_annealed_layers(forward):
    """Values as before, gradients as far as the last annealed layer, and none behind it."""
    net, twin = pair("ternary", "uniform", forward, side=4)
    run = fused(net)
    for part in (net, twin):
        annealer = ss.Annealer(part, ss.Schedule.for_network(part, period=1), steps_per_unit=2)
        for _ in range(5):
            annealer.step()
        assert annealer.annealed == (0, 1)
    x, y = batch(side=4)
    scores, expected = learn(run, x, y), learn(twin, x.double(), y)
    assert distance(scores, expected) < 1e-4
    for name, parameter in net.named_parameters():
        gradient = twin.get_parameter(name).grad
        if name.startswith(("0.", "1.", "4.", "5.")):
            assert parameter.grad is None
            assert gradient.count_nonzero() == 0  # which the training step fills in
        else:
            assert distance(parameter.grad, gradient) < 2e-4, name


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "height", "width", "taps", "padding", "stride", "high"),
    [(2, 48, 20, 5, 7, 3, 1, 1, 8), (1, 16, 16, 6, 6, 5, 2, 1, 8), (1, 32, 130, 9, 3, 1, 0, 1, 8),
     (5, 64, 16, 12, 5, 3, 0, 1, 128), (3, 16, 32, 8, 8, 3, 1, 2, 128),
     (2, 48, 16, 7, 9, 3, 1, 2, 8), (2, 64, 16, 6, 6, 1, 0, 2, 128),
     (1, 80, 160, 4, 4, 3, 1, 1, 8)],
)  # fmt: skip
def test_integers_are_summed_exactly(
    images, inputs, outputs, height, width, taps, padding, stride, high
):
    """Against float64, bit for bit: odd shapes, every tap, sums that fill int16 and int32."""
    from softstair._accelerate import products
    from softstair.kernels.triton import convolution

    torch.manual_seed(0)
    shapes = (images, inputs, height, width), (outputs, inputs, taps, taps)
    integers = [torch.randint(-high, high, shape).to(torch.int8) for shape in shapes]
    x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in integers)
    module, dtype = nn.BatchNorm2d(outputs), torch.int16 if high == 8 else torch.int32
    module.running_mean.normal_()
    twin = copy.deepcopy(module).double()
    zeros = moments.zeros_for(1, outputs, x.device)[0]
    norm = moments.Normalisation(module, module.weight, module.bias, zeros)
    convolve = products.convolve_with_statistics
    sums, stats = convolve(x, w, padding, dtype, norm, 0.5, stride)
    expected = F.conv2d(x.double(), w.double(), stride=stride, padding=padding)
    assert torch.equal(convolution.convolve_int8(x, w, padding, dtype, stride), sums)
    assert sums.dtype == dtype
    assert torch.equal(sums.double(), expected)
    twin(0.5 * expected)
    bound = 1e-6 if dtype == torch.int16 else 1e-5  # moments are exact, or in float32
    for name, buffer in twin.named_buffers():
        assert distance(module.get_buffer(name), buffer) < bound, name
    mean, variance = expected.mean((0, 2, 3)), expected.var((0, 2, 3), correction=0)
    assert distance(stats[0], mean) < bound
    assert distance(stats[2], (variance + 4 * module.eps).rsqrt()) < bound
    assert int(zeros[2 * outputs :].count_nonzero()) == 0
    sums = kernels.convolve_int8(x.float(), w.float(), padding, stride)
    assert torch.equal(sums.double(), expected)
    features, weight = x.float(), w.float()
    features[0, 1, 0, 0] = weight[1, 0, 0, 0] = torch.nan  # int8 has none
    sums = kernels.convolve_int8(features, weight, padding, stride)
    assert sums[0].isnan().all()
    assert sums[:, 1].isnan().all()
    kept = [0, *range(2, outputs)]
    assert torch.equal(sums[1:, kept].double(), expected[1:, kept])


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_layers_sum_integers_exactly(stride):
    """Not features that are multiples of 0.07, whose sums float32 would round."""
    first, each = (nn.Conv2d(8, 8, 3, s, 1, groups=g, bias=False) for s, g in ((1, 1), (stride, 8)))
    norms = (nn.BatchNorm2d(8), nn.ReLU(), each, nn.BatchNorm2d(8), nn.ReLU())
    net = ss.quantise(nn.Sequential(first, *norms), *STAIRS["INT4"])
    layer = fused(net).layers[1]
    assert layer.reads_integers
    torch.manual_seed(0)
    x, w = torch.randint(16, (2, 8, 5, 7)), torch.randint(-8, 8, each.weight.shape)
    norm = moments.Normalisation(
        layer.norm, layer.norm.weight, layer.norm.bias, moments.zeros_for(1, 8, x.device)[0]
    )
    sums, stats, unit = products.int8_sums(layer, x.to(torch.int8), w.to(torch.int8), norm)
    expected = F.conv2d(x.double(), w.double(), None, stride, 1, groups=8)
    assert torch.equal(sums.double(), expected)
    assert unit == pytest.approx(0.07**2)
    assert distance(stats[0], expected.mean((0, 2, 3))) < 1e-6


def test_a_kernel_larger_than_the_image_is_an_error():
    """As for torch: with a stride, the formula of the size gives 0 instead of a negative one."""
    x, w = torch.zeros(1, 16, 2, 2), torch.zeros(16, 16, 3, 3)
    with pytest.raises(ValueError, match="kernel"):
        kernels.convolve_int8(x, w, padding=0, stride=2)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("images", "inputs", "taps", "outputs", "sides", "learns_input", "stride", "padding"),
    [
        (2, 7, 1, 20, (3, 5), False, 1, 0),  # 140 weights: no rows of 128
        (65, 1, 3, 16, (2, 2), False, 1, 1),
        (2, 3, 3, 20, (2, 4), True, 1, 1),  # as any other layer
        (2, 1, (10, 4), 16, (13, 6), False, 2, (5, 1)),  # as in DSCNN: 7×3 sums
        (3, 7, 3, 130, (4, 2), False, 1, 1),
        (1, 2, 5, 200, (6, 6), False, 1, 2),
        (2, 3, (4, 2), 16, (9, 7), False, 3, (2, 0)),  # 4×2 sums, pooled
    ],
)
def test_first_layers_of_other_shapes(
    images, inputs, taps, outputs, sides, learns_input, stride, padding
):
    """Odd sizes, 64 columns and more than one block of channels; also with a learned input."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(inputs, outputs, taps, stride, padding, bias=False)
    x, y = torch.randn(images, inputs, *sides), torch.randint(5, (images,))
    pool = [nn.MaxPool2d(2)] if all(n % 2 == 0 for n in convolution(x).shape[2:]) else []
    last = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    layers = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), *pool, *last)
    layers(x)
    net = ss.quantise(layers, TERNARY, TERNARY, skip=str(len(layers) - 1))
    twin, wanted = copy.deepcopy(net).double(), x.double()
    for given in (x, wanted):
        given.requires_grad_(learns_input)
    run = fused(net)
    assert run.layers[0].has_short_sums
    scores, expected = learn(run, x, y), learn(twin, wanted, y)
    assert distance(scores, expected) < 1e-5
    name, worst = max(differences(net, twin).items(), key=lambda pair: pair[1])
    assert worst < 1e-4, name
    assert net[0].weight.grad.count_nonzero() > 0
    if learns_input:
        assert distance(x.grad, wanted.grad) < 1e-4


def test_averages_over_whole_images_are_means_in_training():
    """With the scores and gradients of the network; other averages are left to torch."""
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers = nn.Sequential(*first, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 5))
    net = ss.quantise(layers, TERNARY, TERNARY, skip="5")
    assert any(isinstance(part, Average) for part in fused(net).code.modules())
    twin, (x, y) = copy.deepcopy(net).double(), batch(side=4, channels=1)
    check(net, twin, x, y, 1e-4)
    others = [(2,), (4, 2, 1), (4, None, 0, False, True, 5)]
    for settings in [(4,), ((4, 4),), *others]:
        pool = nn.AvgPool2d(*settings)
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        y, expected = Average(pool)(x), pool(x)
        assert ("Mean" in y.grad_fn.name()) == (settings not in others)
        assert distance(y, expected) < 1e-6
        assert Average(pool)(x.detach()).equal(expected)  # as in evaluation


class OwnNames(nn.Module):
    """Its modules have names such as fusing might give to others."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.fused_0, self.norm = (
            nn.Conv2d(inputs, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.relu, self.pool, self.average_pool = (
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.AdaptiveMaxPool2d(1),
        )
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.pool(input=self.relu(self.norm(self.fused_0(x))))
        return self.fc(self.average_pool(self.pool(x)).flatten(1))


def test_modules_of_any_name_are_fused():
    torch.manual_seed(0)
    net = ss.quantise(OwnNames(), TERNARY, TERNARY, skip="fc")
    twin, (x, y) = copy.deepcopy(net).double(), batch(side=4, channels=1)
    check(net, twin, x, y, 1e-4)


@pytest.mark.parametrize(("inputs", "side"), [(3, 4), (1, 2)])
def test_inputs_that_a_first_layer_cannot_take_change_nothing(inputs, side):
    """Other channels than those of the weights, or a kernel larger than the padded image."""
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    )
    net = ss.quantise(layers, TERNARY, TERNARY)
    with pytest.raises(ValueError, match="channels" if inputs == 3 else "kernel"):
        fused(net)(torch.randn(2, inputs, side, side))
    assert int(net[1].num_batches_tracked) == 0


@pytest.mark.nightly
def test_a_second_backward_pass_gives_the_same_gradients():
    """The counters of the first one are zeros again."""
    net, _ = pair("ternary", "uniform", "mode", side=4, channels=1)
    x, y = batch(side=4, images=2, channels=1)
    loss, found = F.cross_entropy(fused(net)(x), y), []
    for _ in range(2):
        net.zero_grad()
        loss.backward(retain_graph=True)
        found.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(*gradients) for gradients in zip(*found, strict=True))
    assert all(gradient.count_nonzero() > 0 for gradient in found[1])


def test_what_cannot_be_fused_runs_as_it_is():
    """Biases, hooks, shared modules, uneven stairs: left alone; nothing to fuse: None."""

    def layers(float_model: nn.Module, features: ss.Stair = TERNARY, **settings) -> int:
        run = fused(ss.quantise(float_model, TERNARY, features, **settings))
        return 0 if run is None else len(run.layers)

    plain = lambda **settings: nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, **settings), nn.ReLU()
    )
    assert layers(model(), skip="15") == 4
    assert layers(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())) == 0
    assert layers(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())) == 0
    assert layers(plain(track_running_stats=False)) == 0
    assert layers(plain(), ss.Stair((-1.5, 0.0, 0.25, 2.0), (-0.7, 0.1, 0.3))) == 0
    for axis in (0, 1):  # of features, which the kernels do not divide by quanta
        assert layers(plain(), ss.Stair.ternary((0.5, 1, 1, 2), axis=axis)) == 0
    net = ss.quantise(model(), TERNARY, TERNARY, skip="15")
    net[1].register_forward_hook(lambda *_: None)
    assert len(fused(net).layers) == 3


def test_stairs_of_functional_and_repeated_activations_are_fused():
    lenet = ss.quantise(networks.LeNet(), TERNARY, TERNARY)
    assert [layer.stair for layer in fused(lenet).layers] == [lenet.stair_relu_1]
    resnet = ss.quantise(networks.PlainResNet(), TERNARY, TERNARY)
    assert len(fused(resnet).layers) == 5


def small(*modules: nn.Module, weights: ss.Stair = TERNARY) -> nn.Module:
    torch.manual_seed(0)
    return ss.quantise(nn.Sequential(*modules), weights, TERNARY)


CONVOLUTION = lambda channels=3: (
    nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
)  # fmt: skip
ROWS = lambda: (nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())


class Residual(nn.Module):
    """One layer and a block whose shortcut is the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*CONVOLUTION())
        self.block, self.fc = networks.Block(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(self.block(self.first(x)).mean((2, 3)))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("make", "stairs", "forward", "quanta", "shortcuts"),
    [
        (Residual, "ternary", "mode", "fixed", None),
        (lambda: networks.ResNet(16), "ternary", "mode", "fixed", None),
        (lambda: networks.ResNet(16), "INT4", "expectation", "learned", None),
        (lambda: networks.ResNet(16), "INT4", "expectation", "fixed", None),
        (Residual, "ternary", "mode", "learned", None),
        (Residual, "by channel", "mode", "fixed", None),
        (Residual, "by channel", "mode", "fixed", "uint8"),
        (lambda: networks.ResNet(16), "by channel", "mode", "learned", "uint8"),
    ],
)
def test_shortcuts_are_added_before_the_stair(make, stairs, forward, quanta, shortcuts):
    net, twin = pair(stairs, "normal", forward, quanta=quanta, make=make, shortcuts=shortcuts)
    assert len(fused(net).layers) == (3 if make is Residual else 6)
    x, y = batch(side=4, images=3)
    for module in (*net.modules(), *twin.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():  # sums that are no integers need a running mean for an exact variance
        fused(net)(x), twin(x.double())
    check(net, twin, x, y, 5e-3 if forward == "expectation" else 1e-3)
    with torch.no_grad():
        assert distance(fused(net.eval())(x), twin.eval()(x.double())) < 1e-4


def test_a_summand_of_another_shape_is_no_shortcut():
    class Broadcasts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
            self.offset, self.relu = nn.Parameter(torch.randn(8, 1, 1)), nn.ReLU()

        def forward(self, x):
            return self.relu(self.layers(x) + self.offset).mean((2, 3))

    torch.manual_seed(0)
    net = ss.quantise(Broadcasts(), TERNARY, TERNARY)
    twin = copy.deepcopy(net).double()
    x, y = batch(images=4)
    check(net, twin, x, y)


def test_other_layouts_shapes_and_settings_give_the_networks_features():
    """Transposed weights, a flat batch, matrices of rows, pooling with holes, a loaded quantum."""
    flat = small(nn.Unflatten(1, (3, 4, 4)), *CONVOLUTION(), nn.Flatten(),
                 nn.Linear(256, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())  # fmt: skip
    with torch.no_grad():
        flat[5].weight.data = flat[5].weight.t().contiguous().t()
    cases = [
        (flat, fused(flat), torch.randn(6, 48)),
        (rows := small(*ROWS()), fused(rows), torch.randn(4, 16, 8)),
        (holes := small(*CONVOLUTION(), nn.MaxPool2d(2, 2, dilation=2)), fused(holes),
         torch.randn(2, 3, 8, 8)),
    ]  # fmt: skip
    fitted = small(*ROWS(), weights=ss.Stair.ternary(0.5))
    cases.append((fitted, fused(fitted), torch.randn(5, 8)))
    fitted.load_state_dict(small(*ROWS(), weights=ss.Stair.ternary(0.1)).state_dict())
    for net, run, x in cases:
        expected = copy.deepcopy(net)(x).detach()
        assert torch.equal(run(x).detach(), expected)


def test_a_normalisation_in_evaluation_is_left_to_itself():
    net, _ = pair("ternary", "uniform", "mode", side=4)
    run, (x, _) = fused(net), batch(side=4)
    net[1].eval()
    before, expected = net[1].running_mean.clone(), copy.deepcopy(net)(x).double()
    assert distance(run(x), expected) < 1e-4
    assert torch.equal(net[1].running_mean, before)


def test_weight_stairs_in_evaluation_have_no_noise_and_no_gradient():
    """Also where their quanta are learned and apart."""
    net, _ = pair("by channel", "uniform", "mode", side=4, channels=1, quanta="learned")
    run, (x, y) = fused(net), batch(side=4, channels=1)
    net[4].weight_stair.eval()
    expected = copy.deepcopy(net)(x).double()
    assert distance(learn(run, x, y), expected) < 1e-5
    assert net[4].weight.grad is None
    assert net[7].weight.grad.count_nonzero() > 0


@pytest.mark.nightly
def test_half_precision():
    """float16 (NumPy has no bfloat16): sums of integers are exact, only gradients are rounded."""
    net, twin = (network[:11] for network in pair("ternary", "uniform", "mode"))
    x = torch.randint(-1, 2, (6, 3, 8, 8)).half()
    y, expected = fused(net)(x), twin(x.double())
    assert y.dtype == torch.float16
    assert torch.equal(y.detach().double(), expected.detach())
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    y.backward(gradient.half())
    for name, parameter in net.named_parameters():
        exact = twin.get_parameter(name).grad
        assert float((parameter.grad.double() - exact).norm() / exact.norm()) < 0.02, name


@pytest.mark.nightly
def test_the_network_for_speech():
    """DSCNN: strides, a convolution for each channel, sixteen levels, and int8 between."""
    torch.manual_seed(0)
    net = ss.quantise(build("dscnn", 12, (1, 49, 10)), *STAIRS["INT4"])
    twin = copy.deepcopy(net).double()
    makes_integers = [bool(layer.readers) for layer in fused(net).layers]
    assert makes_integers == [True] * 8 + [False]
    check(net, twin, torch.randn(2, 1, 49, 10), torch.randint(12, (2,)), 1e-4)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("stairs", ["INT4", "ternary", "heaviside"])
def test_evaluation_has_the_features_of_the_network(stairs, monkeypatch):
    """Running statistics, no draws, and integer sums from the second layer on."""
    from softstair._accelerate import layer

    sums, dtypes = layer._evaluated_sums, []
    record = lambda *given: (dtypes.append((result := sums(*given))[0].dtype), result)[1]
    monkeypatch.setattr(layer, "_evaluated_sums", record)
    net, _ = pair(stairs, "uniform", "random" if stairs == "ternary" else "expectation", side=4)
    with torch.no_grad():
        net(batch(side=4)[0])
        net.eval()
        x = batch(side=4)[0]
        run = fused(net)
        before = torch.get_rng_state()
        scores, expected = run(x), net(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert dtypes == [torch.float32, torch.int16, torch.int16]
    assert distance(scores, expected) < 1e-5
    assert distance(run(x).detach(), expected) < 1e-5  # with a gradient: the network as it is


class Writes(nn.Module):
    """Features that are changed in place before the next layer takes them."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(*CONVOLUTION())
        self.layer2 = nn.Sequential(*CONVOLUTION(16))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer1(x)
        self.write(h)
        return self.layer2(h)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "write", [lambda h: h.add_(0.375), lambda h: h[:, :4].mul_(0.5), lambda h: None]
)
def test_features_changed_in_place_are_taken_as_they_are_then(write, training):
    torch.manual_seed(0)
    net = ss.quantise(Writes(write), TERNARY, TERNARY).train(training)
    twin, (x, _) = copy.deepcopy(net), batch(side=4)
    run = fused(net)
    assert len(run.layers) == 2
    with torch.no_grad():
        expected, given = twin(x), run(x)
    # A sum beside a threshold may be rounded to the other side of it.
    assert float((given != expected).float().mean()) < 0.002


class WritesBetween(Writes):
    """Features that are changed in place after the next convolution took them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (conv, norm, relu) = self.layer1(x), self.layer2
        sums = conv(h)
        self.write(h)
        return relu(norm(sums))


def test_a_layer_whose_features_change_before_its_stair_is_not_fused():
    torch.manual_seed(0)
    net = ss.quantise(WritesBetween(lambda h: h.square_()), TERNARY, TERNARY)
    twin, (x, _) = copy.deepcopy(net), batch(side=4)
    run = fused(net)
    assert len(run.layers) == 1
    assert not_fused(net) == "1 of 2 stairs are not fused: layer2.2"
    with torch.no_grad():
        assert float((run(x) != twin(x)).float().mean()) < 0.002


class Asks(nn.Module):
    """Does something else in training, in one of two ways."""

    def __init__(self, net: nn.Module, by_argument: bool) -> None:
        super().__init__()
        self.net, self.by_argument = net, by_argument

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_argument:
            return self.net(F.dropout(x, 0.5, training=self.training))
        return self.net(x * 0.5) if self.training else self.net(x)


def test_a_network_that_asks_whether_it_trains_is_not_evaluated_fused():
    net, _ = pair("ternary", "uniform", "mode")
    assert Execution(fused(net), "float32", fused=True).eval_forward is not None
    for by_argument in (False, True):
        asks = ss.quantise(Asks(model(), by_argument), TERNARY, TERNARY, skip="net.15")
        assert not fused(asks).evaluates


@pytest.mark.nightly
def test_images_that_pooling_windows_do_not_tile():
    """Seven pixels: pooled by torch, and then no integers are passed on."""
    net, twin = pair("ternary", "uniform", "mode", side=7)
    check(net, twin, *batch(side=7), gradients=2e-4)
    torch.manual_seed(0)
    float_model = nn.Sequential(
        *CONVOLUTION(), nn.MaxPool2d(2), *CONVOLUTION(16),
        nn.Conv2d(16, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    net = ss.quantise(float_model, *STAIRS["INT4"], skip="11")
    with torch.no_grad():
        net(torch.randn(8, 3, 7, 7))
        net.eval()
        run, x = fused(net), torch.randn(4, 3, 7, 7)
        assert len(run.layers) == 3
        assert distance(run(x), net(x)) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(run(x), net(x)) < 1e-5
