"""Is a GGUF file what was trained? Its bits and fields, its float32 twin, and the file itself.

1. Every weight is unpacked here and compared with the trained one, and every field with the sizes.
2. The file with all tensors in float32 (the twin), run by llama.cpp, must give PyTorch's
   log-probabilities up to the order of sums: the proof of the fields and the architecture.
3. The file itself is run. llama.cpp rounds features to 8 bits before each product; PyTorch with
   the same roundings must be as near as noise of the size of float32's moves it.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softstair import _check
from softstair._projections import Projection
from softstair.deploy.gguf.blocks import FLOATS, Array
from softstair.deploy.gguf.container import File, open_file, write_tensors
from softstair.deploy.gguf.network import Network, Rotary, Weights, read_network
from softstair.deploy.gguf.runtime import (
    in_float,
    letter_of,
    log_probabilities,
    read,
    roundings_of,
    tokens_of,
    write_text,
)
from softstair.deploy.gguf.writing import as_float

POSITIONS, PROBABILITIES = 128, 1 << 19  # tokens to compare on, fewer for large vocabularies
TWIN_MEAN, TWIN_LARGEST = 1e-5, 1e-4  # differences of log-probabilities that sums in float32 leave
FLOORS, NOISE, SEEDS = 5, 1e-7, 3  # the emulation may be so many times its own noise away


@dataclass(frozen=True)
class Distance:
    """How far log-probabilities of a file are from PyTorch's: absolute differences, the divergence
    KL(PyTorch ‖ file) in nats, the share of equal most likely tokens, the perplexities of both."""

    mean: float
    largest: float
    divergence: float
    same_top: float
    perplexities: tuple[float, float]

    @classmethod
    def of(cls, expected: Tensor, given: Tensor, tokens: Sequence[int]) -> "Distance":
        """Return the distance on a text."""
        difference, following = (given - expected).abs(), torch.tensor([*tokens[1:]])[:, None]
        perplexity = lambda p: math.exp(-float(p[:-1].gather(1, following).mean()))
        return cls(
            float(difference.mean()),
            float(difference.max()),
            float((expected.exp() * (expected - given)).sum(1).mean()),
            float((expected.argmax(1) == given.argmax(1)).double().mean()),
            (perplexity(expected), perplexity(given)),
        )


@dataclass
class Verification:
    """What :func:`verify` found.

    Attributes:
        weights: How many weights were compared.
        wrong: The number of weights that differ, and what is there instead if it is known, by
            tensor.
        fields: Fields and tensors that differ.
        notes: What was rounded, or could not be compared.
        twin: Of the twin in float32; None if it was not run.
        file: Of the file; None if it was not run.
        emulated: The mean distance of the file from PyTorch with llama.cpp's roundings; None if
            they are not known.
        limit: The largest that it may be.
    """

    weights: int = 0
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    twin: Distance | None = None
    file: Distance | None = None
    emulated: float | None = None
    limit: float = 0.0

    @property
    def passes(self) -> tuple[bool, bool, bool]:
        """Whether weights and fields, the twin and the file are as they must be, or not run."""
        bits, twin = not self.wrong and not self.fields, self.twin
        near = twin is None or (twin.mean <= TWIN_MEAN and twin.largest <= TWIN_LARGEST)
        return bits, near, self.emulated is None or self.emulated <= self.limit

    def __str__(self) -> str:
        wrong, (_, *passes) = sum(count for count, _ in self.wrong.values()), self.passes
        twin, file = ("passed" if each else "FAILED" for each in passes)
        lines = [f"weights: {wrong:,} of {self.weights:,} differ"]
        lines += [f"  {name}: {count:,}{hint}" for name, (count, hint) in self.wrong.items()]
        lines += [f"fields: {len(self.fields)} differ", *(f"  {text}" for text in self.fields)]
        lines += [f"note: {note}" for note in self.notes]
        if d := self.twin:
            limits = f"at most {TWIN_MEAN:g} and {TWIN_LARGEST:g}"
            lines.append(
                f"float32 twin: mean {d.mean:.1e}, largest {d.largest:.1e} ({limits}): {twin}"
            )
        if d := self.file:
            own, other = d.perplexities
            lines += [
                f"file: mean {d.mean:.1e}, largest {d.largest:.1e}, KL {d.divergence:.1e}, "
                f"{d.same_top:.1%} equal top tokens, perplexity {other:.4f} (PyTorch {own:.4f})"
            ]
        if self.emulated is not None:
            limit = f"at most {self.limit:.1e}"
            lines.append(f"file, roundings emulated: mean {self.emulated:.1e} ({limit}): {file}")
        return "\n".join(lines)


@torch.no_grad()
def verify(
    net: nn.Module,
    path: Path | str,
    text: Sequence[int] | str | None = None,
    *,
    run: bool = True,
    config: Any = None,
    names: Mapping[str, str] | None = None,
    rotary: Rotary = "halves",
) -> Verification:
    """Compare a GGUF file, of :func:`write` or of others, with the network that it stands for.

    The weights of a quantised network must be equal. Those of a float network may be rounded to the
    type of their tensor, which is noted.

    Args:
        net: The trained network, quantised or not.
        path: The file.
        text: A text or tokens to compare on; by default the network writes 128 tokens, or 16 where
            the vocabulary is large.
        run: Whether to run the file and its twin in llama.cpp.
        config: As for :func:`write`.
        names: As for :func:`write`.
        rotary: As for :func:`write`.

    Raises:
        SoftstairError: If the file is damaged, or if llama.cpp cannot load it.
        MissingExtraError: If xllamacpp is not installed.
    """
    network, file = read_network(net, config, names, rotary), open_file(Path(path))
    found = Verification(fields=[*network.problems, *_fields(network, file)])
    if any(getattr(m, "rounding", None) and isinstance(m, Projection) for m in net.modules()):
        found.notes.append("PyTorch is run without its roundings of features")
    values = {name: file.values(name) for name in file.tensors if name.endswith(".weight")}
    rounded = _compare(found, network, file, values)
    if run:
        _run(found, network, file, values, rounded, text)
    return found


def _fields(network: Network, file: File) -> list[str]:
    """Return the fields that differ; some may be left out."""
    fields, sizes = file.fields, network.sizes
    heads, width = (
        fields.get(f"llama.{n}", 0) for n in ("attention.head_count", "embedding_length")
    )
    count = len(fields.get("tokenizer.ggml.tokens", ()))
    size = width // heads if heads else 0
    defaults = dict.fromkeys(("rope.dimension_count", "attention.key_length"), size)
    defaults |= {"attention.head_count_kv": heads, "attention.value_length": size}
    defaults |= {"rope.freq_base": 1e4, "vocab_size": count}
    allowed = {"general.architecture": "llama", **sizes}
    given = {name: fields.get(name, defaults.get(name.removeprefix("llama."))) for name in allowed}
    others = {name: value for name, value in fields.items() if name.startswith("llama.")}
    others = {n: v for n, v in others.items() if n not in sizes and v not in ("none", "linear")}
    rows: list[tuple[str, Any, Any]]
    rows = [(name, given[name], value) for name, value in allowed.items() if given[name] != value]
    rows += [(name, value, None) for name, value in others.items()]
    if count != sizes["llama.vocab_size"]:
        rows.append(("number of tokenizer.ggml.tokens", count, sizes["llama.vocab_size"]))
    return [f"{name} is {value!r}, but the network has {own!r}" for name, value, own in rows]


def _compare(
    found: Verification, network: Network, file: File, values: Mapping[str, Array]
) -> dict[str, Array]:
    """Count the weights that differ; return the tensors that are rounded, as they are stored."""
    rounded, expected = {}, dict(network.tensors)
    if "output" not in expected and "output.weight" in values:
        expected["output"] = expected["token_embd"]
    for name, weights in expected.items():
        given = values.get(f"{name}.weight")
        if given is None or given.shape != weights.exact.shape:
            problem = "missing" if given is None else f"of shape {given.shape}"
            instead = "; llama.cpp takes the embedding" if name == "output" else ""
            found.fields.append(f"{name}.weight is {problem}{instead}")
            continue
        kind = file.tensors[f"{name}.weight"].kind
        changed = given != weights.exact
        wrong = changed & ~_is_rounding(weights, given, f"{name}.weight", file, network.quantised)
        found.weights += 0 if kind is None else given.size
        if count := int(wrong.sum()):
            found.wrong[name] = (count, _hint(name, expected, given))
        elif changed.any():
            rounded[name] = given
            own = f"{kind.upper()}" if kind else "a type that only the package gguf unpacks"
            found.notes.append(f"{name} is rounded to {own} ({int(changed.sum()):,} weights)")
    known = {f"{name}.weight" for name in expected} | {f"{name}.scale" for name in expected}
    extra = sorted(file.tensors.keys() - known)
    found.fields += [f"{name} is in the file, but not in the network" for name in extra]
    return rounded


def _is_rounding(weights: Weights, given: Array, name: str, file: File, strict: bool) -> Array:
    """Return which weights are the nearest that their type can hold."""
    kind = file.tensors[name].kind
    if kind in FLOATS:
        return given == as_float(weights.exact, str(kind))
    if kind is None or strict:
        return np.full(given.shape, kind is None)
    # Half a step and the rounding of the scale; a whole step where the levels end a level earlier.
    steps = 1.07 if kind in ("q4_0", "q2_0") else 0.57
    return np.abs(given - weights.exact) <= steps * np.abs(file.quanta(name)[1])


def _hint(name: str, expected: Mapping[str, Weights], given: Array) -> str:
    """Return what a tensor is instead, if that is known."""
    near = 0.1 * np.abs(given).mean()
    alike = lambda x: x.shape == given.shape and (np.abs(x - given) <= near).mean() > 0.9
    own = expected[name]
    if not alike(own.exact):
        for other, weights in expected.items():
            if other != name and alike(weights.exact):
                return f" (it holds {other})"
        if own.order is not None and alike(own.exact[np.argsort(own.order)]):
            return " (its rows are in the order of Hugging Face, not in that of llama.cpp)"
        if own.order is not None and alike(own.exact[own.order]):
            return " (its rows were put into the order of llama.cpp twice)"
    ratio = given[own.exact != 0] / own.exact[own.exact != 0]
    is_scaled = (
        ratio.size and np.ptp(ratio) < 1e-9 * abs(ratio[0]) and not given[own.exact == 0].any()
    )
    return f" (its scale is {ratio[0]:.6g} times the trained one)" if is_scaled else ""


def _run(
    found: Verification,
    network: Network,
    file: File,
    values: Mapping[str, Array],
    rounded: Mapping[str, Array],
    text: Sequence[int] | str | None,
) -> None:
    """Run the twin and the file, and compare them with PyTorch."""
    context, size = (int(network.sizes[f"llama.{n}"]) for n in ("context_length", "vocab_size"))
    module, letter = in_float(network, rounded), letter_of(file.fields["tokenizer.ggml.tokens"])
    if text is None:
        count = max(16, min(POSITIONS, PROBABILITIES // size))  # llama.cpp lists them slowly
        text = write_text(module, min(count, context - 1), size)
    tokens = tokens_of(file.path, text, context) if isinstance(text, str) else text
    tokens = [_check.integer("text", int(token), 0, size - 1) for token in tokens]
    tokens = tokens[: context - 1]  # llama.cpp needs a place for its answer
    logits = log_probabilities(module, tokens)
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "twin.gguf"
        floats = {n: (FLOATS["f32"], v.shape, v.astype("<f4").tobytes()) for n, v in values.items()}
        write_tensors(file, floats, twin)
        found.twin = Distance.of(logits, read(twin, tokens, context, size, letter), tokens)
    given = read(file.path, tokens, context, size, letter)
    found.file = Distance.of(logits, given, tokens)
    rounds = roundings_of(network, file)
    if rounds is not None:
        emulated = log_probabilities(module, tokens, rounds)
        noisy = [log_probabilities(module, tokens, rounds, NOISE, seed) for seed in range(SEEDS)]
        floor = max(float((other - emulated).abs().mean()) for other in noisy)
        found.emulated = float((given - emulated).abs().mean())
        found.limit = max(FLOORS * floor, TWIN_MEAN)
