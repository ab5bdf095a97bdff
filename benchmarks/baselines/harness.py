"""What the baselines share: the data, the float network they start from, batches and CUDA graphs.

Everything here is as in ``softstair train``: the folds, the order of the examples, their
normalisation and augmentation, the layers that are quantised (all but the last), bfloat16 on a GPU,
and evaluation in float32 after the last epoch.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softstair.data import Dataset, split
from softstair.data.batches import Examples
from softstair.models import last_layer
from softstair.train import Recipe, evaluate, trained_network
from softstair.train.execution import use_batch_kernel
from softstair.train.network import make_network

WARM_UP_STEPS = 3
"""Steps before the network is compiled, and again before a step is captured; they train too."""

Step = Callable[[Tensor], None]


class Run:
    """One training of one method.

    Attributes:
        network: The float network, with the weights of ``start`` or random ones.
        rate: The initial learning rate.
        weight_decay: The decoupled weight decay of weights.
        first_layer: Whether the first layer's weights are quantised ("same") or not ("float").
        forward: What computes the scores in training instead of the network.
        teacher: What a float network makes of the loss, given the scores and the batch.
        is_eager: Whether steps on CUDA are neither compiled nor captured.
        seconds: The time that training took.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        device: torch.device,
        start: Path | None = None,
        rate: float = 1e-3,
        weight_decay: float = 0.0,
        first_layer: str = "same",
    ) -> None:
        self.recipe, self.device, self.rate, self.weight_decay = recipe, device, rate, weight_decay
        self.first_layer, self.is_cuda = first_layer, device.type == "cuda"
        self.dataset, self.start, self.seconds = dataset, start, 0.0  # all examples
        self.forward: Callable[[Tensor], Tensor] | None = None
        self.teacher: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.is_eager = False
        dataset = dataset.sample(recipe.data.limit)
        numbers = (*dataset.numbers(recipe.data.integer_input, recipe.data.centre_input), device)
        parts = split(dataset, recipe.data.fold, recipe.data.folds)
        training, self.valid = (Examples(dataset.x[i], dataset.y[i], *numbers) for i in parts)
        self.training = use_batch_kernel(training)
        self.test = None
        if dataset.test_x is not None and dataset.test_y is not None:
            self.test = Examples(dataset.test_x, dataset.test_y, *numbers)
        torch.manual_seed(recipe.run.seed)
        network = make_network(recipe, dataset)
        if start is not None:
            network.load_state_dict(trained_network(start, dataset).state_dict())
        self.network = network.train().to(device)
        if self.is_cuda:
            self.network.to(memory_format=torch.channels_last)
        self.steps = len(self.training) // recipe.run.batch

    def quantised_layers(self) -> list[tuple[str, nn.Conv2d | nn.Linear]]:
        """Return the layers whose weights are quantised, by name."""
        layers = [
            (name, layer)
            for name, layer in self.network.named_modules()
            if isinstance(layer, nn.Conv2d | nn.Linear) and name != last_layer(self.network)
        ]
        return layers if self.first_layer == "same" else layers[1:]

    def quantised(
        self, of_weight: Callable[[Tensor], nn.Module], of_features: Callable[[], nn.Module]
    ) -> nn.Module:
        """Return the network with a module on each weight, and one in place of each ReLU."""
        for _, layer in self.quantised_layers():
            quantiser = of_weight(layer.weight.detach()).to(self.device)
            parametrize.register_parametrization(layer, "weight", quantiser)
        for name, module in list(self.network.named_modules()):
            if isinstance(module, nn.ReLU):
                self.network.set_submodule(name, of_features().to(self.device))
        return self.network

    def adamw(self, special: dict[str, float] | None = None) -> torch.optim.AdamW:
        """Return AdamW whose rates are tensors; ``special`` has the decay of other parameters.

        Parameters of one dimension or none have no weight decay, unless the last part of their
        name is in ``special``.
        """
        decays: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.network.named_parameters():
            decay = self.weight_decay if parameter.dim() > 1 else 0.0
            decay = (special or {}).get(name.rpartition(".")[2], decay)
            decays.setdefault(decay, []).append(parameter)
        groups: list[dict[str, Any]] = [
            {
                "params": parameters,
                "weight_decay": decay,
                "lr": torch.tensor(self.rate, device=self.device),
            }
            for decay, parameters in decays.items()
        ]
        return torch.optim.AdamW(groups, fused=self.is_cuda, capturable=self.is_cuda)

    def set_cosine_rate(self, optimiser: torch.optim.Optimizer, share: float) -> None:
        """Set the learning rate: half a cosine from the initial one to 0."""
        for group in optimiser.param_groups:
            group["lr"].fill_(self.rate * 0.5 * (1 + math.cos(math.pi * share)))

    def batches(self) -> Iterator[tuple[float, Tensor]]:
        """Yield (share of the run that is over, indices of the next batch)."""
        generator = torch.Generator().manual_seed(self.recipe.run.seed)
        for epoch in range(self.recipe.run.epochs):
            order = torch.randperm(len(self.training), generator=generator).to(self.device)
            for step in range(self.steps):
                share = (epoch + step / self.steps) / self.recipe.run.epochs
                yield share, order[step * self.recipe.run.batch :][: self.recipe.run.batch]

    def loss(self, indices: Tensor) -> Tensor:
        """Return the loss of the network on the augmented examples at ``indices``."""
        x, y, share = self.training.batch(indices, self.recipe.data.augmentation)
        precision = self.recipe.run.precision_on(self.device)
        with torch.autocast(
            self.device.type, torch.bfloat16, precision == "bfloat16", cache_enabled=False
        ):
            scores = (self.forward or self.network)(x).float()
        loss = F.cross_entropy(scores, y)
        if share is not None:
            loss = (1 - share) * loss + share * F.cross_entropy(scores, y.flip(0))
        return loss if self.teacher is None else self.teacher(loss, scores, x)

    def fit(
        self,
        optimiser: torch.optim.Optimizer,
        warm_up: int = WARM_UP_STEPS,
        compiles: bool = True,
    ) -> None:
        """Train; the rate is half a cosine. On CUDA, steps are compiled and captured.

        The network is compiled after ``warm_up`` steps, unless ``compiles`` is False.
        """

        def step(indices: Tensor) -> None:
            optimiser.zero_grad()
            self.loss(indices).backward()
            optimiser.step()

        begin, is_fast = time.perf_counter(), self.is_cuda and not self.is_eager
        if is_fast:
            step = _CapturedStep(step, warm_up + WARM_UP_STEPS, self.recipe.run.batch, self.device)
        for number, (share, indices) in enumerate(self.batches()):
            if number == warm_up and compiles and is_fast:
                self.forward = torch.compile(self.network, fullgraph=True)
            self.set_cosine_rate(optimiser, share)
            step(indices)
        if self.is_cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - begin

    def accuracies(self) -> dict[str, float | None]:
        """Return the accuracies of the network as it is; None where there are no examples."""
        sets = {"valid_accuracy": self.valid, "test_accuracy": self.test}
        return {
            name: evaluate(self.network, examples)[1] if examples else None
            for name, examples in sets.items()
        }


class _CapturedStep:
    def __init__(self, step: Step, warm_up: int, batch: int, device: torch.device) -> None:
        self._step, self._warm_up, self._calls = step, warm_up, 0
        self._indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, indices: Tensor) -> None:
        self._indices.copy_(indices)
        if self._calls < self._warm_up:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(self._indices)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._step(self._indices)
            self._graph.replay()
        self._calls += 1


def rounded(x: Tensor) -> Tensor:
    """Return round(x), with the gradient of x: the straight-through estimator."""
    return x + (torch.round(x) - x).detach()
