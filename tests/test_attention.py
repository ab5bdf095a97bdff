"""nn.MultiheadAttention and torch's encoder layers with quantised projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import softstair as ss


def by_hand(net: Any, model: Any) -> nn.Module:
    """The float model with the weights that the quantised network multiplies."""
    for own, other in zip(net.modules(), model.modules(), strict=False):
        assert not isinstance(other, ss.nn.StairLayer), type(own)
    with torch.no_grad():
        for name, layer in net.named_modules():
            if isinstance(layer, ss.nn.StairLayer):
                getattr(model.get_submodule(name), layer.weight_name).copy_(
                    layer.quantised_weight()
                )
    return model.eval()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_attention_is_that_of_torch_with_quantised_weights(
    batch_first: bool, need_weights: bool
) -> None:
    """Features stay in float: every kind of mask, self-attention and attention to others."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.MultiheadAttention(32, 4, batch_first=batch_first)})
    net = ss.quantise(model, "int4:32/float").eval()
    own, other = net["a"], by_hand(net, model)["a"]
    assert isinstance(own, ss.nn.TokenAttention)
    assert isinstance(own.out_proj, ss.nn.TokenLinear)
    x, y = torch.randn(3, 5, 32), torch.randn(3, 7, 32)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    masks: list[dict[str, Any]] = [
        {},
        {"attn_mask": causal},
        {"attn_mask": torch.randn(12, 5, 5)},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "key_padding_mask": padding, "average_attn_weights": False},
        {"attn_mask": causal, "is_causal": True},
    ]
    calls = [((x, x, x), mask) for mask in masks] + [((x, y, y), {}), ((x, y, 2 * y), {})]
    for inputs, mask in calls:
        results = [each(*inputs, need_weights=need_weights, **mask) for each in (own, other)]
        torch.testing.assert_close(results[0][0], results[1][0])
        assert (results[0][1] is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(results[0][1], results[1][1])
    single = x[0] if batch_first else x[:, 0]
    torch.testing.assert_close(own(single, single, single)[0], other(single, single, single)[0])


@pytest.mark.parametrize("with_inputs", [False, True])
def test_an_encoder_takes_no_fast_path_past_quantised_weights(with_inputs: bool) -> None:
    """In evaluation without gradients torch would multiply by the float weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 6, 32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    if with_inputs:
        net = ss.quantise(model, "ternary/float", example_inputs=x).eval()
    else:
        net = ss.quantise(model, "ternary:row/float").eval()
    names = {row.name for row in ss.report(net).rows if row.became == "stair weights"}
    own = ("self_attn", "self_attn.out_proj", "linear1", "linear2")
    assert names == {f"layers.{n}.{name}" for n in range(2) for name in own}
    hand = model.eval()
    state = hand.state_dict()
    for name, module in net.named_modules():
        if isinstance(module, ss.nn.StairLayer):
            is_token = hasattr(module, "quantised_weight")
            weight = module.quantised_weight() if is_token else module.weight_stair(module.weight)
            state[f"{name}.{module.weight_name}"] = weight
    hand.load_state_dict(state)
    for mask in (None, padding):
        expected = hand(x, src_key_padding_mask=mask)
        with torch.no_grad():
            value = net(x, src_key_padding_mask=mask)
            keep = slice(None) if mask is None else ~padding
            torch.testing.assert_close(value[keep], expected[keep], rtol=1e-4, atol=1e-5)
    net.train()
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_what_stays_in_float_is_said() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.Conv1d(8, 8, 1)
    )
    with pytest.warns(UserWarning, match=r"% of the weights stay in float: '1' .*, '2'"):
        net = ss.quantise(model, "int8/int8:token")
    became = {row.name: row.became for row in ss.report(net).rows}
    assert became["0"] == "stair weights"
    assert "add_bias_kv" in became["1"]
    assert "for linear layers" in became["2"]
    embedding = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    net = ss.quantise(embedding, "int8/int8:token")
    assert "a pattern of its own" in ss.report(net).rows[0].became
    net = ss.quantise(embedding, {"0": "int4/float", "*": "int8/int8:token"}).eval()
    integers, quanta = net[0].integers_and_quanta()
    tokens = torch.tensor([[1, 4], [8, 0]])
    torch.testing.assert_close(net[0](tokens), (integers * quanta)[tokens])
