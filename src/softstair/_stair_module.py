"""Modules with a stair and its noise, and what of them is saved and loaded."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from softstair import _check, kernels, noise as noises
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum, shifted
from softstair.kernels import SoftStair
from softstair.noise import Noise
from softstair.regularise import FORWARDS, Forward, apply, regularise
from softstair.stair import Stair

EXTRA_STATE = "_extra_state"  # torch's key of get_extra_state in a state dict


def call_node(module: nn.Module, x: Any) -> Any:
    """Return the call of a module as one node, while torch.fx traces the network around it."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x,), {})


class StairModule(nn.Module):
    """A stair with its noise: the base class of :class:`StairActivation` and :class:`StairWeight`.

    Args:
        stair: The stair.
        noise: A family of noise, or its name.
        forward: What it computes in training; see :func:`softstair.regularise`.
        layer: The number of its quantised layer, in order of execution.
        mean: The first mean of the noise, in quanta.
        std: The first standard deviation, in quanta; by default 95 % of the noise is within half a
            quantum.
        scheduled: Whether an annealer moves the noise; not that of a straight-through estimator.
        gradient_margin: Number of levels that are added to each end of the stair in the backward
            pass only. Outputs stay the same, and gradients pass that many quanta farther. It has
            no effect with the forward ``"expectation"``.

    Attributes:
        annealed: Whether the noise is gone. The output then has no gradient and stores none.
        log_ratio: If the quantum is learned, see :meth:`learn_quantum`: the parameter ln(ε/ε₀).
    """

    mean: Tensor
    std: Tensor
    quantum: Tensor
    log_ratio: nn.Parameter | None
    gradient_margin: int = 0
    _longer: tuple[Stair, Stair] | None = None  # with the extra levels; the second in quanta

    def __init__(
        self,
        stair: Stair,
        noise: Noise | str = "uniform",
        forward: Forward = "mode",
        layer: int = 0,
        mean: float = 0.0,
        std: float | None = None,
        scheduled: bool = True,
        gradient_margin: int = 0,
    ) -> None:
        super().__init__()
        _check.choice("forward", forward, FORWARDS)
        self.noise = noises.get(noise)
        std = self.noise.std_within(0.5) if std is None else std
        if not isinstance(stair, Stair):
            raise _check.wrong("stair", stair, "a softstair.Stair")
        _check.integer("layer", layer, 0)
        if _check.integer("gradient_margin", gradient_margin, 0) and len(stair) < 3:
            raise _check.wrong("gradient_margin", gradient_margin, "0 for a stair of two levels")
        _check.number("mean", mean, -noises.LARGEST, noises.LARGEST)
        _check.number("std", std, 0, noises.LARGEST)
        self.strategy, self.layer, self.gradient_margin = forward, layer, gradient_margin
        self._set_stair(stair)
        self.scheduled, self.annealed = scheduled, False
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))
        self.register_buffer("quantum", torch.tensor(stair.quantum, dtype=torch.float32))
        self.register_parameter("log_ratio", None)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        if not self.training:
            return kernels.hard(input, self.stair)
        if self.log_ratio is None:
            mean, std = (self._absolute(quanta, input) for quanta in (self.mean, self.std))
            return self._regularise(input, self.stair, mean, std)
        # ε·S(x/ε), with S the stair in quanta: ∂/∂ε is S(x/ε) − (x/ε)·S′(x/ε).
        is_weight, axis = isinstance(self, StairWeight), self.stair.axis
        quantum = self.scaled_quantum(math.prod(input.shape[0 if is_weight else 1 :]))
        if axis is not None:
            axis %= input.dim()
            quantum = quantum.reshape([-1 if d == axis else 1 for d in range(input.dim())])
        x = input.to(torch.promote_types(input.dtype, torch.float32)) / quantum
        y = self._regularise(x, self.unit_stair, self.mean, self.std)
        return (y * quantum).to(input.dtype)

    def _regularise(self, x: Tensor, stair: Stair, mean: Tensor, std: Tensor) -> Tensor:
        if self.annealed:
            forward = "hard" if self.strategy == "hard" else "mode"
            return kernels.value(x.detach(), SoftStair(stair, self.noise, mean, 0.0), forward)
        longer = self.longer_stair(stair is not self.stair)
        if longer is None:
            return regularise(x, stair, self.noise, mean, std, self.strategy)
        noise = (self.noise, mean, std)
        return apply(x, SoftStair(stair, *noise), SoftStair(longer, *noise), self.strategy)

    def longer_stair(self, in_quanta: bool) -> Stair | None:
        """Return the stair with extra levels, whose gradient is used; None if there is none."""
        if self._longer is None or self.strategy == "expectation":
            return None
        return self._longer[in_quanta]

    def _set_stair(self, stair: Stair) -> None:
        """Set the stair and those with extra levels, so that no forward pass has to make them."""
        self.stair = stair
        if count := self.gradient_margin:
            unit = stair.with_quantum(1.0)
            self._longer = lengthened(stair, count), lengthened(unit, count)

    def learn_quantum(self, log_ratio: nn.Parameter | None = None) -> nn.Parameter:
        """Make the quantum a parameter: ε = ε₀·exp(``log_ratio``), with ε₀ = ``quantum``.

        A step of the optimiser is then relative to the quantum, which stays above 0, and weight
        decay leads back to ε₀. As in LSQ, the gradient is divided by √(N·Q), with N inputs of an
        example that share the quantum and the highest level Q in quanta. Without noise it is 0.

        Args:
            log_ratio: The parameter of other stairs with the same quantum, to share it.

        Returns:
            The parameter ``log_ratio``; 0 at first.
        """
        own = nn.Parameter(torch.zeros_like(self.quantum)) if log_ratio is None else log_ratio
        self.log_ratio, self.unit_stair = own, self.stair.with_quantum(1.0)
        return own

    def present_quantum(self) -> Tensor:
        """Return the quantum as it is learned, in float32, without waiting for the device."""
        return self.quantum if self.log_ratio is None else self.quantum * self.log_ratio.exp()

    def scaled_quantum(self, inputs: int) -> Tensor:
        """Return the learned quantum, with its gradient scaled for so many inputs of an example."""
        quantum = self.present_quantum()
        highest = abs(self.unit_stair.levels[-1]) or 1.0
        scale = (self.std > 0) / math.sqrt(highest * max(inputs // quantum.numel(), 1))
        fixed = quantum.detach()
        return fixed if self.annealed else fixed + (quantum - fixed) * scale.to(fixed.dtype)

    def final_quantum(self) -> Tensor:
        """Return the quantum of ``eval()``: as it is learned, the same number on every device."""
        if self.log_ratio is None:
            return self.quantum
        return learned_quantum(self.quantum, self.log_ratio.detach())

    def synchronise(self) -> None:
        """Give the stair the quantum as it is learned, rounded to float32; ``eval()`` does so."""
        if self.log_ratio is not None:
            values = self.final_quantum().double()
            if len(wrong := values[~((values > 0) & values.isfinite())]):
                problem = f"training diverged: a learned quantum became {float(wrong[0]):g}"
                raise SoftstairError(f"{problem}. Train again with a lower learning rate.")
            quantum = tuple(values.tolist()) if values.dim() else float(values)
            if quantum != self.stair.quantum:
                self._set_stair(self.stair.with_quantum(quantum, self.stair.axis))

    def train(self, mode: bool = True) -> Any:
        """Set the mode; in ``eval()`` the stair has the quantum as it was learned."""
        if not mode:
            self.synchronise()
        return super().train(mode)

    def _absolute(self, quanta: Tensor, x: Tensor) -> Tensor:
        """Return a number of quanta in the units of x."""
        unit = self.stair.quantum
        if isinstance(unit, float):
            return quanta if unit == 1.0 else quanta * unit
        by_channel = kernels.channel_quanta(self.stair, x)
        assert by_channel is not None
        return quanta * by_channel.to(quanta.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the noise with the network, in float32: bfloat16 would round the schedule."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        ratio = None if self.log_ratio is None else self.log_ratio.data
        super()._apply(fn, recurse)
        for name, before in buffers.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        if ratio is not None and self.log_ratio is not None:
            self.log_ratio.data = ratio.to(self.log_ratio.device)
        return self

    def set_quantum(self, quantum: float | Sequence[float]) -> None:
        """Give the stair another quantum, rounded to float32; its levels stay the same in quanta.

        Layers that read the features must learn of it: call ``set_input_units`` afterwards.

        Args:
            quantum: The quantum, or one per channel.
        """
        new = torch.tensor(quantum, dtype=torch.float32)
        self._set_stair(self.stair.with_quantum(new.double().tolist()))
        if new.shape == self.quantum.shape:
            self.quantum.copy_(new)  # a captured step reads the buffer where it is
        else:
            self.quantum = new.to(self.quantum.device)
        if self.log_ratio is not None:
            self.log_ratio.data = torch.zeros_like(self.quantum)

    def get_extra_state(self) -> Tensor:
        """Return the stair as a tensor."""
        self.synchronise()
        return self.stair.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Take the stair of a checkpoint; raise SoftstairError if it does not fit the network."""
        stair = Stair.from_tensor(state, self.stair.axis)
        if stair != self.stair:
            self._take_stair(stair)

    def _take_stair(self, stair: Stair) -> None:
        """Take the quantum of a checkpoint, which is trained state, but no other levels."""
        own, new = (s.with_quantum(1.0).to_tensor() for s in (self.stair, stair))
        is_alike = torch.tensor(stair.quantum).shape == self.quantum.shape and len(own) == len(new)
        if not is_alike or not torch.allclose(own, new, rtol=1e-9, atol=0):
            problem = f"must be {self.stair}, the network's, but the checkpoint has {stair}"
            raise _check.invalid("stair", f"{problem}; quantise the model with that one")
        self._set_stair(stair)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load noise and stair, which a checkpoint of the float network does not have."""
        if not any(key.rpartition(".")[2] == "std" for key in state_dict):
            return
        *_, errors = args
        own = self.quantum.clone()
        quantum, ratio = f"{prefix}quantum", f"{prefix}log_ratio"
        if self.log_ratio is not None:  # a quantum that was not learned is its start
            state_dict.setdefault(ratio, torch.zeros_like(self.log_ratio))
        elif ratio in state_dict and quantum in state_dict:
            state_dict[quantum] = learned_quantum(state_dict[quantum], state_dict.pop(ratio))
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
            self.synchronise()
        except SoftstairError as error:
            errors.append(f"{prefix}{error}")
            self.quantum.copy_(own)

    def extra_repr(self) -> str:
        kind = type(self.noise).__name__.lower()
        return f"{self.stair}, noise={kind}, forward={self.strategy}, layer={self.layer}"


def lengthened(stair: Stair, levels: int) -> Stair:
    """Return the stair with ``levels`` more levels at each end, spaced as the outermost two.

    >>> lengthened(Stair.ternary(), 1).thresholds
    (-1.5, -0.5, 0.5, 1.5)
    """
    q, t = stair.levels, stair.thresholds
    for _ in range(levels):
        q, t = ((2 * v[0] - v[1], *v, 2 * v[-1] - v[-2]) for v in (q, t))
    return Stair(q, t, stair.quantum, stair.axis)


def learned_quantum(quantum: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the learned quantum in float32, rounded to the same number on every device."""
    return (quantum.cpu().double() * log_ratio.cpu().double().exp()).float()


class StairActivation(StairModule):
    """The quantised features of a layer: a stair instead of an activation function, or after one.

    >>> activation = StairActivation(Stair.ternary(), "uniform").eval()
    >>> activation(torch.tensor([-0.7, 0.2, 0.9]))
    tensor([-1.,  0.,  1.])

    Attributes:
        function: The activation function that is kept before the stair; None if there is none.
        follows_range: Whether calibration chooses the lowest level too.
    """

    function: nn.Module | None
    follows_range = False

    def __init__(
        self, stair: Stair, *arguments: Any, function: nn.Module | None = None, **settings: Any
    ) -> None:
        super().__init__(stair, *arguments, **settings)
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        if self.function is None or isinstance(input, fx.Proxy):
            return super().forward(input)
        return super().forward(self.function(input))

    def begin(self, lowest: int) -> None:
        """Let the levels begin at so many quanta."""
        self._set_stair(shifted(self.stair, lowest))
        self.unit_stair = self.stair.with_quantum(1.0)

    def set_range(self, quantum: float, lowest: int) -> None:
        """Set the quantum, and the lowest level in quanta."""
        self.begin(lowest)
        super().set_quantum(quantum)

    def set_quantum(self, quantum: float | Sequence[float]) -> None:
        """Set the quantum; with a larger one, a range that calibration chose begins as before."""
        if self.follows_range and isinstance(quantum, float) and self.stair.integers is not None:
            self.begin(max(round(self.stair.levels[0] / quantum), self.stair.integers[0]))
        super().set_quantum(quantum)

    def _take_stair(self, stair: Stair) -> None:
        if self.follows_range and stair.integers is not None:
            self.begin(stair.integers[0])
        super()._take_stair(stair)


class StairWeight(StairModule):
    """The quantised weights of a layer: a stair between the parameter and the sum.

    Its state holds ``quantum``, which a fit may have chosen, and ``shifted``: whether the weights
    were moved by the first mean of their noise.

    Attributes:
        fit: Whether the quantum was fitted to the weights of the ``"layer"`` or of each
            ``"channel"``. It is fitted again if a checkpoint of the float network is loaded.
    """

    shifted: Tensor
    fit: Literal["layer", "channel"] | None = None

    def __init__(self, stair: Stair, *arguments: Any, **settings: Any) -> None:
        super().__init__(stair, *arguments, **settings)
        self.register_buffer("shifted", torch.tensor(False))

    def in_groups(self, weight: Tensor) -> Tensor:
        """Return the weights in the shape that the stair takes."""
        return weight

    def index(self, weight: Tensor) -> Tensor:
        """Return the number of each weight's level, in the shape that the stair takes."""
        return self.stair.index(weight)

    def integers(self, weight: Tensor) -> Tensor | None:
        """Return the weights in quanta, as integers in weight's dtype (NaN stays NaN); None if they
        are not."""
        levels, weight = self.stair.integers, weight.detach()
        if levels is None:
            return None
        index = kernels.index(weight, self.stair)
        if all(b - a == levels[1] - levels[0] for a, b in pairwise(levels)):
            integers = index * (levels[1] - levels[0]) + levels[0]
        else:
            integers = torch.tensor(levels, device=weight.device)[index]
        return torch.where(weight.isnan(), weight, integers.to(weight.dtype))

    def scale(self, weight: Tensor, behind: int) -> float | Tensor:
        """Return the quantum, or one per output channel with ``behind`` dimensions after it."""
        if isinstance(self.stair.quantum, float):
            return self.stair.quantum
        quanta = torch.tensor(self.stair.quantum, dtype=weight.dtype, device=weight.device)
        return quanta.reshape(-1, *[1] * behind)

    @torch.no_grad()
    def shift(self, weight: Tensor, mean: float) -> None:
        """Move the weights by the first mean of their noise, once in the life of the network."""
        if not bool(self.shifted):
            weight.add_(self._absolute(torch.tensor(mean, device=weight.device), weight))
            self.shifted.fill_(True)

    def refit(self, weight: Tensor) -> None:
        """Fit the quantum to new float weights, if it was fitted."""
        if self.fit is not None:
            self.set_quantum(fit_quantum(weight, self.stair, self.fit == "channel").quantum)
