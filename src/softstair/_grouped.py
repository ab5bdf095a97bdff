"""Weights with a quantum for each group of them, in a tensor, for layers of transformers.

The value that training sees is y = l + λ·(σ(w) − l), with w in quanta and l = clip(w) the line
through the stair, continued by the extra levels of ``gradient_margin``. The gradient is that of l:
1 within the line, 0 beyond. An annealer moves λ from 0 to 1, see
:meth:`softstair.Schedule.blended`; without one it is 1, and y is the stair.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from softstair import _check, kernels
from softstair._quantum import fit_quantum
from softstair._stair_module import StairWeight, lengthened
from softstair.noise import Uniform
from softstair.stair import Stair

Group = Literal["row", "tensor"] | int
"""The weights that share a quantum: those of an output, all, or so many inputs of an output."""
GROUPS: tuple[Group, ...] = ("row", "tensor", 32, 64, 128, 256)


class IntegersAndQuanta(NamedTuple):
    """Quantised weights: ``integers`` (outputs, inputs) in int16, and ``quanta`` in float32.

    ``quanta`` is (outputs, groups of a row), or (1, 1) for one quantum. The weights are
    ``integers.reshape(*quanta.shape, -1) * quanta[..., None]``.
    """

    integers: Tensor
    quanta: Tensor


class GroupedWeight(StairWeight):
    """The quantised weights of a linear layer, with a quantum for each group.

    Args:
        stair: The stair, in quanta.
        weight: The weights (outputs, inputs), to which the quanta are fitted.
        group: ``"row"``, ``"tensor"``, or the number of weights of an output that share a quantum.
        half: Whether the quanta are numbers of float16, as in files for llama.cpp.
        fitted: Whether the quanta are fitted; otherwise they are that of the stair.

    Attributes:
        blend: λ, from 0 (the line) to 1 (the stair).
        is_static: Whether the noise is uniform over a quantum and stays so: the gradient is then
            that of the line. An annealer that moves the noise sets it to False.
    """

    blend: Tensor

    def __init__(
        self,
        stair: Stair,
        weight: Tensor,
        group: Group = "row",
        half: bool = False,
        fitted: bool = True,
        **settings: Any,
    ) -> None:
        if weight.dim() != 2 or (isinstance(group, int) and weight.shape[1] % group):
            shape = f"a row of weights, but the shape of the weights is {tuple(weight.shape)}"
            raise _check.invalid("weights", f"in groups of {group} must divide {shape}")
        sizes = {"row": weight.shape[1], "tensor": weight.numel()}
        self.group, self.in_half = group, _check.boolean("half", half)
        self.size = sizes[group] if isinstance(group, str) else group
        self.rows, self.unit_stair = weight.numel() // self.size, stair.with_quantum(1.0)
        quanta = [stair.quantum if isinstance(stair.quantum, float) else 1.0] * self.rows
        super().__init__(stair.with_quantum(quanta, axis=0), **settings)
        self.register_buffer("blend", torch.tensor(1.0))
        self.has_line = self.unit_stair == _linear(len(stair), stair.integers)
        self.is_static = self._has_static_noise()
        self.fit = "channel" if fitted else None
        self.refit(weight)

    def _has_static_noise(self) -> bool:
        """Whether the noise is uniform over the quantum around a weight."""
        if not (isinstance(self.noise, Uniform) and self.strategy == "mode" and self.has_line):
            return False
        width = self.noise.std_within(0.5)
        return float(self.mean) == 0 and abs(float(self.std) - width) < 1e-6

    def refit(self, weight: Tensor) -> None:
        """Fit the quanta to new float weights, if they were fitted."""
        if self.fit is not None:
            rows = self.in_groups(weight.detach()).contiguous()
            fitted = fit_quantum(rows, self.unit_stair, per_channel=True)
            quanta = torch.tensor(fitted.quantum, dtype=torch.float64)
            self.set_quantum(self._representable(quanta).tolist())

    def _representable(self, quanta: Tensor) -> Tensor:
        """Return quanta as the nearest that files can hold."""
        if not self.in_half:
            return quanta
        return quanta.clamp(2.0**-24, torch.finfo(torch.float16).max).half().to(quanta.dtype)

    def _set_stair(self, stair: Stair) -> None:
        """Set the stair; extra levels are only needed in quanta."""
        self.stair = stair
        if self.gradient_margin:
            self._longer = (lengthened(self.unit_stair, self.gradient_margin),) * 2

    def in_groups(self, weight: Tensor) -> Tensor:
        """Return the weights with a row for each group, as its stair takes them."""
        return weight.reshape(self.rows, self.size)

    def quanta(self) -> Tensor:
        """Return the quanta that ``eval()`` has, a row for each group."""
        return self.final_quantum().to(self.quantum.device)[:, None]

    def final_quantum(self) -> Tensor:
        return self._representable(super().final_quantum())

    def _present(self, count: int) -> Tensor:
        """Return the quanta of the present mode, with their gradient if they are learned."""
        if self.log_ratio is None or not self.training:
            return self.quanta()
        learned = self.scaled_quantum(count)
        if self.in_half:
            learned = learned + (self._representable(learned) - learned).detach()
        return learned[:, None]

    def forward(self, input: Tensor) -> Tensor:
        quanta = self._present(input.numel())
        x = self.in_groups(input).to(torch.promote_types(input.dtype, torch.float32)) / quanta
        if not self.training:
            y = self.hard(x)
        elif self.is_static:
            levels, margin = self.unit_stair.levels, self.gradient_margin
            line = x.clamp(levels[0] - margin, levels[-1] + margin)
            fixed = line.detach()
            y = torch.lerp(fixed, self.hard(fixed), self.blend) + (line - fixed)  # exact at λ = 1
        else:
            y = self._regularise(x, self.unit_stair, self.mean, self.std)
        return (y * quanta).reshape(input.shape).to(input.dtype)

    def hard(self, x: Tensor) -> Tensor:
        """Return the stair of weights in quanta."""
        if not self.has_line:
            return kernels.hard(x, self.unit_stair)
        low = x.floor()
        levels = self.unit_stair.levels
        return (low + (x - low >= 0.5)).clamp(levels[0], levels[-1])

    @torch.no_grad()
    def integers_and_quanta(self, weight: Tensor) -> IntegersAndQuanta:
        """Return the integers and the quanta of weights; see :class:`IntegersAndQuanta`."""
        integers = self.integers(weight.float())
        if integers is None:
            raise _check.invalid("weights", f"must be integers in quanta, but have {self.stair}")
        quanta = self.quanta().float().clone()
        rows = 1 if self.group == "tensor" else len(weight)
        return IntegersAndQuanta(integers.to(torch.int16), quanta.reshape(rows, -1))

    def index(self, weight: Tensor) -> Tensor:
        quanta = self.quanta().float().to(weight.device)
        return self.unit_stair.index(self.hard(self.in_groups(weight.detach()).float() / quanta))

    def integers(self, weight: Tensor) -> Tensor | None:
        if self.unit_stair.integers is None:
            return None
        levels = self.hard(self.in_groups(weight.detach()).float() / self.quanta().float())
        return levels.reshape(weight.shape).to(weight.dtype)

    @torch.no_grad()
    def shift(self, weight: Tensor, mean: float) -> None:
        if not bool(self.shifted):
            weight.add_((mean * self.quanta()).expand(-1, self.size).reshape(weight.shape))
            self.shifted.fill_(True)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_static = self.is_static and self._has_static_noise()

    def extra_repr(self) -> str:
        return f"group={self.group!r}, {super().extra_repr()}"


def _linear(count: int, integers: tuple[int, ...] | None) -> Stair | None:
    """Return the stair of so many integers one apart with thresholds half-way, from the lowest."""
    if integers is None:
        return None
    levels = tuple(range(integers[0], integers[0] + count))
    return Stair(levels, tuple(level - 0.5 for level in levels[1:]))
