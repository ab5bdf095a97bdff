"""Recipes with a name: the paper's three experiments, and the digits."""

from dataclasses import replace
from typing import Literal, get_args

from softstair.train.recipe import Recipe

__all__ = ["PRESETS", "PresetName", "preset"]

PresetName = Literal["digits", "paper-cifar10", "paper-svhn", "paper-speech"]

_CIFAR10 = Recipe(
    data="cifar10",
    model="vgg8",
    augment="crop-flip",
    centre_input=False,
    static_std=True,
    period=50.0,
    update="epoch",
    drop=400.0,
    batch=256,
    epochs=500,
)

PRESETS: dict[PresetName, Recipe] = {
    "digits": Recipe(),
    "paper-cifar10": _CIFAR10,
    # Digits that are flipped are no longer digits; the authors flipped them all the same.
    "paper-svhn": replace(_CIFAR10, data="svhn"),
    "paper-speech": replace(
        _CIFAR10,
        data="speech",
        model="dscnn",
        augment="none",
        weights="int4",
        weight_quantum=0.07,
        features="uint4",
        feature_quantum=0.07,
        period=10.0,
        drop=100.0,
        epochs=120,
    ),
}


def preset(name: str) -> Recipe:
    """The recipe of that name.

    >>> preset("paper-cifar10").rescaled(100).period
    10.0
    """
    for known, recipe in PRESETS.items():
        if known == name:
            return recipe
    raise ValueError(
        f"preset must be one of {', '.join(get_args(PresetName))}, but {name!r} was given."
    )
