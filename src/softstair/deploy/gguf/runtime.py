"""The log-probabilities of every token: those of llama.cpp, through xllamacpp, and of PyTorch."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softstair import _check
from softstair._errors import SoftstairError, import_extra
from softstair._tokens import round_tokens
from softstair.deploy.gguf.blocks import BLOCKS, Array
from softstair.deploy.gguf.container import File
from softstair.deploy.gguf.network import Network
from softstair.nn import StairLayer

Rounding = Callable[[Tensor], Tensor]
ROUNDINGS: dict[str, Rounding] = {
    "q8_0": lambda x: round_tokens(x, "int8:32"),
    "q8_k": lambda x: round_tokens(x, "int8:256"),
    "f16": lambda x: x.half().float(),
    "bf16": lambda x: x.bfloat16().float(),
    "f32": lambda x: x,
}
"""What llama.cpp rounds features to before it multiplies weights of a type."""


def run(path: Path | str, context: int, **job: Any) -> Any:
    """Return what llama.cpp says to a job of the worker."""
    import_extra("xllamacpp", "gguf")
    text = json.dumps({"path": str(path), "context": context, **job})
    words = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), text]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])  # or an assertion
        raise SoftstairError(f"llama.cpp cannot run {str(path)!r} ({reason.rstrip('.')}).")
    return json.loads(done.stdout.strip().splitlines()[-1])


def tokens_of(path: Path | str, text: str, context: int = 128) -> list[int]:
    """Return the tokens of a text, by the vocabulary of a file.

    Raises:
        SoftstairError: If llama.cpp cannot load the file.
    """
    tokens: list[int] = run(path, context, text=text)
    return tokens


def tokens_a_second(path: Path | str, tokens: Sequence[int], count: int) -> float:
    """Return how fast llama.cpp writes so many tokens after these, on one thread of the CPU.

    Raises:
        SoftstairError: If llama.cpp cannot load the file.
    """
    return float(run(path, len(tokens) + count + 1, tokens=[*tokens], count=count))


def read(path: Path, tokens: list[int], context: int, vocabulary: int, letter: int) -> Tensor:
    """Return llama.cpp's log-probabilities (T, vocabulary), in float64."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        sizes = {"vocabulary": vocabulary, "letter": letter}
        run(path, context, tokens=tokens, rows=str(rows), **sizes)
        return torch.from_numpy(np.fromfile(rows).reshape(len(tokens), vocabulary))


def letter_of(words: Sequence[str]) -> int:
    """Return a token that is one printable character."""
    for number, word in enumerate(words):
        if re.fullmatch(r"[!-~]|<0x[3-6].>|\\x[3-6].", word):
            return number
    problem = "must have a token of one printable ASCII character, or llama.cpp returns nothing"
    raise _check.invalid("tokenizer", problem)


def in_float(network: Network, rounded: Mapping[str, Array]) -> nn.Module:
    """Return the network with plain layers of its weights; those that are rounded, as they are."""
    module = network.module
    for name, weights in network.tensors.items():
        values, layer = rounded.get(name, weights.exact), module.get_submodule(weights.module)
        values = values if weights.order is None else values[np.argsort(weights.order)]
        weight = nn.Parameter(torch.from_numpy(values.astype(np.float32)))
        if isinstance(layer, StairLayer):
            parent, _, own = weights.module.rpartition(".")
            rows, columns = weight.shape
            layer = nn.Linear(columns, rows, bias=False)
            if name == "token_embd":
                layer = nn.Embedding(rows, columns)
            layer.weight = weight
            setattr(module.get_submodule(parent), own, layer)
        else:
            layer.get_parameter("weight").data = weight.data  # of a tied head too
    return module.float().cpu()


def log_probabilities(
    module: nn.Module,
    tokens: Sequence[int],
    rounds: Mapping[str, Rounding] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return PyTorch's log-probabilities (T, vocabulary), in float64.

    ``rounds`` rounds what layers read, by their names, after relative ``noise``.
    """
    generator = torch.Generator().manual_seed(seed)

    def hook(rounding: Rounding) -> Any:
        def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            x = inputs[0]
            return rounding(x + noise * x * torch.randn(x.shape, generator=generator))

        return rounded

    with ExitStack() as hooks:
        for path, rounding in (rounds or {}).items():
            layer = module.get_submodule(path)
            hooks.enter_context(layer.register_forward_pre_hook(hook(rounding)))
        result = module(torch.tensor([list(tokens)]))
    logits: Tensor = getattr(result, "logits", result)
    return logits[0].double().log_softmax(-1)


def roundings_of(network: Network, file: File) -> dict[str, Rounding] | None:
    """Return what llama.cpp rounds the features to that each layer reads; None if not known."""
    rounds = {}
    for name, weights in network.tensors.items():
        stored = file.tensors.get(f"{name}.weight")
        if stored is not None and name != "token_embd" and weights.exact.ndim > 1:
            kind = BLOCKS[stored.kind].activations if stored.kind in BLOCKS else stored.kind
            if kind is None:
                return None
            rounds[weights.module] = ROUNDINGS[kind]
    return rounds


def write_text(module: nn.Module, count: int, vocabulary: int) -> list[int]:
    """Return tokens that the network draws, the first by chance."""
    generator = torch.Generator().manual_seed(0)
    tokens = [int(torch.randint(vocabulary, (), generator=generator))]
    while len(tokens) < count:
        following = log_probabilities(module, tokens)[-1].exp()
        tokens.append(int(torch.multinomial(following, 1, generator=generator)))
    return tokens
