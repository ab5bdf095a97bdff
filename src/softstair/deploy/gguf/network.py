"""What a Llama-shaped network is to llama.cpp: tensors by name, sizes, and what is not equal."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import nn

from softstair import _check
from softstair._projections import Projection
from softstair.deploy.gguf.blocks import Array
from softstair.nn import StairActivation, StairLayer

Rotary = Literal["halves", "pairs"]
NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""The modules of a Llama of Hugging Face or of `softstair.models`, by their names in GGUF."""


@dataclass(frozen=True)
class Weights:
    """The weights of a module, its rows in llama.cpp's order: values, or integers times quanta.

    ``quanta`` are (rows, groups of a row) or (1, 1); ``order`` holds the module's row for each row.
    """

    module: str
    exact: Array  # float64
    integers: Array | None = None
    quanta: Array | None = None
    order: Array | None = None


@dataclass
class Network:
    """A network in eval(), its tensors by their names in GGUF, the fields of its file, and what
    llama.cpp would compute otherwise."""

    module: nn.Module
    sizes: dict[str, int | float]
    problems: list[str]
    tensors: dict[str, Weights] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Whether it has weights of `softstair.quantise`."""
        return any(tensor.integers is not None for tensor in self.tensors.values())


def read_network(
    net: nn.Module,
    config: Any = None,
    names: Mapping[str, str] | None = None,
    rotary: Rotary = "halves",
) -> Network:
    """Return what a network is to llama.cpp; arguments as for `write`."""
    _check.choice("rotary", rotary, ("halves", "pairs"))
    config = getattr(net, "config", None) if config is None else config
    if config is None:
        raise _check.invalid("config", "must be given for a network without the attribute config")
    sizes, problems = _sizes(config)
    found = Network(copy.deepcopy(net).eval(), sizes, problems)
    modules = dict(found.module.named_modules(remove_duplicate=False))
    heads = {
        "attn_q": int(sizes["llama.attention.head_count"]),
        "attn_k": int(sizes["llama.attention.head_count_kv"]),
    }
    for name, path in _paths(names or NAMES, int(sizes["llama.block_count"])):
        if path not in modules:
            problem = f"must name the modules of the network, but it has no {path!r} for {name!r}"
            raise _check.invalid("names", problem)
        pair = (modules[path], modules[names["token_embd"] if names else NAMES["token_embd"]])
        is_tied = name == "output" and pair[0].weight is pair[1].weight
        if is_tied and not any(isinstance(module, StairLayer) for module in pair):
            continue  # llama.cpp takes the embedding
        groups = heads.get(name.rpartition(".")[2]) if rotary == "halves" else None
        found.tensors[name] = _weights(path, modules[path], groups)
    problems.extend(_problems(found, modules))
    return found


def _paths(names: Mapping[str, str], blocks: int) -> Iterator[tuple[str, str]]:
    """Yield each name in GGUF with that of its module, block by block."""
    if unknown := {*names} ^ {*NAMES}:
        keys = f"must have the keys {', '.join(NAMES)}"
        raise _check.invalid("names", f"{keys}; {', '.join(sorted(unknown))} differ")
    yield "token_embd", names["token_embd"]
    for number in map(str, range(blocks)):
        for name, path in names.items():
            if "*" in name:
                yield name.replace("*", number), path.replace("*", number)
    yield from ((name, names[name]) for name in ("output_norm", "output"))


def _sizes(config: Any) -> tuple[dict[str, int | float], list[str]]:
    """Return the fields of a file, and what of a configuration llama.cpp computes otherwise."""
    get: Any = lambda name, *x: getattr(config, name, *x)
    get = config.get if isinstance(config, Mapping) else get
    try:
        heads = int(get("num_attention_heads"))
        rope = get("rope_parameters", None) or get("rope_scaling", None) or {}
        size = int(get("head_dim", None) or get("hidden_size") // heads)
        sizes: dict[str, int | float] = {
            "llama.context_length": int(get("max_position_embeddings")),
            "llama.embedding_length": int(get("hidden_size")),
            "llama.block_count": int(get("num_hidden_layers")),
            "llama.feed_forward_length": int(get("intermediate_size")),
            "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": int(get("num_key_value_heads", None) or heads),
            "llama.attention.key_length": size,
            "llama.attention.value_length": size,
            "llama.attention.layer_norm_rms_epsilon": _float32(get("rms_norm_eps")),
            "llama.rope.freq_base": _float32(rope.get("rope_theta") or get("rope_theta", 1e4)),
            "llama.rope.dimension_count": size,
            "llama.vocab_size": int(get("vocab_size")),
        }
    except (AttributeError, TypeError) as error:
        problem = f"must have the fields of a LlamaConfig, such as hidden_size ({error})"
        raise _check.invalid("config", problem) from None
    kind = rope.get("rope_type") or rope.get("type") or "default"
    given = (("model_type", get("model_type", "llama"), "llama"), ("rope_type", kind, "default"))
    checked = (*given, ("hidden_act", get("hidden_act", "silu"), "silu"))
    text = "{} is {!r}, but what is written is {!r}"
    return sizes, [text.format(*row) for row in checked if row[1] != row[2]]


def _float32(value: Any) -> float:
    return float(np.float32(value))


def _weights(path: str, module: nn.Module, heads: int | None) -> Weights:
    """Return the weights of a module; of rotated halves, the rows in the order of pairs."""
    weight, order = module.get_parameter("weight").detach().cpu(), None
    if heads is not None:
        order = np.arange(len(weight)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    rows = slice(None) if order is None else order
    if not isinstance(module, StairLayer):
        return Weights(path, weight.double().numpy()[rows], order=order)
    if isinstance(module, Projection):
        integers: Any = module.integers_and_quanta().integers.cpu()
        quanta: Array = module.integers_and_quanta().quanta.cpu().double().numpy()
    else:
        integers = module.weight_stair.integers(weight)
        quanta = np.array(module.weight_stair.stair.quantum, np.float32).astype(np.float64)
        quanta = quanta.reshape(-1, 1)
    if integers is None or bool(integers.isnan().any()):
        raise _check.invalid("net", f"must have weights that are integers in quanta: {path!r}")
    quanta = quanta[rows] if len(quanta) > 1 else quanta
    ordered = integers.long().numpy()[rows]
    return Weights(path, ordered * spread(quanta, ordered.shape), ordered, quanta, order)


def spread(quanta: Array, shape: tuple[int, ...]) -> Array:
    """Return quanta (R, G) or (1, 1) for each weight (R, C)."""
    return np.broadcast_to(quanta.repeat(shape[1] // quanta.shape[1], axis=1), shape)


def _problems(found: Network, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield what of the modules llama.cpp would compute otherwise, or leave out."""
    used = {weights.module: modules[weights.module] for weights in found.tensors.values()}
    eps = found.sizes["llama.attention.layer_norm_rms_epsilon"]
    for path, module in modules.items():
        kind = type(module).__name__
        if isinstance(module, StairActivation):
            yield f"{path!r} quantises features, which llama.cpp does in a way of its own"
        if isinstance(module, Projection) and module.in_float:
            yield f"{path!r} computes in float as long as the first part of its training lasts"
        is_activation = type(module).__module__.endswith((".activation", ".activations"))
        if is_activation and kind not in ("SiLU", "SiLUActivation", "Softmax"):
            yield f"{path!r} is {kind}, but llama.cpp would compute SiLU"
        if path in used and module.get_parameter("weight").dim() == 1:
            own = getattr(module, "variance_epsilon", getattr(module, "eps", eps))
            if isinstance(module, nn.LayerNorm) or own is None or _float32(own) != eps:
                expected = f"RMSNorm with eps={eps:g}"
                yield f"{path!r} is {kind} with eps={own}, but llama.cpp would compute {expected}"
    known = {id(module.get_parameter("weight")) for module in used.values()}
    for path, parameter in found.module.named_parameters():
        if id(parameter) not in known and ".weight_stair." not in path:
            yield f"{path!r} is a parameter that the Llama of llama.cpp does not have"
