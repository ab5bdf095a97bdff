"""The Triton kernels, interpreted on the CPU, against the oracle of the operator's tests."""

# mypy takes triton.language, which may be missing, for a variable.
# mypy: disable-error-code="name-defined"

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

import oracle
import softstair as ss
from helpers.gpu_code import compile_kernel
from softstair import kernels
from softstair.kernels import triton as backend
from softstair.regularise import apply
from test_regularise import check_everything

triton = pytest.importorskip("triton", reason="needs triton, which is not installed")
tl = importlib.import_module("triton.language")
elementwise = importlib.import_module("softstair.kernels.triton.elementwise")
distributions = importlib.import_module("softstair.kernels.triton.distributions")

NEEDS_INTERPRETER = True
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
STAIRS = {
    "heaviside": ss.Stair.heaviside(),
    "ternary": ss.Stair.ternary(),
    "INT4": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "INT8": ss.Stair.linear(8, signed=True, thresholds="floor"),
    "even": ss.Stair((-1.5, -0.3, 0.9, 2.1), (-0.7, -0.2, 0.3)),
    "many even": ss.Stair([1.5 * k for k in range(20)], [k + 0.1 for k in range(1, 20)]),
}
UNEVEN = ss.Stair((-1.5, 0.0, 0.25, 2.0), (-0.7, 0.1, 0.3))
TERNARY, INT4 = STAIRS["ternary"], STAIRS["INT4"]
CHANNELS = ss.Stair.linear(4, signed=True, quantum=(0.07, 1.0, 2.5), thresholds="midpoint", axis=1)


def grid(default, *axes):
    """All combinations; those that are not in ``default`` run nightly."""
    cells = itertools.product(*axes)
    return [pytest.param(*c, marks=() if c in default else pytest.mark.nightly) for c in cells]


PAIRS = [
    ("heaviside", F32, "logistic"),
    ("ternary", BF16, "triangular"),
    ("INT4", BF16, "normal"),
    ("INT8", F32, "uniform"),
    ("even", F16, "logistic"),
]


def points(*arguments, full=oracle.points, **options) -> torch.Tensor:
    """The oracle's points, fewer of them for many levels, and none too small for the interpreter,
    which rounds bfloat16 of less than 1e-38 to 0."""
    x = full(*arguments, **options)
    x = torch.cat([x[: -50 : max(1, len(x) // 120)], x[-50:]])
    return torch.where(x.abs() < 1e-38, 0.0, x) if x.dtype == BF16 else x


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    """Every test is worked on by Triton; numpy, which interprets, need not warn of infinities."""
    if not distributions.INTERPRETED.value:
        yield
        return
    before = np.seterr(all="ignore")
    monkeypatch.setattr(oracle, "points", points)
    with kernels.use("triton"):
        yield
    np.seterr(**before)


def brief(f):
    """Of an x that is no leaf, so that a byte may be kept of it."""
    return lambda x: f(x.view_as(x))


def operator_of(*arguments):
    return lambda x: ss.regularise(x, *arguments)


def check(name, family, mean, std, dtype, **options):
    """The operator of a stair against the oracle; mean and std in quanta."""
    stair = STAIRS[name]
    law = (family, mean * stair.quantum, std * stair.quantum)
    check_everything((stair.levels, stair.thresholds), *law, dtype, through=brief, **options)


def test_under_the_interpreter(run_interpreted):
    run_interpreted()


@pytest.mark.parametrize(
    ("name", "dtype", "family"),
    grid(PAIRS, [name for name in STAIRS if name != "many even"], [F32, BF16, F16], oracle.NAMES),
)
def test_values_and_gradients_are_the_sum_of_k_terms(name, dtype, family):
    """All four forwards at the default std, at every threshold and extreme."""
    check(name, family, 0.0, ss.noise.get(family).std_within(0.5), dtype)


@pytest.mark.parametrize(
    ("name", "family"),
    grid(
        [("ternary", "logistic"), ("INT4", "triangular"), ("many even", "normal")],
        ["ternary", "INT4", "many even"],
        oracle.NAMES,
    ),
)
def test_wide_noise_with_a_mean(name, family):
    """Ends that win the mode, and noise that reaches over many thresholds."""
    check(name, family, -0.5, 3.0, F32, forwards=("expectation", "mode"))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("std", [0.0, 1e-38])
@pytest.mark.parametrize("name", ["ternary", "INT4", "many even"])
def test_a_dirac_is_the_shifted_stair_without_gradient(name, std):
    """A std of 0, or too small for the dtype, read where it lies."""
    stair, mean = STAIRS[name], torch.tensor(0.25)
    x = torch.tensor([*stair.thresholds, *(t + 0.25 for t in stair.thresholds), 1e30, -3, 0.1])
    x = torch.cat([x, torch.tensor([math.inf, -math.inf])])
    for forward in oracle.FORWARDS:
        f = operator_of(stair, "normal", mean, torch.tensor(std), forward)
        y, g = oracle.value_and_gradient(f, x)
        v = oracle.numpy(x if forward == "hard" else x - 0.25)
        levels, thresholds = (oracle.rounded(r, F32) for r in (stair.levels, stair.thresholds))
        np.testing.assert_array_equal(oracle.numpy(y), oracle.hard(v, levels, thresholds))
        assert (g == 0).all()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("family", oracle.NAMES)
def test_channels_have_their_own_stair(family):
    """In any layout, with noise a channel as a module makes it."""
    quanta = torch.tensor([0.07, 1.0, 2.5])
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)) * 3
    layouts = (x, x.to(memory_format=torch.channels_last), x[:, :, ::2])
    for laid, forward in zip(layouts, ("expectation", "mode", "hard"), strict=True):
        noise = (n * quanta[:, None, None] for n in (-0.1, 0.6))
        f = operator_of(CHANNELS, family, *noise, forward)
        y, g = oracle.value_and_gradient(brief(f), laid)
        for c, q in enumerate(CHANNELS.quantum):
            levels, thresholds = (
                oracle.rounded([q * v for v in r], F32)
                for r in (CHANNELS.levels, CHANNELS.thresholds)
            )
            v, law = oracle.numpy(laid[:, c]), (family, -0.1 * q, 0.6 * q, F32)
            oracle.check_between(g[:, c], *oracle.gradient_bounds(v, levels, thresholds, *law), v)
            if forward == "expectation":
                bounds = oracle.expectation_bounds(v, levels, thresholds, *law)
                oracle.check_between(y[:, c], *bounds, v)
                continue
            k = oracle.level_index(y[:, c], levels, v)
            if forward == "mode":
                oracle.check_mode(k.ravel(), v.ravel(), thresholds, *law)
            else:
                np.testing.assert_array_equal(k, oracle.index(v, thresholds))


def test_noise_of_any_shape_that_broadcasts():
    """One a channel of another dimension than the stair's, one an element; or a sentence."""
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
    mean, std = torch.rand(5), torch.rand(4, 1, 5) + 0.1
    f = lambda x: ss.regularise(x, TERNARY, "normal", mean, std, "expectation")
    y, g = oracle.value_and_gradient(f, x)
    with kernels.use("reference"):
        wanted, slope = oracle.value_and_gradient(f, x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(g, slope, rtol=0, atol=1e-6)
    oracle.refuses(lambda: ss.regularise(x, TERNARY, "normal", torch.rand(2, 5), 0.1), "(2, 5)")


WIDTHS = (0.02, 0.3, 0.9, 5.0)


@pytest.mark.parametrize(
    ("family", "std", "quantum"),
    grid(
        [*zip(oracle.NAMES, WIDTHS, (0.25, 0.27) * 2, strict=True)],
        oracle.NAMES,
        WIDTHS,
        (0.25, 0.27),
    ),
)
def test_16_bits_lose_little_on_a_line(family, std, quantum):
    """Narrow noise and wide, the ends of the stair and beyond: to a fraction of what float16
    rounds off a rise, and of the largest slope; also where a threshold has more than 16 bits."""
    stair = ss.Stair.linear(4, signed=True, quantum=quantum, thresholds="floor")
    x = torch.linspace(-3.3, 3.3, 1001, dtype=torch.float16)
    law = (family, 0.03, std * quantum)
    f = operator_of(stair, family, torch.tensor(0.03), torch.tensor(std * quantum), "expectation")
    y, slope = oracle.value_and_gradient(f, x)
    v, shape = oracle.numpy(x), (stair.levels, stair.thresholds)
    wanted = oracle.expectation(v, *shape, *law)
    np.testing.assert_allclose(oracle.numpy(y), wanted, 2**-11, 3e-4 * quantum)
    wanted = oracle.gradient(v, *shape, *law)
    if family == "uniform":  # which jumps, so that two may differ where float32 rounds
        assert (np.abs(oracle.numpy(slope) - wanted) > 1e-3 * wanted.max()).mean() < 0.01
    else:
        np.testing.assert_allclose(oracle.numpy(slope), wanted, 2**-10, 1e-3 * wanted.max())


@pytest.mark.parametrize(
    ("family", "std"), grid([("triangular", 0.004)], oracle.NAMES, (0.0, 1e-4, 0.004))
)
def test_16_bits_are_compared_with_thresholds_of_float32(family, std):
    """Which lie between numbers of 16 bits: at those, beside them and between, as by the
    reference."""
    at = torch.tensor(INT4.thresholds).to(BF16)
    beside = [(at.view(torch.int16) + step).view(BF16) for step in (-1, 0, 1)]
    x = torch.cat([*beside, torch.linspace(-0.7, 0.7, 200).to(BF16)])
    for forward, mean in itertools.product(("hard", "mode", "expectation"), (0.0, 0.02)):
        f = operator_of(INT4, family, torch.tensor(mean), torch.tensor(std * 0.07), forward)
        y, slope = oracle.value_and_gradient(brief(f), x)
        with kernels.use("reference"):
            wanted, steep = oracle.value_and_gradient(f, x)
        if forward == "expectation":
            torch.testing.assert_close(y, wanted, rtol=0, atol=0.0045)
        else:
            assert torch.equal(y, wanted)
        # Under uniform noise slopes jump, and two may differ where float32 rounds.
        far = (slope - steep).abs() > 0.1 * steep.abs().max() + 1e-6
        assert far.double().mean() <= (0.01 if family == "uniform" else 0)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("quantum", [0.07, 0.1, 1 / 3, 0.013])
def test_a_line_of_float32_is_the_table_to_the_bit(quantum):
    """Though no multiple of the rounded quantum is: hard, and the mode, one bit beside each."""
    stair = ss.Stair.linear(4, signed=True, quantum=quantum, thresholds="midpoint")
    assert backend.is_native(stair)
    at = torch.tensor(stair.thresholds, dtype=F64).to(F32)
    x = torch.cat([(at.view(torch.int32) + step).view(F32) for step in (-1, 0, 1)])
    for forward, std in (("hard", 0.3), ("mode", 0.0), ("mode", 0.1), ("expectation", 0.0)):
        y = ss.regularise(x, stair, "normal", 0.0, torch.tensor(std * quantum), forward)
        assert torch.equal(y, stair(x))


@pytest.mark.parametrize(
    ("family", "dtype"), grid([("logistic", BF16)], oracle.NAMES, [F32, F16, BF16])
)
def test_draws_have_the_probabilities(family, dtype):
    """Chi-square for three stairs, the last of them dyadic: what rounds no threshold is short."""
    dyadic = ss.Stair.linear(4, signed=True, quantum=0.25, thresholds="floor")
    for stair, at, std in ((TERNARY, 0.3, 0.5), (INT4, 0.1, 0.12), (dyadic, 0.3, 0.2)):
        x, law = torch.full((8_000,), at, dtype=dtype), (stair, family, 0.0, std, "random")
        y = ss.regularise(x, *law, torch.Generator().manual_seed(1))
        levels = oracle.rounded(stair.levels, dtype)
        thresholds = oracle.compared(stair.thresholds, dtype)
        count = np.bincount(oracle.level_index(y, levels, oracle.numpy(x)), minlength=len(levels))
        p = oracle.probabilities(oracle.numpy(x[:1]), thresholds, family, 0.0, std)[:, 0]
        assert (count[p < 1e-12] == 0).all()
        often = p * len(x) >= 5
        expected = p[often] * count[often].sum() / p[often].sum()
        assert stats.chisquare(count[often], expected).pvalue > 1e-5


@pytest.mark.nightly
def test_draws_depend_on_the_place_alone():
    """And on the seed: so does the beginning of a longer tensor, or memory in another order."""
    draw = lambda x, seed=3: ss.regularise(
        x, INT4, "logistic", 0.0, 0.3, "random", torch.Generator().manual_seed(seed)
    )
    whole = draw(torch.zeros(10_000))
    assert (draw(torch.zeros(10_000), seed=4) == whole).double().mean() < 0.5
    assert torch.equal(draw(torch.zeros(10_000)), whole)
    assert torch.equal(draw(torch.zeros(4500)), whole[:4500])
    assert torch.equal(draw(torch.zeros(900)), whole[:900])
    square = draw(torch.zeros(80, 125).T)
    assert torch.equal(square.T.reshape(-1), whole)
    run = whole.view(-1)[: 2 * 4096].view(8, 1024)
    for first, second in itertools.combinations(run, 2):
        assert (first == second).double().mean() < 0.5, "no two runs share their words"


@triton.jit
def evaluate(z, u, out, FAMILY: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, distributions.cdf(tl.load(z + at), FAMILY))
    tl.store(out + SIZE + at, distributions.pdf(tl.load(z + at), FAMILY))
    tl.store(out + 2 * SIZE + at, distributions.ppf(tl.load(u + at), FAMILY))


@pytest.mark.parametrize("family", oracle.NAMES)
def test_shapes_are_those_of_scipy(family):
    """cdf and density to a few ulp of their largest; the inverse relatively, in both tails."""
    z, tails = torch.linspace(-9, 9, 512), torch.logspace(-24 * math.log10(2), -0.31, 256)
    u, out = torch.cat([tails, 1 - tails]), torch.empty(3, 512)
    evaluate[(1,)](z, u, out, family, 512)
    cdf, pdf, ppf = out.double().numpy()
    law, z, u = oracle.FAMILIES[family], oracle.numpy(z), oracle.numpy(u)
    np.testing.assert_allclose(cdf, law.cdf(z), 0, 4e-7)
    np.testing.assert_allclose(pdf, law.pdf(z), 0, 4e-7)
    np.testing.assert_allclose(ppf, law.ppf(u), 1e-6, 4e-7)


@triton.jit
def bits(seed, out, SIZE: tl.constexpr):
    at, key, number = tl.arange(0, SIZE), tl.load(seed), tl.load(seed) * 0 + 5_000_000_000
    first = number * SIZE
    low = at + first.to(tl.int32)
    theirs = tl.philox(key, low, at * 0 + (first >> 32).to(tl.int32), at * 0, at * 0, 7)
    ours, shared = (
        distributions.philox_words(key, number, SIZE),
        distributions.shared_words(key, first >> 1, at >> 1, (at & 1) != 0),
    )
    for j in tl.static_range(4):
        tl.store(out + j * SIZE + at, theirs[j].to(tl.uint32, bitcast=True).to(tl.int64))
        tl.store(out + (4 + j) * SIZE + at, ours[j].to(tl.int64))
        tl.store(out + (8 + j) * SIZE + at, shared[j].to(tl.int64))


def test_words_are_those_of_philox():
    """To the bit, beyond 32 bits of counter; of 16-bit tensors, two upper halves to a word."""
    out = torch.empty(3, 4, 512, dtype=torch.int64)
    bits[(1,)](torch.tensor([-7_654_321_987_654]), out, 512)
    assert torch.equal(out[0], out[1])
    first, second = out[2, :, ::2], out[2, :, 1::2]
    assert torch.equal(second, (first >> 16) | ((first & 0xFFFF) << 16))
    assert len(torch.unique(first)) == first.numel()


@triton.jit
def numbers(word, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, distributions.uniform(tl.load(word + at)))


def test_uniform_numbers_lie_strictly_inside():
    """Whatever the word: the smallest, the largest and the others."""
    word = torch.tensor([0, 255, 256, -1, -256, 2**31 - 1, -(2**31), 12345], dtype=torch.int32)
    out = torch.empty(8)
    numbers[(1,)](word, out, 8)
    assert ((out > 0) & (out < 1)).all()
    share = (word.double() % 2**32) / 2**32
    torch.testing.assert_close(out.double(), share, rtol=0, atol=2**-24)
    assert out[3] == 1 - 2**-24


def kept(x, stair, family) -> int:
    """The bytes that autograd keeps for the operator's backward pass, beside the noise."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ss.regularise(x, stair, family, torch.zeros(()), torch.ones(()), "mode")
    return sum(size for size in sizes if size > 8)


def test_a_byte_is_kept_where_one_will_do():
    """Under uniform noise one an element, else x itself; nothing where no gradient is needed."""
    leaf = torch.zeros(1000, requires_grad=True)
    x = leaf * 1
    for name in ("heaviside", "ternary", "INT4", "INT8", "even"):
        assert kept(x, STAIRS[name], "uniform") == 1000
    assert kept(x, STAIRS["many even"], "uniform") == 4000
    assert kept(x, TERNARY, "normal") == 4000
    assert kept(leaf, TERNARY, "uniform") == 4000, "a leaf lives on anyway"
    assert kept(x.detach(), TERNARY, "uniform") == 0
    soft = kernels.SoftStair(TERNARY, ss.noise.Uniform(), 0.0, 1.0)
    assert elementwise.forward(x.detach(), soft, "mode", None, compact=False)[1].numel() == 0


@pytest.mark.parametrize("forward", ["hard", "mode", "expectation", "random"])
def test_supports_that_touch_leave_no_gap_and_do_not_overlap(forward):
    """On a line: x on an edge between two is in one of them alone."""
    stair = ss.Stair.linear(4, signed=True, quantum=0.25, thresholds="midpoint")
    noise, x = ss.noise.Uniform(), (torch.arange(-150, 151) / 64).to(BF16)
    soft = kernels.SoftStair(stair, noise, 0.0, noise.std_within(0.5) * 0.25)
    _, trace = elementwise.forward(x, soft, forward, torch.Generator().manual_seed(0), compact=True)
    inside = (x >= stair.thresholds[0] - 0.125) & (x < stair.thresholds[-1] + 0.125)
    assert torch.equal(trace, inside.to(torch.uint8))


@pytest.mark.parametrize("family", ["uniform", "normal"])
def test_derivatives_of_every_kind(family):
    """Batches of gradients and second derivatives, of leaves and others."""
    stair, law = STAIRS["even"], (family, 0.1, 0.45)
    x = torch.linspace(-2.9, 2.3, 23)
    slope = oracle.gradient(oracle.numpy(x), stair.levels, stair.thresholds, *law)
    check = lambda found: np.testing.assert_allclose(oracle.numpy(found), slope, 0, 3e-5)
    f = lambda x: ss.regularise(x, stair, *law, "mode")
    leaf = x.clone().requires_grad_()
    y = f(leaf * 1)
    (rows,) = torch.autograd.grad(y, leaf, torch.eye(23), is_grads_batched=True, retain_graph=True)
    check(rows.diagonal())
    # d/dx of (2x·s)², s the slope: what is upstream of the stair has its own second derivative.
    (first,) = torch.autograd.grad(f(leaf.square() - 1).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    with kernels.use("reference"):
        (first,) = torch.autograd.grad(f(leaf.square() - 1).sum(), leaf, create_graph=True)
        (wanted,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(second, wanted)


def test_a_module_trains_through_the_kernels():
    """A layer with quanta a channel and an activation: gradients as by the reference."""
    torch.manual_seed(0)
    stair = ss.Stair.ternary((0.1, 0.2, 0.3, 0.4), axis=0)
    weight = ss.nn.StairWeight(stair, "uniform")
    layer = ss.nn.StairLinear(5, 4, weight_stair=weight)
    net = torch.nn.Sequential(layer, ss.nn.StairActivation(INT4, "triangular", "expectation"))
    x, gradients = torch.randn(8, 5), []
    for choice in ("triton", "reference"):
        net.zero_grad()
        with kernels.use(choice):
            net(x).square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert gradients[0].count_nonzero() > 0
    with kernels.use("reference"):
        wanted = net.eval()(x)
    assert torch.equal(net(x), wanted)


EIGHT = ss.Stair(range(9), [k + 0.5 for k in range(8)])
BYTES = ss.Stair.linear(8)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("stair", "std"),
    [(TERNARY, 0.29), (EIGHT, 9.0), (INT4, 0.02), (BYTES, 60.0)],
)
def test_nan_has_a_gradient_of_nan(stair, std, dtype, leaf):
    """Also where a byte replaces x; all eight thresholds are another byte than NaN."""
    x = torch.tensor([math.nan, 4.0, math.inf, -math.inf, 0.1]).to(dtype).requires_grad_()
    for family in ("uniform", "normal"):
        y = ss.regularise(x if leaf else x * 1, stair, family, 0.0, std)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        with kernels.use("reference"):
            wanted = torch.autograd.grad(ss.regularise(x, stair, family, 0.0, std).sum(), x)[0]
        torch.testing.assert_close(gradient, wanted, rtol=1e-2, atol=1e-5, equal_nan=True)
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(gradient.isnan(), x.isnan())


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, for the largest std of channels
@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("family", oracle.NAMES)
@pytest.mark.parametrize("stair", [TERNARY, INT4, CHANNELS])
def test_invalid_noise_gives_nan(stair, family, dtype):
    """No error: the host would have to wait for the device. Every element is NaN."""
    x = torch.linspace(-2, 2, 6, dtype=dtype).view(2, 3).requires_grad_()
    for numbers in ((math.nan, 0.3), (0.0, math.nan), (0.0, math.inf), (0.0, -1.0), (2e30, 0.3)):
        soft = kernels.SoftStair(stair, ss.noise.get(family), *map(torch.tensor, numbers))
        for forward in ("expectation", "mode", "random"):
            y = apply(x * 1, soft, soft, forward)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert y.isnan().all()
            assert gradient.isnan().all()


class Mine(ss.noise.Uniform):
    pass


@pytest.mark.parametrize(
    ("x", "stair", "noise", "words"),
    [
        (torch.zeros(3), TERNARY, Mine(), "uniform, triangular, normal and logistic"),
        (torch.zeros(3), UNEVEN, "uniform", "one width"),
        (torch.zeros(3, dtype=F64), TERNARY, "uniform", "float64"),
    ],
)
def test_what_has_no_kernel_is_refused_in_a_sentence(x, stair, noise, words):
    """And runs by the reference where Triton is not asked for."""
    with pytest.raises(RuntimeError, match=f"must be auto or reference: .*{words}"):
        ss.regularise(x, stair, noise, 0.0, 1.0)
    with kernels.use("auto"):
        assert torch.equal(ss.regularise(x, stair, noise, 0.0, 1.0, "hard"), stair(x))


def test_what_triton_cannot_do_is_refused_without_the_interpreter(monkeypatch):
    """A tensor on the CPU, no Triton, an unknown choice: an error, and no other backend."""
    hard = lambda: kernels.hard(torch.zeros(3), TERNARY)
    with kernels.use("triton"), pytest.raises(RuntimeError, match=r"tensor is on cpu.*INTERPRET=1"):
        hard()
    with pytest.raises(ValueError, match="kernels"), kernels.use("cuda"):
        pass
    monkeypatch.setenv("SOFTSTAIR_KERNELS", "fast")
    with pytest.raises(ValueError, match="SOFTSTAIR_KERNELS"):
        hard()
    monkeypatch.setenv("SOFTSTAIR_KERNELS", "triton")
    for missing in ("triton", "triton.tools.tensor_descriptor"):  # none, or one that is too old
        found = lambda name, missing=missing: None if name == missing else name
        monkeypatch.setattr(importlib.util, "find_spec", found)
        backend.unavailable.cache_clear()
        with pytest.raises(RuntimeError, match=r"3\.4 or later is not installed"):
            hard()
    backend.unavailable.cache_clear()
    with kernels.use("reference"):
        assert torch.equal(hard(), torch.zeros(3))


SPECIALISATIONS = [
    (2, "uniform", "mode", "even", True, False, "bf16"),
    (2, "normal", "random", "even", False, True, "fp32"),
    (15, "logistic", "expectation", "line", False, False, "bf16"),
    (15, "uniform", "random", "native", True, False, "bf16"),
    (15, "logistic", "expectation", "native", False, False, "fp16"),
    (19, "normal", "mode", "even", False, False, "fp32"),
]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", SPECIALISATIONS, ids=str)
def test_a_kernel_compiles_for_a_gpu_without_the_interpreter(case, tmp_path, monkeypatch):
    """What the interpreter accepts the compiler may not; it needs no GPU to say so."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    count, family, forward, kind, traced, rows, dtype = case
    how = "channel" if rows else "scalar"
    constants = dict(COUNT=count, FAMILY=family, FORWARD=forward, KIND=kind, COMPACT=traced)
    constants |= dict(PER_CHANNEL=rows, MEAN=how, STD=how, INT64=False, BLOCK=elementwise.BLOCK)
    constants |= dict(UNROLL=4)
    types = {"table": "*fp32", "mean_ptr": "*fp32", "std_ptr": "*fp32", "seed_ptr": "*i64"}
    types |= {"size": "i32", "stride": "i32", "channels": "i32"}
    types |= {"saved_ptr": "*u8"} if traced else {}
    for kernel in (elementwise.forward_kernel, elementwise.backward_kernel):
        compile_kernel(kernel, constants, types, "*" + dtype)
