"""Brevitas' layers with its default quantisers, and with those of its network CNV (``ternary``).

Default: weights are signed integers of a narrow range, with 2 bits -1, 0, 1, times the largest |w|
of a layer. Features are unsigned, times a scale that is learned, after 300 steps in which it is a
percentile of the features. Python counts these steps, so only later ones are captured.
CNV: -1, 0, 1 times 0.1 for weights, which are clipped to ±0.1, and -1, 0, 1 for features. It is
trained at 0.02 quanta. As in softstair, 0.7 of a layer's mean |w| begins on the threshold.
"""

from torch import nn

from benchmarks.baselines.harness import Run

RATES, WEIGHT_DECAY = {"ternary": 2e-3, "ternary/uint2": 1e-3, "int4": 1e-3}, 1e-4
CNV_SCALE = 0.1


def convert(run: Run, bits: str) -> None:
    """Replace layers of the network by those of Brevitas, with the same weights."""
    try:
        import brevitas.nn as brevitas_nn
        from brevitas import quant
    except ImportError as error:
        raise ValueError(
            f"brevitas cannot be imported ({error}): pip install brevitas, or unpack its wheel and "
            "those of unfoldNd and dependencies 2.0.1 into a folder of PYTHONPATH"
        ) from None
    width = 4 if bits == "int4" else 2
    settings, feature = {"weight_bit_width": width}, brevitas_nn.QuantReLU
    if is_cnv := bits == "ternary":
        settings = {"weight_quant": quant.SignedTernaryWeightPerTensorConst}
        feature = lambda **_: brevitas_nn.QuantIdentity(quant.SignedTernaryActPerTensorConst)
    for name, layer in run.quantised_layers():
        names = ("in_features", "out_features")
        if isinstance(layer, nn.Conv2d):
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
        kind = getattr(brevitas_nn, f"Quant{type(layer).__name__}")
        new = kind(**{key: getattr(layer, key) for key in names}, bias=False, **settings)
        new.weight = layer.weight
        if is_cnv:
            new.weight.data *= CNV_SCALE / 2 / (0.7 * new.weight.abs().mean().item())
        run.network.set_submodule(name, new)
    for name, module in list(run.network.named_modules()):
        if isinstance(module, nn.ReLU):
            run.network.set_submodule(name, feature(bit_width=width))
    run.network.to(run.device)


def train(run: Run, bits: str) -> None:
    convert(run, bits)
    run.fit(run.adamw(), warm_up=300, compiles=False)
