"""The CPU's kernels against the reference, which the oracles of test_regularise hold."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import oracle
import softstair as ss
from softstair import kernels
from softstair.kernels import cpu, cpu_sums, reference
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
    x = torch.linspace(low - 2, high + 2.1, 401, dtype=torch.float64)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "stair",
    [
        ss.Stair.linear(3, quantum=0.21123247088136593, thresholds="floor"),
        ss.Stair((0.0, 0.3, 1.0), (0.5, 1.5)),
        ss.Stair((0.0, 0.7, 1.0), (0.5, 1.5)),
    ],
    ids=["distances differ by rounding", "rising more", "rising less"],
)
def test_supports_that_meet_leave_no_slope_outside(stair, dtype):
    """Uniform noise of the default std, few levels."""
    noise, quantum = ss.noise.Uniform(), float(stair.quantum)
    x = torch.tensor([-3.0, 2.1, 30.0], dtype=dtype, requires_grad=True)
    ss.regularise(x, stair, noise, 0.0, noise.std_within(0.5) * quantum).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, dtype=dtype))


def test_rises_of_any_size_have_a_slope():
    """A rise that is small beside another keeps its slope, and none is divided by a tiny one."""
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    ss.regularise(x, ss.Stair((0.0, 1e-10, 1.0), (0.0, 1.0)), "uniform", 0.0, 0.1).sum().backward()
    torch.testing.assert_close(x.grad[0] / x.grad[1], torch.tensor(1e-10, dtype=torch.float64))
    for family in ss.noise.names():
        stair = ss.Stair((0.0, 1e-40, 1.0), (0.0, 1.0))
        y = ss.regularise(torch.tensor([-9.0, 9.0]), stair, family, 0.0, 0.1, "expectation")
        torch.testing.assert_close(y, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "quantum"), [(10, 0.07), (12, 0.07), (12, 1.0)])
def test_stairs_finer_than_the_dtype(bits, quantum, dtype):
    """x of 16 bits is compared with thresholds of float32, and only the level is rounded."""
    stair = ss.Stair.linear(bits, signed=True, quantum=quantum, thresholds="midpoint")
    thresholds = torch.tensor(stair.thresholds)
    levels = torch.tensor(stair.levels, dtype=torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, generator=generator) * quantum * 2 ** (bits - 2)
    x = torch.cat([thresholds, x]).to(dtype)
    wanted = torch.searchsorted(thresholds.double(), x.double(), right=True)
    assert torch.equal(kernels.index(x, stair), wanted)
    assert torch.equal(kernels.hard(x, stair), levels[wanted])


@pytest.mark.nightly
def test_a_stair_may_be_made_inside_a_compiled_function():
    function = torch.compile(lambda x: ss.Stair.ternary()(x), backend="aot_eager")
    assert torch.equal(function(torch.tensor([-0.7, 0.2])), torch.tensor([-1.0, 0.0]))


def test_tables_of_stairs_stay():
    """A captured graph reads them at their addresses, however many stairs follow."""
    device, stair = torch.device("cpu"), ss.Stair.ternary(quantum=(0.5, 1.0), axis=1)
    assert kernels.triton.table.cache_info().maxsize is None
    assert kernels.bound.cached_quanta_tensor.cache_info().maxsize is None
    found = [
        (kernels.triton.table(stair, device), kernels.channel_quanta(stair, x))
        for x in (torch.zeros(3, 2), torch.ones(3, 2))
    ]
    assert all(a is b for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantum", [0.25, 0.07, 0.1943419873714447, 2.0**-38])
def test_lines_on_a_cpu_at_thresholds_and_edges(quantum, bits, dtype):
    """Of many levels, with supports that meet: the default std. Each threshold, each edge of a
    support, the numbers next to them, and what is not finite."""
    stair = ss.Stair.linear(bits, quantum=quantum, thresholds="midpoint")
    assert stair.rounded(dtype).is_regular
    std = quantum / math.sqrt(12)
    points = torch.tensor(stair.thresholds, dtype=torch.float64).to(dtype)
    ends = torch.tensor([-math.inf, math.inf, -1e30, 1e30, 0.0, -0.0], dtype=dtype)
    x = torch.cat([points, points - 0.5 * quantum, points + 0.5 * quantum, ends])
    x = torch.cat([x, *(torch.nextafter(x, end.expand_as(x)) for end in ends[:2])])
    for mean in (0.0, 0.3 * quantum):
        soft = kernels.SoftStair(stair, ss.noise.get("uniform"), mean, std)
        bound, slack = BoundStair(soft, x), 4 * torch.finfo(dtype).eps * stair.levels[-1]
        for forward in ("hard", "mode", "expectation"):
            found, expected = kernels.value(x, soft, forward), reference.value(x, bound, forward, x)
            atol = slack if forward == "expectation" else 0.0
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        found, expected = kernels.backward(torch.ones_like(x), x, soft), reference.slope(x, bound)
        # At an edge, rounding decides; elsewhere the slope is the same.
        inside = (x - mean - 0.5 * quantum).remainder(quantum)
        clear = (inside - 0.5 * quantum).abs() > 1e-4 * quantum
        clear |= ~x.isfinite() | (x.abs() > 300 * quantum)
        torch.testing.assert_close(found[clear], expected[clear], rtol=1e-5, atol=0)
    assert kernels.value(torch.tensor([math.nan], dtype=dtype), soft, "mode").isnan().all()


def test_levels_of_any_line_are_those_of_a_table():
    """In float32 the unit of most lines has two parts. At every threshold, and beside it."""
    random = torch.Generator().manual_seed(0)
    draw = lambda: float(torch.rand((), generator=random))
    stairs = [
        ss.Stair.linear(bits, signed, 10 ** (4 * draw() - 3), thresholds)
        for bits in (4, 5, 8)
        for thresholds, signed in itertools.product(("floor", "midpoint"), (False, True))
        for _ in range(5)
    ]
    for count in (9, 16, 32):  # lines that begin anywhere
        for unit in (1.0, draw()):
            low, high = draw(), draw()
            values = [(number + low) * unit for number in range(count)]
            stairs.append(ss.Stair(values, [number + high for number in range(count - 1)]))
    parts = set()
    for stair in stairs:
        rounded = stair.rounded(torch.float32)
        parts |= {len(line.unit_parts) for line in (rounded.level_line, rounded.threshold_line)}
        table, levels = torch.tensor(rounded.thresholds), torch.tensor(rounded.levels)
        ends = torch.tensor([-math.inf, math.inf])
        x = torch.cat([table, *(table.nextafter(end) for end in ends), ends, levels])
        for soft, forward in (
            (kernels.SoftStair(stair), "hard"),
            (kernels.SoftStair(stair, std=1e-4 * float(stair.quantum)), "mode"),
        ):
            found = kernels.value(x, soft, forward)
            assert torch.equal(found, levels[torch.bucketize(x, table, right=True)])
    assert {1, 2} <= parts


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ss.noise.names())
def test_thresholds_far_from_x_do_not_matter(family, bits):
    """Of many levels the CPU sums over those near x: the same as over all, in float64."""
    quantum, noise = 0.07, ss.noise.get(family)
    stair = ss.Stair.linear(bits, quantum=quantum, thresholds="midpoint")
    span = stair.levels[-1] - stair.levels[0]
    x = torch.linspace(stair.levels[0] - span, stair.levels[-1] + span, 1001)
    stds = [0.003, 0.1, noise.std_within(0.5), 0.4, 1.1, 3.0]
    if math.isfinite(noise.support):  # one threshold more matters, and just none more
        stds += [(n + 0.5) / noise.support * (1 + near) for n in (1, 2) for near in (-1e-3, 1e-3)]
    for mean, std in itertools.product((0.0, 0.2 * quantum), stds):
        soft = kernels.SoftStair(stair, noise, mean, std * quantum)
        exact = BoundStair(soft, x.double())
        wanted = reference.value(x.double(), exact, "expectation", x)
        near = kernels.value(x, soft, "expectation")
        slack = torch.finfo(x.dtype).eps * span * (8 + 1 / std)  # of a rounded value, and x − θ
        torch.testing.assert_close(near.double(), wanted, rtol=0, atol=slack)
        slope = kernels.backward(torch.ones_like(x), x, soft).double()
        error = (slope - reference.slope(x.double(), exact)).abs() * std
        if family == "uniform":  # density jumps at the edges, where rounding decides
            quanta = (x.double() - mean) / quantum - 0.5
            sides = [(quanta - side * noise.support * std).frac().abs() for side in (-1, 1)]
            error[torch.stack([torch.minimum(side, 1 - side) for side in sides]).amin(0) < 1e-3] = 0
        assert error.amax() < 4 * slack / quantum
    if family != "logistic":
        assert kernels.backward(torch.ones(2), torch.tensor([-9.0, 99.0]), soft).eq(0).all()


def quanta_of(count: int, seed: int) -> Tensor:
    """Quanta of float32, as fits make them, from 1e-5 to 10; a power of two among them."""
    random = torch.Generator().manual_seed(seed)
    return torch.cat([10 ** (6 * torch.rand(count - 1, generator=random) - 5), torch.tensor([0.5])])


def around(values: Tensor, steps: int) -> Tensor:
    """The values and as many of the next numbers on each side, along dimension 1."""
    found = [values]
    for end in (-math.inf, math.inf):
        near = values
        for _ in range(steps):
            near = near.nextafter(torch.full_like(near, end))
            found.append(near)
    return torch.cat(found, 1)


def runs_on_cpu(x: Tensor, soft: kernels.SoftStair, strategy: str) -> bool:
    return cpu.takes_channels(x, BoundStair(soft, x), strategy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["midpoint", "floor"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_channels_at_thresholds_and_edges(share, form, bits, dtype):
    """As lines of one quantum: all numbers around each threshold and edge of each channel."""
    channels, noise = 96 // 2**bits + 4, ss.noise.Uniform()
    column = quanta_of(channels, bits)[:, None]
    unit = ss.Stair.linear(bits, signed=True, thresholds=form)
    stair = unit.with_quantum(column.flatten().tolist(), axis=0)
    exact, mean = column.double(), column * share
    thresholds, levels = (
        (exact * torch.tensor(values, dtype=torch.float64)).to(dtype)
        for values in (unit.thresholds, unit.levels)
    )
    ends = [math.inf, -math.inf, math.nan, 1e30, -1e30, 3e38, 1e-310, -1e-40, 1e-45, 0.0, -0.0]
    points = torch.cat([thresholds, thresholds + mean.to(dtype)], 1)
    edges = [points + side * width * exact.to(dtype) for side in (-0.5, 0.5) for width in (0.4, 1)]
    random = column * 2**bits * torch.randn(channels, 99, generator=torch.manual_seed(0))
    tails = [torch.tensor(ends, dtype=dtype).expand(channels, -1), random.to(dtype)]
    x = torch.cat([around(points, 8), *(around(edge, 1) for edge in edges), *tails], 1)
    gradient = torch.linspace(-2, 3, x.numel(), dtype=dtype).view_as(x)
    mixed = torch.linspace(0.4, 1.0, channels)[:, None]
    for width, has_slope in ((0.0, 0), (0.4, 1), (1.0, 1), (1.9, 0), (mixed, 0)):  # of the supports
        soft = kernels.SoftStair(stair, noise, mean, column * (width * noise.std_within(0.5)))
        for forward in ("hard", "mode"):
            assert runs_on_cpu(x, soft, forward)
            found = kernels.value(x, soft, forward)
            expected = reference.value(x, BoundStair(soft, x), forward, x)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            centred = oracle.numpy(x - mean.to(dtype) if forward == "mode" else x)
            for row in zip(oracle.numpy(found), centred, levels, thresholds, strict=True):
                wanted = oracle.hard(row[1], row[2].tolist(), row[3].tolist())
                assert torch.equal(
                    torch.tensor(row[0]).nan_to_num(9e9), torch.tensor(wanted).nan_to_num(9e9)
                )
        assert runs_on_cpu(x, soft, "backward") == has_slope
        found = kernels.backward(gradient, x, soft)
        expected = gradient * reference.slope(x, BoundStair(soft, x))
        # As above: at an edge, rounding decides.
        place = (x - mean) / exact - unit.thresholds[0]
        sides = [(place - side * 0.5 * width) for side in (-1, 1)]
        clear = torch.stack([(side - side.round()).abs() for side in sides]).amin(0) > 1e-4
        clear = clear | (place.abs() > 300) | x.isnan()
        same = dict(rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(found[clear], expected[clear], **same)
        assert found[place > len(unit)].eq(0).all()
        if width is not mixed and width == 1:  # no gradient is lost where supports meet
            inside = (place > -0.499) & (place < len(unit) - 2 + 0.499)
            assert found[inside & (gradient != 0)].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("view", "is_cut"),
    {
        "convolution": (lambda x: x.clone(), True),
        "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), True),
        "depthwise": (lambda x: x[:, :1].contiguous(), True),
        "linear": (lambda x: x.flatten(1), True),
        "vector": (lambda x: x[:, 0, 0, 0].contiguous(), True),
        "gaps": (lambda x: x[:, ::2], False),
        "channels inside": (lambda x: x.flatten(1).T.contiguous().T, False),
        "more than a block": (lambda x: x.repeat(1, 9, 1, 1), False),
        "empty": (lambda x: x[:, :0], False),
    }.values(),
)
def test_channels_of_any_layout(view, is_cut, dtype, monkeypatch):
    """Blocks of some channels, the last one smaller, and what the reference computes instead."""
    monkeypatch.setattr(cpu_sums, "BLOCK", 160 // torch.get_num_threads())
    column, noise = quanta_of(21, 1), ss.noise.Uniform()
    x = view(torch.randn(21, 5, 2, 2, generator=torch.manual_seed(0)).to(dtype))
    gradient = torch.randn(x.shape, generator=torch.manual_seed(1), dtype=dtype)
    shape = [-1] + [1] * (x.dim() - 1)
    for axis in (0, -x.dim()):
        stair = ss.Stair.linear(4, signed=True).with_quantum(column.tolist(), axis)
        std = (column * noise.std_within(0.5)).view(shape)
        everywhere = torch.full_like(x, 0.01)
        for mean in (0.3 * column.view(shape), torch.tensor(0.01), 0.01, everywhere):
            soft = kernels.SoftStair(stair, noise, mean, std)
            for strategy in ("hard", "mode", "backward"):
                is_taken = is_cut and (strategy == "hard" or mean is not everywhere)
                assert runs_on_cpu(x, soft, strategy) == is_taken or x.dim() == 1
                if strategy == "backward":
                    found = kernels.backward(gradient, x, soft)
                    expected = gradient * reference.slope(x, BoundStair(soft, x))
                else:
                    found = kernels.value(x, soft, strategy)
                    expected = reference.value(x, BoundStair(soft, x), strategy, x)
                rtol = 1e-6 if strategy == "backward" else 0
                torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
                assert found.stride() == x.stride() or not is_taken


UNITS = ss.Stair.linear(4, signed=True)
SHORT = float(torch.tensor(0.1))
"""Of 24 bits: its multiples are on a line in float64, and need rounding in float32."""


@pytest.mark.parametrize(
    ("stair", "factor"),
    [
        (UNITS, torch.rand(99, generator=torch.manual_seed(0), dtype=torch.float64) + 0.5),
        (UNITS, torch.full((99,), 2.0**-130, dtype=torch.float64)),
        (UNITS, torch.full((99,), 1.5 * 2.0**125, dtype=torch.float64)),
        (ss.Stair([SHORT * k for k in range(16)], UNITS.thresholds), quanta_of(99, 2)),
        (ss.Stair([k + SHORT for k in range(16)], UNITS.thresholds), quanta_of(99, 4)),
        (ss.Stair(UNITS.levels, [SHORT * k for k in range(15)]), quanta_of(99, 5)),
        (ss.Stair(UNITS.levels, [k**1.1 for k in range(15)]), quanta_of(99, 6)),
        (ss.Stair.ternary(), quanta_of(99, 7)),
    ],
    ids="float64 tiny huge scaled shifted narrow uneven ternary".split(),
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_channels_that_products_do_not_give(stair, factor, dtype):
    """Quanta of more than 24 bits or of any size, levels that are not whole numbers, few levels."""
    stair = stair.with_quantum(factor.double().tolist(), axis=0)
    column = factor.double()[:, None]
    thresholds = (column * torch.tensor(stair.thresholds, dtype=torch.float64)).to(dtype)
    x = around(thresholds, 2)
    for std in (0.0, column.float() * 0.2, column.float() * 3):
        for family, forward in itertools.product(("uniform", "normal"), ("hard", "mode")):
            soft = kernels.SoftStair(stair, ss.noise.get(family), 0.0, std)
            expected = reference.value(x, BoundStair(soft, x), forward, x)
            found = kernels.value(x, soft, forward)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            slope = kernels.backward(torch.ones_like(x), x, soft)
            wanted = reference.slope(x, BoundStair(soft, x)).to(dtype)
            torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=0, equal_nan=True)


class Comparing(Peaked):
    """A family of one's own whose density is 0 at NaN."""

    def pdf(self, z: Tensor) -> Tensor:
        return torch.where(z.abs() < 3, 0.1, 0.0).to(z.dtype)


ROWS = ss.Stair.linear(4).with_quantum([0.5, 1.0, 2.0], axis=0)


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("family", [*oracle.NAMES, Comparing()], ids=str)
def test_nan_has_a_value_and_a_gradient_of_nan(family, choice):
    """It alone, by every forward, with noise and without; infinity is at an end level."""
    stairs = [*STAIRS.values(), ROWS]
    stds = (0.0, 1e-9, 0.29, torch.tensor(0.4), torch.tensor(0.0))
    for stair, forward, std in itertools.product(stairs, oracle.FORWARDS, stds):
        x = torch.tensor([[math.nan, 0.3], [math.inf, -math.inf], [-0.1, math.nan]])
        x.requires_grad_()
        with kernels.use(choice):
            y = ss.regularise(x, stair, family, 0.1, std, forward)
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
            hard = kernels.hard(x, stair)
        nan = x.isnan()
        assert torch.equal(y.isnan(), nan)
        assert torch.equal(gradient.isnan(), nan)
        assert torch.equal(hard.isnan(), nan)
        assert torch.equal(hard[1], stair(x)[1])


@pytest.mark.parametrize("estimator", [ss.ste.identity(), ss.ste.relu()], ids=str)
def test_the_gradient_of_an_estimator_is_nan_at_nan(estimator):
    x = torch.tensor([math.nan, 0.3], requires_grad=True)
    estimator(x, ss.Stair.ternary()).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([math.nan, 1.0]), equal_nan=True)


INVALID = [(math.nan, 0.3), (math.inf, 0.3), (0.0, math.nan), (0.0, math.inf), (0.0, -1.0)]


@pytest.mark.parametrize("family", oracle.NAMES)
def test_noise_that_cannot_be_read_is_nan_if_it_is_invalid(family):
    """As on a GPU, where raising an error would wait: 0-d tensors that nothing checked."""
    x, noise = torch.linspace(-2, 2, 9), ss.noise.get(family)
    for numbers, stair in itertools.product(INVALID, STAIRS.values()):
        soft = kernels.SoftStair(stair, noise, *map(torch.tensor, numbers))
        for forward in ("expectation", "mode", "random"):
            value = torch.vmap(
                lambda x, soft=soft, forward=forward: kernels.value(x, soft, forward),
                randomness="different",
            )
            assert value(x).isnan().all()
        assert kernels.slope(x, soft).isnan().all()
