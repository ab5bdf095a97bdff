"""Tokens a second of llama.cpp for one untrained network in each type, on one thread of the CPU.

    python -m benchmarks.gguf_speed [--rounds 3]

The types take turns; the best round of each counts. xllamacpp's wheel uses AVX2 at most.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

import softstair as ss
from softstair.deploy import gguf
from softstair.models import Llama, LlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "max_position_embeddings": 256,
}  # fmt: skip
STAIRS = {"ternary": ss.Stair.ternary(2**-5), "int4": ss.Stair.linear(4, True, 2**-7)}
STAIRS["int8"] = ss.Stair.linear(8, True, 2**-11)
TYPES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "F16": (None, {"keep": {"*": "f16"}}),
    "Q8_0": ("int8", {}),
    "Q4_0": ("int4", {}),
    "Q2_0": ("ternary", {"ternary": "q2_0"}),
    "TQ2_0": ("ternary", {}),
    "TQ1_0": ("ternary", {"ternary": "tq1_0"}),
}
PROMPT, COUNT = 8, 96


def quantised(net: nn.Module, name: str | None) -> nn.Module:
    """Return the network with weights of a stair, all but the tables."""
    return net if name is None else ss.quantise(net, weights=STAIRS[name], skip="lm_head")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    net = Llama(LlamaConfig(**SIZES)).half().float()  # so that its tables are stored as F16
    best = dict.fromkeys(TYPES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        files = {
            kind: gguf.write(quantised(net, name), Path(folder) / f"{kind}.gguf", **settings)
            for kind, (name, settings) in TYPES.items()
        }
        for _ in range(rounds):
            for kind, file in files.items():
                rate = gguf.tokens_a_second(file, [65] * PROMPT, COUNT)
                best[kind] = max(best[kind], rate)
        count = sum(parameter.numel() for parameter in net.parameters())
        print(f"{count / 1e6:.1f} M weights")
        print("| type | MB | tokens a second | of F16 |\n|---|---|---|---|")
        for kind, rate in best.items():
            size = files[kind].stat().st_size / 1e6
            print(f"| {kind} | {size:.1f} | {rate:.0f} | {rate / best['F16']:.2f} × |")


if __name__ == "__main__":
    main()
