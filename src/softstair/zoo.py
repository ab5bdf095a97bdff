"""Trained networks in files, and those of the zoo.

A file is safetensors: the state of ``eval()``, each quantised weight in as few bits as its levels
need, the stairs, and in the metadata the name of the model, the options of ``quantise``, the shape
and scale of the input, the classes and a digest of all. Reading it runs no code: where the model is
code of its maker, the reader passes a model. A network that was read cannot be trained further.
"""

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import __version__, _check, _plugins
from softstair._errors import SoftstairError, first_line, import_extra
from softstair._files import replacing
from softstair._stair_module import EXTRA_STATE
from softstair.convert import QuantiseOptions, quantise
from softstair.convert.conversion import graph_of, options_of
from softstair.models import NETWORKS, build
from softstair.nn import StairLayer, StairModule
from softstair.stair import Stair

__all__ = ["About", "Card", "about", "card", "load", "names", "path_of", "save"]

FORMAT = 1
FILES = "*.safetensors"
MAX_BYTES = 1 << 30
WRONG = (LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError, ValueError)
"""What reading a file that lies may raise."""
RARE = tuple(each.name for each in fields(QuantiseOptions) if each.name != "init")
"""The rare options of ``quantise`` that a file has."""
RELEASE: str | None = None
"""The address of the networks of this release; None as long as there is no release."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a file says of its network, which takes (x − mean)/std of integers x.

    Args:
        model: Name of the model; ``package.module:function`` is a label, and never imported.
        shape: Shape of an input, such as (C, H, W).
        classes: Names of the classes; empty if the outputs are none.
        mean: The integer that stands for 0.
        std: The scale of the input.
        form: A digest of the modules and operations, which a model must have too.
        options: The options of ``quantise``; None for a float network.
        data: The data set that it was trained on.
        fold: Its validation fold, or ``"all"``.
        folds: How many folds there were.
        limit: How many examples were used; None for all.
        valid_accuracy: Its accuracy on the validation fold.
        test_accuracy: Its accuracy on the test set.
        version: The version of softstair that wrote the file.
    """

    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    mean: float
    std: float
    form: str = field(repr=False)
    options: dict[str, Any] | None = field(default=None, repr=False)
    data: str = ""
    fold: int | Literal["all"] = "all"
    folds: int = 1
    limit: int | None = None
    valid_accuracy: float | None = None
    test_accuracy: float | None = None
    version: str = __version__


def save(
    net: nn.Module,
    file: Path | str,
    model: str,
    shape: Sequence[int],
    mean: float,
    std: float,
    **facts: Any,
) -> Path:
    """Write a trained network to a file, in place of one that exists.

    >>> import tempfile
    >>> import softstair as ss
    >>> net = ss.quantise(build("digits", classes=10, shape=(1, 8, 8)), "ternary")
    >>> known = dict(model="digits", shape=(1, 8, 8), mean=8, std=4, classes=range(10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = load(save(net, f"{folder}/digits.safetensors", **known))
    >>> x = torch.randn(2, 1, 8, 8)
    >>> torch.equal(loaded(x), net.eval()(x))
    True

    Args:
        net: A network of :func:`softstair.quantise`, or a float one; it is left as it is.
        file: The file to write.
        model: The name of a model of softstair, or a label for one of your own.
        shape: Shape of one input, without the batch.
        mean: The network takes (x − mean)/std of what the device reads; exports need an integer
            and a power of two.
        std: See ``mean``.
        **facts: Other fields of :class:`About`, such as ``classes`` and ``data``.
    """
    names = {each.name for each in fields(About)} - {"options", "version", "form"}
    for name in facts:
        _check.choice("facts", name, names)
    quantised = any(isinstance(module, StairModule) for module in net.modules())
    options = _encoded(_flat(options_of(net))) if quantised else None
    facts |= {"shape": tuple(shape), "classes": tuple(map(str, facts.get("classes", ())))}
    if model in NETWORKS and not facts["classes"]:
        raise _check.invalid("classes", f"must name the outputs of {model!r}, but none were given")
    numbers: dict[str, Any] = {"mean": float(mean), "std": float(std)}
    known = About(model=model, options=options, form=_form(net), **numbers, **facts)
    state = {
        key: tensor.detach().cpu().contiguous().clone() for key, tensor in net.state_dict().items()
    }
    for key, layer in _stair_layers(net):
        own = layer.weight_stair
        if bool(layer.weight.isnan().any()):
            raise _check.invalid("net", f"must have no NaN among its weights, but {key!r} has")
        weight = layer.matrix(layer.weight.detach().cpu())
        state[key] = _to_bits(own.index(weight), _width(own.stair))
    metadata = {"format": FORMAT, **vars(known)}
    text = json.dumps({**metadata, "digest": _digest(metadata, state)}, allow_nan=False)
    data = import_extra("safetensors.torch").save(state, metadata={"softstair": text})
    with replacing(Path(file)) as partial:
        partial.write_bytes(data)
    return Path(file)


def load(
    network: Path | str, model: nn.Module | Callable[..., nn.Module] | str | None = None
) -> nn.Module:
    """Return a trained network in ``eval()``; its outputs are bit-identical.

    Args:
        network: A file of :func:`save`, or one of :func:`names`.
        model: The float network if it is code of your own, or ``package.module:function`` or the
            function itself, called with those of the keywords ``classes`` and ``shape`` that it
            takes. A network that is quantised already takes the weights as it is.

    Raises:
        SoftstairError: If there is no such network, if its file is damaged, or if it does not fit
            the model.

    >>> network, known = load("speech-dscnn-int4"), about("speech-dscnn-int4")
    >>> x = torch.randint(256, (2, *known.shape), dtype=torch.uint8)
    >>> network((x.float() - known.mean) / known.std).shape
    torch.Size([2, 12])
    """
    file = path_of(network)
    known, tensors = _read(file)
    if known.model not in NETWORKS and model is None:
        raise SoftstairError(
            f"the model of {str(file)!r} is code of its maker, {known.model!r}: pass `model`.",
            field="model",
        )
    try:
        with torch.random.fork_rng([]):
            net = _quantised(_model(known, model), known)
        if _form(net) != known.form:
            raise ValueError("its modules or operations are others")
        net.load_state_dict(_unpacked(net, tensors))
    except WRONG as e:
        if model is None:
            raise _damaged(file, e) from None
        problem = f"does not fit the network of {str(file)!r} ({first_line(e)})"
        raise SoftstairError(f"`model` {problem}.", field="model") from None
    return net.eval()


def about(network: Path | str) -> About:
    """Return what a file, or the file of one of :func:`names`, says of its network."""
    return _read(path_of(network))[0]


@dataclass(frozen=True)
class Card:
    """What the maker of a network of the zoo says of it.

    Args:
        data: Data that it was trained and tested on.
        bits: Its stairs by name.
        accuracies: The accuracy for each seed that was trained, this network's first.
        command: The command that trained it.
        commit: The commit of softstair that trained it.
    """

    data: str
    bits: str
    accuracies: tuple[float, ...]
    command: str
    commit: str


def card(name: str) -> Card:
    """Return the card of a network of the zoo.

    >>> card("speech-dscnn-int4").bits
    'int4'
    """
    file = path_of(name).with_name("cards.json")
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))[name]
        return Card(**{**entry, "accuracies": tuple(entry["accuracies"])})
    except (*WRONG, OSError) as error:
        raise _damaged(file, error) from None


def names() -> tuple[str, ...]:
    """Return the names of the networks of the zoo that are on this machine, sorted.

    >>> "speech-dscnn-int4" in names()
    True
    """
    return tuple(sorted({file.stem for folder in _folders() for file in folder.glob(FILES)}))


def _folders() -> list[Path]:
    """Return where networks of the zoo may lie: SOFTSTAIR_ZOO, a clone's folder zoo, the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "softstair" / "zoo"
    own = os.environ.get("SOFTSTAIR_ZOO")
    return [*([Path(own)] if own else []), Path(__file__).parents[2] / "zoo", cache]


def where_to_look() -> str:
    """Return how to get the networks of the zoo where there are none."""
    if RELEASE is None:
        return "no release has networks yet: set SOFTSTAIR_ZOO to the folder zoo of a clone."
    return f"download them from {RELEASE}, and set SOFTSTAIR_ZOO to their folder."


def path_of(network: Path | str) -> Path:
    """Return the file of a network: the path itself, or that of a name in the zoo."""
    if (path := Path(network)).is_file():
        return path
    for folder in _folders():
        if (file := folder / f"{network}.safetensors").is_file():
            return file
    hint = _check.suggestion(network, names()) or f"the zoo has {', '.join(names())}."
    hint = hint if names() else where_to_look()
    problem = f"{_check.shortened(str(network))} is no file and no network of the zoo; {hint}"
    raise SoftstairError(problem, field="network")


def _model(known: About, model: nn.Module | Callable[..., nn.Module] | str | None) -> nn.Module:
    """Return the float model of a file, of which code is called only if the caller gave it."""
    classes, shape = len(known.classes), known.shape
    if model is None or isinstance(model, str):
        return build(model or known.model, classes, shape)
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    given = {"classes": classes, "shape": shape}
    return _plugins.call_function(model, known.model, "model", nn.Module, **given)


def _quantised(model: nn.Module, known: About) -> nn.Module:
    """Return a float model with the stairs that a file names; a quantised one as it is."""
    if known.options is None or any(isinstance(m, StairModule) for m in model.modules()):
        return model
    options = _decoded(known.options)
    rare = {name: options.pop(name) for name in RARE if name in options}
    chosen = QuantiseOptions(**{**rare, "init": "keep"})
    return quantise(model, **options, options=chosen, example_inputs=torch.zeros(2, *known.shape))


def _form(net: nn.Module) -> str:
    """Return a digest of what a network computes, whatever its weights are."""
    text, plain = [], (int, float, str, tuple, type(None))
    changing = ("training", "inplace", "widest_input", "momentum", "in_float")
    for name, module in net.named_modules(remove_duplicate=False):
        own, facts = vars(module).items(), dict[str, Any]()
        # A user's own module may count its calls; the stairs have tensors of their own.
        ours = ("torch.nn", "softstair.nn", "softstair._projections")
        if type(module).__module__.startswith(ours):
            facts = {k: v for k, v in own if k[0] != "_" and isinstance(v, plain)}
        settings = sorted((key, value) for key, value in facts.items() if key not in changing)
        text.append(f"{name} {type(module).__name__} {settings}")
    if any(isinstance(module, StairModule) for module in net.modules()):
        text += [f"{step.module} {step.function} {step.inputs}" for step in graph_of(net).steps]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``quantise`` with the rare ones beside them, but for ``init``."""
    direct = {name: value for name, value in options.items() if name != "options"}
    return direct | {name: getattr(options["options"], name) for name in RARE}


def _encoded(value: Any) -> Any:
    """Return options of ``quantise`` as data for JSON."""
    if isinstance(value, Stair):
        return {"stair": value.to_json()}
    if isinstance(value, Mapping):
        return {"entries": [[key, _encoded(entry)] for key, entry in value.items()]}
    return [_encoded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and "stair" in value:
        return Stair.from_json(value["stair"])
    if isinstance(value, dict):
        return {key: _decoded(entry) for key, entry in value["entries"]}
    return [_decoded(entry) for entry in value] if isinstance(value, list) else value


def _read(file: Path) -> tuple[About, dict[str, Tensor]]:
    safetensors = import_extra("safetensors")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError("it is too long")
        with safetensors.safe_open(file, "pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get("softstair", "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if metadata.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if metadata.pop("digest") != _digest({"format": FORMAT, **metadata}, tensors):
            raise ValueError("its digest differs")
        sizes = [_check.integer("shape", size, 1, 1 << 16) for size in metadata.pop("shape")]
        for name in ("mean", "std"):
            metadata[name] = float(_check.number(name, metadata[name]))
        known = About(**{**metadata, "shape": tuple(sizes), "classes": tuple(metadata["classes"])})
    except (*WRONG, OSError, safetensors.SafetensorError) as error:
        raise _damaged(file, error) from None
    return known, tensors


def _digest(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of what a file holds."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _damaged(file: Path, error: Exception) -> SoftstairError:
    reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
    return SoftstairError(f"{str(file)!r} is no network of softstair, or is damaged ({reason}).")


def _unpacked(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the network, each weight well inside the bin of its level."""
    state = dict(tensors)
    for key, layer in _stair_layers(net):
        place = f"{key.removesuffix(layer.weight_name)}weight_stair"
        own, quanta = layer.weight_stair, state[f"{place}.quantum"]
        if quanta.shape != own.quantum.shape:  # calibration gives each channel its own
            own.set_quantum(quanta.tolist())
        stair = Stair.from_tensor(state[f"{place}.{EXTRA_STATE}"], own.stair.axis)
        index = _from_bits(state[key], _width(stair), layer.weight.numel())
        matrix = layer.matrix(layer.weight)
        weight = _representatives(stair, index.reshape(own.in_groups(matrix).shape))
        state[key] = layer.matrix(weight.reshape(matrix.shape))
    return state


def _stair_layers(network: nn.Module) -> list[tuple[str, StairLayer]]:
    """Return the layers with quantised weights, by the names of their weights."""
    return [
        (f"{name}.{module.weight_name}".removeprefix("."), module)
        for name, module in network.named_modules()
        if isinstance(module, StairLayer)
    ]


def _width(stair: Stair) -> int:
    """Return the bits per level: 1, 2, 4 or 8, so that none crosses a byte boundary."""
    bits = (len(stair.levels) - 1).bit_length()
    return next(width for width in (1, 2, 4, 8) if bits <= width)


def _to_bits(index: Tensor, width: int) -> Tensor:
    """Return the indices in bytes, the first in the lowest bits, padded with 0."""
    flat = index.reshape(-1).to(torch.int32)
    per_byte = 8 // width
    flat = nn.functional.pad(flat, (0, -len(flat) % per_byte)).reshape(-1, per_byte)
    return (flat << torch.arange(0, 8, width)).sum(1).to(torch.uint8)


def _from_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the indices that :func:`_to_bits` packed."""
    if packed.dtype != torch.uint8 or packed.shape != (math.ceil(count * width / 8),):
        raise ValueError(f"{count} weights are not {width} bits each")
    index = (packed.int()[:, None] >> torch.arange(0, 8, width)) & ((1 << width) - 1)
    return index.reshape(-1)[:count].long()


def _representatives(stair: Stair, index: Tensor) -> Tensor:
    """Return for each level index a weight inside its bin: the level itself if it lies there."""
    quanta = torch.tensor(stair.quantum, dtype=torch.float64)
    unit = 1.0 if quanta.dim() else float(quanta)  # with one per channel, levels are in quanta
    low, high = stair.thresholds[0] - unit, stair.thresholds[-1] + unit
    middles = [low, *((a + b) / 2 for a, b in pairwise(stair.thresholds)), high]
    bins = pairwise((-math.inf, *stair.thresholds, math.inf))
    values = [
        level if start < level < end else middle
        for level, middle, (start, end) in zip(stair.levels, middles, bins, strict=True)
    ]
    weight = torch.tensor(values, dtype=torch.float64)[index]
    if quanta.dim():
        weight = weight * quanta.reshape(-1, *[1] * (index.dim() - 1))
    weight = weight.float()
    if not torch.equal(stair.index(weight), index):
        raise ValueError("its levels lie too close together for float32")
    return weight
