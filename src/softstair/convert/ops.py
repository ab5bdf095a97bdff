"""The operator table: what modules and functions do to quantised features.

Quantised features are integer multiples of a quantum. Each row of :data:`OPERATORS` is one
operation, which a network may call as a module or as a function. Its :class:`Effect` says what
:func:`softstair.quantise` does with the operation, and what its result is for quantised inputs:

========== ========================================= ===========================================
effect     quantise                                  result for quantised inputs
========== ========================================= ===========================================
WEIGHTS    replaces the module by ``replacement``    float: sums of features times weights
ACTIVATION replaces the call by a StairActivation    quantised; if kept, see ``effect_if_kept``
PASS       keeps it                                  the input itself
DROPOUT    keeps it                                  in evaluation, the input itself
MOVE       keeps it                                  elements of the input, and possibly zeros
JOIN       keeps it                                  the elements of all inputs
ADD        keeps it                                  sums of the inputs or of their negatives
AVERAGE    keeps it                                  multiples of a fraction of the quantum
FLOAT      keeps it; ``report`` shows ``why``        float
========== ========================================= ===========================================

An operation without a row is kept, and its result is float. So is the result of ADD with a Python
number, and of a dropout that is called as a function.

In ``Conv2d → BatchNorm2d → ReLU → MaxPool2d → Linear``, for example, the rows conv2d and linear
(WEIGHTS) become StairConv2d and StairLinear, and relu (ACTIVATION) becomes a StairActivation.
BatchNorm (FLOAT) stays. max_pool2d (MOVE) stays and keeps features quantised: StairLinear therefore
knows the quantum of its input.

:mod:`~softstair.convert.sites` reads the table to choose what to replace and to derive the quanta
of inputs, :mod:`~softstair.convert.rewrite` to replace functional dropouts by modules, and
:mod:`softstair.deploy.integer` to convert a trained network to integers.

To add an operation, add a row. Its name is the function's bare name: ``relu`` stands for
``F.relu``, ``torch.relu``, ``x.relu()`` and ``x.relu_()``. Deployment converts PASS and DROPOUT by
their effect, and other operations by name: each needs a case in :mod:`softstair.deploy.integer`.

>>> operator_of(nn.MaxPool2d(2)).effect.name
'MOVE'
>>> operator_named("concat").name
'cat'
"""

from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from softstair.nn import StairConv1d, StairConv2d, StairLayer, StairLinear


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
    effect_if_kept: Effect = Effect.FLOAT
    """For ACTIVATION: the effect of a call that is not replaced."""
    why: str = ""
    """For FLOAT: the reason in the report; if empty, modules without parameters are not listed."""

    @property
    def axes(self) -> int:
        """The number of axes of a pooling's windows: its name ends in 1d or 2d."""
        return int(self.name[-2])


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
GATES = (nn.Sigmoid, nn.Hardsigmoid, nn.Softmax, nn.LogSigmoid)
MOVE_FUNCTIONS = (
    "chunk clone contiguous expand flip getitem narrow permute repeat reshape roll split squeeze "
    "transpose unsqueeze view"
).split()

OPERATORS = (
    Operator("linear", Effect.WEIGHTS, (nn.Linear,), replacement=StairLinear),
    Operator("conv1d", Effect.WEIGHTS, (nn.Conv1d,), replacement=StairConv1d),
    Operator("conv2d", Effect.WEIGHTS, (nn.Conv2d,), replacement=StairConv2d),
    Operator("bilinear", Effect.WEIGHTS, (nn.Bilinear,)),
    Operator("relu", Effect.ACTIVATION, (nn.ReLU,), effect_if_kept=Effect.MOVE),  # x or 0
    Operator("relu6", Effect.ACTIVATION, (nn.ReLU6,)),
    Operator("leaky_relu", Effect.ACTIVATION, (nn.LeakyReLU,)),
    Operator("rrelu", Effect.ACTIVATION, (nn.RReLU,)),
    Operator("elu", Effect.ACTIVATION, (nn.ELU,)),
    Operator("celu", Effect.ACTIVATION, (nn.CELU,)),
    Operator("selu", Effect.ACTIVATION, (nn.SELU,)),
    Operator("gelu", Effect.ACTIVATION, (nn.GELU,)),
    Operator("silu", Effect.ACTIVATION, (nn.SiLU,)),
    Operator("mish", Effect.ACTIVATION, (nn.Mish,)),
    Operator("softplus", Effect.ACTIVATION, (nn.Softplus,)),
    Operator("hardswish", Effect.ACTIVATION, (nn.Hardswish,)),
    Operator("hardtanh", Effect.ACTIVATION, (nn.Hardtanh,)),
    Operator("tanh", Effect.ACTIVATION, (nn.Tanh,)),
    Operator("Identity", Effect.PASS, (nn.Identity,)),
    Operator("dropout", Effect.DROPOUT, (nn.Dropout,)),
    Operator("dropout1d", Effect.DROPOUT, (nn.Dropout1d,)),
    Operator("dropout2d", Effect.DROPOUT, (nn.Dropout2d,)),
    Operator("dropout3d", Effect.DROPOUT, (nn.Dropout3d,)),
    Operator("alpha_dropout", Effect.DROPOUT, (nn.AlphaDropout,)),
    Operator("feature_alpha_dropout", Effect.DROPOUT, (nn.FeatureAlphaDropout,)),
    Operator("flatten", Effect.MOVE, (nn.Flatten,)),
    Operator("unflatten", Effect.MOVE, (nn.Unflatten,)),
    *(Operator(name, Effect.MOVE) for name in MOVE_FUNCTIONS),
    Operator("pixel_shuffle", Effect.MOVE, (nn.PixelShuffle,)),
    Operator("channel_shuffle", Effect.MOVE, (nn.ChannelShuffle,)),
    # Modules only: F.pad may pad with any number.
    Operator("ZeroPad", Effect.MOVE, (nn.ZeroPad1d, nn.ZeroPad2d)),
    Operator("CopyingPad", Effect.MOVE, (nn.ReflectionPad2d, nn.ReplicationPad2d)),
    Operator("max_pool1d", Effect.MOVE, (nn.MaxPool1d,)),
    Operator("max_pool2d", Effect.MOVE, (nn.MaxPool2d,)),
    Operator("adaptive_max_pool1d", Effect.MOVE, (nn.AdaptiveMaxPool1d,)),
    Operator("adaptive_max_pool2d", Effect.MOVE, (nn.AdaptiveMaxPool2d,)),
    Operator("cat", Effect.JOIN, aliases=("concat",)),
    Operator("stack", Effect.JOIN),
    Operator("add", Effect.ADD, aliases=("iadd",)),
    Operator("sub", Effect.ADD, aliases=("isub",)),
    Operator("neg", Effect.ADD),
    # Deployment sums the integers and divides the quantum by the area.
    Operator("avg_pool1d", Effect.AVERAGE, (nn.AvgPool1d,)),
    Operator("avg_pool2d", Effect.AVERAGE, (nn.AvgPool2d,)),
    # The size of their windows is not known before the input's.
    Operator("adaptive_avg_pool1d", Effect.FLOAT, (nn.AdaptiveAvgPool1d,)),
    Operator("adaptive_avg_pool2d", Effect.FLOAT, (nn.AdaptiveAvgPool2d,)),
    # Not with the other normalisations: deployment folds it into thresholds.
    Operator("BatchNorm", Effect.FLOAT, BATCH_NORMS, why="a normalisation"),
    Operator("OtherNorm", Effect.FLOAT, OTHER_NORMS, why="a normalisation"),
    Operator("Gate", Effect.FLOAT, GATES, why="a gate or a probability, not a feature"),
)
UNKNOWN = Operator("", Effect.FLOAT)
"""The row of every operation that is not in the table."""

_BY_MODULE = {module: operator for operator in OPERATORS for module in operator.modules}
_BY_NAME = {name: operator for operator in OPERATORS for name in (operator.name, *operator.aliases)}


def operator_of(module: nn.Module) -> Operator:
    """Return the row of a module's type or of its nearest base class; else :data:`UNKNOWN`."""
    rows = (_BY_MODULE[base] for base in type(module).__mro__ if base in _BY_MODULE)
    return next(rows, UNKNOWN)


def operator_named(function: str | None) -> Operator:
    """Return the row of a function by its bare name; else :data:`UNKNOWN`."""
    return _BY_NAME.get(function or "", UNKNOWN)
