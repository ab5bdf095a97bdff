"""The operator against the K-term sum, chi-square tests and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from scipy import stats
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import softstair as ss
from test_noise import OWN

F64 = torch.float64
TERNARY = ss.Stair.ternary()
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
UNEVEN = ss.Stair((-2.0, -0.5, 0.25, 3.0, 3.1), (-1.5, -1.4, 0.6, 2.0))
MEANS = st.sampled_from([0.0, -0.5, 0.3, -0.035, 17.0]) | st.floats(-50, 50)
STDS = st.sampled_from([0.0, 0.05, 0.255107, 1.0, 20.0, 1e3]) | st.floats(0, 1e3)
WIDE = st.sampled_from([0.0, 0.05, 0.255107, 1.0, 20.0, 1e3]) | st.floats(1e-5, 1e3)


def own(name: str):
    """A family of the library by name, or one of the user's as an object."""
    return OWN[name]() if name in OWN else name


def apply(stair, name, mean, std, forward, **options):
    return lambda x: ss.regularise(x, stair, own(name), mean, std, forward=forward, **options)


def check_everything(
    shape, name, mean, std, dtype, seed=0, through=lambda f: f, forwards=oracle.FORWARDS
):
    """Value, gradient, level set and NaN of all four forwards at the points of a stair."""
    x = oracle.points(shape[0], shape[1], mean, std, dtype, seed)
    v, q, t = oracle.numpy(x), oracle.rounded(shape[0], dtype), oracle.compared(shape[1], dtype)
    known, law = ~np.isnan(v), (name, mean, std)
    weight = torch.linspace(-2, 3, len(x), dtype=dtype)
    weight = torch.where(weight.abs() < 0.1, 1.0, weight)
    steep, shallow = oracle.gradient_bounds(v, q, t, *law, dtype)
    for forward in forwards:
        f = through(apply(ss.Stair(*shape), name, mean, std, forward))
        y, g = oracle.value_and_gradient(f, x, weight)
        assert y.dtype == g.dtype == dtype
        assert y.shape == g.shape == x.shape
        if forward == "expectation":
            oracle.check_between(y, *oracle.expectation_bounds(v, q, t, *law, dtype), v)
        else:
            k = oracle.level_index(y, q, v)
            if forward == "mode":
                oracle.check_mode(k[known], v[known], t, *law, dtype)
            elif forward == "hard":
                np.testing.assert_array_equal(k[known], oracle.index(v[known], t))
            else:
                oracle.check_possible(k[known], v[known], t, *law, dtype)
        slope = oracle.numpy(g)[known] / oracle.numpy(weight)[known]
        ulp = 2 * torch.finfo(dtype).eps * np.abs(slope)
        low, high = steep[known] - ulp, shallow[known] + ulp
        oracle.check_between(torch.from_numpy(slope), low, high, v[known])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", oracle.NAMES)
@given(oracle.stairs(), MEANS, STDS, st.integers(0, 99))
@example((tuple(range(-8, 8)), tuple(range(-7, 8))), 0.0, 55.0, 0)
@example(((0.0, 1.0), (0.0,)), 0.0, 5e-324, 0)
@example(((7.8, 7.84, 14.9), (19.7, 19.9)), 0.0, 1.1125369292536007e-308, 0)
def test_float64_is_the_sum_of_k_terms(name, shape, mean, std, seed):
    """Any stair, mean and std, thresholds and extremes included: values and gradients."""
    check_everything(shape, name, mean, std, F64, seed)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", oracle.NAMES)
@given(oracle.stairs(), MEANS, WIDE, st.integers(0, 99))
@example((tuple(range(-8, 8)), tuple(range(-7, 8))), 0.0, 1e-5, 0)
@example(
    (tuple(k + 0.4 * (k % 3) for k in range(30)), tuple(29.963937 + k / 2 for k in range(29))),
    0.3,
    0.05,
    0,
)
def test_float32_is_the_sum_of_k_terms(name, shape, mean, std, seed):
    """The same within a few units in the last place of float32."""
    check_everything(shape, name, mean, std, torch.float32, seed)


LARGE = ss.Stair((0.0, 1e12, 2e12), (0.5, 1.5))
NARROW = [(0.0, 1e-3), (1e-9, 1e-9), (1 / 3, 1e-15), (0.0, 1e-30), (-1e-9, 1e-40), (0.0, 5e-324)]
WIDTHS = [(0.0, 0.25), (-0.5, 1.0), (0.25, 0.0), (0.0, 0.05), (0.0, 8.0)]
LAWS = {  # families, dtypes, stairs, and pairs of mean and std
    "half precision": (oracle.NAMES, (torch.bfloat16, torch.float16), TERNARY, WIDTHS),
    "narrow": (oracle.NAMES, (F64, torch.float32, torch.bfloat16), LARGE, NARROW),
    "own": (OWN, (F64, torch.float32), TERNARY, WIDTHS),
}


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize(
    ("name", "dtype", "stair", "pairs"),
    [
        pytest.param(name, dtype, stair, pairs, id=f"{kind}, {name}, {dtype}")
        for kind, (names, dtypes, stair, pairs) in LAWS.items()
        for dtype in dtypes
        for name in names
    ],
)
def test_other_precisions_widths_and_families_are_the_sum_of_k_terms(name, dtype, stair, pairs):
    """bfloat16 and float16 keep their dtype; noise may be narrower than the spacing of numbers, or
    a family of one's own, symmetric or skewed, from cdf and pdf alone."""
    for each in (stair, UINT4, UNEVEN):
        for mean, std in pairs:
            check_everything((each.levels, each.thresholds), name, mean, std, dtype)


@pytest.mark.parametrize("name", oracle.NAMES)
@pytest.mark.parametrize("stair", [TERNARY, UNEVEN], ids=str)
def test_expectation_is_the_mean_of_the_noisy_stair(stair, name):
    """Monte Carlo within five standard errors, and quadrature of the convolution to 1e-9."""
    mean, std = 0.1 * stair.quantum, 0.8 * stair.quantum
    x = np.linspace(stair.thresholds[0] - std, stair.thresholds[-1] + std, 7)
    y = apply(stair, name, mean, std, "expectation")(torch.from_numpy(x)).numpy()
    nu = mean + std * oracle.FAMILIES[name].rvs((100_000, 1), random_state=7)
    draws = oracle.hard(x - nu, stair.levels, stair.thresholds)
    error = draws.std(0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - y) <= 5 * error + 1e-12).all()
    exact = [oracle.convolution(v, stair.levels, stair.thresholds, name, mean, std) for v in x]
    np.testing.assert_allclose(y, exact, 0, 1e-9 * (stair.levels[-1] - stair.levels[0]))


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", oracle.NAMES)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_dirac_is_the_shifted_stair_without_gradient(name, tensor):
    """std = 0: sigma(x - mean) for expectation, mode, random; sigma(x) for hard; gradient 0."""
    for stair in (TERNARY, UNEVEN, ss.Stair.linear(8, thresholds="floor")):
        for mean in (0.0, -0.5, 0.25):
            x = torch.tensor([*stair.thresholds, *(t + mean for t in stair.thresholds), -9, 1e30])
            x = torch.cat([x, torch.tensor([math.inf, -math.inf, 0.0, 0.1])]).double()
            std = torch.tensor(0.0) if tensor else 0.0
            for forward in oracle.FORWARDS:
                at = torch.tensor(mean) if tensor else mean
                y, g = oracle.value_and_gradient(apply(stair, name, at, std, forward), x)
                expected = stair(x if forward == "hard" else x - mean)
                torch.testing.assert_close(y, expected, rtol=0, atol=0)
                assert (g == 0).all()


@pytest.mark.parametrize("name", [*oracle.NAMES, *OWN])
@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_gradient_is_the_slope_of_the_expectation(name, forward):
    """Every forward's gradient is the central difference of the float64 expectation."""
    reaches = {"uniform": [3**0.5], "triangular": [6**0.5, 0.0], "laplace": [0.0]}
    reach = reaches.get(name, [])
    for stair, mean, std in ((TERNARY, 0.0, 0.6), (UNEVEN, -0.5, 0.4), (UINT4, 0.01, 0.05)):
        law = (stair.levels, stair.thresholds, name, mean, std)
        x = np.linspace(stair.thresholds[0] - 2 * std, stair.thresholds[-1] + 2 * std, 401)
        z = (x[:, None] - np.array(stair.thresholds) - mean) / std
        kink = np.any([np.abs(np.abs(z) - r).min(1) < 1e-3 for r in reach], axis=0)
        x = x[~kink] if reach else x
        h = 1e-5 * std
        slope = (oracle.expectation(x + h, *law) - oracle.expectation(x - h, *law)) / (2 * h)
        f = apply(stair, name, mean, std, forward)
        _, g = oracle.value_and_gradient(f, torch.from_numpy(x))
        scale = (stair.levels[-1] - stair.levels[0]) / std
        np.testing.assert_allclose(g.numpy(), slope, 0, 1e-8 * scale)
        np.testing.assert_allclose(g.numpy(), oracle.gradient(x, *law), 0, 1e-12 * scale)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("quantum", [1.0, 0.07, 3.0])
def test_a_tie_with_the_ends_goes_to_the_shifted_stair(quantum, dtype):
    """One third each, or one half each, up to a few units in the last place: sigma(x - mean)."""
    third, stair = 1.5 * quantum / math.sqrt(3), ss.Stair.ternary(quantum=quantum)
    for mean in (0.0, 0.25 * quantum):
        x = torch.tensor(mean, dtype=dtype)
        assert ss.regularise(x, stair, "uniform", mean, third, forward="mode") == 0
        for name in oracle.NAMES:
            half = ss.regularise(x, ss.Stair.heaviside(), name, mean, 0.7, forward="mode")
            assert half == 1, "x = mean is half and half: the upper bin, as sigma(0)"


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_ties_of_the_interior_go_to_the_shifted_stair(dtype):
    """Uniform noise over several whole bins makes them equally likely: sigma(x - mean) wins."""
    for quantum in (1.0, 0.07):
        for bits, half in ((4, 3.0), (4, 2.2), (8, 20.0)):
            stair = ss.Stair.linear(bits, quantum=quantum, thresholds="midpoint")
            std = half * quantum / math.sqrt(3)
            x = torch.rand(3000, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 1.2
            x = (x - 0.1) * quantum * 2**bits
            away = (x / quantum - 0.5 - (x / quantum - 0.5).round()).abs() > 1e-3
            x = x[away]
            t, v = oracle.rounded(stair.thresholds, dtype), oracle.numpy(x)
            p = oracle.probabilities(v, t, "uniform", 0.0, std)
            centre = oracle.index(v, t)
            here = np.take_along_axis(p, centre[None], 0)[0]
            rival = np.maximum(p[0], p[-1])
            end = np.where(p[0] > p[-1], 0, len(stair) - 1)
            clear = np.abs(rival - here) > 1e-4
            expected = np.where(rival > here, end, centre)
            y = ss.regularise(x, stair, "uniform", 0.0, std, forward="mode")
            got = oracle.level_index(y, oracle.rounded(stair.levels, dtype), v)
            np.testing.assert_array_equal(got[clear], expected[clear])


def test_where_the_papers_sentence_on_the_mode_fails():
    """Wide noise: an end wins everywhere; unbounded noise: an end wins in a band at any width."""
    x = torch.tensor([-0.2, 0.2], dtype=F64)
    for name in oracle.NAMES:
        y = ss.regularise(x, TERNARY, name, 0.0, 20.0, forward="mode")
        assert y.tolist() == [-1.0, 1.0]
        assert TERNARY(x).tolist() == [0.0, 0.0]
    for name, std, x in (
        ("normal", 0.4, 0.499),
        ("logistic", 0.4, 0.499),
        ("normal", 0.3, 0.4999),
    ):
        y = ss.regularise(torch.tensor(x, dtype=F64), TERNARY, name, 0.0, std, forward="mode")
        assert y == 1
        assert TERNARY(torch.tensor(x)) == 0
    for name in ("uniform", "triangular"):
        y = ss.regularise(torch.tensor(0.49999), TERNARY, name, 0.0, 0.2, forward="mode")
        assert y == 0, "a bounded family has no such band"


@pytest.mark.parametrize("name", [*oracle.NAMES, *OWN])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_draws_have_the_probabilities(name, dtype):
    """Chi-square of many draws against p_k at several x, with a fixed seed."""
    generator, size = torch.Generator().manual_seed(2022), 2_000 if name in OWN else 40_000
    for stair, mean, std in ((TERNARY, 0.0, 0.5), (UNEVEN, 0.5, 1.5), (UINT4, -0.035, 0.1)):
        q, t = oracle.rounded(stair.levels, dtype), oracle.compared(stair.thresholds, dtype)
        for at in (t[0], t[-1] + 0.3 * std, (t[0] + t[-1]) / 2):
            x = torch.full((size,), at).to(dtype)
            f = apply(stair, name, mean, std, "random", generator=generator)
            k = oracle.level_index(f(x), q, oracle.numpy(x))
            p = oracle.probabilities(oracle.numpy(x[0]), t, name, mean, std)
            count = np.bincount(k, minlength=len(q))
            assert (count[p < 1e-12] == 0).all()
            rare = p * len(x) < 10
            seen, expected = ([*v[~rare], v[rare].sum()] for v in (count, p * len(x)))
            if expected[-1] < 5:
                seen, expected = seen[:-1], expected[:-1]
            expected = np.array(expected) * sum(seen) / sum(expected)
            if len(seen) > 1:
                assert stats.chisquare(seen, expected).pvalue > 1e-5


class Fixed(TorchFunctionMode):
    """Hands out chosen numbers for uniform draws, whether torch or numpy is asked for them."""

    def __init__(self, u: torch.Tensor, patch: pytest.MonkeyPatch):
        super().__init__()
        self.u, self.given = u, 0
        patch.setattr(np.random, "Generator", lambda *_: self)
        patch.setattr(np.random, "default_rng", lambda *_: self)

    def replace(self, drawn: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            start, self.given = self.given, self.given + drawn.numel()
            return drawn.copy_(self.u[start : self.given].view(drawn.shape))

    def random(self, size=None, dtype=np.float64, out=None):
        out = np.empty(size, dtype) if out is None else out
        self.replace(torch.from_numpy(out))
        return out

    standard_normal = random  # as good as any draws for the level set

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        drawn = func in (torch.rand, torch.rand_like, torch.Tensor.uniform_)
        return self.replace(out) if drawn else out


EVERY_UNIFORM = [pytest.param(name, 2**24, marks=pytest.mark.nightly) for name in oracle.NAMES]


@pytest.mark.parametrize(("name", "size"), [("uniform", 2**21), *EVERY_UNIFORM])
def test_no_uniform_number_leaves_the_level_set(name, size, monkeypatch):
    """All 2^24 float32 u, or every eighth: every output a level, frequencies exact; so too at
    u = F exactly."""
    u = torch.arange(size, dtype=torch.float32) / size
    for stair, at, std in ((TERNARY, 0.2, 0.6), (UINT4, 0.4, 0.1)):
        levels, x = torch.tensor(stair.levels, dtype=F64).float(), torch.tensor(at)
        draw = apply(stair, name, 0.0, std, "random")
        with monkeypatch.context() as patch, Fixed(u, patch) as fixed:
            y = draw(x.expand(size))
        assert fixed.given == size, "the draws come from elsewhere: teach Fixed about it"
        count = torch.stack([(y == q).sum() for q in levels]).numpy()
        assert count.sum() == size, "an output outside the level set"
        t = oracle.rounded(stair.thresholds, torch.float32)
        p = oracle.probabilities(oracle.numpy(x), t, name, 0.0, std)
        if name != "normal":  # numpy draws normal numbers as such
            np.testing.assert_allclose(count / size, p, 0, 1e-6)
        edge = ss.noise.get(name).cdf((x - torch.tensor(t, dtype=x.dtype)) / std)
        edge = torch.cat([edge, torch.nextafter(edge, -edge), torch.nextafter(edge, 2 * edge)])
        edge = edge.clamp(0, 1 - 2**-24)
        with monkeypatch.context() as patch, Fixed(edge, patch):
            y = draw(x.expand(len(edge)))
        assert torch.isin(y, levels).all()


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_draws_are_reproducible_and_inside_the_set(times):
    """A Generator or the global seed repeats the draws; 2^22 · times stay inside the set."""
    x = torch.linspace(-0.5, 1.5, 2**20)
    draw = apply(UINT4, "normal", 0.0, 0.07, "random")
    first, again = (
        apply(UINT4, "normal", 0.0, 0.07, "random", generator=torch.Generator().manual_seed(s))(x)
        for s in (5, 5)
    )
    assert torch.equal(first, again)
    state = torch.get_rng_state()
    apply(UINT4, "normal", 0.0, 0.07, "random", generator=torch.Generator().manual_seed(5))(x)
    assert torch.equal(state, torch.get_rng_state()), "a generator leaves the global one alone"
    torch.manual_seed(11)
    one, two = draw(x), draw(x)
    torch.manual_seed(11)
    assert torch.equal(draw(x), one)
    assert not torch.equal(one, two)
    levels = torch.tensor(UINT4.levels, dtype=F64).float()
    for name in oracle.NAMES * times:
        assert torch.isin(apply(UINT4, name, 0.0, 0.2, "random")(x), levels).all()


@pytest.mark.parametrize("forward", ["expectation", "mode", "hard"])
def test_only_random_draws(forward):
    """The other forwards leave the random state alone, with or without a generator."""
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
    before = generator.get_state()
    apply(TERNARY, "normal", 0.0, 1.0, forward, generator=generator)(torch.randn(9, generator=None))
    torch.set_rng_state(state)
    apply(TERNARY, "normal", 0.0, 1.0, forward)(torch.zeros(9))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(before, generator.get_state())


LAYOUTS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "strided": lambda x: x[:, ::2, :, 1::2],
    "one channel": lambda x: x[:, 1],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "empty": lambda x: x[:, :0],
    "0-d": lambda x: x[0, 0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_any_layout_has_the_values_of_the_contiguous_tensor(layout, forward):
    """Values, gradients and shapes do not depend on strides; x is left alone."""
    base = torch.randn(2, 4, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(3))
    x, law = LAYOUTS[layout](base), ("logistic", 0.1, 0.4)
    kept, weight = x.clone(), torch.rand(x.shape[::-1], dtype=F64)
    weight = weight.permute(tuple(range(x.dim()))[::-1])
    leaf = base.clone().requires_grad_()
    view = LAYOUTS[layout](leaf)
    y = apply(UNEVEN, *law, forward)(view)
    (g,) = torch.autograd.grad(y, view, weight)
    assert y.shape == g.shape == x.shape
    assert torch.equal(x, kept)
    v, shape = oracle.numpy(x), (UNEVEN.levels, UNEVEN.thresholds)
    if forward == "expectation":
        np.testing.assert_allclose(oracle.numpy(y), oracle.expectation(v, *shape, *law), 0, 1e-12)
    elif forward == "hard":
        np.testing.assert_array_equal(oracle.numpy(y), oracle.hard(v, *shape))
    else:
        k = oracle.level_index(y, np.array(UNEVEN.levels), v)
        if forward == "mode":
            oracle.check_mode(k, v, UNEVEN.thresholds, *law, F64)
    slope = weight.numpy() * oracle.gradient(v, *shape, *law)
    np.testing.assert_allclose(g.numpy(), slope, 0, 1e-11)


@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_noise_may_be_tensors_of_any_dtype(forward):
    """Numbers, ints and 0-d tensors of another dtype give the same; the output keeps x's dtype."""
    for dtype in oracle.DTYPES:
        x = torch.linspace(-2, 2, 41).to(dtype)
        same = []
        for mean, std in ((0, 1), (0.0, 1.0), (torch.tensor(0.0), torch.tensor(1.0, dtype=F64))):
            torch.manual_seed(0)
            same.append(oracle.value_and_gradient(apply(TERNARY, "normal", mean, std, forward), x))
        for y, g in same:
            assert y.dtype == g.dtype == dtype
            torch.testing.assert_close(y, same[0][0], rtol=0, atol=0)
            torch.testing.assert_close(g, same[0][1])
    x = torch.zeros(1, dtype=F64)
    y = apply(ss.Stair.heaviside(), "normal", 0.1, 0.3, "expectation")(x)
    exact = stats.norm.cdf(-0.1 / 0.3)
    assert y.item() == pytest.approx(exact, abs=1e-15), "Python numbers are not rounded to float32"


@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_channels_have_their_own_stair(forward, name):
    """A per-channel quantum is, channel by channel, the stair of that quantum; noise absolute."""
    quantum, mean, std = (0.07, 1.0, 2.5), -0.1, 0.6
    x = torch.randn(2, 3, 50, dtype=F64, generator=torch.Generator().manual_seed(0))
    stair = ss.Stair.linear(3, signed=True, quantum=quantum, thresholds="midpoint", axis=1)
    y, g = oracle.value_and_gradient(apply(stair, name, mean, std, forward), x)
    for c, q in enumerate(quantum):
        one = ss.Stair.linear(3, signed=True, quantum=q, thresholds="midpoint")
        shape, v = (np.array([q * k for k in range(-4, 4)]), one.thresholds), oracle.numpy(x[:, c])
        slope = oracle.gradient_bounds(v, *shape, name, mean, std, F64)
        oracle.check_between(g[:, c], *slope, v)
        if forward == "expectation":
            bounds = oracle.expectation_bounds(v, *shape, name, mean, std, F64)
            oracle.check_between(y[:, c], *bounds, v)
            continue
        k = oracle.level_index(y[:, c], shape[0], v)
        if forward == "mode":
            oracle.check_mode(k, v, one.thresholds, name, mean, std, F64)
        elif forward == "hard":
            np.testing.assert_array_equal(k, oracle.index(v, one.thresholds))


@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_autocast_changes_nothing(forward):
    """Under bfloat16 autocast a float32 x gives the float32 result; a bfloat16 x stays so."""
    x = torch.linspace(-2, 2, 999)
    f = apply(TERNARY, "normal", 0.1, 0.5, forward)
    torch.manual_seed(0)
    y, g = oracle.value_and_gradient(f, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        cast, slope = oracle.value_and_gradient(f, x)
        assert f(torch.nn.Linear(3, 4)(torch.zeros(2, 3))).dtype == torch.bfloat16
    assert cast.dtype == slope.dtype == torch.float32
    torch.testing.assert_close(cast, y, rtol=0, atol=0)
    torch.testing.assert_close(slope, g, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Notes the largest tensor made and the number of operations."""

    def __init__(self):
        super().__init__()
        self.size, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self.size = max(self.size, made.untyped_storage().nbytes() // made.element_size())
        self.calls += 1
        return out


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_memory_does_not_grow_with_the_number_of_levels(name, forward):
    """For K = 256, linear or not, scratch is at most three times x, and one x is kept."""
    rng = np.random.default_rng(0)
    uneven = ss.Stair(range(256), np.cumsum(rng.uniform(0.1, 2, 255)).tolist())
    mean, std = torch.tensor(0.1), torch.tensor(3.0)
    for stair in (TERNARY, ss.Stair.linear(8, thresholds="floor"), uneven):
        kept: dict[int, int] = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.linspace(-5, 300, 4096).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Largest() as largest:
            y = apply(stair, name, mean, std, forward)(x)
            y.backward(torch.ones_like(y))
        assert largest.size <= 3 * x.numel()
        large = [size for size in kept.values() if size > 4 * 600]
        assert sum(large) <= 4 * x.numel(), "at most one tensor of the size of x is kept"


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_time_does_not_grow_with_the_levels_of_a_linear_stair(name, forward):
    """256 equal steps take no more operations than 16; only the tails of logistic noise may."""
    smooth = name == "logistic"
    count = {}
    for bits in (4, 8):
        stair = ss.Stair.linear(bits, quantum=0.07, thresholds="midpoint")
        x = torch.linspace(-5, 25, 512).requires_grad_()
        with Largest() as forwards:
            y = apply(stair, name, torch.tensor(0.01), torch.tensor(0.05), forward)(x)
        with Largest() as backwards:
            y.backward(torch.ones_like(y))
        count[bits] = (forwards.calls, backwards.calls)
    if not (smooth and forward == "expectation"):
        assert count[8][0] <= count[4][0] + 4
    if not smooth:
        assert count[8][1] <= count[4][1] + 4


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("uniform", 1027),  # more elements than a block of 2^20
        pytest.param("uniform", 2053, marks=pytest.mark.nightly),
        pytest.param("normal", 2053, marks=pytest.mark.nightly),
    ],
)
def test_tensors_of_millions_and_odd_strides(name, rows):
    """However the work is cut in pieces, every element is right; NaN hits itself alone."""
    x = torch.linspace(-2, 2, 1031 * rows).view(1031, rows).T
    x[1000, 7] = x[3, 1030] = math.nan
    kept, law, thresholds = x.clone(), (name, 0.1, 0.4), TERNARY.thresholds
    v, levels = oracle.numpy(x), np.array(TERNARY.levels)
    known = ~np.isnan(v)
    mean, std = 0.1, 0.4
    slope = oracle.gradient_bounds(v[known], levels, thresholds, *law, torch.float32)
    for forward in oracle.FORWARDS:
        y, g = oracle.value_and_gradient(apply(TERNARY, name, mean, std, forward), x)
        oracle.check_between(torch.from_numpy(oracle.numpy(g)[known]), *slope, v[known])
        if forward == "expectation":
            bounds = oracle.expectation_bounds(v, levels, thresholds, *law, torch.float32)
            oracle.check_between(y, *bounds, v)
            continue
        k = oracle.level_index(y, levels, v)[known]
        if forward == "mode":
            oracle.check_mode(k, v[known], thresholds, *law, torch.float32)
        elif forward == "hard":
            np.testing.assert_array_equal(k, oracle.index(v[known], thresholds))
        else:
            p = oracle.probabilities(v[known], thresholds, *law)
            for half in np.array_split(np.arange(len(k)), 4):
                count, odds = np.bincount(k[half], minlength=3), p[:, half]
                error = np.sqrt((odds * (1 - odds)).sum(1))
                assert (np.abs(count - odds.sum(1)) <= 5 * error + 1).all()
    torch.testing.assert_close(x, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_hard_is_the_stair_itself_exactly(dtype):
    """Forward hard is stair(x) bit for bit, and so is a Dirac at 0; by channel too."""
    channels = ss.Stair.linear(3, signed=True, quantum=(0.07, 1.0, 2.5), thresholds="floor", axis=1)
    quanta = torch.tensor([0.07, 1.0, 2.5], dtype=F64)
    for stair in (TERNARY, UINT4, UNEVEN, channels):
        t = torch.tensor(stair.thresholds, dtype=F64)[:, None]
        t = t * quanta if stair is channels else t.expand(-1, 3)
        x = torch.cat([t, torch.randn(50, 3, dtype=F64)]).to(dtype)
        for name in oracle.NAMES:
            y = apply(stair, name, 0.3, 0.4, "hard")(x)
            torch.testing.assert_close(y, stair(x), rtol=0, atol=0)
            for forward in ("expectation", "mode", "random"):
                y = apply(stair, name, 0.0, torch.zeros(()), forward)(x)
                torch.testing.assert_close(y, stair(x), rtol=0, atol=0)
                with torch.inference_mode():
                    assert torch.equal(apply(stair, name, 0.0, 0.0, forward)(x), stair(x))


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_nothing_is_read_back_from_a_device(name, forward):
    """On a device without values the operator still runs: no branch looks into mean or std."""
    for stair in (TERNARY, UNEVEN, UINT4):
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        mean, std = (torch.empty((), device="meta") for _ in range(2))
        y = ss.regularise(x, stair, name, mean, std, forward=forward)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == g.shape == x.shape
        assert y.device.type == g.device.type == "meta"


@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_widest_noise_gives_finite_numbers(name, forward):
    stair = ss.Stair.linear(4, signed=True)
    for mean, std in ((0.0, 1e30), (-1e30, 1e30), (1e30, 0.0)):
        x = torch.linspace(-9, 9, 50, requires_grad=True)
        y = ss.regularise(x, stair, name, mean, std, forward)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"std": -0.1}, ["std", "-0.1"]),
        ({"std": math.nan}, ["std", "nan"]),
        ({"std": math.inf}, ["std", "inf"]),
        ({"std": 2e38}, ["std", "0 to 1e+30", "2e+38"]),
        ({"std": torch.tensor(math.inf)}, ["std", "inf"]),
        ({"std": torch.tensor(1e39, dtype=torch.float64)}, ["std", "1e+39"]),
        ({"std": torch.tensor([1.0, -1.0, 1.0])}, ["std", "-1.0"]),
        ({"std": torch.tensor([1.0, math.nan, 1.0])}, ["std", "nan"]),
        ({"mean": torch.tensor([0.0, math.inf, 0.0])}, ["mean", "inf"]),
        ({"mean": torch.zeros(2, 3)}, ["mean", "(3,)", "(2, 3)"]),
        ({"mean": torch.zeros(1, 1)}, ["mean", "(3,)", "(1, 1)"]),
        ({"x": torch.zeros(1), "std": torch.ones(4)}, ["std", "(1,)", "(4,)"]),
        ({"mean": math.nan}, ["mean", "nan"]),
        ({"mean": -3e38}, ["mean", "-1e+30 to 1e+30", "-3e+38"]),
        ({"std": "wide"}, ["std", "wide"]),
        ({"forward": "modal"}, ["forward", "modal", *oracle.FORWARDS]),
        ({"noise": "gaussian"}, ["noise", "gaussian", *oracle.NAMES]),
        ({"stair": "ternary"}, ["stair", "ternary"]),
        ({"x": torch.arange(3)}, ["x", "int64"]),
    ],
    ids=str,
)
def test_nonsense_is_refused_in_a_sentence(change, words):
    """Every bad argument is named with what was given."""
    good = {"x": torch.zeros(3), "stair": TERNARY, "noise": "normal", "mean": 0.0, "std": 1.0}
    a = {**good, "forward": "mode", **change}
    call = lambda: ss.regularise(a["x"], a["stair"], a["noise"], a["mean"], a["std"], a["forward"])
    oracle.refuses(call, *words)
