"""Networks by name: the paper's two, a small one for digits, and whatever a user's module makes.

They are float networks; :func:`softstair.quantise` makes stair networks of them, with all but
:func:`last_layer` quantised.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softstair import _plugins
from softstair.models.digits import digits
from softstair.models.dscnn import dscnn
from softstair.models.vgg8 import vgg8

__all__ = ["NETWORKS", "Entry", "build", "default_for", "digits", "dscnn", "last_layer", "vgg8"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A network that comes with the library.

    make    (classes, channels) -> the network
    shape   (channels, height, width) of what it takes; None where any number will do
    about   what it is, in a few words
    """

    make: Callable[[int, int], nn.Module]
    shape: tuple[int | None, int, int]
    about: str


NETWORKS: dict[str, Entry] = {
    "vgg8": Entry(
        vgg8, (None, 32, 32), "five convolutions and two linear layers, 13.9 M parameters"
    ),
    "dscnn": Entry(
        lambda classes, channels: dscnn(classes),
        (1, 49, 10),
        "depthwise separable convolutions for spoken words, 23 k parameters",
    ),
    "digits": Entry(
        lambda classes, channels: digits(classes),
        (1, 8, 8),
        "three linear layers of 256 for images of 8×8 pixels, 152 k parameters",
    ),
}

DEFAULTS: dict[str, str] = {
    "digits": "digits",
    "cifar10": "vgg8",
    "svhn": "vgg8",
    "speech": "dscnn",
}


def build(name: str, classes: int, shape: Shape) -> nn.Module:
    """The network of that name for so many classes and examples of that (C, H, W).

    ``package.module:function`` is a function (or a class) of the user's own, which returns a
    network; it is given ``classes`` and ``shape`` by keyword, or those of the two that it takes.
    Its module may lie in the current directory.

    >>> build("vgg8", classes=10, shape=(1, 32, 32)).features[0]
    Conv2d(1, 128, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    >>> build("torch.nn:Identity", classes=10, shape=(3, 32, 32))
    Identity()
    """
    if not isinstance(name, str) or (name not in NETWORKS and ":" not in name):
        raise ValueError(
            f"model must be one of {', '.join(NETWORKS)}, or package.module:function for a network "
            f"of your own, but {name!r} was given."
        )
    if ":" in name:
        return _plugins.call(name, "model", nn.Module, classes=classes, shape=shape)
    entry = NETWORKS[name]
    fits = len(shape) == 3 and all(
        wanted in (None, given) for wanted, given in zip(entry.shape, shape, strict=True)
    )
    if not fits:
        wanted = "×".join("any" if size is None else str(size) for size in entry.shape)
        raise ValueError(
            f"model {name!r} takes examples of {wanted} (channels×height×width), but those of the "
            f"data are {'×'.join(map(str, shape))}; take another model, or one of your own, "
            "package.module:function."
        )
    return entry.make(classes, shape[0])


def default_for(data: str) -> str:
    """The name of the network that a data set is trained with unless another is asked for.

    >>> default_for("speech")
    'dscnn'
    """
    if data not in DEFAULTS:
        raise ValueError(f"data must be one of {', '.join(DEFAULTS)}, but {data!r} was given.")
    return DEFAULTS[data]


@torch.no_grad()
def last_layer(model: nn.Module, example: Tensor | None = None) -> str:
    """The name of the last Linear, Conv1d or Conv2d that is called for an example, or, without one,
    in the order of the model's modules: the layer that stays in float unless something else is
    asked for.

    >>> last_layer(vgg8())
    'classifier.6'
    """
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if example is not None:
        trial, called = copy.deepcopy(model).eval(), []
        for name in found:
            note = lambda *_, name=name: called.append(name)
            trial.get_submodule(name).register_forward_hook(note)
        trial(example)
        # Weights that are used as functions' arguments are not called; then the order must do.
        found = called or found
    if not found:
        raise ValueError(
            f"model must have a Linear, Conv1d or Conv2d, but {type(model).__name__} has none."
        )
    return found[-1]
