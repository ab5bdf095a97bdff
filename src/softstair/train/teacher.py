"""Float runs that a training uses: its teacher, and the weights that it starts from.

With the teacher's scores t and the network's scores s, the loss is

    (1 − w)·cross entropy + w·T²·KL(softmax(t/T) ‖ softmax(s/T)),

where w is ``teacher_weight`` and T the ``temperature``. The teacher gets the same augmented batch.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair._accelerate.inference import optimised_for_inference
from softstair._quantum import fit_quantum
from softstair.convert.conversion import graph_of
from softstair.data import Dataset
from softstair.models import teacher_for
from softstair.nn import StairLayer, layer_count
from softstair.stair import Stair
from softstair.train.groups import NetworkOptions
from softstair.train.network import make_network, trained_network
from softstair.train.optimiser import OptimiserOptions, clip_latent, latent_bounds
from softstair.train.parallel import from_rank_zero
from softstair.train.recipe import Recipe
from softstair.train.records import FLOAT_RUNS, Role, RunError, recipe_of, summary_of
from softstair.train.settings import HALF

AUTO = "auto"
ON_THRESHOLD = 0.7
"""Of the mean |w| of a layer: it lies on the threshold of ternary weights (Li and Liu, 2016)."""


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
    given = {role: recipe[field] for role, field in FLOAT_RUNS.items()}
    runs = {
        role: out / role if path == AUTO else Path(path)
        for role, path in given.items()
        if path is not None
    }
    has_its_model = teacher_for(shape) in (None, recipe.network.model)
    if given["start"] == given["teacher"] == AUTO and has_its_model:
        runs["teacher"] = runs["start"]
    return runs


def auto_recipe(recipe: Recipe, role: Role, shape: tuple[int, ...]) -> Recipe:
    """Return the recipe of a float run that is trained first, for examples of a shape.

    Data, folds, seed and execution are those of ``recipe``; it has a third of the epochs.

    >>> auto_recipe(Recipe(), "teacher", (3, 32, 32)).network.model
    'resnet18'
    """
    is_speech, model = shape == (1, 49, 10), recipe.network.model
    data = replace(recipe.data, mixup=0.0, cutmix=0.0)
    if shape[1:] == (32, 32):
        data = replace(data, cutout=12)
    if is_speech:
        data = replace(data, augment="shift", time_mask=8, coefficient_mask=2)
    if role == "teacher":
        model = teacher_for(shape) or model
    return Recipe(
        data=data,
        network=NetworkOptions(model, weights="float", features="float"),
        optimiser=OptimiserOptions(
            "adamw",
            learning_rate=2e-3,
            weight_decay=0.01 if is_speech else 0.1,
            norm_decay=0.0,  # small scales of normalised features would be quantised to 0
            rate_shape="cosine",
        ),
        run=replace(recipe.run, epochs=max(1, recipe.run.epochs // 3)),
    )


def load_float_run(
    role: Role, path: Path, recipe: Recipe, dataset: Dataset, model: nn.Module | None
) -> FloatRun:
    """Return the network of a finished float run, which rank 0 reads.

    Raises RunError if there is none. Code that the run names is called if ``recipe`` names it too.
    """
    field = FLOAT_RUNS[role]
    wanted = f"{field} must be the directory of a finished float run, or auto, but"
    network: nn.Module | None = None

    def read() -> tuple[Recipe, dict[str, Tensor]]:
        nonlocal network
        try:
            loaded = recipe_of(path)
            problem = "is not finished" if loaded and summary_of(path) is None else ""
            problem = "holds no run" if loaded is None else problem
            if loaded is None or problem or not loaded.network.is_float:
                problem = f"{str(path)!r} {problem or 'holds a quantised network'}"
                advice = "train one with weights and features in float"
                raise RunError(f"{wanted} {problem}: {advice}.", field=field)
            _check_same_data(field, path, loaded, recipe)
            if role == "start":
                _check_same_input(path, loaded, recipe, dataset)
            is_same = loaded.network.model == recipe.network.model
            network = trained_network(path, dataset, model if is_same else None, own_code=is_same)
            return loaded, network.state_dict()
        except RunError as error:
            if error.field == field:
                raise
            # What it advises is for the run itself, such as another `out`.
            problem = str(error).rpartition(": ")[0] or str(error).rstrip(".")
            raise RunError(f"{wanted} {problem}: give another run.", field=field) from None

    loaded, state = from_rank_zero(read)
    if network is None:
        with torch.random.fork_rng([]):
            is_same = loaded.network.model == recipe.network.model
            network = make_network(loaded, dataset, model if is_same else None)
        network.load_state_dict(state)
    return FloatRun(loaded, network.eval(), _digest(state))


def _check_same_data(field: str, path: Path, loaded: Recipe, recipe: Recipe) -> None:
    """Raise RunError if a float run has other data, or may have seen the validation examples."""
    names = ("data",) if recipe.data.fold == "all" else ("data", "limit", "folds", "fold")
    for name in names:
        if loaded[name] != recipe[name]:
            raise RunError(
                f"{field} must be a run on the same data and fold, so that validation examples are "
                f"new to it, but {str(path)!r} has {name} = {loaded[name]} instead of "
                f"{recipe[name]}: train one for this fold, or give auto.",
                field=field,
            )


def _input_change(own: Recipe, recipe: Recipe, dataset: Dataset) -> tuple[float, float]:
    """Return (a, b): for the same bytes, a run of ``own`` has the input a·x + b, and one of
    ``recipe`` x."""
    zero, scale = dataset.numbers(recipe.data.integer_input, recipe.data.centre_input)
    own_zero, own_scale = dataset.numbers(own.data.integer_input, own.data.centre_input)
    return scale / own_scale, (zero - own_zero) / own_scale


def _check_same_input(path: Path, own: Recipe, recipe: Recipe, dataset: Dataset) -> None:
    """Raise RunError if a start was trained on other inputs."""
    if _input_change(own, recipe, dataset) == (1.0, 0.0):
        return
    names = ("integer_input", "centre_input")
    name = next(name for name in names if name in own.differences(recipe))
    raise RunError(
        f"init_from: {str(path)!r} was trained with {name} = {own[name]}, this run has "
        f"{recipe[name]}: train a start with the same setting, or give auto.",
        field="init_from",
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
        network = optimised_for_inference(run.network.eval(), tuple(dataset.x.shape[1:]))
        self._network = network.to(device).requires_grad_(False)
        self._dtype = torch.float32
        if recipe.run.precision_on(device) in HALF:
            self._dtype = torch.bfloat16
            for module in self._network.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                    module.to(torch.bfloat16)  # as autocast does, but once
        if device.type == "cuda":
            for parameter in self._network.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        options = recipe.optimiser
        self.weight, self.temperature = options.teacher_weight, options.temperature
        # The teacher gets the bytes by its own zero point and scale.
        self._factor, self._offset = _input_change(run.recipe, recipe, dataset)

    def __call__(self, loss: Tensor, scores: Tensor, x: Tensor) -> Tensor:
        """Return the loss of a batch x, given its cross entropy and the network's scores."""
        with torch.no_grad():
            if (self._factor, self._offset) != (1.0, 0.0):
                x = x * self._factor + self._offset
            targets = F.log_softmax(self._network(x.to(self._dtype)).float() / self.temperature, 1)
        logarithms = F.log_softmax(scores.float() / self.temperature, 1)
        divergence = F.kl_div(logarithms, targets, reduction="batchmean", log_target=True)
        return (1 - self.weight) * loss + self.weight * self.temperature**2 * divergence


@torch.no_grad()
def start_from(network: nn.Module, run: FloatRun, recipe: Recipe) -> None:
    """Give a network the weights of its float twin.

    Quanta that are fitted are fitted to them. Other latent weights are scaled by layer, see
    :func:`latent_scale`, with their bias and the running statistics of a batch normalisation that
    follows. It absorbs the scale; where none follows, the layer's output has another scale than the
    float network's. Then latent weights are clipped to where the first noise has a density.
    """
    try:
        with warnings.catch_warnings():  # of their scale, which is set below
            warnings.simplefilter("ignore")
            network.load_state_dict(run.network.state_dict())
    except RuntimeError:
        raise RunError(
            "init_from must be a float run of the same model, but its parameters have other names "
            "or shapes: give another run, or leave out `init_from`.",
            field="init_from",
        ) from None
    if recipe.network.is_float:
        return
    for layer, norms in _layers_and_norms(network):
        if layer.weight_stair.fit is not None:
            continue
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
    graph = graph_of(network)
    consumers = graph.consumers()
    modules = [step.module and network.get_submodule(step.module) for step in graph.steps]
    layers = [module for module in modules if isinstance(module, StairLayer)]
    for layer in dict.fromkeys(layers):
        uses = [number for number, module in enumerate(modules) if module is layer]
        takers = dict.fromkeys(modules[taker] for use in uses for taker in consumers[use])
        norms = [norm for norm in takers if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
        yield layer, norms
