"""The operator table: what modules and functions do to quantised features.

Quantised features are integer multiples of a quantum. Each row of :data:`OPERATORS` is one
operation, which a network may call as a module or as a function. Its :class:`Effect` says what
:func:`softstair.quantise` does with the operation, and what its result is for quantised inputs:

========== ========================================= ===========================================
effect     quantise                                  result for quantised inputs
========== ========================================= ===========================================
WEIGHTS    replaces the module by ``replacement``    float: sums of features times weights
ACTIVATION calls a StairActivation in its place      quantised; in float, see ``effect_if_kept``
PASS       keeps it                                  the input itself
DROPOUT    keeps it                                  in evaluation, the input itself
MOVE       keeps it                                  elements of the input, and possibly zeros
JOIN       keeps it                                  the elements of all inputs
ADD        keeps it                                  sums of the inputs or of their negatives
AVERAGE    keeps it                                  multiples of a fraction of the quantum
FLOAT      keeps it; ``report`` shows ``why``        float
========== ========================================= ===========================================

An operation without a row is kept, and its result is float. So is the result of ADD with a Python
number, and of a dropout that is called as a function, unless evaluation turns it off.

In ``Conv2d → BatchNorm2d → ReLU → MaxPool2d → Linear``, for example, the rows conv2d and linear
(WEIGHTS) become StairConv2d and StairLinear, and relu (ACTIVATION) becomes a StairActivation.
BatchNorm (FLOAT) stays. max_pool2d (MOVE) stays and keeps features quantised: StairLinear therefore
knows the quantum of its input.

:mod:`~softstair.convert.sites` reads the table to choose what to replace,
:mod:`~softstair.convert.units` to derive the quanta of inputs, and :mod:`softstair.deploy.lowering`
to convert a trained network to integers.

To add an operation, add a row. Its name is the function's bare name: ``relu`` stands for
``F.relu``, ``torch.relu``, ``x.relu()`` and ``x.relu_()``. Deployment converts PASS and DROPOUT by
their effect, and other operations by name: each that is ``exact`` needs a case in
:mod:`softstair.deploy.lowering`. It takes a function for its module if the row has a
``module_of_call``. docs/layers.py writes the table of docs/layers.md from the rows, and
tests/deploy/test_rows.py exports a network for each.

>>> operator_of(nn.MaxPool2d(2)).effect.name
'MOVE'
>>> operator_named("concat").name
'cat'
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from softstair._projections import Projection
from softstair.convert.graph import GraphStep, by_mode
from softstair.nn import (
    StairConv1d,
    StairConv2d,
    StairConv3d,
    StairConvTranspose1d,
    StairConvTranspose2d,
    StairLayer,
    StairLinear,
    TokenAttention,
    TokenConv1D,
    TokenEmbedding,
    TokenLinear,
)


class Effect(Enum):
    """What an operation does to quantised features; the table above explains each."""

    WEIGHTS = auto()
    ACTIVATION = auto()
    PASS = auto()
    DROPOUT = auto()
    MOVE = auto()
    JOIN = auto()
    ADD = auto()
    AVERAGE = auto()
    FLOAT = auto()


@dataclass(frozen=True)
class Operator:
    """A row of the table."""

    name: str
    """Bare name of the function, or a capitalised name if no function has this row."""
    effect: Effect
    modules: tuple[type[nn.Module], ...] = ()
    """Module types that compute it. Subclasses have the same effect, but are never replaced, since
    their code may differ."""
    aliases: tuple[str, ...] = ()
    """Other bare names of the function; ``iadd`` is that of ``x += y``."""
    replacement: type[StairLayer] | None = None
    """For WEIGHTS: the quantised layer; None if the module stays in float."""
    grouped: type[Projection] | None = None
    """For WEIGHTS: the layer with weights in groups and features per token, if there is one."""
    effect_if_kept: Effect = Effect.FLOAT
    """For ACTIVATION: the effect of a call that stays in float."""
    is_gate: bool = False
    """For ACTIVATION: whether it is quantised by names of intN and uintN alone, and in float at the
    end of a network."""
    module_of_call: Callable[..., nn.Module] | None = None
    """The module that computes a call of the function, given its arguments after the first."""
    why: str = ""
    """For FLOAT and gates: the reason in the report; if empty, modules without parameters are not
    listed."""
    exact: bool = False
    """Whether deployment has an integer form of the operation."""
    not_in: tuple[str, ...] = ()
    """Formats that have no form of it: "C", "ONNX" or "QONNX"; they refuse it by name."""
    note: str = ""
    """For the documentation: the conditions of an export, or what is special."""
    keeps_order: bool = False
    """For FLOAT: whether it is left out of an export at the end of a network, since the order of
    the scores does not change."""

    @property
    def exports(self) -> bool:
        """Whether frozen networks have what ``quantise`` makes of it; ``not_in`` is about files."""
        return self.exact or self.passes or self.keeps_order or self.effect is Effect.ACTIVATION

    @property
    def fuses(self) -> bool:
        """Whether fused training may compute it together with its neighbours."""
        return self.effect is Effect.ACTIVATION or self.name in FUSED

    @property
    def passes(self) -> bool:
        """Whether its module returns its input in evaluation."""
        return self.effect in (Effect.PASS, Effect.DROPOUT)

    @property
    def axes(self) -> int:
        """The number of axes of a pooling's windows: its name ends in 1d or 2d."""
        return int(self.name[-2])


FUSED = ("linear", "conv2d", "batch_norm", "max_pool2d")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
ADAPTIVE_MAX_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
ADAPTIVE_AVG_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
NORM = "a normalisation of each example, which is not exported; use BatchNorm"
ATTENTION = "an attention is quantised by names, such as 'int8/float' or 'ternary/int8:token'"
CONV1D = "a Conv1D of Hugging Face is quantised by names, such as 'ternary/int8:token'"
EMBEDDING = "an embedding, which a pattern of its own quantises, such as {'*embed*': 'int8/float'}"
PRODUCT = "a product, not exported; write a * torch.sigmoid(b) of the parts of x.chunk(2, 1)"
CONSTANTS = "of features, or with a constant for all or for each channel"
DIVISIONS = ("truediv", "itruediv", "divide", "true_divide")
LAST = "at the end of a network, where it is left out; not exported elsewhere"
EQUAL = "with windows of equal size"
PLAIN = "without dilation and return_indices"
GATE = "a gate or a probability in float, which is not exported, except at the end of a network"
NAMED = f"{GATE}; features of intN or uintN by name quantise it"
PROBABILITIES: dict[str, type[nn.Module]] = {
    "softmax": nn.Softmax,
    "log_softmax": nn.LogSoftmax,
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "rrelu": nn.RReLU,
    "elu": nn.ELU,
    "celu": nn.CELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "softshrink": nn.Softshrink,
    "hardshrink": nn.Hardshrink,
    "tanhshrink": nn.Tanhshrink,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "tanh": nn.Tanh,
}
SELECTIONS = "chunk clone expand flip getitem narrow repeat roll split".split()
"""Functions that take features from other channels, rows or columns."""
NEAREST = "and `Upsample(mode='nearest')`, `F.interpolate` with this mode"
LINEAR = "`Upsample` and `F.interpolate` with mode linear or bilinear: to twice the size, "
LINEAR += "align_corners=False"
ZEROS = "`F.pad` with zeros, or with features: reflect, replicate and circular"
SHUFFLED = "where a channel shuffle or a flattening follows"
ALONG = "along channels, rows and columns, each by itself"
RESHAPES = "flatten unflatten contiguous reshape squeeze unsqueeze view".split()
"""Functions that keep the order of the elements."""
VECTOR = "to the same shape, or to a vector for each example"


def _max_pool(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return the function that takes the arguments in the order of F.max_pool1d and 2d."""

    def build(
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> nn.Module:
        return kind(kernel_size, stride, padding, dilation, return_indices, ceil_mode)

    return build


def _poolings(
    name: str,
    effect: Effect,
    kinds: tuple[type[nn.Module], ...],
    note: str,
    build: Callable[..., Callable[..., nn.Module]] = lambda kind: kind,
) -> list[Operator]:
    """Return the rows of a pooling along one axis and along two."""
    facts: dict[str, Any] = {"exact": True, "note": note}
    return [
        Operator(f"{name}{axes}d", effect, (kind,), module_of_call=build(kind), **facts)
        for axes, kind in enumerate(kinds, 1)
    ]


def _batch_norm(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> nn.Module:
    norm: Any = nn.SyncBatchNorm(len(running_var), eps, momentum)  # takes inputs of any shape
    norm.weight = None if weight is None else nn.Parameter(weight)
    norm.bias = None if bias is None else nn.Parameter(bias)
    norm.running_mean = None if training else running_mean
    norm.running_var = None if training else running_var
    return norm.eval()


def _elementwise(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    """Return the function that takes the arguments of an activation's function after the first."""

    def build(*arguments: Any, **settings: Any) -> nn.Module:
        # Booleans are ``inplace`` and ``training``, which change no value in evaluation.
        numbers = [value for value in arguments if not isinstance(value, bool)]
        return kind(*numbers, **{k: v for k, v in settings.items() if not isinstance(v, bool)})

    return build


def _gate(name: str, kind: type[nn.Module], **facts: Any) -> Operator:
    facts |= {"module_of_call": _elementwise(kind), "is_gate": True}
    return Operator(name, Effect.ACTIVATION, (kind,), why=NAMED, **facts)


def _prelu(weight: Any) -> nn.Module:
    module = nn.PReLU(weight.numel())
    module.weight = weight
    return module


OPERATORS = (
    Operator(
        "linear",
        Effect.WEIGHTS,
        (nn.Linear,),
        replacement=StairLinear,
        grouped=TokenLinear,
        exact=True,
    ),
    Operator("conv1d", Effect.WEIGHTS, (nn.Conv1d,), replacement=StairConv1d, exact=True),
    Operator("conv2d", Effect.WEIGHTS, (nn.Conv2d,), replacement=StairConv2d, exact=True),
    Operator("conv3d", Effect.WEIGHTS, (nn.Conv3d,), replacement=StairConv3d),
    *(
        Operator(name, Effect.WEIGHTS, (kind,), replacement=layer, exact=True)
        for name, kind, layer in (
            ("conv_transpose1d", nn.ConvTranspose1d, StairConvTranspose1d),
            ("conv_transpose2d", nn.ConvTranspose2d, StairConvTranspose2d),
        )
    ),
    Operator("bilinear", Effect.WEIGHTS, (nn.Bilinear,)),
    Operator("Embedding", Effect.WEIGHTS, (nn.Embedding,), why=EMBEDDING, grouped=TokenEmbedding),
    Operator("Conv1D", Effect.WEIGHTS, why=CONV1D, grouped=TokenConv1D),
    Operator(
        "multi_head_attention_forward",
        Effect.WEIGHTS,
        (nn.MultiheadAttention,),
        why=ATTENTION,
        grouped=TokenAttention,
    ),
    Operator(
        "relu",
        Effect.ACTIVATION,
        (nn.ReLU,),
        effect_if_kept=Effect.MOVE,  # x or 0
        module_of_call=nn.ReLU,
    ),
    *(
        Operator(name, Effect.ACTIVATION, (kind,), module_of_call=_elementwise(kind))
        for name, kind in ACTIVATIONS.items()
    ),
    Operator("prelu", Effect.ACTIVATION, (nn.PReLU,), module_of_call=_prelu),
    _gate("sigmoid", nn.Sigmoid, keeps_order=True),
    _gate("logsigmoid", nn.LogSigmoid, keeps_order=True, aliases=("log_sigmoid",)),
    _gate("hardsigmoid", nn.Hardsigmoid),
    Operator("Identity", Effect.PASS, (nn.Identity,)),
    Operator("dropout", Effect.DROPOUT, (nn.Dropout,)),
    Operator("dropout1d", Effect.DROPOUT, (nn.Dropout1d,)),
    Operator("dropout2d", Effect.DROPOUT, (nn.Dropout2d,)),
    Operator("dropout3d", Effect.DROPOUT, (nn.Dropout3d,)),
    Operator("alpha_dropout", Effect.DROPOUT, (nn.AlphaDropout,)),
    Operator("feature_alpha_dropout", Effect.DROPOUT, (nn.FeatureAlphaDropout,)),
    Operator("flatten", Effect.MOVE, (nn.Flatten,), exact=True, note=VECTOR),
    Operator("unflatten", Effect.MOVE, (nn.Unflatten,), exact=True, note=VECTOR),
    *(Operator(name, Effect.MOVE, exact=True, note=ALONG) for name in SELECTIONS),
    *(Operator(name, Effect.MOVE, exact=True, note=SHUFFLED) for name in ("permute", "transpose")),
    *(Operator(name, Effect.MOVE, exact=True, note=VECTOR) for name in RESHAPES[2:]),
    Operator(
        "pixel_shuffle",
        Effect.MOVE,
        (nn.PixelShuffle,),
        module_of_call=nn.PixelShuffle,
        exact=True,
    ),
    Operator("channel_shuffle", Effect.MOVE, (nn.ChannelShuffle,), exact=True),
    Operator("interpolate", Effect.MOVE, (nn.UpsamplingNearest2d,), exact=True, note=NEAREST),
    Operator("interpolate_linear", Effect.FLOAT, exact=True, note=LINEAR),
    Operator("pad", Effect.MOVE, (nn.ZeroPad1d, nn.ZeroPad2d), exact=True, note=ZEROS),
    Operator("CopyingPad", Effect.MOVE, (nn.ReflectionPad2d, nn.ReplicationPad2d), exact=True),
    *_poolings("max_pool", Effect.MOVE, (nn.MaxPool1d, nn.MaxPool2d), PLAIN, _max_pool),
    *_poolings("adaptive_max_pool", Effect.MOVE, ADAPTIVE_MAX_POOLS, EQUAL),
    Operator("cat", Effect.JOIN, aliases=("concat",), exact=True),
    Operator("stack", Effect.JOIN),
    Operator("add", Effect.ADD, aliases=("iadd",), exact=True, note=CONSTANTS),
    Operator("sub", Effect.ADD, aliases=("isub", "subtract"), exact=True, note=CONSTANTS),
    Operator("neg", Effect.ADD, aliases=("negative",), exact=True),
    # Deployment sums the integers and divides the quantum by the area.
    *_poolings("avg_pool", Effect.AVERAGE, (nn.AvgPool1d, nn.AvgPool2d), ""),
    # The size of their windows is not known before the input's.
    *_poolings("adaptive_avg_pool", Effect.FLOAT, ADAPTIVE_AVG_POOLS, EQUAL),
    Operator("mean", Effect.FLOAT, exact=True, note="over all positions"),
    # Not with the other normalisations: deployment folds it into thresholds.
    Operator(
        "batch_norm",
        Effect.FLOAT,
        BATCH_NORMS,
        module_of_call=_batch_norm,
        why="a normalisation",
        exact=True,
        note="after a layer with weights, or before an activation",
    ),
    Operator("OtherNorm", Effect.FLOAT, OTHER_NORMS, why=NORM),
    Operator("mul", Effect.FLOAT, aliases=("imul", "multiply"), exact=True, note=CONSTANTS),
    Operator("div", Effect.FLOAT, aliases=DIVISIONS, exact=True, note="by a constant"),
    Operator("glu", Effect.FLOAT, (nn.GLU,), why=PRODUCT),
    *(
        Operator(name, Effect.FLOAT, (kind,), why=GATE, keeps_order=True, note=LAST)
        for name, kind in PROBABILITIES.items()
    ),
)
CONV1D_CLASS = "transformers.pytorch_utils.Conv1D"
COMPOSITES = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip
"""Modules of torch whose own modules are quantised. torch.fx takes each for one operation."""
UNKNOWN = Operator("", Effect.FLOAT)
"""The row of every operation that is not in the table."""

_BY_MODULE = {module: operator for operator in OPERATORS for module in operator.modules}
_BY_NAME = {name: operator for operator in OPERATORS for name in (operator.name, *operator.aliases)}


def operator_of(module: nn.Module) -> Operator:
    """Return the row of a module's type or of its nearest base class; else :data:`UNKNOWN`."""
    if f"{type(module).__module__}.{type(module).__name__}" == CONV1D_CLASS:
        return _BY_NAME["Conv1D"]
    if isinstance(module, nn.Upsample):
        return operator_named(by_mode("interpolate", module.mode))
    rows = (_BY_MODULE[base] for base in type(module).__mro__ if base in _BY_MODULE)
    return next(rows, UNKNOWN)


def operator_named(function: str | None) -> Operator:
    """Return the row of a function by its bare name; else :data:`UNKNOWN`."""
    return _BY_NAME.get(function or "", UNKNOWN)


def called(net: nn.Module, step: GraphStep) -> tuple[nn.Module | None, Operator]:
    """Return the module that a step calls, None if it is a function, and its row."""
    module = None if step.module is None else net.get_submodule(step.module)
    return module, operator_named(step.function) if module is None else operator_of(module)
