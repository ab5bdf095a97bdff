"""The log-probabilities of every token: those of llama.cpp, through xllamacpp, and of PyTorch."""

import json
import re
import urllib.request
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


class Runtime:
    """A file in llama.cpp, on one thread of the CPU, with a cache in float32.

    Args:
        path: The file.
        context: The longest text, in tokens.
    """

    def __init__(self, path: Path, context: int) -> None:
        x: Any = import_extra("xllamacpp", "gguf")
        params = x.CommonParams()
        params.model.path, params.n_ctx = str(path), context
        params.n_parallel, params.n_gpu_layers, params.fit_params = 1, 0, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity, params.cache_ram_mib = False, -1, 0
        # Neither helps alone: flash attention rounds what it reads of any cache to fp16.
        params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        try:
            self.server = x.Server(params)
        except RuntimeError as error:
            raise SoftstairError(f"llama.cpp cannot load {str(path)!r} ({error}).") from None

    def read(self, tokens: Sequence[int], vocabulary: int, letter: int) -> Tensor:
        """Return the log-probabilities (T, vocabulary) of what follows each token, in float64.

        There is a request for each position, which draws the token ``letter``: after others
        llama.cpp returns no probabilities.
        """
        rows = torch.full((len(tokens), vocabulary), torch.nan, dtype=torch.float64)
        for place in range(len(tokens)):
            reply = self._complete(
                tokens[: place + 1], 1, n_probs=vocabulary, logprobs=vocabulary,
                post_sampling_probs=False, logit_bias=[[letter, 1000.0]],
            )  # fmt: skip
            for entry in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                rows[place, entry["id"]] = entry["logprob"]
        if bool(rows.isnan().any()):
            raise SoftstairError("llama.cpp did not return the probabilities of all tokens.")
        return rows

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, by the file's vocabulary."""
        data = json.dumps({"content": text, "add_special": True}).encode()
        address = f"{self.server.listening_address}/tokenize"
        with urllib.request.urlopen(urllib.request.Request(address, data)) as reply:
            tokens: list[int] = json.load(reply)["tokens"]
        return tokens

    def tokens_a_second(self, tokens: Sequence[int], count: int) -> float:
        """Return how fast it writes so many tokens after these."""
        timings = self._complete(tokens, count, ignore_eos=True)["timings"]
        return float(timings["predicted_per_second"])

    def _complete(self, tokens: Sequence[int], count: int, **settings: Any) -> Mapping[str, Any]:
        request = {"prompt": list(tokens), "max_tokens": count, "cache_prompt": True, **settings}
        reply: Mapping[str, Any] = self.server.handle_completions(request)
        if "choices" not in reply:
            raise SoftstairError(f"llama.cpp did not answer ({reply.get('error', reply)}).")
        return reply


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
