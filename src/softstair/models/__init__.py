"""Networks by name: the paper's two, their teachers, MLPerf Tiny's, digits, or a user's own.

They are float networks; :func:`softstair.quantise` makes stair networks of them, with all layers
but :func:`last_layer` quantised.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softstair import _check, _plugins
from softstair._errors import SoftstairError
from softstair.models.networks import (
    digits,
    dscnn,
    dscnn_l,
    mobilenet,
    resnet8,
    resnet18,
    resnet20,
    vgg8,
)

__all__ = [
    "NETWORKS",
    "Entry",
    "build",
    "default_for",
    "digits",
    "dscnn",
    "dscnn_l",
    "first_layer",
    "last_layer",
    "mobilenet",
    "resnet8",
    "resnet18",
    "resnet20",
    "teacher_for",
    "vgg8",
]


@dataclass(frozen=True)
class Entry:
    """A network of the library.

    Attributes:
        make: Function of (classes, channels) that returns the network.
        shape: (channels, height, width) of its examples; None where any number is allowed.
        about: Short description.
        has_sums: Whether it adds features, as shortcuts do; if not, ``Recipe.sums`` has no effect.
    """

    make: Callable[[int, int], nn.Module]
    shape: tuple[int | None, int, int]
    about: str
    has_sums: bool = False


NETWORKS: dict[str, Entry] = {
    "vgg8": Entry(
        vgg8, (None, 32, 32), "five convolutions and two linear layers, 13.9 M parameters"
    ),
    "dscnn": Entry(
        lambda classes, channels: dscnn(classes),
        (1, 49, 10),
        "depthwise separable convolutions for spoken words, 23 k parameters",
    ),
    "resnet18": Entry(
        resnet18, (None, 32, 32), "residual network, a teacher of vgg8, 11.2 M parameters", True
    ),
    "dscnn-276": Entry(
        lambda classes, channels: dscnn(classes, channels=276, blocks=5),
        (1, 49, 10),
        "dscnn of 276 channels and five blocks, its teacher, 414 k parameters",
    ),
    "resnet8": Entry(
        resnet8, (None, 32, 32), "residual network of MLPerf Tiny, 78 k parameters", True
    ),
    "resnet20": Entry(
        resnet20, (None, 32, 32), "residual network of nine blocks, 272 k parameters", True
    ),
    "mobilenet-96": Entry(
        mobilenet, (None, 96, 96), "MobileNetV1-0.25 of MLPerf Tiny, 214 k parameters"
    ),
    "mobilenet-16": Entry(
        lambda classes, channels: mobilenet(classes, channels, size=16),
        (None, 16, 16),
        "MobileNetV1-0.25 for small images, 214 k parameters",
    ),
    "dscnn-l": Entry(
        lambda classes, channels: dscnn_l(classes),
        (1, 49, 10),
        "DS-CNN L, five blocks of 276 channels for spoken words, 414 k parameters",
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
        raise _check.wrong("model", name, f"one of {', '.join(NETWORKS)}, or {own}")
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
