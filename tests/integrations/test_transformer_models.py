"""Models of Hugging Face, made from a configuration: quantised by a run on example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import softstair as ss
from helpers import annealed

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_models_of_transformers_need_the_arguments_of_a_forward_pass(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    family = name.partition("For")[0]
    model: Any = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**SIZES))
    for refused in (ss.quantise, ss.report):
        with pytest.raises(ValueError, match=r"^example_inputs must .*{'input_ids': …}.*decorated"):
            refused(model, **({"weights": "int8"} if refused is ss.quantise else {}))
    inputs = {"input_ids": torch.randint(50, (2, 5)), "attention_mask": torch.ones(2, 5)}
    net = ss.quantise(model, "int8/float", example_inputs=inputs)
    weights = {row.kind for row in ss.report(net).rows if row.became == "stair weights"}
    assert weights == {"Linear"}
    net(**inputs).logits.square().sum().backward()
    layers = [layer for layer in net.modules() if isinstance(layer, ss.nn.StairLayer)]
    assert all(layer.weight.grad is not None for layer in layers)
    before, after = model.eval()(**inputs).logits, net.eval()(**inputs).logits
    assert (after - before).norm() < 0.2 * before.norm()


def test_example_of_the_documentation() -> None:
    pytest.importorskip("transformers")
    net = annealed.run_documented("BertConfig", "net")
    assert ss.report(net).rows[-1].became == "stair weights"
