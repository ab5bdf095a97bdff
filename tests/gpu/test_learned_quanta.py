"""Learned quanta on CUDA: gradients, captured steps without a wait, exact integers."""

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

import softstair as ss
from softstair.data.batches import Examples
from softstair.nn import StairActivation, StairModule, StairWeight
from softstair.train.recipe import Recipe
from softstair.train.state import State
from softstair.train.step import CapturedStep, Step

sys.path.append(str(Path(__file__).parents[1] / "fused"))
from standalone import main
from twins import distance, model

STAIRS = [ss.Stair.ternary(), ss.Stair.linear(4, signed=True), ss.Stair.linear(8)]


def test_values_and_gradients_are_those_of_the_cpu_in_float64() -> None:
    kinds = ((StairActivation, None), (StairWeight, None), (StairWeight, 0))
    cells = itertools.product(STAIRS, ss.noise.names(), ("expectation", "mode", "hard"), kinds)
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


def state(precision: str = "bfloat16", **settings: object) -> tuple[State, Examples]:
    recipe = Recipe(
        data="cifar10", weights="int4", weight_quantum=0.125, features="uint4", quanta="learned",
        precision=precision, batch=64, epochs=64, drop=None, clip_latent=True, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    weights, features = recipe.stair("weights"), recipe.stair("features")
    net = ss.quantise(model(side=32), weights, features, skip="15", quanta="learned")
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (1024, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(5, (1024,), generator=draw)
    x += y[:, None, None, None].byte() * 20
    return State(recipe, net, 1024, torch.device("cuda")), Examples(x, y, 128.0, 64.0, "cuda")


def go(state: State, step: object, steps: int) -> None:
    for _ in range(steps):
        if state.order is None or state.step == state.steps:
            if state.order is not None:
                state.epoch, state.step, state.order = state.epoch + 1, 0, None
            state.begin_epoch()
        step()  # type: ignore[operator]


def ratios(network: nn.Module) -> torch.Tensor:
    found = [p for name, p in network.named_parameters() if name.endswith("log_ratio")]
    return torch.stack([p.detach() for p in found]).cpu()


def test_captured_steps_move_the_quanta_as_steps_do() -> None:
    for precision in ("float32", "bfloat16"):
        moved = []
        for kind in (Step, CapturedStep):
            trained, examples = state(precision, static_std=True)
            assert trained.execution.fused
            go(trained, kind(trained, examples), 8)
            moved.append(ratios(trained.network))
        assert float(moved[0].abs().min()) > 1e-4, moved
        torch.testing.assert_close(*moved, rtol=0.1, atol=1e-3)


def test_no_host_waits_in_a_step() -> None:
    trained, examples = state(period=4.0)
    step = CapturedStep(trained, examples)
    go(trained, step, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        go(trained, step, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_network_that_learned_its_quanta_is_exact_in_integers() -> None:
    trained, examples = state(period=2.0, learning_rate=3e-3, integer_input=True)
    go(trained, CapturedStep(trained, examples), 16 * 9)
    net = trained.network.eval()
    quanta = [module.stair.quantum for _, module in ss.nn.stair_modules(net)]
    net = net.cpu().eval()
    assert [module.stair.quantum for _, module in ss.nn.stair_modules(net)] == quanta
    x = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8)
    integer = ss.deploy.integerise(net, (3, 32, 32), 128, 64.0)
    assert ss.deploy.verify(net, integer, x)["integer network"].mismatches == 0


if __name__ == "__main__":
    main(globals())
