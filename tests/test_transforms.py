"""The operator under autograd, torch.func and torch.compile, all against one float64 oracle."""

from __future__ import annotations

import importlib
import shutil
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import oracle
import softstair as ss
from test_regularise import check_everything

STAIR = ss.Stair((-2.0, -0.5, 0.25, 3.0), (-1.5, -0.4, 0.6))
LINEAR = ss.Stair.linear(2, signed=True, quantum=0.5, thresholds="midpoint")
MEAN, STD = 0.1, 0.45
X = torch.linspace(-2.9, 2.3, 23, dtype=torch.float64)
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No test sees another's compiled graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)


def by_backward(f, compile=None):
    def transform(x):
        return oracle.value_and_gradient(compile(f) if compile else f, x)[1]

    return transform


def wrapped(make):
    """A transform that is itself compiled, not only the function in it."""
    return lambda f, compile=None: compile(make(f)) if compile else make(f)


TRANSFORMS = {
    "backward": by_backward,
    "func.grad": wrapped(lambda f: grad(lambda x: f(x).sum())),
    "vmap(grad)": wrapped(lambda f: vmap(grad(f), randomness="different")),
    "jvp": wrapped(lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]),
    "vmap(jvp)": wrapped(
        lambda f: vmap(lambda v: jvp(f, (v,), (torch.ones_like(v),))[1], randomness="different")
    ),
    "jacfwd": wrapped(lambda f: lambda x: jacfwd(f, randomness="same")(x).diagonal()),
    "jacrev": wrapped(lambda f: lambda x: jacrev(f)(x).diagonal()),
}
# The default lane has the first.
COMPILED = ["func.grad", "backward", "vmap(grad)", "jvp", "vmap(jvp)", "jacfwd", "jacrev"]


def operator(name, forward, stair=STAIR, mean=MEAN, std=STD):
    """The operator on a stair that nothing has used before: compiling is its first use."""
    fresh = ss.Stair(stair.levels, stair.thresholds, stair.quantum, stair.axis)
    return lambda x: ss.regularise(x, fresh, name, mean, std, forward=forward)


def aot_eager(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def compile_counter():
    """A backend that counts graphs; importing it takes seconds, also where Triton is tested."""
    return importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")


def check_slope(slope, name, stair=STAIR, mean=MEAN, std=STD, x=X):
    """The derivative is the density sum; not merely non-zero."""
    exact = oracle.gradient(oracle.numpy(x), stair.levels, stair.thresholds, name, mean, std)
    if std:
        assert np.count_nonzero(exact) > 3
    scale = (stair.levels[-1] - stair.levels[0]) / (std or 1)
    np.testing.assert_allclose(oracle.numpy(slope), exact, 0, 1e-12 * scale)


def check_value(y, name, forward, stair=STAIR, mean=MEAN, std=STD, x=X):
    """The value is that of the forward, by the oracle."""
    v, q, t = oracle.numpy(x), np.array(stair.levels), stair.thresholds
    if forward == "expectation":
        exact = oracle.expectation(v, q, t, name, mean, std)
        np.testing.assert_allclose(oracle.numpy(y), exact, 0, 1e-12)
        return
    k = oracle.level_index(y, q, v)
    if forward == "hard":
        np.testing.assert_array_equal(k, oracle.index(v, t))
    else:
        check = oracle.check_mode if forward == "mode" else oracle.check_possible
        check(k, v, t, name, mean, std, torch.float64)


@pytest.mark.nightly(keep=27)  # each transform, family and forward
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_gives_the_density_sum(transform, name, forward):
    """Eager: reverse, forward and batched derivatives, linear and arbitrary stairs, tensors too."""
    for stair in (STAIR, LINEAR):
        check_slope(TRANSFORMS[transform](operator(name, forward, stair))(X), name, stair)
    mean, std = torch.tensor(MEAN, dtype=X.dtype), torch.tensor(STD, dtype=X.dtype)
    check_slope(TRANSFORMS[transform](operator(name, forward, mean=mean, std=std))(X), name)
    dirac = operator(name, forward, std=torch.zeros(()))
    assert (TRANSFORMS[transform](dirac)(X) == 0).all()


ROTATED = [
    (transform, oracle.NAMES[(row + column) % 4], forward)
    for row, transform in enumerate(COMPILED)
    for column, forward in enumerate(oracle.FORWARDS)
]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("transform", "name", "forward"), ROTATED)
def test_every_compiled_transform_gives_the_density_sum(transform, name, forward):
    """compile(fullgraph=True) of each, against the oracle; every forward meets every family.

    A plain autograd.Function gives zeros under compile(func.grad(f)), without a word.
    """
    std = torch.tensor(STD, dtype=X.dtype)
    f = operator(name, forward, mean=torch.tensor(MEAN, dtype=X.dtype), std=std)
    compiled = TRANSFORMS[transform](f, aot_eager)
    check_slope(compiled(X), name)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_values_survive_transforms_and_compilation(name, forward):
    """vmap, the primal of jvp, and the compiled function give the forward's own values."""
    for stair in (STAIR, LINEAR):
        f = operator(name, forward, stair)
        check_value(vmap(f, randomness="different")(X), name, forward, stair)
        check_value(
            vmap(f, in_dims=1, randomness="same")(X[None]), name, forward, stair, x=X[:, None]
        )
        check_value(jvp(f, (X,), (torch.ones_like(X),))[0], name, forward, stair)
    compiled = aot_eager(operator(name, forward, LINEAR))
    check_value(compiled(X), name, forward, LINEAR)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_over_the_noise(forward, compiled):
    """A batch of stds and means, zero among them, gives the rows of each."""
    stds = torch.tensor([0.0, 0.2, 1.0, 30.0], dtype=X.dtype)
    means = torch.tensor([0.3, 0.0, -0.5, 0.1], dtype=X.dtype)

    def one(mean, std, x):
        return ss.regularise(x, STAIR, "normal", mean, std, forward=forward)

    def slope(mean, std, x):
        return grad(lambda v: one(mean, std, v).sum())(x)

    both = lambda *given: (one(*given), slope(*given))
    rows = vmap(both, in_dims=(0, 0, None), randomness="different")
    values, tangents = (aot_eager(rows) if compiled else rows)(means, stds, X)
    for row, (mean, std) in enumerate(zip(means.tolist(), stds.tolist(), strict=True)):
        check_value(values[row], "normal", forward, mean=mean, std=std)
        check_slope(tangents[row], "normal", mean=mean, std=std)


@pytest.mark.nightly  # test_values_survive_transforms_and_compilation has numbers that stay
@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_numbers_may_move_under_compilation(forward):
    """mean and std as Python numbers may recompile when they move, but stay right."""
    stair = ss.Stair(STAIR.levels, STAIR.thresholds)
    f = lambda x, mean, std: ss.regularise(x, stair, "triangular", mean, std, forward=forward)
    compiled = aot_eager(f)
    for mean, std in ((0.1, 0.45), (0.0, 0.3), (-0.5, 0.2), (-0.5, 0.0)):
        check_value(compiled(X, mean, std), "triangular", forward, mean=mean, std=std)


@pytest.mark.nightly
@pytest.mark.parametrize("forward", ["expectation", "mode", "hard"])
def test_compiled_training_step_follows_moving_noise(forward):
    """.backward() through one compiled graph while mean and std move in place, down to zero."""
    mean, std = (torch.tensor(number, dtype=X.dtype) for number in (MEAN, STD))
    counter, counts = compile_counter(), set()
    f = operator("logistic", forward, mean=mean, std=std)
    f = torch.compile(f, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for noise in ((0.1, 0.45), (0.0, 0.2), (0.0, 0.0), (-0.5, 0.0), (-0.5, 1.0)):
            mean.fill_(noise[0])
            std.fill_(noise[1])
            y, g = oracle.value_and_gradient(f, X)
            counts.add(counter.frame_count)
            check_value(y, "logistic", forward, STAIR, *noise)
            check_slope(g, "logistic", STAIR, *noise)
    assert len(counts) == 1


SECOND = {
    "create_graph": lambda f: (
        lambda x: torch.autograd.functional.vjp(
            lambda v: torch.autograd.grad(f(v).sum(), v, create_graph=True)[0],
            x,
            torch.ones_like(x),
        )[1]
    ),
    "grad(grad)": lambda f: vmap(grad(grad(f)), randomness="different"),
    "jacfwd(grad)": lambda f: vmap(jacfwd(grad(f), randomness="different"), randomness="different"),
}


@pytest.mark.parametrize("route", SECOND)
@pytest.mark.parametrize("forward", oracle.FORWARDS)
def test_the_second_derivative_of_normal_noise(forward, route):
    """The derivative of the density sum, -z mu(z) / std^2 for the normal family; never just 0."""
    exact = np.zeros(len(X))
    for k, threshold in enumerate(STAIR.thresholds):
        z = (X.numpy() - threshold - MEAN) / STD
        exact -= (STAIR.levels[k + 1] - STAIR.levels[k]) * z * stats.norm.pdf(z) / STD**2
    second = SECOND[route](operator("normal", forward))(X)
    np.testing.assert_allclose(oracle.numpy(second), exact, 0, 1e-10)


def afresh(f):
    """Compiled as if it were the first."""
    torch._dynamo.reset()
    return aot_eager(f)


THROUGH = {"vmap": lambda f: vmap(f, randomness="different"), "compile": afresh}


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    ("name", "mean", "std", "dtype"),
    [
        ("uniform", 0.0, 5e-324, torch.float64),
        ("normal", 0.25, 0.0, torch.float32),
        ("laplace", 0.1, 0.4, torch.float64),
        ("logistic", 0.0, 0.25, torch.float16),
        ("gumbel", 0.1, 0.4, torch.float64),
    ],
)
def test_extremes_survive_transforms_and_compilation(name, mean, std, dtype, through):
    """Thresholds, infinities, NaN, std 0, a std of nearly 0 and own families, as in eager."""
    shape, forwards = (LINEAR.levels, LINEAR.thresholds), ("expectation", "mode", "hard")
    options = {"through": THROUGH[through], "forwards": forwards}
    check_everything(shape, name, mean, std, dtype, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("forward", ["expectation", "mode", "hard"])
def test_channels_under_transforms_and_compilation(forward):
    """The channel axis is that of the tensor the function sees, inside vmap and compiled."""
    make = lambda axis: ss.Stair.ternary(quantum=(0.5, 1.0, 3.0), axis=axis)
    x = torch.linspace(-4, 4, 2 * 3 * 7, dtype=torch.float64).view(7, 3, 2)
    f, inner = operator("normal", forward, make(1)), operator("normal", forward, make(0))
    y, g = oracle.value_and_gradient(f, x)
    for other in (vmap(inner), aot_eager(f), aot_eager(vmap(inner))):
        value, slope = oracle.value_and_gradient(other, x)
        torch.testing.assert_close(value, y, rtol=0, atol=1e-14)
        torch.testing.assert_close(slope, g, rtol=0, atol=1e-13)
    sliced = vmap(f, in_dims=2, out_dims=2)(x)
    torch.testing.assert_close(sliced, y, rtol=0, atol=1e-14)


@pytest.mark.nightly
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "forward"), [("uniform", "mode"), ("normal", "random"), ("logistic", "expectation")]
)
def test_inductor_agrees_with_the_oracle(name, forward):
    """The default backend: values, .backward() and compile(func.grad(f)), std a moving tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its first import
        importlib.import_module("torch._inductor.compile_fx")
    std = torch.tensor(STD, dtype=X.dtype)
    f = operator(name, forward, std=std)
    compiled = torch.compile(f, fullgraph=True)
    slope = torch.compile(grad(lambda x: f(x).sum()), fullgraph=True)
    for value in (0.45, 0.0):
        std.fill_(value)
        y, g = oracle.value_and_gradient(compiled, X)
        check_value(y, name, forward, std=value)
        check_slope(g, name, std=value)
        check_slope(slope(X), name, std=value)
