"""DSCNN, the paper's network of depthwise separable convolutions for spoken words."""

from collections import OrderedDict

from torch import nn

__all__ = ["dscnn"]


def dscnn(classes: int = 12) -> nn.Module:
    """The float network; with its last layer skipped, nine layers are there to be quantised.

    (N, 1, 49, 10), 49 frames of 10 coefficients, -> (N, classes). A 10×4 convolution of stride 2
    over the frames with 5 rows of zeros above and below and one column on either side, which gives
    64×25×5; four blocks of a depthwise 3×3 and a pointwise 1×1 convolution; the average over the
    25×5 places; a linear layer. No layer has a bias, the last one included.

    >>> net = dscnn()
    >>> sum(parameter.numel() for parameter in net.parameters())
    23168
    >>> net.block1[0]
    Conv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=64, bias=False)
    """
    last = nn.Linear(64, classes, bias=False)
    nn.init.normal_(last.weight, std=0.01)
    whole = nn.Conv2d(1, 64, (10, 4), stride=2, padding=(5, 1), bias=False)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(*_normalised(whole))}
    for number in range(1, 5):
        depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        pointwise = nn.Conv2d(64, 64, 1, bias=False)
        stages[f"block{number}"] = nn.Sequential(*_normalised(depthwise), *_normalised(pointwise))
    pool = nn.Sequential(nn.AvgPool2d((25, 5)), nn.Flatten())
    return nn.Sequential(OrderedDict(**stages, pool=pool, classifier=last))


def _normalised(weights: nn.Conv2d) -> tuple[nn.Module, ...]:
    return weights, nn.BatchNorm2d(weights.out_channels), nn.ReLU()
