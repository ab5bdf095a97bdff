"""Exported networks as they are run elsewhere, for :func:`softstair.deploy.verify`."""

from pathlib import Path

import torch
from torch import Tensor

from softstair._errors import import_extra
from softstair.deploy.comparison import CLASS, Runner, layers
from softstair.deploy.network import IntegerNetwork

__all__ = ["by_c", "by_onnx"]


def by_onnx(network: IntegerNetwork, folder: Path) -> Runner:
    """ONNX Runtime, with its default options, on a file that shows its features as well."""
    from softstair.deploy import onnx

    runtime = import_extra("onnxruntime", "onnx")
    file = onnx.write(network, folder / "network.onnx", features=True)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    outputs = onnx.feature_outputs(network)
    names = {layer: outputs[layer] for layer in layers(network)}

    def run(x: Tensor) -> dict[str, Tensor]:
        asked = [*names.values(), "class"]
        given = session.run(asked, {session.get_inputs()[0].name: x.numpy()})
        *found, classes = map(torch.from_numpy, given)
        whole = [one if one.is_floating_point() else one.long() for one in found]
        return {**dict(zip(names, whole, strict=True)), CLASS: classes.long()}

    return run


def by_c(network: IntegerNetwork, folder: Path) -> Runner:
    """The C program, compiled here; once more with its features shown."""
    from softstair.deploy import c
    from softstair.deploy.c import build

    c.write(network, folder)
    program, traced = build.build(folder), build.build(folder, trace=True)
    names = layers(network)

    def run(x: Tensor) -> dict[str, Tensor]:
        features = build.features(traced, network, x)
        classes, _ = build.classes(program, x)
        classes = classes.reshape(len(x), *network.sizes[network.nodes[-1].name][1:])
        return {**{layer: features[layer] for layer in names}, CLASS: classes}

    return run
