"""The operator and the annealer on CUDA, against the float64 reference on the CPU."""

import itertools
import warnings

import torch
from standalone import main
from torch import Tensor, nn

import softstair as ss
from softstair import kernels

FAMILIES = ss.noise.names()
FORWARDS = ("expectation", "mode", "hard")
STAIRS = {
    "heaviside": ss.Stair.heaviside(),
    "ternary": ss.Stair.ternary(),
    "INT4": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "INT8": ss.Stair.linear(8, signed=True, thresholds="floor"),
    "arbitrary": ss.Stair((-1.5, 0.0, 0.25, 2.0), (-0.7, 0.1, 0.3)),
    "channels": ss.Stair.ternary(quantum=(0.5, 1.0, 0.25), axis=1),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def inputs(dtype: torch.dtype, stair: ss.Stair, std: float) -> Tensor:
    """Random x of three channels, away from where rounding decides between two levels."""
    generator = torch.Generator().manual_seed(7)
    unit = stair.quantum if isinstance(stair.quantum, float) else 0.5
    x = (torch.randn(64, 3, 50, generator=generator) * 3 * unit).to(dtype)
    quanta = torch.tensor(stair.quantum) if isinstance(stair.quantum, tuple) else torch.ones(1)
    edges = torch.tensor(stair.thresholds).outer(quanta)[:, None, :, None]
    half = ss.noise.Uniform.support * std
    gap = torch.stack([(x.float() - edges + s).abs().amin(0) for s in (0.0, half, -half)]).amin(0)
    return torch.where(gap < 2e-2 * unit, x + 0.05 * unit, x)


def oracle(x: Tensor, stair: ss.Stair, noise: str, mean: float, std: float, forward: str):
    wide = x.detach().cpu().double()
    soft = kernels.SoftStair(stair, ss.noise.get(noise), mean, std)
    with torch.no_grad():
        return kernels.value(wide, soft, forward), kernels.slope(wide, soft)


def compare(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str, rare: bool) -> None:
    """All close; where rounding may decide (near a tie), all but a few."""
    error = (found.detach().cpu().double() - wanted).abs() / wanted.abs().amax().clamp(min=1e-9)
    bad = (error > TOLERANCE[dtype]).double().mean().item()
    few = 5e-4 if TOLERANCE[dtype] < 1e-3 else 1e-2
    assert bad <= (few if rare else 0.0), f"{what}: {bad:.2%} off, worst {error.max():.3g}"


def operator(stair: ss.Stair, noise: str, forward: str):
    def function(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return ss.regularise(x, stair, noise, mean, std, forward)

    return function


def check(function, dtype: torch.dtype, name: str, noise: str, forward: str, std: float) -> None:
    stair = STAIRS[name]
    x = inputs(dtype, stair, std).cuda().requires_grad_()
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    mean, deviation = torch.tensor([0.0, std], dtype=precise, device="cuda")
    y = function(x, mean, deviation)
    assert y.dtype == dtype
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    value, slope = oracle(x, stair, noise, 0.0, std, forward)
    what = f"{dtype} {name} {noise} {forward} std={std}"
    compare(y, value, dtype, what, rare=forward == "mode")
    compare(gradient, slope, dtype, what + " gradient", rare=dtype not in (torch.float64,))
    if std > 0:
        assert gradient.count_nonzero() > 0, what + ": dead gradient"


def test_nan_and_invalid_noise_in_a_captured_step() -> None:
    """Noise out of range gives NaN without a synchronisation; NaN has a gradient of NaN."""
    for dtype, (name, stair) in itertools.product((torch.float32, torch.bfloat16), STAIRS.items()):
        x = inputs(dtype, stair, 0.3).cuda()
        x[5, 1, 7] = torch.nan
        leaf, nan = x.clone().requires_grad_(), x.isnan()
        mean, std = torch.tensor([0.0, 0.3], device="cuda").unbind()

        def step(leaf: Tensor, stair: ss.Stair, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
            y = ss.regularise(leaf * 1, stair, "uniform", mean, std)
            return y, torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

        step(leaf, stair, mean, std)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, gradient = step(leaf, stair, mean, std)
        for value in (0.3, -1.0, torch.nan, torch.inf, 0.0, 0.3):
            std.fill_(value)
            graph.replay()
            wanted = nan if value in (0.3, 0.0) else torch.ones_like(nan)
            assert torch.equal(y.isnan(), wanted), f"{dtype} {name} {value}"
            assert torch.equal(gradient.isnan(), wanted), f"{dtype} {name} {value} gradient"


def test_eager_equals_the_oracle() -> None:
    """Every family × forward × stair × dtype, with noise and without."""
    for dtype, (name, stair) in itertools.product(TOLERANCE, STAIRS.items()):
        for (noise, forward), std in itertools.product(cases(stair), (0.0, 0.3, 2.0)):
            check(operator(STAIRS[name], noise, forward), dtype, name, noise, forward, std)


def test_what_has_no_kernel_says_so_once() -> None:
    kernels._warn.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name, dtype in 2 * [("arbitrary", torch.float32), ("ternary", torch.float64)]:
            x = torch.zeros(3, dtype=dtype, device="cuda")
            ss.regularise(x, STAIRS[name], "uniform", 0.0, 0.3)
    assert [str(each.message).split(",")[0] for each in told] == [
        "Triton needs bins and rises of one width",
        "Triton computes in float32",
    ]


def cases(stair: ss.Stair) -> list[tuple[str, str]]:
    """Families × forwards; 255 thresholds, which unbounded families unroll, only for bounded."""
    families = FAMILIES if len(stair) < 64 else ("uniform", "triangular")
    return list(itertools.product(families, FORWARDS))


def all_cases(stair: ss.Stair):
    """Every family and forward in one function, which compiles once: a slice of xs for each."""

    def function(xs: Tensor, std: Tensor) -> Tensor:
        return torch.stack(
            [
                ss.regularise(x, stair, noise, 0.0, std, forward)
                for x, (noise, forward) in zip(xs, cases(stair), strict=True)
            ]
        )

    return function


def check_all(values: Tensor | None, slopes: Tensor, xs: Tensor, stair: ss.Stair, std: float):
    for number, (noise, forward) in enumerate(cases(stair)):
        value, slope = oracle(xs[number], stair, noise, 0.0, std, forward)
        what = f"{xs.dtype} {stair} {noise} {forward} std={std}"
        if values is not None:
            compare(values[number], value, xs.dtype, what, rare=forward == "mode")
        compare(slopes[number], slope, xs.dtype, what + " gradient", rare=True)
        assert std == 0 or slopes[number].count_nonzero() > 0, what + ": dead gradient"


def test_compiled_equals_the_oracle() -> None:
    """Inductor's kernels, std moved to 0 and back without recompiling."""
    for dtype, (name, stair) in itertools.product(TOLERANCE, STAIRS.items()):
        torch._dynamo.reset()
        function = torch.compile(all_cases(stair), fullgraph=True)
        for number, std in enumerate((0.3, 0.0, 2.0)):
            xs = inputs(dtype, stair, std).cuda().repeat(len(cases(stair)), 1, 1, 1)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                precise = torch.float64 if dtype == torch.float64 else torch.float32
                moved = torch.tensor(std, dtype=precise, device="cuda")
                values = function(xs.requires_grad_(), moved)
                (slopes,) = torch.autograd.grad(values, xs, torch.ones_like(values))
            check_all(values, slopes, xs, stair, std)
        print("  compiled", dtype, name, flush=True)


def test_captured_equals_the_oracle() -> None:
    """Every family × forward × stair × dtype in a CUDA graph, std moved between replays."""
    for dtype, stair in itertools.product(TOLERANCE, STAIRS.values()):
        function = all_cases(stair)
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        std = torch.tensor(0.3, dtype=precise, device="cuda")
        xs = inputs(dtype, stair, 0.3).cuda().repeat(len(cases(stair)), 1, 1, 1).requires_grad_()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.autograd.grad(function(xs, std).sum(), xs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values = function(xs, std)
            (slopes,) = torch.autograd.grad(values, xs, torch.ones_like(values))
        for new in (0.3, 0.0, 2.0):
            fresh = inputs(dtype, stair, new).cuda().repeat(len(cases(stair)), 1, 1, 1)
            with torch.no_grad():
                xs.copy_(fresh)
            std.fill_(new)
            graph.replay()
            check_all(values, slopes, xs, stair, new)


def test_transforms_equal_the_oracle() -> None:
    """torch.func on the device, eager and compiled: compile(grad) above all."""
    stair, std = STAIRS["ternary"], torch.tensor(0.3, device="cuda")
    xs = inputs(torch.float32, stair, 0.3).cuda().repeat(len(cases(stair)), 1, 1, 1)
    function = all_cases(stair)
    gradient = torch.func.grad(lambda t: function(t, std).sum())
    tangent = lambda t: torch.func.jvp(lambda u: function(u, std), (t,), (torch.ones_like(t),))[1]
    each = torch.func.vmap(gradient, in_dims=1, out_dims=1)
    for form in (gradient, tangent, each):
        for run in (form, torch.compile(form, fullgraph=True)):
            check_all(None, run(xs), xs, stair, 0.3)


def test_noise_moves_without_synchronisation() -> None:
    """Eager: neither the forward nor the backward pass waits for the device."""
    x = torch.randn(1000, device="cuda", requires_grad=True)
    mean, std = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    for forward in (*FORWARDS, "random"):
        ss.regularise(x, STAIRS["INT4"], "normal", mean, std, forward).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            std.fill_(0.0)
            ss.regularise(x, STAIRS["INT4"], "normal", mean, std, forward).sum().backward()
            std.fill_(1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_random_follows_its_probabilities() -> None:
    """Frequencies within five standard errors, from a generator and again the same."""
    stair, generator = STAIRS["ternary"], torch.Generator("cuda")
    x = torch.full((2_000_000,), 0.3, device="cuda")
    for noise in FAMILIES:
        family = ss.noise.get(noise)
        above = family.cdf((0.3 - torch.tensor(stair.thresholds).double()) / 0.4)
        y = ss.regularise(x, stair, noise, 0.0, 0.4, "random", generator.manual_seed(1))
        again = ss.regularise(x, stair, noise, 0.0, 0.4, "random", generator.manual_seed(1))
        assert torch.equal(y, again)
        assert set(y.unique().tolist()) <= set(stair.levels)
        for level, probability in ((-1.0, 1 - above[0]), (0.0, above[0] - above[1])):
            share, p = (y == level).double().mean().item(), probability.item()
            assert abs(share - p) <= 5 * (p * (1 - p) / len(x)) ** 0.5 + 1e-6, (noise, share, p)


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for i, o in ((3, 16), (16, 16), (16, 16)):
        blocks += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return ss.quantise(model, STAIRS["ternary"], STAIRS["ternary"], skip="11").cuda()


def test_compiled_network_has_the_gradients_of_the_eager_one() -> None:
    """No quantised layer's gradient is zero, or other than eager's, before and after annealing."""
    x = torch.randn(32, 3, 16, 16, device="cuda")
    nets = [network(), network()]
    runs = [nets[0], torch.compile(nets[1], fullgraph=True)]
    annealers = [
        ss.Annealer(run, ss.Schedule.for_network(net, period=2))
        for run, net in zip(runs, nets, strict=True)
    ]
    for step in range(7):
        gradients = []
        for run, net, annealer in zip(runs, nets, annealers, strict=True):
            annealer.step()
            net.zero_grad()
            run(x).square().sum().backward()
            gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        for name, wanted in gradients[0].items():
            found = gradients[1][name]
            close = torch.allclose(found, wanted, rtol=1e-2, atol=1e-3 * wanted.abs().max().item())
            assert close, f"step {step} {name}: {(found - wanted).abs().max():.3g}"
        if step == 0:
            assert all(g.count_nonzero() > 0 for n, g in gradients[1].items() if "weight" in n)


def test_captured_step_follows_the_noise() -> None:
    """A whole step in a CUDA graph: the noise moves between replays, to 0 as well."""
    net = network()
    x = torch.randn(32, 3, 16, 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.zero_grad(set_to_none=False)
            net(x).square().sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    net.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        net(x).square().sum().backward()
    first = dict(net.named_parameters())["0.weight"]
    for std in (0.2, 0.0, 0.4):
        for _, stair in ss.nn.stair_modules(net):
            stair.std.fill_(std)
        net.zero_grad(set_to_none=False)
        graph.replay()
        captured = first.grad.clone()
        net.zero_grad(set_to_none=False)
        net(x).square().sum().backward()
        assert torch.allclose(captured, first.grad, rtol=1e-3, atol=1e-5)
        assert (captured.count_nonzero() == 0) == (std == 0.0)


if __name__ == "__main__":
    main(globals())
