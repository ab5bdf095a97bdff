"""GGUF files in llama.cpp: equal to PyTorch up to the order of sums, and found wrong where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llamas import NARROW, SIZES, WIDE, llama, spread_out, written
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import gguf
from softstair.models import Llama, LlamaConfig

package = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")

TEXT = [int(t) for t in torch.randint(80, (24,), generator=torch.Generator().manual_seed(5))]


def test_a_file_is_verified_in_llama_cpp(tmp_path: Path) -> None:
    net = llama("int4:32/int8:32")
    found = gguf.verify(net, written(net, tmp_path), TEXT[:12])
    assert found.passes == (True, True, True), str(found)
    assert found.twin is not None
    assert found.file is not None
    assert 0 < found.twin.mean < 1e-5 < found.file.mean
    # The emulated roundings are what llama.cpp computes: much nearer than PyTorch in float.
    assert found.emulated is not None
    assert found.emulated < found.file.mean / 3
    assert "without its roundings" in found.notes[0]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", ["q8_0", "tq2_0", "tq1_0", "q2_0", "int2"])
def test_every_type_runs_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    bits = {"q8_0": "int8:row/float", "int2": "int2:row/float"}.get(kind, "ternary:row/float")
    net = llama(bits, **(NARROW if kind in ("q8_0", "int2") else WIDE))
    ternary = kind if "q" in kind and bits.startswith("ternary") else "auto"
    found = gguf.verify(net, written(net, tmp_path, ternary=ternary), TEXT)
    assert found.passes == (True, True, True), str(found)
    assert found.file is not None
    own, theirs = found.file.perplexities
    assert theirs == pytest.approx(own, rel=2e-2)  # of weights that are random


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}], ids=["grouped", "tied"])
def test_a_llama_of_hugging_face_is_verified(settings: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    net = spread_out(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings)))
    quantised = ss.quantise(
        net, "int4:row/float", skip="lm_head", options=ss.QuantiseOptions(half=True)
    )
    found = gguf.verify(quantised, written(quantised, tmp_path), TEXT)
    assert found.passes == (True, True, True), str(found)
    # Folders of others, in float and rounded by the package.
    net.save_pretrained(tmp_path / "folder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    path = written(loaded, tmp_path, keep={"*": "f16"})
    found = gguf.verify(loaded, path, TEXT)
    assert found.passes == (True, True, True), str(found)
    assert any("is rounded to F16" in note for note in found.notes)


MISTAKES: dict[str, dict[str, Any]] = {
    "eps": {"rms_norm_eps": 1e-2},
    "rotary base": {"rope_theta": 10000.0},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_twin_finds_wrong_fields(mistake: str, tmp_path: Path) -> None:
    net = llama()
    other = llama(**MISTAKES[mistake])
    weights = net.state_dict()
    if mistake == "tied":
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    other.load_state_dict(weights)
    found = gguf.verify(net, written(other, tmp_path), TEXT)
    assert found.passes[:2] == (False, False), str(found)
    assert len(found.fields) == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mistake", ["gelu", "pairs", "swapped"])
def test_the_twin_finds_another_architecture(mistake: str, tmp_path: Path) -> None:
    """Which no field and no weight shows."""
    net: Any = llama()
    names: dict[str, str] = {**gguf.NAMES}
    settings: dict[str, Any] = {"names": names}
    if mistake == "gelu":
        for layer in net.model.layers:
            layer.mlp.act_fn = Gelu()
    elif mistake == "pairs":
        settings["rotary"] = "pairs"
    else:
        block = "model.layers.*.mlp."
        names |= {"blk.*.ffn_gate": f"{block}up_proj", "blk.*.ffn_up": f"{block}gate_proj"}
    found = gguf.verify(net, written(net, tmp_path, **settings), TEXT, **settings)
    assert found.passes[:2] == (True, False), str(found)
    assert "float32 twin" in str(found)
    assert "FAILED" in str(found)


class Gelu(nn.Module):
    """An activation by a function, as a user may write it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(3))
def test_a_network_that_was_hardly_trained_is_verified(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    net = Llama(LlamaConfig(**SIZES))
    options = ss.QuantiseOptions(half=True)
    quantised = ss.quantise(net, "int4:32/float", skip="lm_head", options=options).train()
    optimiser = torch.optim.Adam(quantised.parameters(), 1e-3)
    for _ in range(seed):
        x = torch.randint(80, (4, 17))
        loss = F.cross_entropy(quantised(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = gguf.verify(quantised, written(quantised, tmp_path), TEXT)
    assert found.passes == (True, True, True), str(found)


def test_other_types_are_read_by_the_package(tmp_path: Path) -> None:
    net: Any = llama()
    path = written(net, tmp_path)
    kind = package.GGMLQuantizationType.Q5_0
    data = package.quants.quantize(net.model.embed_tokens.weight.detach().numpy(), kind)
    from test_gguf import replaced

    other = replaced(path, tmp_path / "other.gguf", "token_embd.weight", int(kind), data.tobytes())
    found = gguf.verify(net, other, TEXT[:8])
    assert found.passes == (True, True, True), str(found)
    assert found.notes == [
        "token_embd is rounded to a type that only the package gguf unpacks (5,120 weights)"
    ]


def test_bytes_and_characters_are_tokens(tmp_path: Path) -> None:
    text = 'Don\'t "ask"\\ for a  tab\tor é, <0x41> ▁ and\r\n2 lines\n'
    path = written(llama(vocab_size=258), tmp_path)
    assert gguf.tokens_of(path, text) == [*text.encode()]
    letters = sorted(set(text))
    net = llama(vocab_size=len(letters) + 2)
    path = written(net, tmp_path, tokenizer=gguf.characters(letters))
    assert gguf.tokens_of(path, text) == [letters.index(letter) for letter in text]
    (tmp_path / "letters.txt").write_bytes("".join(letters).encode())
    path = written(net, tmp_path, tokenizer=str(tmp_path / "letters.txt"))
    assert gguf.tokens_of(path, text) == [letters.index(letter) for letter in text]


TEXTS = ["The cat's 12 hats; isn't it?  Yes!\n", "Once upon a time, there was a héron.", " a b"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", ["sentencepiece", "gpt-2", "llama-bpe"])
def test_tokenizers_of_hugging_face_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from softstair.deploy.gguf.vocabulary import LLAMA3

    parts, levels = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel
    is_pieces = kind == "sentencepiece"
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    own = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>" if is_pieces else None, byte_fallback=is_pieces)
    )
    special = ["<unk>", "<s>", "</s>", *bytes_] if is_pieces else ["<s>"]
    alphabet = [] if is_pieces else levels.alphabet()
    if is_pieces:
        steps = tokenizers.normalizers
        own.normalizer = steps.Sequence([steps.Prepend("▁"), steps.Replace(" ", "▁")])
    elif kind == "gpt-2":
        own.pre_tokenizer = levels(add_prefix_space=False)
    else:
        split = parts.Split(tokenizers.Regex(LLAMA3), "isolated")
        own.pre_tokenizer = parts.Sequence([split, levels(add_prefix_space=False, use_regex=False)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(["the cat sat once upon a time in 1212 hats", *TEXTS[:1]] * 9, trainer)
    names = {"bos_token": "<s>", "eos_token": "<s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)
    fast.save_pretrained(tmp_path / "folder")
    net = llama(vocab_size=512)
    path = written(net, tmp_path, tokenizer=tmp_path / "folder")
    for text in TEXTS:
        expected = fast.encode(text)
        assert text != TEXTS[0] or len(expected) < len(text) - 5
        assert gguf.tokens_of(path, text) == expected, text


def test_float16_scales_beside_a_tensor_are_used(tmp_path: Path) -> None:
    """A quantum for a layer that is no fp16 number; llama.cpp ignores a tensor it does not know."""
    net = spread_out(Llama(LlamaConfig(**NARROW)))
    quantised = ss.quantise(net, weights=ss.Stair.linear(4, True, 0.0611), skip="lm_head").eval()
    for layer in quantised.modules():
        if isinstance(layer, ss.nn.StairLinear):
            layer.weight.data = torch.randn_like(layer.weight) / 8
    path = written(quantised, tmp_path)
    assert gguf.verify(quantised, path, TEXT[:8]).passes == (True, True, True)
    rate = gguf.tokens_a_second(path, TEXT[:4], 8)
    assert np.isfinite(rate)
    assert rate > 0


def test_a_file_that_llama_cpp_does_not_load_is_an_error(tmp_path: Path) -> None:
    """And does not end the process."""
    net = llama()
    path = written(net, tmp_path)
    data = path.read_bytes().replace(b"llama.block_count", b"llama.block_xount")
    path.write_bytes(data)
    with pytest.raises(ss.SoftstairError, match=r"llama.cpp cannot run .*twin.gguf"):
        gguf.verify(net, path, TEXT[:4])
