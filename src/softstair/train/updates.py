"""The place where parameters change: learning rates, the optimiser's step, clipping."""

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _check
from softstair.anneal import Annealer
from softstair.nn import stair_modules
from softstair.train.optimiser import Bounds, clip_latent, latent_bounds, make_optimiser
from softstair.train.recipe import Recipe


class Updates:
    """What changes the parameters: the optimiser, its rates, clipping, and fused updates on a GPU.

    Attributes:
        optimiser: The optimiser of torch.
        rates: Its learning rates.
        bounds: The range of latent weights by layer, if they are clipped.
    """

    def __init__(
        self, network: nn.Module, recipe: Recipe, annealer: Annealer | None, device: torch.device
    ) -> None:
        self._network, self._recipe, self._annealer = network, recipe, annealer
        self._device, self._latent, self._fills = device, None, False
        self._zeros: dict[Tensor, Tensor] = {}
        self.follow_quanta()

    def follow_quanta(self) -> None:
        """Set what depends on the quanta of weights: rates, and the bounds if they are clipped."""
        recipe, device = self._recipe, self._device
        has_bits = recipe.network.bits is not None
        self.optimiser = make_optimiser(self._network, recipe.optimiser, device, has_bits)
        self.rates = Rates(self.optimiser, device if device.type == "cuda" else None)
        self.bounds: dict[str, Bounds] = {}
        if self._annealer is not None and recipe.optimiser.clip_latent:
            noises = (stair.noise for _, stair in stair_modules(self._network))
            if endless := next((noise for noise in noises if not noise.proper), None):
                reason = "passes gradients at any distance from the thresholds"
                problem = f"must be False with the {endless.name} estimator, which {reason}"
                raise _check.invalid("clip_latent", f"{problem}; or choose another noise")
            self.bounds = latent_bounds(self._network, recipe.schedule(self._annealer.layers))

    def use_fused(self, forward: Any, alone: bool) -> None:
        """Follow a fused network: it leaves gradients of truncated layers out, and, if ``alone``,
        updates the weights of layers that nothing else reads itself."""
        self._fills = self._annealer is not None
        if alone and self._recipe.optimiser.clip_gradient is None:
            from softstair._accelerate.update import supports_update  # which needs Triton

            self._latent = (
                forward.attach_latent_steps() if supports_update(self.optimiser) else None
            )

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self.optimiser.zero_grad()
        if self._latent is not None:
            bounds = {self._weight(name): each for name, each in self.bounds.items()}
            self._latent.begin(self.optimiser, bounds)

    def step(self) -> None:
        """Change the parameters by their gradients."""
        if (largest := self._recipe.optimiser.clip_gradient) is not None:
            nn.utils.clip_grad_norm_(self._network.parameters(), largest)
        updated: Set[Tensor] = set() if self._latent is None else self._latent.finish()
        self._fill_gradients(updated)
        self.optimiser.step()
        left = {n: each for n, each in self.bounds.items() if self._weight(n) not in updated}
        clip_latent(self._network, left)
        if self._latent is not None:
            self._latent.join()

    def _weight(self, name: str) -> Tensor:
        return self._network.get_parameter(f"{name}.weight")

    def _fill_gradients(self, updated: Set[Tensor]) -> None:
        """Set gradients of zero behind truncated layers, so that momentum continues there; not of
        weights that were updated."""
        for parameter in self._annealer.tied if self._fills and self._annealer else ():
            if parameter.grad is None and parameter not in updated:
                if parameter not in self._zeros:
                    self._zeros[parameter] = torch.zeros_like(parameter)
                parameter.grad = self._zeros[parameter]


class Rates:
    """The learning rates of an optimiser's groups; with a ``device`` they are tensors on it.

    A captured graph reads the tensors, so that it is not captured again when a rate changes.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, device: torch.device | None) -> None:
        self._optimiser = optimiser
        self._initial = [float(group["lr"]) for group in optimiser.param_groups]
        self._tensors: tuple[Tensor, Tensor] | None = None
        if device is not None:
            initial = torch.tensor(self._initial, dtype=torch.float32, device=device)
            self._tensors = initial, initial.clone()

    def set(self, factor: float) -> None:
        """Set each rate to a multiple of its initial value."""
        rates: Iterable[float | Tensor] = [rate * factor for rate in self._initial]
        if self._tensors is not None:
            initial, current = self._tensors
            rates = torch.mul(initial, factor, out=current).unbind()
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
