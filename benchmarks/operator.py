"""The operator beside ReLU: forward and backward on one tensor, eager, families × forwards.

    python benchmarks/operator.py [--device cpu|cuda] [--json FILE]

Prints, for each family and forward, its time as a multiple of torch.relu's on the same tensor in
the same run, and the most memory held beyond x and its upstream gradient, as a multiple of it.
"""

import sys

# Run as a script, this folder leads the path, where this file would stand for Python's `operator`.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("benchmarks")]

import argparse
import gc
import json
import time
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import softstair as ss

SHAPE = (256, 128, 32, 32)
STAIRS = {
    "ternary": ss.Stair.ternary(),
    "INT4": ss.Stair.linear(4, signed=True, thresholds="midpoint"),
    "INT8": ss.Stair.linear(8, signed=True, thresholds="midpoint"),
}


def seconds(function: Callable[[], object], repeats: int, device: str) -> float:
    """The median time of a call after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


class Peak(TorchDispatchMode):
    """The most bytes of storage that the operations inside hold at once, beyond what was there."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        pointer = storage.data_ptr()
        if pointer in self.known or pointer in self.held:
            return
        self.held[pointer] = storage.nbytes()
        weakref.finalize(storage, self.held.pop, pointer, None)
        self.peak = max(self.peak, sum(self.held.values()))


def measure(device: str, repeats: int, stairs: list[str]) -> list[dict[str, object]]:
    x = torch.randn(SHAPE, device=device).requires_grad_()
    gradient = torch.randn(SHAPE, device=device)

    def step(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            function(x).backward(gradient)

        return run

    relu = seconds(step(torch.relu), repeats, device)
    rows: list[dict[str, object]] = [
        {"stair": "", "noise": "", "forward": "relu", "ms": 1e3 * relu}
    ]
    for name in stairs:
        for noise in ss.noise.names():
            std = ss.noise.get(noise).std_within(0.5)
            for forward in ("expectation", "mode", "random", "hard"):

                def operator(t, name=name, noise=noise, std=std, forward=forward):  # type: ignore[no-untyped-def]
                    return ss.regularise(t, STAIRS[name], noise, 0.0, std, forward)

                elapsed = seconds(step(operator), repeats, device)
                rows.append(
                    {
                        "stair": name,
                        "noise": noise,
                        "forward": forward,
                        "ms": 1e3 * elapsed,
                        "times_relu": elapsed / relu,
                        "memory": peak(step(operator), x, gradient),
                    }
                )
    return rows


def peak(run: Callable[[], None], x: torch.Tensor, gradient: torch.Tensor) -> float:
    x.grad = None
    gc.collect()
    with Peak(x, gradient) as mode:
        run()
    return mode.peak / (x.numel() * x.element_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stairs", nargs="+", default=["ternary"], choices=list(STAIRS))
    parser.add_argument("--json", help="write the rows to this file as well")
    options = parser.parse_args()
    rows = measure(options.device, options.repeats, options.stairs)
    print(f"relu forward + backward on {SHAPE} float32: {rows[0]['ms']:.1f} ms\n")
    print(f"{'stair':8} {'noise':11} {'forward':12} {'ms':>8} {'× relu':>7} {'memory':>7}")
    for row in rows[1:]:
        print(
            f"{row['stair']:8} {row['noise']:11} {row['forward']:12} {row['ms']:8.1f} "
            f"{row['times_relu']:7.1f} {row['memory']:6.2f}×"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
