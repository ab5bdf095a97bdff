"""The annealer: moves the noise of a network along a schedule, and ends the backward pass early.

A stair without noise passes no gradient. Modules from which every path to the output meets such a
stair run as under :func:`torch.no_grad`. Their parameters still receive gradients of zero, so that
optimisers with momentum, and DDP, do what they would have done.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from softstair import _check
from softstair._grouped import GroupedWeight
from softstair._projections import Projection
from softstair.convert.conversion import ATTRIBUTE
from softstair.convert.graph import Graph
from softstair.nn import StairActivation, StairLayer, StairModule, layer_count, stair_modules
from softstair.noise import LARGEST
from softstair.schedule import NoisePath, Schedule

SMALLEST_STD = 2.0**-149
"""The smallest positive number of float32, in which the noise is stored."""


class Annealer:
    """Sets the noise of each layer of a network before each iteration.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="2")
    >>> annealer = ss.Annealer(net, ss.Schedule.for_network(net, period=2), steps_per_unit=10)
    >>> for _ in range(21):
    ...     annealer.step()  # then the forward pass, the backward pass and the optimiser
    >>> annealer.annealed
    (0,)

    Args:
        net: A quantised network, which DDP or ``torch.compile`` may wrap.
        schedule: A :class:`Schedule`, or any function (layer, t) -> (mean, std) in quanta.
        steps_per_unit: Steps per unit of the schedule's time: ``len(loader)`` if it is epochs.
        update: ``"iteration"`` moves the noise at every step, ``"epoch"`` once per unit.
        truncate: End the backward pass at annealed layers. Each annealed layer changes the backward
            pass, so that ``torch.compile`` compiles the network again; with False it does so once.
        shift: Move the weights once by the first mean of their noise; None does so if the mean is
            dynamic.

    Raises:
        ValueError: If the network is not quantised, or if an argument does not fit it.
    """

    def __init__(
        self,
        net: nn.Module,
        schedule: NoisePath,
        steps_per_unit: int = 1,
        update: Literal["iteration", "epoch"] = "iteration",
        truncate: bool = True,
        shift: bool | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise _check.wrong("net", net, "a torch.nn.Module")
        self.net = _unwrapped(net)
        self.layers = layer_count(self.net)
        _check_schedule(schedule, self.layers)
        _check.integer("steps_per_unit", steps_per_unit, 1)
        _check.choice("update", update, ("iteration", "epoch"))
        _check.boolean("truncate", truncate)
        if shift is None:
            shift = isinstance(schedule, Schedule) and not schedule.static_mean
        _check.boolean("shift", shift)
        self.schedule, self.steps_per_unit, self.update = schedule, steps_per_unit, update
        self.truncate, self.steps = truncate, 0
        self._stairs: list[list[StairModule]] = [[] for _ in range(self.layers)]
        for _, module in stair_modules(self.net):
            if module.scheduled:
                self._stairs[module.layer].append(module)
        self._versions: list[int] = []
        self._gathered: Tensor | None = None
        self._noise: list[tuple[float, float] | None] = [None] * self.layers
        self._truncation = Truncation.of(self.net)
        self._blend = Blending.of(self.net, schedule)
        if shift:
            self._shift_weights()

    @property
    def t(self) -> float:
        """The time of the next step, in the schedule's units."""
        return self._time(self.steps)

    def _time(self, steps: int) -> float:
        if self.update == "epoch":
            return float(steps // self.steps_per_unit)
        return steps / self.steps_per_unit

    @property
    def annealed(self) -> tuple[int, ...]:
        """The layers whose noise is gone."""
        return tuple(
            layer for layer, noise in enumerate(self._noise) if noise and noise[1] < SMALLEST_STD
        )

    @property
    def noise(self) -> tuple[tuple[float, float] | None, ...]:
        """The present (mean, std) of each layer, in quanta; None before the first step."""
        return tuple(self._noise)

    @property
    def tied(self) -> list[nn.Parameter]:
        """The parameters that have a gradient even if the backward pass does not reach them."""
        return [getattr(module, name) for module, name in self._truncation.tied]

    def step(self) -> None:
        """Set the noise of the next iteration; call it before the forward pass."""
        self._set(self.t)
        if self._blend is not None:
            self._blend.move(self.t, fit=True)
        self.steps += 1

    def tick(self) -> None:
        """Count an iteration without moving the noise, within an accumulated batch."""
        self.steps += 1

    def _set(self, t: float) -> None:
        targets = [self._noise_at(layer, t) for layer in range(self.layers)]
        # Something else may have written to the noise since, such as a loaded checkpoint.
        is_current = self._versions == self._current_versions()
        changed = [not is_current or a != b for a, b in zip(self._noise, targets, strict=True)]
        with torch.no_grad():
            if self._gathered is not None and any(changed):
                # Copied while the device still works on the previous step.
                self._gathered.copy_(torch.tensor(targets), non_blocking=True)
            elif self._gathered is None:
                for layer in (layer for layer, is_changed in enumerate(changed) if is_changed):
                    for stair in self._stairs[layer]:
                        stair.mean.fill_(targets[layer][0])
                        stair.std.fill_(targets[layer][1])
        self._noise, self._versions = list(targets), self._current_versions()
        self._mark_annealed(self.annealed if self.truncate else ())

    def gather(self) -> None:
        """Store the noise of all layers in one tensor, so that one copy to the device sets it."""
        device = next((stair.mean.device for stairs in self._stairs for stair in stairs), None)
        if device is None:
            return
        gathered = torch.zeros((self.layers, 2), dtype=torch.float32, device=device)
        for stairs, (mean, std) in zip(self._stairs, gathered, strict=True):
            for stair in stairs:
                mean.copy_(stair.mean)
                std.copy_(stair.std)
                stair.mean, stair.std = mean, std
        self._gathered, self._versions = gathered, []

    def _current_versions(self) -> list[int]:
        return [stair.std._version for stairs in self._stairs for stair in stairs]

    def _noise_at(self, layer: int, t: float) -> tuple[float, float]:
        noise = self.schedule(layer, t)
        try:
            mean, std = (float(value) for value in noise)
            is_valid = abs(mean) <= LARGEST and 0 <= std <= LARGEST
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise _check.invalid(
                "schedule",
                f"must give a mean of at most ±{LARGEST:g} and a std from 0 to {LARGEST:g}, "
                f"but gave {noise!r} for layer {layer} at t = {t:g}",
            )
        return mean, std

    def _mark_annealed(self, layers: tuple[int, ...]) -> None:
        """End the backward pass at these layers, and at no other."""
        annealed = {
            # A slope that is no probability density does not vanish with the noise.
            stair: stair.layer in layers and stair.noise.proper
            for stairs in self._stairs
            for stair in stairs
        }
        # Compared with the stairs' own flags, which another annealer may have set.
        if all(stair.annealed == is_annealed for stair, is_annealed in annealed.items()):
            return
        for stair, is_annealed in annealed.items():
            stair.annealed = is_annealed
        self._truncation.update(self.net)
        _allow_recompilations(self.layers)

    def _shift_weights(self) -> None:
        means = [self._noise_at(layer, 0.0)[0] for layer in range(self.layers)]
        shifted: set[int] = set()
        for module in self.net.modules():
            if isinstance(module, StairLayer):
                stair = module.weight_stair
                # A parameter that two layers share moves with the first of them.
                is_first = id(module.weight) not in shifted
                stair.shift(module.matrix(module.weight), means[stair.layer] if is_first else 0.0)
                shifted.add(id(module.weight))

    def state_dict(self) -> dict[str, Any]:
        """Return the clock and the schedule; the network's own state holds the noise."""
        schedule = self.schedule.to_json() if isinstance(self.schedule, Schedule) else None
        names = ("steps", "steps_per_unit", "update")
        return {**{name: getattr(self, name) for name in names}, "schedule": schedule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the clock to where :meth:`state_dict` was called, under the same schedule."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            raise _check.wrong("state", state, f"a mapping with {', '.join(own)}")
        for name in ("schedule", "steps_per_unit", "update"):
            saved, current = state[name], own[name]
            if saved == current:
                continue
            if isinstance(saved, Mapping) and isinstance(current, Mapping):
                names = [key for key in {**current, **saved} if saved.get(key) != current.get(key)]
                saved, current = (_listed(each, names) for each in (saved, current))
                problem = f"must have {saved}, as in the saved state, but has {current}"
            else:
                problem = f"must be {saved!r}, as in the saved state, but is {current!r}"
            raise _check.invalid(name, problem)
        self.steps = _check.integer("steps", state["steps"], 0)
        self._noise = [None] * self.layers
        if self.steps:
            self._set(self._time(self.steps - 1))
            if self._blend is not None:
                self._blend.move(self._time(self.steps - 1), fit=False)


class Blending:
    """The share of hard values in the weights of a network, along a schedule."""

    def __init__(self, net: nn.Module, schedule: Schedule) -> None:
        self.schedule = schedule
        self.layers = [module for module in net.modules() if isinstance(module, Projection)]
        self.stairs = [layer.weight_stair for layer in self.layers if layer.weight_stair.is_static]
        self.shares: list[float] = []
        if not self.stairs:
            problem = "blends, which needs a network with weights in groups or features per token"
            raise _check.invalid("schedule", f"{problem}, such as 'ternary/int8:token'")
        self.move(0.0, fit=False)

    @classmethod
    def of(cls, net: nn.Module, schedule: NoisePath) -> "Blending | None":
        """Return what blends by a schedule; None if it moves noise, as weights then know."""
        if isinstance(schedule, Schedule) and schedule.blend is not None:
            return cls(net, schedule)
        for module in net.modules():
            if isinstance(module, GroupedWeight) and module.scheduled:
                module.is_static = False
        return None

    @torch.no_grad()
    def move(self, t: float, fit: bool) -> None:
        """Set the shares at time t; fit quanta to the weights of layers that were in float."""
        in_float = t < self.schedule.float_until
        for layer in self.layers:
            if layer.in_float and not in_float and fit:
                layer.refit()
            layer.in_float = in_float
        shares = [self.schedule.share(stair.layer, t) for stair in self.stairs]
        if shares != self.shares:
            self.shares, blends = shares, [stair.blend for stair in self.stairs]
            torch._foreach_zero_(blends)
            torch._foreach_add_(blends, shares)


def _listed(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={_check.shortened(values.get(name))}" for name in names)


def _allow_recompilations(layers: int) -> None:
    """Let dynamo compile the network once per annealed layer; by default it stops after eight."""
    if "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo"].config
        # torch 2.6 calls the limit cache_size_limit.
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, max(getattr(config, name), layers + 8))


def _unwrapped(net: nn.Module) -> nn.Module:
    if isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(net.module)
    inner = getattr(net, "_orig_mod", None)  # of torch.compile
    return _unwrapped(inner) if isinstance(inner, nn.Module) else net


def _check_schedule(schedule: NoisePath, layers: int) -> None:
    if not callable(schedule):
        raise _check.wrong("schedule", schedule, "a Schedule or a function (layer, t)")
    if isinstance(schedule, Schedule) and schedule.layers != layers:
        raise _check.invalid(
            "schedule", f"must have {layers} layers, as the network, but has {schedule.layers}"
        )


class Truncation:
    """A forward hook that ties the parameters of a network to its output.

    ``p[:0].sum()`` is an empty sum: 0 in value whatever p holds, with a gradient of zeros for p.
    Added to an existing gradient it changes nothing, so that it is enough to tie all parameters.
    """

    def __init__(self) -> None:
        self.tied: list[tuple[nn.Module, str]] = []
        self.handles: list[Any] = []

    @classmethod
    def of(cls, net: nn.Module) -> "Truncation":
        """Return the hook of a network, which all its annealers share."""
        for hook in net._forward_hooks.values():
            if isinstance(hook, cls):
                return hook
        hook = cls()
        net.register_forward_hook(hook)
        return hook

    def update(self, net: nn.Module) -> None:
        """Find the modules behind annealed stairs again."""
        for handle in self.handles:
            handle.remove()
        blocked = _blocked_modules(net)
        self.handles = []
        for module in blocked:
            self.handles += [
                module.register_forward_pre_hook(_disable_gradients),
                module.register_forward_hook(_restore_gradients, always_call=True),
            ]
        annealed = any(stair.annealed for _, stair in stair_modules(net))
        self.tied = _used_parameters(net) if annealed else []

    def __call__(self, net: nn.Module, inputs: Any, output: Any) -> Any:
        if not net.training or not torch.is_grad_enabled() or not self.tied:
            return None
        empty = [getattr(module, name).reshape(-1)[:0].sum() for module, name in self.tied]
        zero = torch.stack(empty).sum()
        has_tensors = False

        def tie(value: Any) -> Any:
            nonlocal has_tensors
            if isinstance(value, Tensor) and value.is_floating_point():
                has_tensors = True
                return value + zero.to(value.dtype)
            if is_dataclass(value) and not isinstance(value, type):
                names = [field.name for field in fields(value) if field.init]
                return replace(value, **{n: tree_map(tie, getattr(value, n)) for n in names})
            return value

        tied = tree_map(tie, output)
        if not has_tensors:
            raise TypeError(
                "the network must return a tensor, or tuples, lists, dictionaries or dataclasses "
                "of tensors, for its backward pass to be truncated, but it returned "
                f"{type(output).__name__}; give Annealer truncate=False."
            )
        return tied


def _complete_graphs(net: nn.Module) -> Iterator[tuple[nn.Module, Graph]]:
    """Yield each quantised network inside ``net`` whose graph is complete, with its graph."""
    for part in net.modules():
        conversion = getattr(part, ATTRIBUTE, None)
        if conversion is not None and conversion.graph.complete:
            yield part, conversion.graph


def _used_parameters(net: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the parameters are that the network uses; unused ones have no gradient."""
    listed: set[int] = set()
    used: set[int] = set()
    for part, graph in _complete_graphs(net):
        called = {step.module for step in graph.steps if step.module}
        for name, parameter in part.named_parameters(remove_duplicate=False):
            owners = [name[:i] for i, letter in enumerate(name) if letter == "."]
            listed.add(id(parameter))
            if name in graph.attributes or not called.isdisjoint(owners):
                used.add(id(parameter))
    seen = listed - used
    places = []
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                places.append((module, name))
    return places


def _blocked_modules(net: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters whose every path to the output meets an annealed stair."""
    blocked: dict[int, nn.Module] = {}
    for part, graph in _complete_graphs(net):
        modules = [part.get_submodule(step.module) if step.module else None for step in graph.steps]
        walls = {
            number
            for number, module in enumerate(modules)
            if isinstance(module, StairActivation) and module.annealed
        }
        # Somebody's hook may use a result elsewhere, perhaps in the loss.
        hooked = [n for n, module in enumerate(modules) if module and _has_other_hooks(module)]
        alive = {id(modules[number]) for number in graph.reaching_output(walls, hooked)}
        for module in modules:
            if module and id(module) not in alive and any(True for _ in module.parameters()):
                blocked[id(module)] = module
    return list(blocked.values())


def _has_other_hooks(module: nn.Module) -> bool:
    return any(hook is not _restore_gradients for hook in module._forward_hooks.values())


def _disable_gradients(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        module.__dict__["_recording"] = torch.is_grad_enabled()
        torch.set_grad_enabled(False)


def _restore_gradients(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        torch.set_grad_enabled(module.__dict__.pop("_recording", True))
