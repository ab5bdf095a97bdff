"""Export of a trained Llama-shaped network as GGUF: its integers as they are, or an error."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import nn

from softstair import _check
from softstair._errors import SoftstairError, import_extra
from softstair._files import output_file
from softstair.deploy.gguf.blocks import BLOCKS, FLOATS, Array
from softstair.deploy.gguf.network import Rotary, Weights, read_network, spread
from softstair.deploy.gguf.vocabulary import Vocabulary, vocabulary_of

Ternary = Literal["auto", "tq2_0", "tq1_0", "q2_0"]


class Encoded(NamedTuple):
    """A tensor as it is written: the number of its type, its bytes, and a scale beside it."""

    number: int
    data: Array
    scale: float | None = None


def write(
    net: nn.Module,
    path: Path | str,
    *,
    tokenizer: str | Path | Vocabulary = "bytes",
    keep: Mapping[str, str] | None = None,
    ternary: Ternary = "auto",
    config: Any = None,
    names: Mapping[str, str] | None = None,
    rotary: Rotary = "halves",
) -> Path:
    """Write a trained network as a file for llama.cpp, in place of one that exists.

    Quantised weights are stored as their integers and quanta: ternary ones as TQ2_0 (rows of a
    multiple of 256) or Q2_0 (64), INT2 as Q2_0, INT3 and INT4 as Q4_0 (32), others as Q8_0 (32).
    Float weights are stored as F16 if that changes none of a tensor, and otherwise, and those of
    normalisations, as F32. The
    quantum of a whole layer may be any number; those of rows and groups must be fp16 numbers.

    Args:
        net: A trained network, quantised or not: :class:`softstair.models.Llama`, Hugging Face's
            ``LlamaForCausalLM``, or a module that `config` and `names` describe.
        path: The file to write.
        tokenizer: ``"bytes"``, a .txt file of all characters in order, a folder with a
            tokenizer.json of Hugging Face, or a :class:`Vocabulary`.
        keep: The float type of layers by patterns of their names in the file, such as
            ``{"blk.*.ffn_down": "f16"}``: their weights are rounded to it.
        ternary: The type of ternary weights.
        config: The sizes, with the names of Hugging Face's LlamaConfig; by default ``net.config``.
        names: The module of each tensor, with the keys of :data:`NAMES`.
        rotary: Which elements of a head turn together: ``"halves"`` (i and i + size/2, as in
            Hugging Face) or ``"pairs"`` (2i and 2i + 1).

    Raises:
        SoftstairError: If llama.cpp would compute something else, or if weights do not fit.
        MissingExtraError: If gguf is not installed.
    """
    gguf: Any = import_extra("gguf", "gguf")
    _check.choice("ternary", ternary, get_args(Ternary))
    network, kept = read_network(net, config, names, rotary), dict(keep or {})
    if network.problems:
        raise _check.invalid("net", f"cannot be written as GGUF: {'; '.join(network.problems)}")
    words = vocabulary_of(tokenizer, int(network.sizes["llama.vocab_size"]))
    for pattern in kept:
        if not any(fnmatchcase(name, pattern) for name in network.tensors):
            known = ", ".join(network.tensors)
            raise _check.invalid("keep", f"has {pattern!r}, which fits none of {known}")
    encoded = {name: _encode(name, w, kept, ternary) for name, w in network.tensors.items()}
    with output_file(Path(path), "out", (".gguf",)) as partial:
        writer = gguf.GGUFWriter(str(partial), "llama")
        for key, value in network.sizes.items():
            _add(writer, key, value)
        writer.add_tokenizer_model(words.model)
        writer.add_token_list(list(words.tokens))
        writer.add_token_types(list(words.types))
        for name, value in (words.fields or {}).items():
            _add(writer, f"tokenizer.ggml.{name}", value)
        for name, (number, data, scale) in encoded.items():
            # As int8, since of uint8 gguf asks for the size of a type, and does not know all.
            raw, shape = np.ascontiguousarray(data).view(np.int8), network.tensors[name].exact.shape
            writer.add_tensor(f"{name}.weight", raw, raw_shape=shape, raw_dtype=number)
            if scale is not None:
                writer.add_tensor(f"{name}.scale", np.array([scale], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _encode(name: str, weights: Weights, keep: Mapping[str, str], ternary: Ternary) -> Encoded:
    """Return a tensor as it is written."""
    kind = next((k for pattern, k in keep.items() if fnmatchcase(name, pattern)), None)
    exact, integers, quanta, scale = weights.exact, weights.integers, weights.quanta, None
    if kind is not None:
        _check.choice("keep", kind, FLOATS)
    elif integers is None:
        kind = "f16" if (as_float(exact, "f16") == exact).all() else "f32"
    if exact.ndim == 1:
        kind = "f32"  # llama.cpp takes no other normalisations
    if kind is not None or integers is None or quanta is None:
        return Encoded(FLOATS[str(kind)], _floats(name, exact, str(kind)))
    kind, sign = _block_of(name, integers, ternary)
    is_half = (as_float(quanta, "f16") == quanta) & (quanta < np.inf)
    if quanta.size == 1 and not is_half.all():
        quanta, scale, is_half = np.ones_like(quanta), float(quanta.item()), np.True_
    blocks = integers.shape[1] // BLOCKS[kind].size
    if blocks % quanta.shape[1]:
        size = f"at least {BLOCKS[kind].size} weights for {kind.upper()}"
        raise _refused(name, f"a quantum must be that of {size}; quantise it as ':row'")
    if not is_half.all():
        problem = f"{quanta[~is_half][0]:.9g} is a quantum, and no fp16 number"
        raise _refused(
            name, f"{problem}; quantise with QuantiseOptions(half=True), or as ':tensor'"
        )
    scales = spread(quanta * sign, (len(integers), blocks))
    return Encoded(BLOCKS[kind].number, BLOCKS[kind].encode(integers * sign, scales), scale)


def _block_of(name: str, integers: Array, ternary: Ternary) -> tuple[str, int]:
    """Return the type of quantised weights, and the sign of its scales."""
    low, high, columns = integers.min(), integers.max(), integers.shape[1]
    if low >= -1 and high <= 1:
        kinds = ["tq2_0", "q2_0"] if ternary == "auto" else [str(ternary)]
    elif low >= -2 and high <= 1:
        kinds = ["q2_0", "q4_0"]  # Q2_0 has −1 to 2: its scale is negative
    else:
        kinds = ["q4_0"] if low >= -8 and high <= 7 else ["q8_0"]
    for kind in kinds:
        if columns % BLOCKS[kind].size == 0:
            return kind, -1 if kind == "q2_0" and low == -2 else 1
    sizes = " or ".join(f"{BLOCKS[kind].size} ({kind.upper()})" for kind in kinds)
    problem = f"its rows must be a multiple of {sizes}, but are {columns} long"
    raise _refused(name, f"{problem}; change the width, or pass `keep={name}=f16`")


def _refused(name: str, problem: str) -> SoftstairError:
    return SoftstairError(f"{name} cannot be written as GGUF: {problem}.", field="net")


def _floats(name: str, exact: Array, kind: str) -> Array:
    """Return weights as the bytes of a float type."""
    rounded = as_float(exact, kind)
    if not np.isfinite(rounded).all():
        raise _refused(name, f"{kind} does not hold its largest weight; pass `keep={name}=f32`")
    if kind == "bf16":
        return (rounded.view(np.uint32) >> 16).astype("<u2")
    return rounded.astype("<f4" if kind == "f32" else "<f2")


def as_float(values: Array, kind: str) -> Array:
    """Return values rounded to a float type, in float32."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    rounded: Array = torch.from_numpy(values).to(dtype).float().numpy()
    return rounded
