"""The float networks: the paper's, those of MLPerf Tiny, a small one for digits, and teachers."""

from collections import OrderedDict

from torch import Tensor, nn


def vgg8(classes: int = 10, inputs: int = 3) -> nn.Module:
    """VGG8, the paper's network for CIFAR-10 and SVHN: (N, inputs, 32, 32) -> (N, classes).

    Five 3×3 convolutions with padding 1, then two linear layers of 1024, each with batch
    normalisation and without bias or dropout, and a linear layer. Seven layers are quantised, all
    but the last. Pooling follows the activation, so that it takes the maximum of quantised
    features.

    >>> net = vgg8()
    >>> sum(parameter.numel() for parameter in net.parameters())
    13881994
    >>> net.get_submodule("classifier.6")
    Linear(in_features=1024, out_features=10, bias=True)
    """
    last = _last(1024, classes)  # first: the order decides which random numbers each layer gets
    features: list[nn.Module] = []
    for outputs, pools in ((128, True), (256, False), (256, True), (512, False), (512, True)):
        features += _normalised(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        features += [nn.MaxPool2d(2)] if pools else []
        inputs = outputs
    classifier: list[nn.Module] = []
    for inputs in (512 * 4 * 4, 1024):
        classifier += _normalised(nn.Linear(inputs, 1024, bias=False))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features, nn.Flatten()),
            classifier=nn.Sequential(*classifier, last),
        )
    )


def dscnn(classes: int = 12, channels: int = 64, blocks: int = 4) -> nn.Module:
    """DSCNN, the paper's network for spoken words: (N, 1, 49, 10) -> (N, classes).

    A 10×4 convolution with stride 2 and padding (5, 1), which gives 64×25×5; four blocks of a
    depthwise 3×3 and a pointwise 1×1 convolution; the average over 25×5; a linear layer. No layer
    has a bias. Nine layers are quantised, all but the last. With 276 ``channels`` and five
    ``blocks`` it is the teacher ``dscnn-276``.

    >>> net = dscnn()
    >>> sum(parameter.numel() for parameter in net.parameters())
    23168
    >>> net.block1[0]
    Conv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=64, bias=False)
    """
    last = _last(channels, classes, bias=False)
    stem = nn.Conv2d(1, channels, (10, 4), stride=2, padding=(5, 1), bias=False)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(*_normalised(stem))}
    for number in range(1, blocks + 1):
        stages[f"block{number}"] = _separable(channels, channels)
    pool = nn.Sequential(nn.AvgPool2d((25, 5)), nn.Flatten())
    return nn.Sequential(OrderedDict(**stages, pool=pool, classifier=last))


def dscnn_l(classes: int = 12) -> nn.Module:
    """DS-CNN L of "Hello Edge" for spoken words: (N, 1, 49, 10) -> (N, classes).

    As :func:`dscnn`, with 276 channels and five blocks; the stem has stride 2 in time alone, and
    the first block has stride 2.

    >>> sum(parameter.numel() for parameter in dscnn_l().parameters())
    413724
    """
    last = _last(276, classes, bias=False)
    stem = nn.Conv2d(1, 276, (10, 4), stride=(2, 1), padding=(5, 1), bias=False)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(*_normalised(stem))}
    for number in range(1, 6):
        stages[f"block{number}"] = _separable(276, 276, stride=2 if number == 1 else 1)
    pool = nn.Sequential(nn.AvgPool2d((13, 5)), nn.Flatten())
    return nn.Sequential(OrderedDict(**stages, pool=pool, classifier=last))


def mobilenet(classes: int = 2, inputs: int = 3, size: int = 96) -> nn.Module:
    """MobileNetV1 of a quarter of its width: (N, inputs, size, size) -> (N, classes).

    For 96×96 images it is MLPerf Tiny's network. For images below 32×32, such as digits of 16×16,
    the first two strides are 1.

    >>> sum(parameter.numel() for parameter in mobilenet().parameters())
    213586
    """
    first = 1 if size < 32 else 2
    stem = nn.Conv2d(inputs, 8, 3, first, padding=1, bias=False)
    blocks: list[nn.Module] = [nn.Sequential(*_normalised(stem))]
    channels = 8
    for outputs, stride in (
        *((16, 1), (32, first), (32, 1), (64, 2), (64, 1), (128, 2)),
        *((128, 1),) * 5,
        *((256, 2), (256, 1)),
    ):
        blocks.append(_separable(channels, outputs, stride))
        channels = outputs
    return _averaged(blocks, _last(channels, classes))


def digits(classes: int = 10) -> nn.Module:
    """A small network for scikit-learn's digits: (N, 1, 8, 8) -> (N, classes).

    Three linear layers of 256 with batch normalisation, and a linear layer. Three layers are
    quantised, all but the last: 147,456 weights, or 36 KiB as ternary ones.

    >>> sum(parameter.numel() for parameter in digits().parameters())
    151562
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (8 * 8, 256, 256):
        layers += _normalised(nn.Linear(inputs, 256, bias=False))
    features = nn.Sequential(*layers)
    return nn.Sequential(OrderedDict(features=features, classifier=_last(256, classes)))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes.

    The shortcut's convolution has a batch normalisation, or a bias.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, bias: bool = False) -> None:
        super().__init__()
        self.sums = nn.Sequential(
            *_normalised(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=bias)
            if not bias:
                self.shortcut = nn.Sequential(self.shortcut, nn.BatchNorm2d(outputs))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.sums(x) + self.shortcut(x))


def resnet8(classes: int = 10, inputs: int = 3) -> nn.Module:
    """ResNet-8, MLPerf Tiny's network for CIFAR-10: (N, inputs, 32, 32) -> (N, classes).

    Three blocks of 16, 32 and 64 channels. Their 1×1 convolutions have a bias and no batch
    normalisation. Convolutions before a batch normalisation have no bias, which it would remove.

    >>> sum(parameter.numel() for parameter in resnet8().parameters())
    77946
    """
    return _residual(classes, inputs, (16, 32, 64), blocks=1, bias=True)


def resnet20(classes: int = 10, inputs: int = 3) -> nn.Module:
    """ResNet-20 for small images: (N, inputs, 32, 32) -> (N, classes).

    Nine blocks, three each of 16, 32 and 64 channels.

    >>> sum(parameter.numel() for parameter in resnet20().parameters())
    272474
    """
    return _residual(classes, inputs, (16, 32, 64), blocks=3)


def resnet18(classes: int = 10, inputs: int = 3) -> nn.Module:
    """ResNet-18 for small images, a teacher of VGG8: (N, inputs, 32, 32) -> (N, classes).

    As for ImageNet, but with a 3×3 convolution of stride 1 and no pooling at the input.

    >>> sum(parameter.numel() for parameter in resnet18().parameters())
    11173962
    """
    return _residual(classes, inputs, (64, 128, 256, 512), blocks=2)


def _residual(
    classes: int, inputs: int, widths: tuple[int, ...], blocks: int, bias: bool = False
) -> nn.Module:
    """Return a residual network with so many blocks of each width."""
    channels = widths[0]
    stem = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
    layers: list[nn.Module] = [nn.Sequential(*_normalised(stem))]
    for outputs in widths:
        for number in range(blocks):
            stride = 2 if number == 0 and outputs != widths[0] else 1
            layers.append(ResidualBlock(channels, outputs, stride, bias))
            channels = outputs
    return _averaged(layers, nn.Linear(channels, classes))


def _averaged(layers: list[nn.Module], last: nn.Linear) -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(OrderedDict(features=nn.Sequential(*layers, pool), classifier=last))


def _separable(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
    pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
    return nn.Sequential(*_normalised(depthwise), *_normalised(pointwise))


def _normalised(layer: nn.Conv2d | nn.Linear) -> list[nn.Module]:
    if isinstance(layer, nn.Linear):
        return [layer, nn.BatchNorm1d(layer.out_features), nn.ReLU()]
    return [layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()]


def _last(inputs: int, classes: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, classes, bias=bias)
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
