"""Small Llamas with weights that matter, quantised and not, and their files."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import softstair as ss
from softstair.deploy import gguf
from softstair.models import Llama, LlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-4, "rope_theta": 500.0,
}  # fmt: skip
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
NARROW = {**SIZES, "intermediate_size": 64, "num_hidden_layers": 1}


def spread_out(net: nn.Module, seed: int = 0) -> nn.Module:
    """The network with random weights of the size of trained ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (
            1 + noise / 8 if parameter.dim() == 1 else noise / parameter.shape[1] ** 0.5
        )
    return net.eval()


def llama(bits: str | None = None, half: bool = True, **changes: Any) -> nn.Module:
    return copy.deepcopy(_llama(bits, half, tuple(changes.items())))


@cache  # fitting quanta takes a second
def _llama(bits: str | None, half: bool, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    net = spread_out(Llama(LlamaConfig(**{**SIZES, **dict(changes)})))
    if bits is None:
        return net
    options = ss.QuantiseOptions(half=half)
    return ss.quantise(net, bits, skip="lm_head", options=options).eval()


def written(net: nn.Module, folder: Path, **settings: Any) -> Path:
    return gguf.write(net, folder / "model.gguf", **settings)
