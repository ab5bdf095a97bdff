"""Brevitas' layers with their default quantisers at 2 bits.

Weights: signed integers of a narrow range, so -1, 0 and 1, times the largest |w| of the layer.
Features: unsigned integers from 0 to 3, times a scale that is learned, after 300 steps in which it
follows a percentile of the features. These steps are counted in Python, so they are not captured.
"""

from torch import nn

from harness import Run

LEVELS = {
    "weights": "2 bits, narrow range: -1, 0, 1 times a scale",
    "features": "2 bits: 0, 1, 2, 3 times a scale",
    "weight_bits": 1.58,
    "feature_bits": 2,
}
RATE, WEIGHT_DECAY = 1e-3, 1e-4


def convert(run: Run) -> None:
    """Replace layers of the network by those of Brevitas, with the same weights."""
    try:
        import brevitas.nn as brevitas_nn
    except ImportError as error:
        raise ValueError(
            f"brevitas cannot be imported ({error}): pip install brevitas, or unpack its wheel and "
            "those of unfoldNd and dependencies 2.0.1 into a folder of PYTHONPATH"
        ) from None
    for name, layer in run.quantised_layers():
        if isinstance(layer, nn.Linear):
            sizes = (layer.in_features, layer.out_features)
            new = brevitas_nn.QuantLinear(*sizes, bias=False, weight_bit_width=2)
        else:
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
            settings = {"stride": layer.stride, "padding": layer.padding, "bias": False}
            new = brevitas_nn.QuantConv2d(*sizes, **settings, weight_bit_width=2)
        new.weight = layer.weight
        run.network.set_submodule(name, new)
    for name, module in list(run.network.named_modules()):
        if isinstance(module, nn.ReLU):
            run.network.set_submodule(name, brevitas_nn.QuantReLU(bit_width=2))


def train(run: Run) -> None:
    convert(run)
    run.network.to(run.device)
    optimiser = run.adamw()
    for share, indices in run.batches():
        run.set_cosine_rate(optimiser, share)
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()
