"""Layers of transformers with weights in groups, on features per token.

They are torch's layers, or Hugging Face's ``Conv1D``, with the same parameters under the same
names. The weights are a :class:`~softstair._grouped.GroupedWeight`; the features that they read may
be rounded per token. Nothing here has a form for :func:`softstair.freeze`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from softstair._grouped import GroupedWeight, IntegersAndQuanta
from softstair._stair_layer import StairLayer
from softstair._stair_module import call_node
from softstair._tokens import TokenName, TokenRounding


class Projection(StairLayer):
    """The base class of the layers below.

    Attributes:
        rounding: What rounds the features that it reads; None leaves them in float.
        in_float: Whether it computes as the float layer, in the first part of a training.
    """

    in_float = False

    weight_stair: GroupedWeight
    rounding: TokenRounding | None

    @classmethod
    def grouped(cls, module: nn.Module, features: TokenName | None, **settings: Any) -> Any:
        """Return the layer with the parameters, hooks and settings of a float one.

        ``settings`` are those of its :class:`GroupedWeight`.
        """
        weight = cls.matrix(module.get_parameter(cls.weight_name))
        layer = cls.from_float(module, GroupedWeight(weight=weight, **settings))
        layer.rounding = None if features is None else TokenRounding(features)
        return layer

    def quantised_weight(self) -> Tensor:
        """Return the weights as they are multiplied, (outputs, inputs), with their gradient."""
        weight = self.matrix(self.weight)
        return weight if self.in_float else self.weight_stair(weight)

    def integers_and_quanta(self) -> IntegersAndQuanta:
        """Return the integers (outputs, inputs) and the quanta (outputs, groups of a row)."""
        return self.weight_stair.integers_and_quanta(self.matrix(self.weight.detach()))

    def rounded(self, x: Tensor) -> Tensor:
        """Return the features as the weights read them."""
        return x if self.rounding is None or self.in_float else self.rounding(x)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        return F.linear(self.rounded(input), self.quantised_weight(), self.bias)


class TokenLinear(Projection, nn.Linear):
    """:class:`torch.nn.Linear` with weights in groups, on any leading dimensions."""


class TokenConv1D(Projection):
    """``Conv1D`` of Hugging Face's GPT-2, whose weight is (inputs, outputs)."""

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        return weight.t()


class TokenEmbedding(Projection, nn.Embedding):
    """:class:`torch.nn.Embedding` whose rows are quantised."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        rows = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        return F.embedding(input, self.quantised_weight(), *rows, self.sparse)


class TokenAttention(Projection, nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` with quantised projections.

    ``out_proj`` is a :class:`TokenLinear`. The softmax and its products stay in float.
    """

    weight_name = "in_proj_weight"

    @property
    def weight(self) -> Any:  # type: ignore[override]
        return self.in_proj_weight

    @classmethod
    def grouped(cls, module: Any, features: TokenName | None, **settings: Any) -> Any:
        layer: Any = super().grouped(module, features, **settings)
        layer.out_proj = TokenLinear.grouped(module.out_proj, features, **settings)
        return layer

    @staticmethod
    def why_float(module: Any) -> str:
        """Return why an attention stays in float, if it does."""
        if not module._qkv_same_embed_dim:
            return "keys or values of another width; quantise such attention by Linear modules"
        if module.bias_k is not None or module.add_zero_attn:
            return "add_bias_kv or add_zero_attn; write such attention with Linear modules"
        return ""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_single = query.dim() == 2
        q, k, v = (
            self._heads(x, is_single) for x in self._projected(query, key, value)
        )  # (N, heads, L, width)
        if is_single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        mask = self._mask(attn_mask, key_padding_mask, q)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            y = F.dropout(weights, p) @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if is_single else weights
        else:
            alone = is_causal and key_padding_mask is None
            y = F.scaled_dot_product_attention(q, k, v, None if alone else mask, p, alone)
        y = y.transpose(1, 2).flatten(2)
        y = y[0] if is_single else y if self.batch_first else y.transpose(0, 1)
        return self.out_proj(y), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.quantised_weight(), self.in_proj_bias
        if query is key and key is value:
            return F.linear(self.rounded(query), weight, bias).chunk(3, -1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
        return tuple(F.linear(self.rounded(x), w, b) for x, w, b in parts)

    def _heads(self, x: Tensor, is_single: bool) -> Tensor:
        """Return (N, heads, L, width) for projected queries, keys or values."""
        x = x[None] if is_single else x if self.batch_first else x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return what is added to the scores (N, heads, L, S), if anything."""
        added = None
        if mask is not None:
            added = _additive(mask, q)
            if mask.dim() == 3:
                added = added.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            blocked = _additive(padding, q)[:, None, None, :]
            added = blocked if added is None else added + blocked
        return added


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask as numbers to add: −∞ where a boolean one is True."""
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
