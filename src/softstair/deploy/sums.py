"""The sum of a layer as a node, with the least and the greatest that each channel can have."""

from typing import Any

import torch
from torch import Tensor, nn

from softstair.deploy import nodes
from softstair.deploy.values import ExportError, Whole
from softstair.nn import StairLayer

__all__ = ["pair", "total"]


def total(name: str, layer: StairLayer, weight: Tensor, x: Whole) -> nodes.Sum:
    """The sum of whole weights over whole features; padding adds zeros to what may be met."""
    flat = weight.flatten(1)
    ends = torch.stack([flat * x.low, flat * x.high])
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise ExportError(
                f"{name} pads with {layer.padding_mode!r} ({layer.padding!r}), which is not "
                "exported: pad with zeros, by numbers."
            )
        how = [pair(getattr(layer, one)) for one in ("stride", "padding", "dilation")]
        if any(how[1]):
            ends = torch.cat([ends, torch.zeros_like(ends[:1])])
        groups = layer.groups
    elif isinstance(layer, nn.Linear):
        how, groups = [(1, 1), (0, 0), (1, 1)], 1
    else:
        raise ExportError(f"{name} is a convolution over one dimension, which is not exported.")
    least, greatest = ends.amin(0).sum(1), ends.amax(0).sum(1)
    low, high = int(least.min()), int(greatest.max())
    stride, padding, dilation = how
    return nodes.Sum(
        name, (x.node,), low, high, weight, stride, padding, dilation, groups, least, greatest
    )


def pair(value: Any) -> tuple[int, int]:
    """What torch takes as one number or as two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
