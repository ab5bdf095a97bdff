"""Float runs that a training uses: its teacher, and the weights that it starts from.

With the teacher's scores t and the network's scores s, the loss is

    (1 − w)·cross entropy + w·T²·KL(softmax(t/T) ‖ softmax(s/T)),

where w is ``teacher_weight`` and T the ``temperature``. The teacher gets the same augmented batch.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from softstair.convert import report, swap_modules
from softstair.convert.graph import trace
from softstair.data import Dataset
from softstair.models import teacher_for
from softstair.nn import StairLayer, layer_count
from softstair.stair import Stair, fit_quantum
from softstair.train.network import make_network, trained_network
from softstair.train.optimiser import clip_latent, latent_bounds
from softstair.train.options import DataOptions, SplitOptions, describe
from softstair.train.parallel import Team
from softstair.train.recipe import ExecutionOptions, Recipe
from softstair.train.records import FLOAT_RUNS, Role, RunError, recipe_of, summary_of

AUTO = "auto"
ON_THRESHOLD = 0.7
"""Of the mean |w| of a layer: it lies on the threshold of ternary weights (Li and Liu, 2016)."""

FOLDS: dict[Any, Callable[[Any, Any], nn.Module]] = {
    nn.Linear: fuse_linear_bn_eval,
    nn.Conv1d: fuse_conv_bn_eval,
    nn.Conv2d: fuse_conv_bn_eval,
}
NEW_RESULT = (*FOLDS, nn.BatchNorm1d, nn.BatchNorm2d)
"""Modules whose result shares no memory with another tensor."""


@dataclass(frozen=True)
class FloatRun:
    """A float network that a run directory holds, with the digest of its parameters."""

    recipe: Recipe
    network: nn.Module
    digest: str


def float_runs(recipe: Recipe, out: Path, shape: tuple[int, ...]) -> dict[Role, Path]:
    """Return the directories of the float runs that a run in ``out`` uses.

    Those that are trained first are inside. A run from which the network starts, and which has the
    architecture of the teacher, is the teacher too.
    """
    given = {role: getattr(recipe, field) for role, field in FLOAT_RUNS.items()}
    runs = {
        role: out / role if path == AUTO else Path(path)
        for role, path in given.items()
        if path is not None
    }
    has_its_model = teacher_for(shape) in (None, recipe.model)
    if given["start"] == given["teacher"] == AUTO and has_its_model:
        runs["teacher"] = runs["start"]
    return runs


def auto_recipe(recipe: Recipe, role: Role, shape: tuple[int, ...]) -> Recipe:
    """Return the recipe of a float run that is trained first, for examples of a shape.

    Data, folds, seed and execution are those of ``recipe``; it has a third of the epochs.

    >>> auto_recipe(Recipe(epochs=60), "teacher", (3, 32, 32)).model
    'resnet18'
    """
    groups = (DataOptions, SplitOptions, ExecutionOptions)
    values = {name: getattr(recipe, name) for group in groups for name in describe(group)}
    values |= {"mixup": 0.0, "cutmix": 0.0}
    is_speech = shape == (1, 49, 10)
    if shape[1:] == (32, 32):
        values["cutout"] = 12
    if is_speech:
        values |= {"augment": "shift", "time_mask": 8, "coefficient_mask": 2}
    if role == "teacher":
        values["model"] = teacher_for(shape) or recipe.model
    return Recipe(
        **values,
        weights="float",
        features="float",
        optimiser="adamw",
        learning_rate=2e-3,
        weight_decay=0.01 if is_speech else 0.1,
        rate_shape="cosine",
        batch=recipe.batch,
        epochs=max(1, recipe.epochs // 3),
    )


def load_float_run(
    role: Role, path: Path, recipe: Recipe, dataset: Dataset, model: nn.Module | None, team: Team
) -> FloatRun:
    """Return the network of a finished float run; of a team, rank 0 reads it.

    Raises RunError if there is none. Code that the run names is called if ``recipe`` names it too.
    """

    def read() -> tuple[Recipe, dict[str, Tensor]]:
        loaded, field = recipe_of(path), FLOAT_RUNS[role]
        problem = "is not finished" if loaded and summary_of(path) is None else ""
        problem = "holds no run" if loaded is None else problem
        if loaded is None or problem or not loaded.is_float:
            problem = problem or "holds a quantised network"
            raise RunError(
                f"{field} must be the directory of a finished float run, or auto, but "
                f"{str(path)!r} {problem}: train one with weights and features in float.",
                field=field,
            )
        _check_same_data(field, path, loaded, recipe)
        is_same = loaded.model == recipe.model
        network = trained_network(path, dataset, model if is_same else None, own_code=is_same)
        return loaded, network.state_dict()

    def read_or_name_the_field() -> tuple[Recipe, dict[str, Tensor]]:
        try:
            return read()
        except RunError as error:
            if error.field == FLOAT_RUNS[role]:
                raise
            # What it advises is for the run itself, such as another `out`.
            problem = str(error).rpartition(": ")[0] or str(error).rstrip(".")
            raise RunError(
                f"{FLOAT_RUNS[role]} must be the directory of a finished float run, or auto, but "
                f"{problem}: give another run.",
                field=FLOAT_RUNS[role],
            ) from None

    loaded, state = team.broadcast(read_or_name_the_field)
    with torch.random.fork_rng([]):
        network = make_network(loaded, dataset, model if loaded.model == recipe.model else None)
    network.load_state_dict(state)
    return FloatRun(loaded, network.eval(), _digest(state))


def _check_same_data(field: str, path: Path, loaded: Recipe, recipe: Recipe) -> None:
    """Raise RunError if a float run has other data, or may have seen the validation examples."""
    names = ("data",) if recipe.fold == "all" else ("data", "limit", "folds", "fold")
    for name in names:
        before, now = getattr(loaded, name), getattr(recipe, name)
        if before != now:
            raise RunError(
                f"{field} must be a run on the same data and fold, so that validation examples are "
                f"new to it, but {str(path)!r} has {name} = {before} instead of {now}: train one "
                "for this fold, or give auto.",
                field=field,
            )


def _digest(state: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the names and values of a network's state."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Teacher:
    """The part of the loss that a float network adds: see the formula of the module."""

    def __init__(
        self, run: FloatRun, recipe: Recipe, dataset: Dataset, device: torch.device
    ) -> None:
        network = fold_norms(run.network.eval(), tuple(dataset.x.shape[1:]))
        self._network = network.to(device).requires_grad_(False)
        if recipe.precision_on(device) == "bfloat16":
            for module in self._network.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                    module.to(torch.bfloat16)  # as autocast does, but once
        if device.type == "cuda":
            for parameter in self._network.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.weight, self.temperature = recipe.teacher_weight, recipe.temperature
        zero, scale = dataset.numbers(recipe.integer_input, recipe.centre_input)
        own_zero, own_scale = dataset.numbers(run.recipe.integer_input, run.recipe.centre_input)
        # The teacher gets the bytes (scale·x + zero) by its own zero point and scale.
        self._factor, self._offset = scale / own_scale, (zero - own_zero) / own_scale

    def __call__(self, loss: Tensor, scores: Tensor, x: Tensor) -> Tensor:
        """Return the loss of a batch x, given its cross entropy and the network's scores."""
        with torch.no_grad():
            if (self._factor, self._offset) != (1.0, 0.0):
                x = x * self._factor + self._offset
            targets = F.log_softmax(self._network(x).float() / self.temperature, 1)
        logarithms = F.log_softmax(scores.float() / self.temperature, 1)
        divergence = F.kl_div(logarithms, targets, reduction="batchmean", log_target=True)
        return (1 - self.weight) * loss + self.weight * self.temperature**2 * divergence


@torch.no_grad()
def fold_norms(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return a network in evaluation with batch normalisations folded into the layers before them.

    A ReLU works in place where nothing else reads its input. A network whose forward pass cannot be
    traced is returned as it is, and so is one that would give other scores for examples of
    ``shape``.
    """
    folded = copy.deepcopy(network)
    try:
        graph, _ = trace(folded, training=False)
    except Exception:  # whatever the model's code raises for torch.fx's proxies
        return network
    steps, readers = graph.steps, graph.consumers()
    modules = [step.module and folded.get_submodule(step.module) for step in steps]
    replaced: dict[Any, nn.Module] = {}

    def is_only_read_by(source: int, reader: int) -> bool:
        return readers[source] == [reader] and source not in graph.outputs

    for number, norm in enumerate(modules):
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or modules.count(norm) > 1:
            continue
        source = steps[number].inputs[0]
        layer = modules[source]
        is_single = modules.count(layer) == 1 and is_only_read_by(source, number)
        if type(layer) in FOLDS and is_single and norm.running_mean is not None:
            replaced |= {layer: FOLDS[type(layer)](layer, norm), norm: nn.Identity()}
    for relu in {module for module in modules if type(module) is nn.ReLU}:
        uses = [number for number, module in enumerate(modules) if module is relu]
        sources = [steps[use].inputs[0] for use in uses]
        relu.inplace = all(
            (type(modules[source]) in NEW_RESULT or steps[source].function == "add")
            and not steps[source].written
            and is_only_read_by(source, use)
            for source, use in zip(sources, uses, strict=True)
        )
    swap_modules(folded, replaced)
    example = torch.linspace(-2, 2, 2 * math.prod(shape)).reshape(2, *shape)
    device = next((parameter.device for parameter in network.parameters()), None)
    scores, expected = (net(example.to(device)) for net in (folded, network))
    return folded if torch.allclose(scores, expected, rtol=1e-3, atol=1e-3) else network


@torch.no_grad()
def start_from(network: nn.Module, run: FloatRun, recipe: Recipe) -> None:
    """Give a network the weights of its float twin.

    Latent weights are scaled by layer, see :func:`latent_scale`, with their bias and the running
    statistics of a batch normalisation that follows. It absorbs the scale; where none follows, the
    layer's output has another scale than the float network's. Then latent weights are clipped to
    where the first noise has a density.
    """
    try:
        network.load_state_dict(run.network.state_dict())
    except RuntimeError:
        raise RunError(
            "init_from must be a float run of the same model, but its parameters have other names "
            "or shapes: give another run, or leave out `init_from`.",
            field="init_from",
        ) from None
    if recipe.is_float:
        return
    for layer, norms in _layers_and_norms(network):
        scale = latent_scale(layer.weight, layer.weight_stair.stair)
        layer.weight.mul_(scale)
        if layer.bias is not None:
            layer.bias.mul_(scale)
        for norm in norms:
            if norm.running_mean is not None and norm.running_var is not None:
                norm.running_mean.mul_(scale)
                norm.running_var.mul_(scale**2)
    clip_latent(network, latent_bounds(network, recipe.schedule(layer_count(network))))


def latent_scale(weight: Tensor, stair: Stair) -> float:
    """Return the factor by which float weights become latent ones.

    It puts 0.7 of the mean |w| on the threshold of ternary weights. For other stairs it minimises
    the squared error of quantisation.

    >>> round(latent_scale(torch.tensor([[0.1, -0.3]]), Stair.ternary()), 3)  # 0.5 / (0.7 · 0.2)
    3.571
    """
    if len(stair) == 3:
        mean = float(weight.double().abs().mean())
        return stair.thresholds[-1] / (ON_THRESHOLD * mean) if mean else 1.0
    fitted = fit_quantum(weight, stair).quantum
    assert isinstance(stair.quantum, float)  # recipes quantise with one quantum per layer
    assert isinstance(fitted, float)
    return stair.quantum / fitted


def _layers_and_norms(
    network: nn.Module,
) -> Iterator[tuple[StairLayer, list[nn.modules.batchnorm._BatchNorm]]]:
    """Yield each quantised layer with the batch normalisations that take its output."""
    graph = report(network).graph
    modules = [step.module and network.get_submodule(step.module) for step in graph.steps]
    layers = [module for module in modules if isinstance(module, StairLayer)]
    for layer in dict.fromkeys(layers):
        uses = [number for number, module in enumerate(modules) if module is layer]
        takers = dict.fromkeys(modules[taker] for use in uses for taker in graph.consumers()[use])
        norms = [norm for norm in takers if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
        yield layer, norms
