"""Rivals of :mod:`benchmarks.language`: the recipes of other papers in a few lines of PyTorch each.

A rival gives the value of a layer's weights in training; its gradient is autograd's. All round the
features that a layer reads to int8 per token by their greatest magnitude, as BitNet does.

======== ============================================================== ========================
name     value                                                          gradient of w
======== ============================================================== ========================
bitnet   s·round(w/s), s = mean |w| of the layer now (BitNet b1.58)     1
plain    s·round(w/s), s of least squared error of a row at the start   1
lsq      s·round(w/s), s learned, one a row (LSQ)                       1 between the ends
paretoq  ⅔α·round(1½·clip(w/α)), α learned, one a row (ParetoQ)         1 where abs(w) < α
quest    s·round(Hw/s), H Hadamard's of 128, s best for normal          1 where the error is at
         numbers of the row's RMS; features are multiplied by H too     most s/2, in H's domain
parq     the identity between levels, ever steeper (PARQ's sigmoid)     1
======== ============================================================== ========================

Where a paper leaves something open, the code says what is taken. With more bits than ternary,
integers go from −2^(b−1) to 2^(b−1) − 1.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("bitnet", "plain", "lsq", "paretoq", "quest", "parq")
LEVELS = {"ternary": (-1, 1), "int2": (-2, 1), "int4": (-8, 7)}
NORMAL = {"ternary": 1.224, "int2": 0.996, "int4": 0.335}
"""Quanta of least squared error for normal numbers of variance 1 (Max, 1960: 3, 4, 16 levels)."""


def scaled(parameter: Tensor, scale: float) -> Tensor:
    """The parameter, with its gradient times the scale."""
    return parameter.detach() + (parameter - parameter.detach()) * scale


def hard(x: Tensor, value: Tensor) -> Tensor:
    """The value, with the gradient of x."""
    return value.detach() + (x - x.detach())


def hadamard(x: Tensor, size: int = 128) -> Tensor:
    """Multiply groups of the last dimension by Hadamard's matrix, which is its own inverse."""
    shape, x = x.shape, x.unflatten(-1, (-1, size))
    for half in (2**n for n in range(int(math.log2(size)))):
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return (x / math.sqrt(size)).reshape(shape)


class Rival(nn.Linear):
    """A linear layer with the weights of a rival; the first part of a training is in float."""

    share: Tensor

    def __init__(self, layer: nn.Linear, method: str, bits: str, normed: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight, self.method, self.bits = layer.weight, method, bits
        self.low, self.high = LEVELS[bits]
        self.in_float = False
        self.norm = nn.RMSNorm(layer.in_features) if normed else None
        self.log_scale = nn.Parameter(torch.zeros(layer.out_features, 1))
        self.log_scale.requires_grad_(method in ("lsq", "paretoq"))
        self.register_buffer("share", torch.zeros(()))  # of the training that has passed
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Set the scale from the weights as they are."""
        w = self.weight
        if self.method == "plain":
            ratios = torch.linspace(0.05, 3, 60, device=w.device)[:, None, None]
            scales = ratios * w.abs().mean(1, keepdim=True) * (1 if self.high == 1 else 0.5)
            errors = ((w / scales).round().clamp(self.low, self.high) * scales - w).square().sum(2)
            scale = scales[:, :, 0].gather(0, errors.argmin(0)[None]).T
        elif self.method == "paretoq" and self.bits != "int4":
            scale = w.abs().amax(1, keepdim=True)  # as in the authors' code
        else:
            scale = 2 * w.abs().mean(1, keepdim=True) / math.sqrt(self.high)
        self.log_scale.copy_(scale.clamp_min(1e-8).log())

    def value(self) -> Tensor:
        w, low, high = self.weight, self.low, self.high
        if self.method == "bitnet":
            mean = w.detach().abs().mean().clamp_min(1e-5)
            s = mean if high == 1 else w.detach().abs().amax() / (high + 0.5)
            return hard(w, (w / s).round().clamp(low, high) * s)
        if self.method == "plain":
            s = self.log_scale.exp()
            return hard(w, (w / s).round().clamp(low, high) * s)
        if self.method == "lsq" or (self.method == "paretoq" and self.bits == "int4"):
            s = scaled(self.log_scale, 1 / math.sqrt(w.shape[1] * high)).exp()
            x = (w / s).clamp(low, high)
            return hard(x, x.round()) * s
        if self.method == "paretoq":
            s = scaled(self.log_scale, 1 / math.sqrt(w.shape[1])).exp()
            x = (w / s).clamp(-0.99, 0.99)
            steps, shift = (1.5, 0.0) if self.bits == "ternary" else (2.0, 0.5)
            return hard(x, ((x * steps - shift).round() + shift) / steps) * s
        if self.method == "quest":
            h = hadamard(w)
            s = NORMAL[self.bits] * h.detach().square().mean(1, keepdim=True).sqrt()
            q = (h / s).round().clamp(low, high) * s
            trusted = ((q - h).abs() <= s / 2).to(h.dtype)  # beyond the ends too, up to half a step
            return hard(h * trusted, q)
        return hard(w, self.parq(w))

    @torch.no_grad()
    def parq(self, w: Tensor) -> Tensor:
        """The proximal map: slope 1/r around thresholds, with r from 1 to 0 by a sigmoid."""
        s = w.abs().mean(1, keepdim=True) * (1 if self.high == 1 else 2 / math.sqrt(self.high))
        curve = lambda u: 1 / (1 + torch.exp(10 * (u - 0.5)))
        ends = curve(self.share.new_tensor(0.0)), curve(self.share.new_tensor(1.0))
        r = ((curve(self.share) - ends[1]) / (ends[0] - ends[1])).clamp_min(1e-6)
        x = w / s
        inside = x.clamp(self.low, self.high)
        middle = inside.floor() + 0.5
        steep = middle + ((inside - middle) / r).clamp(-0.5, 0.5)
        return (steep.clamp(self.low, self.high) + r * (x - inside)) * s

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.in_float:
            return F.linear(x, self.weight)
        if self.method == "quest":
            x = hadamard(x)
        scale = 127.0 / x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-5)
        x = hard(x, (x * scale).round().clamp(-128, 127) / scale)
        return F.linear(x, self.value())


def replaced(net: nn.Module, method: str, bits: str, normed: bool) -> nn.Module:
    """Replace all linear layers of the network but the last; normed: after a norm, as BitNet's."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, Rival(child, method, bits, normed))
    return net


def rivals(net: nn.Module) -> Iterator[Rival]:
    return (module for module in net.modules() if isinstance(module, Rival))


@torch.no_grad()
def move(net: nn.Module, share: float, in_float: bool) -> None:
    """Set what changes with time: the share of the quantised steps, and whether it is in float."""
    for layer in rivals(net):
        if layer.in_float and not in_float:
            layer.start()
        layer.in_float = in_float
        layer.share.fill_(min(1.0, max(0.0, share)))
