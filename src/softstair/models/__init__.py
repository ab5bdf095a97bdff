"""Networks by name: the paper's two, their teachers, MLPerf Tiny's, digits, or a user's own.

They are float networks; :func:`softstair.quantise` makes stair networks of them, with all layers
but :func:`last_layer` quantised. :class:`Llama`, a network for text, has no name: its sizes decide.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softstair import _check, _plugins
from softstair._errors import SoftstairError
from softstair.models.llama import Llama, LlamaConfig

__all__ = [
    "NETWORKS",
    "Entry",
    "Llama",
    "LlamaConfig",
    "build",
    "default_for",
    "digits",
    "dscnn",
    "first_layer",
    "last_layer",
    "mobilenet",
    "resnet8",
    "resnet18",
    "resnet20",
    "teacher_for",
    "vgg8",
]


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
    return _network([*features, nn.Flatten()], nn.Sequential(*classifier, last))


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
    return _network(layers, _last(256, classes))


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
    return _network([*layers, pool], last)


def _network(features: list[nn.Module], classifier: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(features=nn.Sequential(*features), classifier=classifier))


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


@dataclass(frozen=True)
class Entry:
    """A network of the library.

    Attributes:
        make: Function of (classes, channels) that returns the network.
        shape: (channels, height, width) of its examples; None where any number is allowed.
        about: Short description.
    """

    make: Callable[[int, int], nn.Module]
    shape: tuple[int | None, int, int]
    about: str


NETWORKS: dict[str, Entry] = {
    "vgg8": Entry(vgg8, (None, 32, 32), "five convolutions, two linear layers, 13.9 M parameters"),
    "dscnn": Entry(
        lambda classes, channels: dscnn(classes),
        (1, 49, 10),
        "depthwise separable convolutions for spoken words, 23 k parameters",
    ),
    "resnet18": Entry(
        resnet18, (None, 32, 32), "residual network, a teacher of vgg8, 11.2 M parameters"
    ),
    "dscnn-276": Entry(
        lambda classes, channels: dscnn(classes, channels=276, blocks=5),
        (1, 49, 10),
        "dscnn of 276 channels and five blocks, its teacher, 414 k parameters",
    ),
    "resnet8": Entry(resnet8, (None, 32, 32), "residual, of MLPerf Tiny, 78 k parameters"),
    "resnet20": Entry(resnet20, (None, 32, 32), "residual, nine blocks, 272 k parameters"),
    "mobilenet-96": Entry(
        mobilenet, (None, 96, 96), "MobileNetV1-0.25 of MLPerf Tiny, 214 k parameters"
    ),
    "mobilenet-16": Entry(
        lambda classes, channels: mobilenet(classes, channels, size=16),
        (None, 16, 16),
        "MobileNetV1-0.25 for small images, 214 k parameters",
    ),
    "digits": Entry(
        lambda classes, channels: digits(classes),
        (1, 8, 8),
        "three linear layers of 256 for images of 8×8 pixels, 152 k parameters",
    ),
}

DEFAULTS = {"digits": "digits", "cifar10": "vgg8", "svhn": "vgg8", "speech": "dscnn"}
"""The network of each data set."""
TEACHERS = ("resnet18", "dscnn-276")


def build(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return the network of that name.

    Args:
        name: A name in `NETWORKS`, or ``package.module:function`` for a function or class of your
            own that returns a network. It is called with those of the keywords ``classes`` and
            ``shape`` that it takes; its module may be in the current directory.
        classes: Number of classes.
        shape: (channels, height, width) of the examples.

    Raises:
        SoftstairError: If there is no such network, or if it does not take such examples.

    >>> build("vgg8", classes=10, shape=(1, 32, 32)).features[0]
    Conv2d(1, 128, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    >>> build("torch.nn:Identity", classes=10, shape=(3, 32, 32))
    Identity()
    """
    if isinstance(name, str) and ":" in name:
        return _plugins.call(name, "model", nn.Module, classes=classes, shape=shape)
    if name not in NETWORKS:
        own = "package.module:function for a network of your own"
        raise _check.wrong("model", name, f"one of {', '.join(NETWORKS)}, or {own}", NETWORKS)
    entry = NETWORKS[name]
    if not _takes(entry, shape):
        allowed = "×".join("any" if size is None else str(size) for size in entry.shape)
        raise SoftstairError(
            f"model {name!r} takes examples of {allowed} (channels×height×width), but those of the "
            f"data are {'×'.join(map(str, shape))}; choose another `model`.",
            field="model",
        )
    return entry.make(classes, shape[0])


def default_for(data: str) -> str:
    """Return the name of the network of a data set.

    >>> default_for("speech")
    'dscnn'
    """
    return DEFAULTS[_check.choice("data", data, DEFAULTS)]


def teacher_for(shape: tuple[int, ...]) -> str | None:
    """Return the name of the teacher of networks for such examples; None if there is none.

    >>> teacher_for((3, 32, 32)), teacher_for((1, 49, 10)), teacher_for((1, 8, 8))
    ('resnet18', 'dscnn-276', None)
    """
    return next((name for name in TEACHERS if _takes(NETWORKS[name], shape)), None)


def _takes(entry: Entry, shape: tuple[int, ...]) -> bool:
    sizes = zip(entry.shape, shape, strict=False)
    return len(shape) == 3 and all(size in (None, given) for size, given in sizes)


def first_layer(model: nn.Module, example: Tensor | None = None) -> str:
    """Return the name of the first Linear, Conv1d or Conv2d; arguments as for `last_layer`.

    >>> first_layer(vgg8())
    'features.0'
    """
    return _layers(model, example)[0]


def last_layer(model: nn.Module, example: Tensor | None = None) -> str:
    """Return the name of the last Linear, Conv1d or Conv2d, which usually stays in float.

    Args:
        model: The network.
        example: Input for which the last layer that is called counts; without it, the last one in
            the order of the modules.

    >>> last_layer(vgg8())
    'classifier.6'
    """
    return _layers(model, example)[-1]


@torch.no_grad()
def _layers(model: nn.Module, example: Tensor | None) -> list[str]:
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if example is not None:
        trial, called = copy.deepcopy(model).eval(), []
        for name in names:
            note = lambda *_, name=name: called.append(name)
            trial.get_submodule(name).register_forward_hook(note)
        trial(example)
        # A layer whose weight is passed to a function is not called; then the order decides.
        names = called or names
    if not names:
        problem = f"must have a Linear, Conv1d or Conv2d, but {type(model).__name__} has none"
        raise _check.invalid("model", problem)
    return names
