"""The Llama of the library, against that of Hugging Face with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import softstair as ss
from softstair.models import Llama, LlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
USUAL: dict[str, Any] = {"rms_norm_eps": 1e-5}
UNUSUAL: dict[str, Any] = {"rms_norm_eps": 1e-2, "rope_theta": 37.0}


@pytest.mark.parametrize(
    "settings",
    [USUAL, {"num_key_value_heads": 2, **UNUSUAL}, {"tie_word_embeddings": True, **UNUSUAL}],
    ids=["heads", "grouped", "tied"],
)
def test_logits_are_those_of_hugging_face(settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings)).eval()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter) / 4 + (parameter.dim() == 1)
    ours = Llama(LlamaConfig(**SIZES, **settings))
    ours.load_state_dict(theirs.state_dict())  # strictly: all names are equal
    x = torch.randint(50, (3, 24))
    expected = theirs(x).logits
    assert expected.std() > 1
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=2e-5)


def test_quantise_reads_its_code_and_keeps_the_tied_embedding() -> None:
    net = Llama(LlamaConfig(**SIZES, tie_word_embeddings=True))
    quantised = ss.quantise(net, "ternary/float", skip="lm_head", strict=True)
    assert isinstance(quantised, Llama)
    assert quantised.config == net.config
    assert quantised.lm_head.weight is quantised.model.embed_tokens.weight
    layers = [m for m in quantised.modules() if isinstance(m, ss.nn.StairLinear)]
    assert len(layers) == 14
    for length in (5, 24):  # that of the trace is not remembered
        assert quantised(torch.randint(50, (2, length))).shape == (2, length, 50)
    quantised(torch.randint(50, (2, 24))).square().sum().backward()
    assert all(layer.weight.grad is not None for layer in layers)


def test_later_tokens_change_nothing() -> None:
    net, x = Llama(LlamaConfig(**SIZES)), torch.randint(50, (1, 24))
    torch.testing.assert_close(net(x)[:, :9], net(x[:, :9]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 36}, "hidden_size must be a multiple of twice the 4 heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide the 4 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ss.SoftstairError, match=message):
        LlamaConfig(**{**SIZES, **settings})


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ss.SoftstairError, match="at most 24 long"):
        Llama(LlamaConfig(**SIZES))(torch.zeros(1, 25, dtype=torch.long))
