"""Fused layers, learned quanta and captured steps on CUDA, against float64 on the CPU."""

import copy
import itertools
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from softstair._accelerate.inference import optimised_for_inference
from softstair.data import Dataset
from softstair.data.augment import Augmentation, draw as make_draws
from softstair.data.batches import Examples
from softstair.models import build
from softstair.nn import StairActivation, StairModule, StairWeight
from softstair.train.execution import use_batch_kernel
from softstair.train.fit import Step
from softstair.train.recipe import Recipe
from softstair.train.state import State
from softstair.train.teacher import FloatRun, Teacher

sys.path += [str(Path(__file__).parents[1] / "accelerate"), str(Path(__file__).parents[1])]
from standalone import main
from twins import STAIRS, batch, differences, distance, learn, model, pair

from networks import ResNet

eager, graphed = (partial(Step, captured=each) for each in (False, True))


def test_fused_network_has_the_values_and_gradients_of_the_reference() -> None:
    """Every family × forward in float32, every stair, many images; each layer has a gradient."""
    from softstair._accelerate import fused

    torch.backends.cudnn.allow_tf32 = False
    forwards = ("mode", "expectation", "hard")
    cells = [*itertools.product(("ternary", "INT4"), ss.noise.names(), forwards)]
    cells += [(stairs, "uniform", "mode") for stairs in STAIRS]
    cases = [(*cell, 8, 16) for cell in cells] + [("INT8 first", "uniform", "mode", 32, 256)]
    for stairs, noise, forward, side, images in cases:
        net, twin = pair(stairs, noise, forward, side)
        x, y = batch(side, images)
        run = fused(net.cuda())
        assert run is not None
        scores, wanted = learn(run, x.cuda(), y.cuda()), learn(twin, x.double(), y)
        what = f"{stairs} {noise} {forward}"
        assert distance(scores, wanted) < 1e-3, (what, distance(scores, wanted))
        worst = max(differences(net, twin).items(), key=lambda item: item[1])
        assert worst[1] < (2e-2 if forward == "expectation" else 5e-3), (what, worst)
        for name, parameter in net.named_parameters():
            assert parameter.grad.count_nonzero() > 0, (what, name)
    torch.backends.cudnn.allow_tf32 = True


def test_byte_shortcuts_and_gradient_margin_have_the_gradients_of_the_reference() -> None:
    """Fixed and learned quanta; the running means of a first pass make the variances exact."""
    from softstair._accelerate import fused

    torch.backends.cudnn.allow_tf32 = False
    for quanta, shortcuts in itertools.product(("fixed", "learned"), (None, "uint8")):
        stairs, extra = ("by channel", 0) if shortcuts else ("ternary by channel", 1)
        cell = (stairs, "normal", "mode", 8, quanta, lambda: ResNet(16))
        net, twin = pair(*cell, shortcuts=shortcuts, gradient_margin=extra)
        x, y = batch(4, 6)
        run = fused(net.cuda())
        assert run is not None
        assert len(run.layers) == 6
        for module in (*net.modules(), *twin.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        with torch.no_grad():
            run(x.cuda()), twin(x.double())
        scores, wanted = learn(run, x.cuda(), y.cuda()), learn(twin, x.double(), y)
        what = f"{quanta} {shortcuts}"
        assert distance(scores, wanted) < 1e-3, (what, distance(scores, wanted))
        worst = max(differences(net, twin).items(), key=lambda item: item[1])
        assert worst[1] < 5e-3, (what, worst)
    torch.backends.cudnn.allow_tf32 = True


def test_whole_numbers_are_summed_exactly() -> None:
    """The convolutions of VGG8 and ResNet-20, batch 64: every sum that of float64."""
    from softstair.kernels.triton import convolution

    shapes = [(128, 256, 16, 1, 1), (256, 512, 8, 1, 1), (512, 512, 8, 1, 127)]
    shapes += [(16, 16, 32, 1, 1), (16, 32, 32, 2, 127), (32, 32, 16, 1, 1), (64, 128, 16, 2, 1)]
    for inputs, outputs, side, stride, high in shapes:
        x = torch.randint(-high, high + 1, (64, inputs, side, side), device="cuda")
        w = torch.randint(-high, high + 1, (outputs, inputs, 3, 3), device="cuda")
        whole = [t.to(torch.int8).contiguous(memory_format=torch.channels_last) for t in (x, w)]
        dtype = torch.int16 if high == 1 else torch.int32
        sums = convolution.convolve_int8(whole[0], whole[1], 1, dtype, stride)
        wanted = F.conv2d(x.double(), w.double(), stride=stride, padding=1)
        assert int((sums.double() != wanted).sum()) == 0


def test_depthwise_layers_are_summed_exactly() -> None:
    """Those of DSCNN and of MobileNet: torch's sums, also where it rounds factors to TF32."""
    from softstair._accelerate import products

    torch.backends.cudnn.allow_tf32 = True
    for channels, sides, stride in ((64, (25, 5), 1), (8, (48, 48), 1), (128, (6, 6), 2)):
        layer = torch.nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        x = torch.randint(-128, 128, (256, channels, *sides), device="cuda")
        w = torch.randint(-128, 128, (channels, 1, 3, 3), device="cuda")
        rows = [t.float().contiguous(memory_format=torch.channels_last) for t in (x, w)]
        sums = products.sums_of(layer, rows[0], rows[1])
        wanted = F.conv2d(x.double(), w.double(), None, stride, 1, groups=channels)
        assert torch.equal(sums.double(), wanted)


def test_large_layers_have_exact_statistics_in_every_pass() -> None:
    """The last of many programs adds what all have stored: the same bits in each of ten passes."""
    from softstair._accelerate import moments, products
    from softstair._accelerate.batchnorm_backward import reduce_dz
    from softstair._accelerate.stairs import PreparedStair, prepare_rows
    from softstair.kernels.triton import convolution, table

    ternary, std = ss.Stair.ternary(), torch.tensor([0.4], device="cuda")
    values = table(ternary, std.device)
    row = prepare_rows(values, std * 0, std, 2, "uniform")[0]
    stair = PreparedStair(values, row, {"COUNT": 2, "FAMILY": "uniform"})
    shapes = (256, 16, 16, 32), (256, 32, 64, 16), (256, 128, 128, 32), (64, 256, 512, 8)
    for images, inputs, outputs, side in shapes:
        sizes = (images, inputs, side, side), (outputs, inputs, 3, 3)
        integers = [torch.randint(-1, 2, size, device="cuda").to(torch.int8) for size in sizes]
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in integers)
        module = nn.BatchNorm2d(outputs, momentum=1.0, device="cuda").requires_grad_(False)
        sums = convolution.convolve_int8(x, w, 1, torch.int16)
        wanted, found = sums.double(), []
        variance, mean = torch.var_mean(wanted, (0, 2, 3), correction=0)
        inverse = (variance + module.eps).rsqrt()
        dy = torch.randn(sums.shape, device="cuda").contiguous(memory_format=torch.channels_last)
        zeros = moments.zeros_for(11, outputs, std.device)
        for zero in zeros:
            norm = moments.Normalisation(module, module.weight, module.bias, zero)
            stats = products.convolve_with_statistics(x, w, 1, torch.int16, norm)[1]
            assert distance(module.running_mean, mean) < 1e-6
            floats = moments.batch_statistics(sums, norm)  # about the mean of the last pass
            found.append((stats, floats, *(
                reduce_dz(dy, sums, stats, stair, None, 1.0, zero, sizes=True) for _ in range(2)
            )))  # fmt: skip
        for pass_, tensors in enumerate(found[1:]):
            for tensor, first in zip(tensors, found[1], strict=True):
                assert torch.equal(tensor, first), (outputs, pass_)
        for number, value in ((0, mean), (1, inverse), (2, inverse), (3, -mean * inverse)):
            assert distance(found[1][0][number], value) < 1e-6, (outputs, number)
        floats = found[1][1].double()  # of the mean, errors count in deviations
        assert ((floats[0] - mean) * inverse).abs().amax() < 5e-7, outputs
        assert ((module.running_mean - mean) * inverse).abs().amax() < 5e-7, outputs
        assert (floats[3] + mean * inverse).abs().amax() < 5e-7, outputs
        assert all(distance(floats[number], inverse) < 1e-6 for number in (1, 2)), outputs
        stats, _, coefficients, again = found[1]
        assert torch.equal(coefficients, again)
        z = (sums.float() * stats[2, :, None, None] + stats[3, :, None, None]).requires_grad_()
        y = ss.regularise(z, ternary, "uniform", 0.0, 0.4, "mode")
        (dz,) = torch.autograd.grad(y, z, dy)
        dz, centred = dz.double(), (wanted - mean[:, None, None]) * inverse[:, None, None]
        sizes = inverse * dz.square().mean((0, 2, 3)).sqrt()
        expected = dz.sum((0, 2, 3)), (dz * centred).sum((0, 2, 3)), inverse, sizes
        for number, value in zip((0, 1, 2, 5), expected, strict=True):
            assert distance(coefficients[number], value) < 1e-5, (outputs, number)


def test_first_layers_in_bfloat16_and_tf32_are_those_of_float64() -> None:
    """Few channels and many, sums of 27 and of 63 products, pooled and not."""
    cases = itertools.product((torch.bfloat16, torch.float32), (16, 32, 64, 128), (3, 7), (1, 2))
    for dtype, outputs, inputs, pooled in cases:
        check_first_layer("cuda", dtype, outputs, inputs, pooled == 2, (16, 16))
    for dtype in (torch.bfloat16, torch.float32):  # as in DSCNN
        check_first_layer("cuda", dtype, 64, 1, False, (49, 10), (10, 4), 2, (5, 1))


def check_first_layer(
    device: str,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    pool: bool,
    sides: tuple[int, int],
    taps: tuple[int, int] = (3, 3),
    stride: int = 1,
    padding: tuple[int, int] = (1, 1),
) -> None:
    """Statistics, features and the gradient of the weights of 64 images."""
    from softstair._accelerate import batchnorm, first, moments
    from softstair._accelerate.stairs import PreparedStair, prepare_rows
    from softstair.kernels.triton import table

    ternary, std = ss.Stair.ternary(), torch.tensor([0.4], device=device)
    values = table(ternary, std.device)
    row = prepare_rows(values, std * 0, std, 2, "uniform")[0]
    stair = PreparedStair(values, row, {"COUNT": 2, "FAMILY": "uniform"})
    # Inputs that bfloat16 and TF32 hold exactly.
    x = torch.randn(64, inputs, *sides, device=device).bfloat16().to(dtype)
    w = torch.randint(-1, 2, (outputs, inputs, *taps), device=device).to(dtype)
    x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    module = nn.BatchNorm2d(outputs, device=device).requires_grad_(False)
    zeros = moments.zeros_for(1, outputs, std.device)[0]
    norm = moments.Normalisation(module, module.weight, module.bias, zeros)
    layer = first.First(w, stride, padding)
    stats, squares = first.first_statistics(x, layer, norm)
    given = (x, stats, stair, "mode", zeros[:1], dtype)
    y, integers, argmax, _ = batchnorm.forward(*given, pool=pool, quantum=1.0, first=layer)
    exact = w.double().requires_grad_()
    sums = F.conv2d(x.double(), exact, None, stride, padding)
    z = F.batch_norm(sums, None, None, training=True)
    what = (dtype, outputs, inputs, pool, taps)
    inverse = sums.detach().var((0, 2, 3), correction=0)
    inverse = (inverse + module.eps).rsqrt()
    assert distance(stats[1], inverse) < 1e-5, what
    wanted = ss.regularise(z, ternary, "uniform", 0.0, 0.4, "mode")
    # Rounding decides on which side of a threshold, or of an end of its noise, a few values lie.
    ends = [end for t in ternary.thresholds for end in (t - 0.4 * 3**0.5, t, t + 0.4 * 3**0.5)]
    is_near = sum((z.detach() - end).abs() < 1e-4 for end in ends).double()
    if pool:
        wanted, is_near = F.max_pool2d(wanted, 2), F.max_pool2d(is_near, 2)
    assert 0 < int(is_near.count_nonzero()) < 0.01 * y.numel(), what
    assert not ((y != wanted) & (is_near == 0)).any(), what
    assert integers is not None
    assert torch.equal(integers.to(dtype), y)
    dy = torch.randn_like(y) * (is_near == 0)
    _, gradient = first.first_weight_gradient(x, dy, layer, stats, stair, argmax, squares)
    (expected,) = torch.autograd.grad(wanted, exact, dy.double())
    assert distance(gradient, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-3), what


def test_networks_in_two_streams_train_as_alone() -> None:
    """Kernels that count their programs run at the same time: the same bits, captured or not."""
    options = {"static_std": True, "augment": "none"}
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for kind in (eager, graphed):
            trained = [state("mode", **options) for _ in range(4)]
            steps = [kind(*each) for each in trained]
            streams = [torch.cuda.Stream() for _ in range(2)]
            for (each, _), step in zip(trained, steps, strict=True):
                go(each, step, 1)  # compiled and captured
            torch.cuda.synchronize()
            for _ in range(12):
                for stream, (each, _), step in zip(streams, trained[:2], steps[:2], strict=True):
                    with torch.cuda.stream(stream):
                        go(each, step, 1)
            torch.cuda.synchronize()
            for (each, _), step in zip(trained[2:], steps[2:], strict=True):
                go(each, step, 12)
            found = [weights(each) for each, _ in trained]
            assert all(torch.equal(each, found[3]) for each in found), kind


def test_steps_beside_the_backward_pass_are_those_after_it() -> None:
    """In a second stream or not, with steps as early as possible or at the end: the same bits."""
    from softstair._accelerate import update
    from softstair._accelerate.update import SecondStream

    usual, beside = update.LEAST_WEIGHTS, SecondStream.beside
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            for kind in (eager, graphed):
                found = []
                for two, least in ((True, 1), (True, 1 << 60), (False, 1 << 60)):
                    update.LEAST_WEIGHTS = least
                    SecondStream.beside = beside if two else lambda *given: nullcontext()
                    each = state("mode", static_std=True, augment="none")
                    go(each[0], kind(*each), 12)
                    found.append(weights(each[0]))
                assert all(torch.equal(other, found[0]) for other in found), kind
    finally:
        update.LEAST_WEIGHTS, SecondStream.beside = usual, beside


def test_products_of_float8_are_those_of_float64() -> None:
    """Of VGG8 and of a small network, batch 64, given the same rounded gradient; repeated, those of
    the weights have the same bits."""
    from softstair._accelerate import gradients, moments

    e5m2, last = torch.float8_e5m2, torch.channels_last
    shapes = [(128, 128, 32, 1, 3), (256, 512, 8, 15, 3), (512, 512, 8, 1, 3)]
    for inputs, outputs, side, high, taps in [*shapes, (16, 32, 16, 1, 3), (32, 16, 16, 1, 1)]:
        x = torch.randint(-1, high + 1, (64, inputs, side, side), device="cuda").double()
        w = torch.randint(-8, 8, (outputs, inputs, taps, taps), device="cuda").double()
        dc = torch.randn(64, outputs, side, side, device="cuda").to(e5m2)
        dc, factor = dc.contiguous(memory_format=last), torch.tensor(0.5, device="cuda")
        padding = taps // 2
        wanted = torch.ops.aten.convolution_backward(
            dc.double() * 0.5, x, w, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1,
            [True, True, False],
        )  # fmt: skip
        format = torch.float8_e4m3fn if high > 8 else e5m2
        features, weights = (t.permute(1, 2, 3, 0).contiguous() for t in (x, w))
        dx = gradients.feature_gradient(dc, weights.to(e5m2), factor, padding, torch.float32, 1.0)
        zeros = moments.zeros_for(1, outputs, dc.device)[0]
        given = dc.permute(1, 2, 3, 0).contiguous(), features.to(format), factor
        dw, *others = (
            gradients.weight_gradient(*given, (taps, taps), padding, 1.0, zeros) for _ in range(9)
        )
        assert all(torch.equal(dw, other) for other in others), (inputs, outputs, side)
        # Hopper adds 32 products of FP8 at a time to a sum that it truncates to 13 bits:
        # each of these additions loses at most 2⁻¹³ of the sum.
        tiles = -(-outputs // 128) * -(-inputs // 128) * taps
        pixels = -(-(side**2) // gradients.part_count(tiles, side**2))  # in one chunk of images
        additions = taps**2 * outputs / 32, pixels * 64 / 32
        dw, shape = dw.permute(0, 3, 1, 2), (inputs, outputs, side)
        for value, exact, count in zip((dx, dw), wanted, additions, strict=False):
            assert distance(value, exact) < (1 + count) * 2**-13, (shape, distance(value, exact))


def round_gradient(layer: nn.Module, inputs: object, sums: Tensor) -> None:
    """A forward hook: round the gradient of the sums to E5M2, as it is where products are FP8."""

    def rounded(gradient: Tensor) -> Tensor:
        size = gradient.square().mean((0, 2, 3)).amax().sqrt()
        power = torch.exp2(-size.log2().floor())
        return (gradient * power).to(torch.float8_e5m2).to(gradient.dtype) / power

    sums.register_hook(rounded)


def test_gradients_are_rounded_as_torch_rounds() -> None:
    """The values are the same; the gradient of the sums has the bits that torch's cast gives, and
    all others are those of a network in float64 whose gradient of the sums is rounded."""
    from softstair._accelerate import batchnorm_backward, fused

    backward, compared = batchnorm_backward.backward, []

    def checked(dy, sums, stats, stair, argmax, coefficients, shortcut=None):
        result = backward(dy, sums, stats, stair, argmax, coefficients, shortcut)
        if result.factor is not None:
            exact = backward(dy, sums, stats, stair, argmax, coefficients[:5], shortcut).dc
            wanted = (exact / result.factor).to(torch.float8_e5m2)
            compared.append(float((result.dc.float() != wanted.float()).float().mean()))
        return result

    batchnorm_backward.backward = checked
    torch.backends.cudnn.allow_tf32 = False
    try:
        for stairs, forward in (("ternary", "mode"), ("INT4", "mode"), ("ternary", "hard")):
            net, twin = pair(stairs, "uniform", forward, side=16)
            other, (x, y) = copy.deepcopy(net), batch(side=16, images=64)
            for layer in (twin[4], twin[7]):
                layer.register_forward_hook(round_gradient)
            exact, rounded = fused(other.cuda()), fused(net.cuda(), float8=True)
            assert exact is not None
            assert rounded is not None
            wanted = learn(exact, x.cuda(), y.cuda())
            assert torch.equal(learn(rounded, x.cuda(), y.cuda()), wanted)
            learn(twin, x.double(), y)
            for name, parameter in net.named_parameters():
                gradient = twin.get_parameter(name).grad
                error = float((parameter.grad.cpu() - gradient).norm() / gradient.norm())
                assert error < 0.03, (stairs, forward, name, error)
    finally:  # the next tests run in this process
        torch.backends.cudnn.allow_tf32 = True
        batchnorm_backward.backward = backward
    assert len(compared) == 6
    assert max(compared) < 1e-4, compared  # a last bit of float32 may decide about a rounding


def test_training_in_float8_is_captured_and_learns() -> None:
    """Without augmentation, which would hide six epochs of learning from so small a network."""
    found = []
    for kind in (eager, graphed):
        options = {"precision": "float8", "learning_rate": 3e-3, "augment": "none"}
        trained, examples = state("mode", **options)
        assert trained.execution.precision == "float8"
        step, losses = kind(trained, examples), []
        for _ in range(7):
            go(trained, step, 16)
            losses.append(trained.mean_loss())
        assert trained.is_finite(), losses
        assert losses[-1] < 0.97 * losses[0], losses
        found.append(losses[-1])
    assert abs(found[0] - found[1]) < 0.05 * found[0], found


def in_training(recipe: Recipe, net: nn.Module) -> tuple[State, Examples]:
    """The state of a training, and 1,024 pictures whose brightness tells their class."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (1024, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(5, (1024,), generator=draw)
    x += y[:, None, None, None].byte() * 20
    torch.manual_seed(0)
    return State(recipe, net, 1024, torch.device("cuda")), Examples(x, y, 128.0, 64.0, "cuda")


def state(
    forward: str, precision: str = "bfloat16", taught: bool = False, **settings: object
) -> tuple[State, Examples]:
    """A small network in training, with a teacher that has not learned."""
    recipe = Recipe.from_flat(
        data="cifar10", forward=forward, precision=precision, batch=64, epochs=64, drop=None,
        **{"augment": "crop-flip", **settings},
    )  # fmt: skip
    net, _ = pair("ternary", "uniform", forward, side=32)
    trained, examples = in_training(recipe, net)
    if taught:
        # The teacher has another zero point, 127.6.
        float_run = FloatRun(Recipe.from_flat(data="cifar10"), model(side=32).eval(), "")
        x, y = examples.x.cpu(), examples.y.cpu()
        pictures = Dataset("pictures", x, y, tuple("abcde"), 127.6, 64.0)
        normalised = recipe.replace(integer_input=True)
        trained.teacher = Teacher(float_run, normalised, pictures, trained.device)
    return trained, examples


def learned_state(precision: str = "bfloat16", **settings: object) -> tuple[State, Examples]:
    """A small INT4 network in training, whose quanta are learned."""
    recipe = Recipe.from_flat(
        data="cifar10", weights="int4", weight_quantum=0.125, features="uint4", quanta="learned",
        precision=precision, batch=64, epochs=64, drop=None, clip_latent=True, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    weights, features = recipe.network.stair("weights"), recipe.network.stair("features")
    net = ss.quantise(model(side=32), weights, features, skip="15", quanta="learned")
    return in_training(recipe, net)


def test_the_kernel_makes_the_batch_that_torch_makes_on_the_cpu() -> None:
    everything = {"augment": "crop-flip", "cutout": 10}
    cases = [{}, {"augment": "crop"}, {**everything, "mixup": 0.8}, {**everything, "cutmix": 0.7}]
    cases += [{"augment": "shift", "time_mask": 8, "coefficient_mask": 2}]
    for options, shape in itertools.product(cases, ((3, 32, 32), (1, 49, 10))):
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(256, (300, *shape), dtype=torch.uint8, generator=draw)
        indices, augmentation = torch.randperm(300, generator=draw)[:200], Augmentation(**options)
        examples = use_batch_kernel(Examples(x, torch.arange(300), 127.6, 63.0, "cuda"))
        device_draw = torch.Generator("cuda").manual_seed(0)
        inputs, labels, share = examples.batch(indices.cuda(), augmentation, device_draw)
        draws = make_draws(200, device_draw.manual_seed(0), examples.x.device).cpu()
        moved = augmentation.move(x[indices], draws)
        masked = augmentation.mask((moved.float() - 127.6) / 63.0, draws)
        expected, expected_share = augmentation.mix(masked, draws)
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels.cpu(), indices)
        assert float((inputs.cpu() - expected).abs().max()) <= 1e-5, options
        assert (share is None) is (expected_share is None)
        if share is not None:
            torch.testing.assert_close(share.cpu(), expected_share)


def test_a_teacher_for_inference_gives_the_scores_of_its_network() -> None:
    """In float32 as the network; in bfloat16 as near to it as the plain network in bfloat16."""
    torch.manual_seed(0)
    for name, shape in (("vgg8", (3, 32, 32)), ("resnet18", (3, 32, 32)), ("dscnn", (1, 49, 10))):
        network = build(name, 10, shape)
        network(torch.randn(64, *shape))  # running statistics
        network = network.eval().requires_grad_(False)
        x = torch.randn(64, *shape, device="cuda")
        optimised = optimised_for_inference(network, shape).cuda()
        wanted = network.double()(x.double().cpu())
        torch.backends.cudnn.allow_tf32 = False
        assert distance(optimised(x), wanted) < 1e-4, name
        torch.backends.cudnn.allow_tf32 = True
        plain = network.cuda().bfloat16()(x.bfloat16())
        rounded = optimised.bfloat16()(x.bfloat16())
        assert distance(rounded, wanted) < 2 * distance(plain, wanted) < 0.1, name


def go(state: State, step: object, steps: int) -> None:
    for _ in range(steps):
        if state.order is None or state.step == state.steps:
            if state.order is not None:
                state.epoch, state.step, state.order = state.epoch + 1, 0, None
            state.begin_epoch()
        step()  # type: ignore[operator]


def go_without_waiting(trained: State, step: object, steps: int) -> None:
    """Steps after some others; a synchronisation of host and device is an error."""
    go(trained, step, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        go(trained, step, steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def weights(state: State) -> Tensor:
    return torch.cat([p.detach().flatten() for p in state.network.parameters()]).cpu()


def test_captured_step_is_the_step() -> None:
    """One step from the same start: the same loss, and nearly every weight moves alike."""
    for forward in ("mode", "expectation"):
        found = []
        for kind in (eager, graphed):
            trained, examples = state(forward, static_std=True, augment="none")
            assert trained.execution.fused
            before = weights(trained)
            go(trained, kind(trained, examples), 1)
            found.append((float(trained.loss), weights(trained) - before))
        (loss, moved), (captured, moved_too) = found
        assert abs(loss - captured) < 1e-3 * loss, (forward, loss, captured)
        # Adam's first step is the learning rate one way or the other, but for gradients of zero.
        assert float((moved.abs() > 5e-4).double().mean()) > 0.3, forward
        assert float(((moved - moved_too).abs() > 1e-4).double().mean()) < 0.02, forward


def test_a_step_is_captured_at_the_end_of_an_epoch() -> None:
    """The steps that run before take further batches, which the epoch does not have."""
    trained, examples = state("mode", static_std=True)
    trained.begin_epoch()
    trained.step = trained.steps - 1
    graphed(trained, examples)()
    torch.cuda.synchronize()
    assert trained.step == trained.steps
    assert torch.isfinite(trained.loss)


OPTIONS = {
    "latent_rate": 0.03, "norm_rate": 0.3, "rate_shape": "cosine",
    "warm_up": 0.25, "weight_decay": 0.1, "norm_decay": 0.0, "clip_gradient": 1.0,
    "clip_latent": True, "label_smoothing": 0.1, "anneal_from": "50%", "period": None,
}  # fmt: skip
RANDOM = {"augment": "crop-flip", "cutout": 8, "mixup": 0.3}


def test_captured_step_with_all_options_is_the_step() -> None:
    for optimiser in ("adamw", "nesterov"):
        found = []
        for kind in (eager, graphed):
            options = {**OPTIONS, "optimiser": optimiser, "augment": "none"}
            trained, examples = state("mode", "float32", taught=True, **options)
            before = weights(trained)
            go(trained, kind(trained, examples), 8)
            found.append((float(trained.loss), weights(trained) - before))
        (loss, moved), (captured, moved_too) = found
        assert abs(loss - captured) < 1e-2 * loss, (optimiser, loss, captured)
        alike = float(F.cosine_similarity(moved, moved_too, 0))
        assert alike > 0.98, (optimiser, alike)
        ratio = float(moved_too.norm() / moved.norm())
        assert 0.98 < ratio < 1.02, (optimiser, ratio)


def test_rates_move_without_a_capture_or_a_wait() -> None:
    for optimiser in ("adam", "adamw", "sgd", "nesterov"):
        options = {**OPTIONS, **RANDOM, "optimiser": optimiser}
        trained, examples = state("random", taught=True, **options)
        step = graphed(trained, examples)
        go_without_waiting(trained, step, 10)  # in an epoch: the order of the next one is copied
        go(trained, step, 16 * 2)
        assert step.graph.captures == 1, optimiser
        assert trained.is_finite(), optimiser
        factor = trained.recipe.optimiser.rate_factor(
            trained.epoch + (trained.step - 1) / trained.steps, trained.recipe.run.epochs
        )
        rates = [group["lr"] for group in trained.optimiser.param_groups]
        expected = {1e-3 * factor * part for part in (0.3, 0.1)}
        expected |= {trained.recipe.optimiser.latent_rate_for(1.0) * factor}
        assert all(rate.is_cuda for rate in rates)
        for rate in expected:
            assert any(abs(float(tensor) - rate) < 1e-6 * rate for tensor in rates), (rate, rates)
        for name, (low, high) in trained.latent_bounds.items():
            weight = trained.network.get_parameter(f"{name}.weight")
            assert bool(((weight >= low) & (weight <= high)).all()), name


def test_training_learns_and_is_captured_anew_as_layers_are_annealed() -> None:
    for forward in ("mode", "random", "expectation"):
        trained, examples = state(forward, period=2.0, learning_rate=3e-3)
        step = graphed(trained, examples)
        go(trained, step, 16)
        first = trained.mean_loss()
        go(trained, step, 16 * 8)
        assert trained.truncated_layers == (0, 1, 2, 3)
        assert step.graph.captures == 5
        behind = trained.network[0].weight
        assert behind.grad is not None
        assert behind.grad.count_nonzero() == 0
        last = trained.network[15].weight.grad
        assert last.count_nonzero() > 0
        assert trained.mean_loss() < first, (forward, first, trained.mean_loss())


def test_no_host_waits_in_a_step() -> None:
    for make, steps in (
        (lambda: state("random", period=4.0), 4),
        (lambda: learned_state(period=4.0), 8),
    ):
        trained, examples = make()
        go_without_waiting(trained, graphed(trained, examples), steps)


def test_evaluation_is_exact() -> None:
    """eval() through int8 on the device: the CPU's bits, layer by layer."""
    net, _ = pair("ternary", "uniform", "mode", side=32)
    net.eval()
    x = torch.randn(8, 3, 32, 32).round()
    hidden: nn.Module = net[:11]
    with torch.no_grad():
        assert torch.equal(hidden.cuda()(x.cuda()).cpu(), hidden.cpu()(x))


def test_fused_evaluation_is_that_of_the_network() -> None:
    """After some steps: its scores, but where a last bit decides about a threshold."""
    from softstair.train.metrics import evaluate

    trained, examples = state("mode", period=4.0)
    go(trained, graphed(trained, examples), 6)
    trained.network.eval()
    with torch.no_grad():
        x = examples.batch(torch.arange(256, device="cuda"))[0]
        found, wanted = trained.forward(x), trained.network(x)
    other = ((found - wanted).abs().amax(1) > 1e-3 * wanted.abs().amax()).sum()
    assert other <= 2, f"{other} of 256 score otherwise"
    judged = evaluate(trained.network, examples, forward=trained.execution.eval_forward)
    plain = evaluate(trained.network, examples)
    assert abs(judged[1] - plain[1]) <= 2 / len(examples), (judged, plain)


# Learned quanta


LEARNED = [ss.Stair.ternary(), ss.Stair.linear(4, signed=True), ss.Stair.linear(8)]


def test_learned_quanta_have_the_values_and_gradients_of_the_cpu_in_float64() -> None:
    kinds = ((StairActivation, None), (StairWeight, None), (StairWeight, 0))
    cells = itertools.product(LEARNED, ss.noise.names(), ("expectation", "mode", "hard"), kinds)
    for unit, noise, forward, (kind, axis) in cells:
        quantum = 0.3 if axis is None else [0.3, 0.07, 2.0, 1.0]
        draw = torch.Generator().manual_seed(0)
        u = torch.rand(4, 2000, generator=draw) * (len(unit) + 2) + unit.levels[0] - 1.5
        x, g = u * torch.tensor(quantum).reshape(-1, 1), torch.randn(4, 2000, generator=draw)
        found = []
        for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
            module: StairModule = kind(unit.with_quantum(quantum, axis), noise, forward)
            ratio = module.learn_quantum()
            module.to(device)
            input = x.to(device, dtype).requires_grad_()
            y = module(input)
            (y * g.to(device, dtype)).sum().backward()
            found.append((y, input.grad, ratio.grad))
        for wanted, value in zip(*found, strict=True):
            # Where rounding decides about a threshold, an element differs by a quantum.
            error = distance(value, wanted)
            assert error < (1e-3 if forward == "expectation" else 2e-2), (unit, noise, forward)


def ratios(network: nn.Module) -> torch.Tensor:
    found = [p for name, p in network.named_parameters() if name.endswith("log_ratio")]
    return torch.stack([p.detach() for p in found]).cpu()


def test_captured_steps_move_the_quanta_as_steps_do() -> None:
    for precision in ("float32", "bfloat16"):
        moved = []
        for kind in (eager, graphed):
            trained, examples = learned_state(precision, static_std=True)
            assert trained.execution.fused
            go(trained, kind(trained, examples), 8)
            moved.append(ratios(trained.network))
        assert float(moved[0].abs().min()) > 1e-4, moved
        torch.testing.assert_close(*moved, rtol=0.1, atol=1e-3)


def test_a_network_that_learned_its_quanta_is_exact_in_integers() -> None:
    trained, examples = learned_state(period=2.0, learning_rate=3e-3, integer_input=True)
    go(trained, graphed(trained, examples), 16 * 9)
    net = trained.network.eval()
    quanta = [module.stair.quantum for _, module in ss.nn.stair_modules(net)]
    net = net.cpu().eval()
    assert [module.stair.quantum for _, module in ss.nn.stair_modules(net)] == quanta
    x = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8)
    frozen = ss.freeze(net, (3, 32, 32), zero=128, scale=64.0, examples=x)
    assert frozen.report.differing == 0


if __name__ == "__main__":
    main(globals())
