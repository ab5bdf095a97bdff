"""The operator table: what modules and functions do to quantised features.

Features are quantised if they are integer multiples of a quantum. Each row of :data:`OPERATORS` is
one operation, called as a module or as a function. Its :class:`Effect` says what
:func:`softstair.quantise` does with the operation and what becomes of quantised features in it:

========== ===================================== ===============================================
effect     quantise                              quantised features
========== ===================================== ===============================================
WEIGHTS    replaces the module: ``replacement``  are multiplied by weights and summed
ACTIVATION replaces the call: StairActivation    not replaced: see ``in_float``
PASS       leaves it                             are returned as they are
DROPOUT    leaves it                             are returned as they are, in evaluation
MOVE       leaves it                             are selected or rearranged, perhaps with zeros
JOIN       leaves it                             of several inputs are put side by side
ADD        leaves it                             of several inputs are added or subtracted
AVERAGE    leaves it                             become float (deployment keeps their sums)
NORMALISE  leaves it, reports ``why``            become float
FLOAT      leaves it, reports ``why``            become float
========== ===================================== ===============================================

An operation without a row is left as it is, and its results are float. Conversion, deployment and
fusing all read this table.

To add an operation, add a row. Its name is the function's bare name: ``relu`` stands for
``F.relu``, ``torch.relu``, ``x.relu()`` and ``x.relu_()``. If deployment has to do more than return
its input, add a handler for that name there.

>>> operator_of(nn.MaxPool2d(2)).effect.name
'MOVE'
>>> operator_named("concat").name
'cat'
"""

from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from softstair.nn import StairConv1d, StairConv2d, StairLayer, StairLinear

__all__ = ["OPERATORS", "UNKNOWN", "Effect", "Operator", "operator_named", "operator_of"]


class Effect(Enum):
    """What becomes of quantised features in an operation; see the table above."""

    WEIGHTS = auto()
    ACTIVATION = auto()
    PASS = auto()
    DROPOUT = auto()
    MOVE = auto()
    JOIN = auto()
    ADD = auto()
    AVERAGE = auto()
    NORMALISE = auto()
    FLOAT = auto()


@dataclass(frozen=True)
class Operator:
    """A row of the table."""

    name: str
    """Bare name of the function; a capitalised name if only modules compute it."""
    effect: Effect
    modules: tuple[type[nn.Module], ...] = ()
    """Module types that compute it. Subclasses have the same effect, but are never replaced."""
    aliases: tuple[str, ...] = ()
    """Other names of the function."""
    replacement: type[StairLayer] | None = None
    """For WEIGHTS: the quantised layer. Without one the module stays in float."""
    in_float: Effect = Effect.FLOAT
    """For ACTIVATION: the effect where the activation is not replaced."""
    why: str = ""
    """For NORMALISE and FLOAT: why it stays in float."""


WEIGHTS, ACTIVATION, DROPOUT, MOVE = Effect.WEIGHTS, Effect.ACTIVATION, Effect.DROPOUT, Effect.MOVE
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
GATES = (nn.Sigmoid, nn.Hardsigmoid, nn.Softmax, nn.LogSigmoid)

OPERATORS = (
    Operator("linear", WEIGHTS, (nn.Linear,), replacement=StairLinear),
    Operator("conv1d", WEIGHTS, (nn.Conv1d,), replacement=StairConv1d),
    Operator("conv2d", WEIGHTS, (nn.Conv2d,), replacement=StairConv2d),
    Operator("bilinear", WEIGHTS, (nn.Bilinear,)),
    Operator("relu", ACTIVATION, (nn.ReLU,), in_float=MOVE),  # selects x or 0
    Operator("relu6", ACTIVATION, (nn.ReLU6,)),
    Operator("leaky_relu", ACTIVATION, (nn.LeakyReLU,)),
    Operator("rrelu", ACTIVATION, (nn.RReLU,)),
    Operator("elu", ACTIVATION, (nn.ELU,)),
    Operator("celu", ACTIVATION, (nn.CELU,)),
    Operator("selu", ACTIVATION, (nn.SELU,)),
    Operator("gelu", ACTIVATION, (nn.GELU,)),
    Operator("silu", ACTIVATION, (nn.SiLU,)),
    Operator("mish", ACTIVATION, (nn.Mish,)),
    Operator("softplus", ACTIVATION, (nn.Softplus,)),
    Operator("hardswish", ACTIVATION, (nn.Hardswish,)),
    Operator("hardtanh", ACTIVATION, (nn.Hardtanh,)),
    Operator("tanh", ACTIVATION, (nn.Tanh,)),
    Operator("Identity", Effect.PASS, (nn.Identity,)),
    Operator("dropout", DROPOUT, (nn.Dropout,)),
    Operator("dropout1d", DROPOUT, (nn.Dropout1d,)),
    Operator("dropout2d", DROPOUT, (nn.Dropout2d,)),
    Operator("dropout3d", DROPOUT, (nn.Dropout3d,)),
    Operator("alpha_dropout", DROPOUT, (nn.AlphaDropout,)),
    Operator("feature_alpha_dropout", DROPOUT, (nn.FeatureAlphaDropout,)),
    Operator("contiguous", MOVE),
    Operator("clone", MOVE),
    Operator("flatten", MOVE, (nn.Flatten,)),
    Operator("unflatten", MOVE, (nn.Unflatten,)),
    Operator("reshape", MOVE),
    Operator("view", MOVE),
    Operator("squeeze", MOVE),
    Operator("unsqueeze", MOVE),
    Operator("permute", MOVE),
    Operator("transpose", MOVE),
    Operator("getitem", MOVE),
    Operator("narrow", MOVE),
    Operator("chunk", MOVE),
    Operator("split", MOVE),
    Operator("expand", MOVE),
    Operator("repeat", MOVE),
    Operator("roll", MOVE),
    Operator("flip", MOVE),
    Operator("pixel_shuffle", MOVE, (nn.PixelShuffle,)),
    Operator("channel_shuffle", MOVE, (nn.ChannelShuffle,)),
    # Not F.pad, which may pad with any number.
    Operator("ZeroPad", MOVE, (nn.ZeroPad1d, nn.ZeroPad2d)),
    Operator("CopyingPad", MOVE, (nn.ReflectionPad2d, nn.ReplicationPad2d)),
    Operator("max_pool1d", MOVE, (nn.MaxPool1d,)),
    Operator("max_pool2d", MOVE, (nn.MaxPool2d,)),
    Operator("adaptive_max_pool1d", MOVE, (nn.AdaptiveMaxPool1d,)),
    Operator("adaptive_max_pool2d", MOVE, (nn.AdaptiveMaxPool2d,)),
    Operator("cat", Effect.JOIN, aliases=("concat",)),
    Operator("stack", Effect.JOIN),
    Operator("add", Effect.ADD, aliases=("iadd",)),
    Operator("sub", Effect.ADD, aliases=("isub",)),
    Operator("neg", Effect.ADD),
    Operator("avg_pool2d", Effect.AVERAGE, (nn.AvgPool2d,)),
    Operator("adaptive_avg_pool2d", Effect.AVERAGE, (nn.AdaptiveAvgPool2d,)),
    Operator("BatchNorm", Effect.NORMALISE, NORMS, why="a normalisation"),
    Operator("OtherNorm", Effect.FLOAT, OTHER_NORMS, why="a normalisation"),
    Operator("Gate", Effect.FLOAT, GATES, why="a gate or a probability, not a feature"),
)
UNKNOWN = Operator("", Effect.FLOAT)
"""What modules and functions without a row have."""

_BY_MODULE = {module: operator for operator in OPERATORS for module in operator.modules}
_BY_NAME = {name: operator for operator in OPERATORS for name in (operator.name, *operator.aliases)}


def operator_of(module: nn.Module) -> Operator:
    """Return the row of a module's type, or of its nearest base class that has one."""
    rows = (_BY_MODULE[kind] for kind in type(module).__mro__ if kind in _BY_MODULE)
    return next(rows, UNKNOWN)


def operator_named(function: str | None) -> Operator:
    """Return the row of a function, by its bare name."""
    return _BY_NAME.get(function or "", UNKNOWN)
