"""GGUF: blocks against other readers, what is refused, and mistakes that verify must find."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import NARROW, SIZES, WIDE, llama, spread_out, written
from torch import nn

import softstair as ss
from softstair.deploy import gguf
from softstair.deploy.gguf.blocks import BLOCKS
from softstair.deploy.gguf.container import open_file as read, write_tensors
from softstair.models import Llama, LlamaConfig

package = pytest.importorskip("gguf", reason="gguf is not installed")

CASES = [
    ("ternary:row/float", "tq2_0"),
    ("ternary:256/float", "tq1_0"),
    ("ternary:64/float", "q2_0"),
    ("int2:row/float", "q2_0"),
    ("int4:32/float", "q4_0"),
    ("int3:64/float", "q4_0"),
    ("int8:row/float", "q8_0"),
    ("int8:tensor/float", "q8_0"),
]


def unpacked(data: bytes, kind: str) -> list[float]:
    """The weights of blocks, by loops over bits, from the descriptions of the types."""
    values: list[float] = []
    size = {"tq2_0": 66, "tq1_0": 54, "q2_0": 18, "q4_0": 18, "q8_0": 34}[kind]
    for start in range(0, len(data), size):
        block = data[start : start + size]
        is_last = kind.startswith("tq")
        (scale,) = struct.unpack("<e", block[-2:] if is_last else block[:2])
        codes = block[:-2] if is_last else block[2:]
        if kind == "q8_0":
            integers = [code - 256 * (code > 127) for code in codes]
        elif kind == "q4_0":
            integers = [code % 16 - 8 for code in codes] + [code // 16 - 8 for code in codes]
        elif kind == "q2_0":
            integers = [(code >> 2 * place & 3) - 1 for code in codes for place in range(4)]
        elif kind == "tq2_0":
            halves = (codes[:32], codes[32:])
            integers = [(c >> 2 * p & 3) - 1 for half in halves for p in range(4) for c in half]
        else:
            integers = []
            for part, digits in ((codes[:32], 5), (codes[32:48], 5), (codes[48:], 4)):
                for place in range(digits):
                    integers += [int(code * 3**place % 256 * 3 / 256) - 1 for code in part]
        values += [integer * scale for integer in integers]
    return values


def trained(layer: Any) -> np.ndarray:
    """What a quantised layer multiplies by, in float64, as PyTorch holds it."""
    integers, quanta = layer.integers_and_quanta()
    wide = quanta.double().repeat_interleave(integers.shape[1] // quanta.shape[1], dim=1)
    return (integers.double() * wide).numpy()


@pytest.mark.quick
@pytest.mark.parametrize(("bits", "kind"), CASES, ids=[f"{b}-{k}" for b, k in CASES])
def test_other_readers_find_the_trained_weights(bits: str, kind: str, tmp_path: Path) -> None:
    net: Any = llama(bits, **(WIDE if bits.startswith("ternary") else NARROW))
    ternary = kind if bits.startswith("ternary") else "auto"
    path = written(net, tmp_path, ternary=ternary)
    file = read(path)
    layers = {
        "blk.0.attn_v": net.model.layers[0].self_attn.v_proj,
        "blk.0.attn_output": net.model.layers[0].self_attn.o_proj,
        "blk.0.ffn_gate": net.model.layers[0].mlp.gate_proj,
        "blk.0.ffn_down": net.model.layers[0].mlp.down_proj,
    }
    for name, layer in layers.items():
        expected, stored = trained(layer), file.tensors[f"{name}.weight"]
        assert len(np.unique(expected)) > 2
        block = BLOCKS[kind]
        count = expected.size // block.size * block.bytes
        data = path.read_bytes()[stored.offset : stored.offset + count]
        scale = 1.0
        if f"{name}.scale" in file.tensors:
            place = file.tensors[f"{name}.scale"].offset
            (scale,) = struct.unpack_from("<f", path.read_bytes(), place)
        values = np.array(unpacked(data, kind)).reshape(expected.shape) * scale
        assert int((values != expected).sum()) == 0
        if kind != "q2_0":  # which the package does not know
            number = package.GGMLQuantizationType[kind.upper()]
            rows = np.frombuffer(data, np.uint8).reshape(len(expected), -1)
            theirs = package.quants.dequantize(rows, number).astype(np.float64) * scale
            assert int((theirs != expected).sum()) == 0
    found = gguf.verify(net, path, run=False)
    assert found.passes[0], str(found)
    assert found.weights == sum(p.numel() for n, p in net.named_parameters() if "stair" not in n)
    assert f"0 of {found.weights:,} differ" in str(found)


def test_the_package_reads_fields_and_float_tensors(tmp_path: Path) -> None:
    net: Any = llama()
    path = written(net, tmp_path, keep={"blk.1.*": "f16", "output": "bf16"})
    reader = package.GGUFReader(path)
    value = lambda key: reader.get_field(key).contents()
    assert value("general.architecture") == "llama"
    assert value("llama.attention.head_count_kv") == 2
    assert value("llama.rope.freq_base") == 500.0
    assert value("llama.attention.layer_norm_rms_epsilon") == np.float32(1e-4)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    own = net.model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert np.array_equal(tensors["blk.0.ffn_up.weight"].data, own)
    half = net.model.layers[1].mlp.up_proj.weight.detach().half().numpy()
    assert np.array_equal(tensors["blk.1.ffn_up.weight"].data, half)
    found = gguf.verify(net, path, run=False)
    assert found.passes[0]
    assert any("output is rounded to BF16" in note for note in found.notes)


def test_float_weights_that_are_fp16_numbers_are_stored_as_such(tmp_path: Path) -> None:
    net = llama()
    net.lm_head.weight.data = net.lm_head.weight.half().float()
    file = read(written(net, tmp_path))
    assert [file.tensors[f"{n}.weight"].kind for n in ("output", "token_embd")] == ["f16", "f32"]


def test_stairs_of_other_layers_are_written_too(tmp_path: Path) -> None:
    """Those of a quantum for a layer that is no fp16 number, beside the blocks."""
    net = spread_out(Llama(LlamaConfig(**WIDE)))
    quantised = ss.quantise(net, weights=ss.Stair.ternary(0.0611), skip="lm_head")
    found = gguf.verify(quantised, written(quantised, tmp_path), run=False)
    assert found.passes[0], str(found)
    assert read(tmp_path / "model.gguf").values("blk.0.attn_q.scale").item() == np.float32(0.0611)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "rows": (lambda: llama("ternary:row/float"), {}, r"multiple of 256 \(TQ2_0\) or 64.*keep"),
    "quanta": (lambda: llama("int4:row/float", half=False), {}, r"no fp16 number.*half=True"),
    "groups": (
        lambda: llama("int4:row/float"),
        {"keep": {"ffn": "f16"}},
        r"'ffn', which fits none",
    ),
    "type": (lambda: llama(), {"keep": {"output": "q8"}}, "keep must be"),
    "activation": (lambda: with_activation(llama()), {}, "'model.layers.0.mlp.act_fn' is GELU"),
    "eps": (lambda: with_eps(llama()), {}, "'model.norm' is RMSNorm with eps=0.5"),
    "extra": (lambda: with_norm(llama()), {}, "'model.layers.0.inner.weight' is a parameter"),
    "features": (lambda: llama("int4:row/int8:token"), {"rotary": "x"}, "rotary"),
    "overflow": (lambda: with_huge(llama()), {"keep": {"output": "f16"}}, "largest weight"),
    "words": (lambda: llama(), {"tokenizer": gguf.characters("a" * 81)}, "at most 80 tokens"),
    "tokenizer": (lambda: llama(), {"tokenizer": "words"}, "'bytes', a .txt file"),
    "names": (lambda: llama(), {"names": {"output": "x"}}, "must have the keys"),
    "config": (lambda: nn.Linear(2, 2), {}, "config must be given"),
}


def with_activation(net: Any) -> nn.Module:
    net.model.layers[0].mlp.act_fn = nn.GELU()
    return net


def with_eps(net: Any) -> nn.Module:
    net.model.norm.eps = 0.5
    return net


def with_norm(net: Any) -> nn.Module:
    net.model.layers[0].inner = nn.RMSNorm(4)
    return net


def with_huge(net: Any) -> nn.Module:
    net.lm_head.weight.data[3, 4] = 1e5
    return net


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    make, settings, message = REFUSED[name]
    with pytest.raises(ss.SoftstairError, match=message):
        ss.deploy.export(make(), tmp_path / "model.gguf", to="gguf", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
        ({"attention_bias": True}, "q_proj.bias"),
    ],
)
def test_what_a_model_of_hugging_face_has_otherwise_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))
    with pytest.raises(ss.SoftstairError, match=message):
        ss.deploy.export(net, tmp_path / "model.gguf", to="gguf")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    net = llama("int4:32/float")
    return net, written(net, tmp_path_factory.mktemp("int4"))


def with_bytes(path: Path, name: str, change: Callable[[np.ndarray], None], count: int) -> None:
    """Change the first bytes of a tensor, or of a field's value."""
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    if name in (tensors := read(path).tensors):
        start = tensors[name].offset
    else:
        start = data.tobytes().index(name.encode()) + len(name) + 4
    change(data[start : start + count])
    path.write_bytes(data.tobytes())


def set_float(value: float) -> Callable[[np.ndarray], None]:
    return lambda part: part.__setitem__(
        slice(4), np.frombuffer(struct.pack("<f", value), np.uint8)
    )


def rescale(part: np.ndarray) -> None:
    scales = part.view("<f2").reshape(-1, 9)[:, 0]
    bits = scales.view("<u2")
    bits += 1  # the next fp16 number: about 0.1 % more


def one_weight(part: np.ndarray) -> None:
    part[2] ^= 0x01


def flip(part: np.ndarray) -> None:
    part ^= 0xFF


EPS, BASE = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"
CHANGES: dict[str, tuple[str, Callable[[np.ndarray], None], int, str]] = {
    "eps": (EPS, set_float(1e-2), 4, f"{EPS} is 0.0099"),
    "rotary base": (BASE, set_float(10000.0), 4, f"{BASE} is 10000.0, but the network has 500.0"),
    "scale": ("blk.1.ffn_up.weight", rescale, 96 * 2 * 18, "blk.1.ffn_up: 5"),
    "one weight": ("blk.0.attn_v.weight", one_weight, 18, "blk.0.attn_v: 1"),
    "64 bytes": ("blk.0.ffn_gate.weight", flip, 64, "blk.0.ffn_gate: "),
    "64 bytes of a norm": ("blk.1.ffn_norm.weight", flip, 64, "blk.1.ffn_norm: 16"),
}


@pytest.mark.parametrize("mistake", CHANGES)
def test_a_file_that_was_changed_is_not_the_trained_network(
    mistake: str, int4: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    net, path = int4
    changed = Path(shutil.copy(path, tmp_path))
    name, change, count, message = CHANGES[mistake]
    with_bytes(changed, name, change, count)
    found = gguf.verify(net, changed, run=False)
    assert not found.passes[0]
    assert message in str(found)
    assert len(found.wrong) + len(found.fields) == 1


def test_mistakes_of_a_converter_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net: Any = llama("int4:32/float")
    block = "model.layers.*.mlp."
    swapped = {
        **gguf.NAMES,
        "blk.*.ffn_gate": f"{block}up_proj",
        "blk.*.ffn_up": f"{block}gate_proj",
    }
    found = gguf.verify(net, written(net, tmp_path, names=swapped), run=False)
    assert found.wrong["blk.0.ffn_gate"][1] == " (it holds blk.0.ffn_up)"
    found = gguf.verify(net, written(net, tmp_path, rotary="pairs"), run=False)
    assert "order of Hugging Face, not" in found.wrong["blk.0.attn_q"][1]
    assert [*found.wrong] == [f"blk.{n}.attn_{x}" for n in (0, 1) for x in "qk"]
    found = gguf.verify(net, written(net, tmp_path), run=False, rotary="pairs")
    assert not found.passes[0]
    tied = {**gguf.NAMES}
    whole = llama(tie_word_embeddings=True)
    path = written(whole, tmp_path, names=tied)
    net = llama()
    for own, other in zip(net.model.parameters(), whole.model.parameters(), strict=True):
        own.data = other.data
    found = gguf.verify(net, path, run=False)
    assert found.fields == ["output.weight is missing; llama.cpp takes the embedding"]


def test_tables_of_a_quantised_network_may_not_be_rounded(
    int4: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """To Q8_0, as `llama-quantize` does; those of a float network may."""
    net, _ = int4
    embedding: Any = net.get_submodule("model.embed_tokens")
    writer = package.quants.quantize
    data = writer(embedding.weight.detach().numpy(), package.GGMLQuantizationType.Q8_0)
    path = replaced(int4[1], tmp_path / "other.gguf", "token_embd.weight", 8, data.tobytes())
    found = gguf.verify(net, path, run=False)
    assert found.wrong["token_embd"][0] > 1000
    whole: Any = llama()
    whole.model.embed_tokens.weight.data = embedding.weight.data
    path = replaced(written(whole, tmp_path), path, "token_embd.weight", 8, data.tobytes())
    found = gguf.verify(whole, path, run=False)
    assert found.passes[0], str(found)
    assert found.notes[0].startswith("token_embd is rounded to Q8_0")
    with_bytes(path, "token_embd.weight", lambda part: part.__setitem__(2, part[2] ^ 0x20), 34)
    assert gguf.verify(whole, path, run=False).wrong == {"token_embd": (1, "")}


def replaced(path: Path, out: Path, name: str, number: int, data: bytes) -> Path:
    """A file with another type and other bytes of one tensor."""
    file, old = read(path), path.read_bytes()
    starts = [*sorted(each.offset for each in file.tensors.values()), len(old)]
    tensors = {}
    for each, stored in file.tensors.items():
        end = starts[starts.index(stored.offset) + 1]
        tensors[each] = (stored.number, stored.shape, old[stored.offset : end])
    tensors[name] = (number, file.tensors[name].shape, data)
    write_tensors(file, tensors, out)
    return out


def test_damaged_files_are_errors(int4: tuple[nn.Module, Path], tmp_path: Path) -> None:
    net, path = int4
    data, damaged = path.read_bytes(), tmp_path / "damaged.gguf"
    for length in (0, 3, 20, 100, 1000, len(data) - 1000):
        damaged.write_bytes(data[:length])
        with pytest.raises(ss.SoftstairError, match=r"damaged|ends before"):
            gguf.verify(net, damaged, run=False)
    rng = np.random.default_rng(0)
    for _ in range(8):  # never another exception, and never taken for the network
        changed = bytearray(data)
        place = int(rng.integers(read(path).tensors["token_embd.weight"].offset // 4))
        changed[place] ^= int(rng.integers(1, 256))
        damaged.write_bytes(bytes(changed))
        try:
            gguf.verify(net, damaged, run=False)
        except ss.SoftstairError:
            continue


def test_a_plain_module_is_described_by_names(tmp_path: Path) -> None:
    """With rotary pairs, whose rows are in llama.cpp's order already."""
    net: Any = llama("int4:row/float")
    names = {name: f"inner.{path}" for name, path in gguf.NAMES.items()}
    plain = nn.ModuleDict({"inner": net})
    path = written(plain, tmp_path, names=names, config=net.config, rotary="pairs")
    settings: dict[str, Any] = {"names": names, "config": vars(net.config), "rotary": "pairs"}
    found = gguf.verify(plain, path, run=False, **settings)
    assert found.passes[0], str(found)
    query = net.model.layers[0].self_attn.q_proj
    assert np.array_equal(read(path).values("blk.0.attn_q.weight"), trained(query))


def test_options_of_gguf_are_for_gguf(tmp_path: Path) -> None:
    with pytest.raises(ss.SoftstairError, match="keep is an option of GGUF"):
        ss.deploy.export(nn.Linear(2, 2), tmp_path / "c", to="c", keep={})
    small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    frozen = ss.freeze(ss.quantise(small, "int4"), (4,), zero=0, scale=1.0)
    with pytest.raises(ss.SoftstairError, match="which is not frozen"):
        ss.deploy.export(frozen, tmp_path / "model.gguf", to="gguf")
