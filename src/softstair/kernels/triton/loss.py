"""The cross entropy of a batch, its gradient and the number of correct answers, in one kernel.

Operation by operation these are more than ten kernels, each of which takes a few microseconds. One
program handles the whole batch, so that its sums have one order.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cross_entropy", "supports_loss"]

TILE, LARGEST = 4096, 65536
"""Scores of a tile, and the most of a batch, rounded up to a power of two per example."""


@triton.jit
def _cross_entropy(
    scores_ptr, y_ptr, share_ptr, gradient_ptr, loss_ptr, correct_ptr, rows, smoothing,
    CLASSES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    exists = (column < CLASSES)[None, :]
    loss = tl.zeros((ROWS,), dtype=tl.float32)
    correct = tl.zeros((ROWS,), dtype=tl.int32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < rows
        offsets, mask = row[:, None] * CLASSES + column[None, :], inside[:, None] & exists
        scores = tl.load(scores_ptr + offsets, mask=mask, other=0).to(tl.float32)
        scores = tl.where(exists, scores, float("-inf"))
        label = tl.load(y_ptr + row, mask=inside, other=0)
        target = tl.where(column[None, :] == label[:, None], 1.0, 0.0)
        if share_ptr is not None:
            other = tl.load(y_ptr + rows - 1 - row, mask=inside, other=0)
            second = tl.where(column[None, :] == other[:, None], 1.0, 0.0)
            target += tl.load(share_ptr) * (second - target)
        target = target * (1 - smoothing) + smoothing / CLASSES
        scores -= tl.max(scores, 1)[:, None]
        powers = tl.exp(scores)
        total = tl.sum(powers, 1)[:, None]
        losses = tl.where(mask, tl.log(total) - scores, 0.0)
        loss += tl.sum(target * losses, 1)
        answer = tl.argmax(scores, 1, tie_break_left=True)
        correct += (inside & (answer == label)).to(tl.int32)
        gradient = (powers / total - target) / rows
        tl.store(gradient_ptr + offsets, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)
    tl.store(loss_ptr, tl.sum(loss, 0) / rows)
    tl.store(correct_ptr, tl.sum(correct, 0).to(tl.int64))


def supports_loss(scores: Tensor) -> bool:
    """Whether :func:`cross_entropy` takes these scores: a matrix that one program can handle."""
    block = triton.next_power_of_2(max(scores.shape[-1], 1))
    return scores.dim() == 2 and 0 < len(scores) * block <= LARGEST


def cross_entropy(
    scores: Tensor, y: Tensor, share: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return what :func:`softstair.train.step.cross_entropy` returns."""
    return _CrossEntropy.apply(scores, y, share, smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, y: Tensor, share: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        scores = scores.contiguous()
        gradient = torch.empty_like(scores)
        loss = torch.empty((), device=scores.device)
        correct = torch.empty((), dtype=torch.int64, device=scores.device)
        rows, classes = scores.shape
        block = triton.next_power_of_2(classes)
        tile = min(triton.next_power_of_2(rows), max(1, TILE // block))
        with torch.cuda.device(scores.device) if scores.is_cuda else nullcontext():
            _cross_entropy[(1,)](
                scores, y.contiguous(), share, gradient, loss, correct, rows, smoothing,
                CLASSES=classes, ROWS=tile, BLOCK=block, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss, None, None, None
