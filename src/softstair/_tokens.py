"""Features per token: each vector of features, or each group of it, in quanta of its own.

``int8:token`` and ``int4:token`` divide a token's features by amax/127 or amax/7, with amax the
greatest magnitude in it, and round. Groups of a token are rounded as ggml does for products with
quantised weights:

========= ============================================== ======================================
name      quantum d                                      integers
========= ============================================== ======================================
int8:32   amax/127, stored in float16 (Q8_0)             x·(127/amax), halves away from 0
int8:256  −m/127 with m of greatest magnitude (Q8_K)     x·(−127/m), halves to even, at most 127
========= ============================================== ======================================

The gradient is that of the identity.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from softstair import _check

TokenName = Literal["int8:token", "int4:token", "int8:32", "int8:256"]
TOKEN_NAMES: tuple[TokenName, ...] = get_args(TokenName)
SMALLEST = 1e-30
"""Below this greatest magnitude a token or a group is 0."""


def round_tokens(x: Tensor, name: TokenName) -> Tensor:
    """Return features rounded per token, in x's dtype, with the gradient of the identity.

    >>> round_tokens(torch.tensor([[1.0, 0.26, -0.5], [10.0, 2.6, -5.0]]), "int4:token")
    tensor([[ 1.0000,  0.2857, -0.5714],
            [10.0000,  2.8571, -5.7143]])

    Args:
        x: Features of any shape, of which the last dimension is a token's.
        name: ``"int8:token"``, ``"int4:token"``, ``"int8:32"`` or ``"int8:256"``.
    """
    size = None if name.endswith("token") else int(name.partition(":")[2])
    with torch.no_grad():
        groups = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        groups = groups if size is None else groups.unflatten(-1, (-1, size))
        if size == 256:
            rounded = _greatest(groups)
        else:
            rounded = _absolute(groups, 7 if name == "int4:token" else 127, size is not None)
        rounded = rounded.reshape(x.shape).to(x.dtype)
    return rounded + (x - x.detach())


def _absolute(x: Tensor, highest: int, is_stored: bool) -> Tensor:
    """Return x in multiples of amax/highest; as Q8_0 if it is stored."""
    amax = x.abs().amax(-1, keepdim=True)
    quantum, is_zero = amax / highest, amax < SMALLEST
    if not is_stored:
        scale = highest / amax.clamp_min(SMALLEST)
        return (x * scale).round().clamp(-highest, highest) / scale
    scale = torch.where(is_zero, 0.0, 1 / quantum)
    scaled = x * scale
    away = scaled.trunc()
    away = away + (scaled - away).abs().ge(0.5) * scaled.sign()
    return away * quantum.half().to(x.dtype)


def _greatest(x: Tensor) -> Tensor:
    """Return x in multiples of −m/127, with m of greatest magnitude, as Q8_K."""
    greatest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    is_zero = greatest.abs() < SMALLEST
    # Divided as tensors: a number over a tensor is the product with its reciprocal.
    scale = torch.where(is_zero, 0.0, torch.full_like(greatest, -127) / greatest)
    quantum = torch.where(is_zero, 0.0, 1 / scale)
    return (x * scale).round().clamp(max=127) * quantum


class TokenRounding(nn.Module):
    """Rounds features per token; see :func:`round_tokens`."""

    def __init__(self, name: TokenName) -> None:
        super().__init__()
        self.name: TokenName = name
        _check.choice("features", name, TOKEN_NAMES)

    def forward(self, input: Tensor) -> Tensor:
        return round_tokens(input, self.name)

    def extra_repr(self) -> str:
        return self.name
