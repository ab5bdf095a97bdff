"""A Llama in plain torch: its parameters have the names of Hugging Face's LlamaForCausalLM."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair import _check


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a :class:`Llama`, with the names of Hugging Face's configuration.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the features between layers.
        intermediate_size: Width inside the gated layers.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of heads of the queries.
        num_key_value_heads: Number of heads of keys and values; None for as many as queries have.
        max_position_embeddings: The longest text, in tokens.
        rms_norm_eps: What normalisations add to the mean square.
        rope_theta: Base of the rotary positions.
        tie_word_embeddings: Whether the last layer has the weights of the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name, value in vars(self).items():
            if name not in ("rms_norm_eps", "rope_theta", "tie_word_embeddings"):
                _check.integer(name, value, 1)
        _check.number("rms_norm_eps", self.rms_norm_eps, 0, 1)
        _check.number("rope_theta", self.rope_theta, 1, 1e9)
        width, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if width % (2 * heads):
            problem = f"must be a multiple of twice the {heads} heads, but {width} was given"
            raise _check.invalid("hidden_size", problem)
        if heads % (groups or heads):
            problem = f"must divide the {heads} heads, but {groups} was given"
            raise _check.invalid("num_key_value_heads", problem)


class Llama(nn.Module):
    """Llama, a transformer for text: tokens (N, T) -> logits (N, T, vocab_size).

    Blocks of attention with rotary positions and of a gated layer, SiLU(gate)·up, each after a
    normalisation by the root mean square; no layer has a bias. Its state is that of Hugging Face's
    ``LlamaForCausalLM``, with equal logits. There is no cache. To quantise the blocks, skip the
    last layer: ``softstair.quantise(net, "ternary/float", skip="lm_head")``.

    >>> sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    >>> net = Llama(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    >>> net(torch.tensor([[72, 105]])).shape
    torch.Size([1, 2, 256])

    Args:
        config: Its sizes.

    Attributes:
        config: Its sizes.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Blocks(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


class _Blocks(nn.Module):
    """All but the last layer."""

    rotary: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        turns = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * turns
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(tokens, Tensor) and tokens.shape[1] > self.rotary.shape[1]:
            problem = f"must be at most {self.rotary.shape[1]} long (max_position_embeddings)"
            raise _check.invalid("tokens", f"{problem}, but have {tokens.shape[1]}")
        x = self.embed_tokens(tokens)
        positions = torch.ones_like(tokens[0]).cumsum(0) - 1  # torch.fx can trace this
        cos, sin = (F.embedding(positions, table.to(x.dtype)) for table in self.rotary)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Gated(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.size = config.hidden_size // config.num_attention_heads
        inner = self.size * (config.num_key_value_heads or config.num_attention_heads)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = lambda layer: layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = rotate(heads(self.q_proj), cos, sin), heads(self.k_proj), heads(self.v_proj)
        settings: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        y = F.scaled_dot_product_attention(q, rotate(k, cos, sin), v, **settings)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inside, bias=False)
        self.up_proj = nn.Linear(width, inside, bias=False)
        self.down_proj = nn.Linear(inside, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (N, heads, T, size) turned by their positions: element i with i + size/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
