"""VGG8, the paper's network for images of 32×32 pixels: CIFAR-10 and SVHN."""

from collections import OrderedDict

from torch import nn

__all__ = ["vgg8"]


def vgg8(classes: int = 10, inputs: int = 3) -> nn.Module:
    """The float network; with its last layer skipped, seven layers are there to be quantised.

    (N, inputs, 32, 32) -> (N, classes). 3×3 convolutions with padding 1 and batch normalisation,
    five of them, then two linear layers of 1024 likewise; no bias before a normalisation, which
    has its own, and no dropout. The pooling follows the activation, so that it takes the largest of
    quantised features.

    >>> net = vgg8()
    >>> sum(parameter.numel() for parameter in net.parameters())
    13881994
    >>> net.get_submodule("classifier.6")
    Linear(in_features=1024, out_features=10, bias=True)
    """
    last = nn.Linear(1024, classes)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    features = nn.Sequential(
        *_convolution(inputs, 128),
        nn.MaxPool2d(2),
        *_convolution(128, 256),
        *_convolution(256, 256),
        nn.MaxPool2d(2),
        *_convolution(256, 512),
        *_convolution(512, 512),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    classifier = nn.Sequential(*_linear(512 * 4 * 4, 1024), *_linear(1024, 1024), last)
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    weights = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return weights, nn.BatchNorm2d(outputs), nn.ReLU()


def _linear(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()
