"""Small transformers: quantise, train, report, save and load, compile; Hugging Face's Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softstair as ss

COMMON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = COMMON | {"vocab_size": 50, "intermediate_size": 64, "max_position_embeddings": 16}
CASES: dict[str, tuple[str, str, dict[str, int], Any]] = {
    "gpt": ("GPT2Config", "GPT2LMHeadModel",
            {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 16},
            {"*attn*": "ternary:32/int8:32", "*mlp*": "int4/int8:token", "*": "float"}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", TEXT,
              {"*layers*": "ternary/int8:token", "*": "float"}),
    "bert": ("BertConfig", "BertForSequenceClassification", TEXT,
             {"*word_embeddings": "int8:32/float", "*encoder*": "int4/int4:token", "*": "float"}),
    "vit": ("ViTConfig", "ViTForImageClassification",
            COMMON | {"intermediate_size": 64, "image_size": 8, "patch_size": 4},
            {"*layer*": "ternary/int8:token", "*": "float"}),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, str]]:
    """A float model, a batch with labels, and bits."""
    transformers = pytest.importorskip("transformers")
    config, kind, sizes, bits = CASES[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, use_cache=False))
    if name == "vit":
        return (
            model,
            {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])},
            bits,
        )
    tokens = torch.randint(50, (2, 8))
    return (
        model,
        {"input_ids": tokens, "labels": tokens[:, 0] % 2 if name == "bert" else tokens},
        bits,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_small_transformer_goes_all_the_way(name: str, tmp_path: Path) -> None:
    """Two steps by hand and two of the Trainer; the compiled network has the same loss."""
    transformers = pytest.importorskip("transformers")
    from softstair.integrations.transformers import AnnealerCallback

    model, batch, bits = made(name)
    net = ss.quantise(model, bits)
    quantised = [m for m in net.modules() if isinstance(m, ss.nn.StairLayer)]
    assert len(quantised) == {"gpt": 4, "llama": 7, "bert": 7, "vit": 6}[name]
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3)
    annealer = ss.Annealer(net, ss.Schedule.blended(net, steps=2, float_share=0.5))
    losses = []
    for _ in range(2):
        annealer.step()
        torch.manual_seed(1)  # of dropout
        losses.append(net(**batch).loss)
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    torch.manual_seed(1)
    assert losses[0] == model(**batch).loss != losses[1]
    assert all(layer.weight.grad.abs().max() > 0 for layer in quantised)
    report = ss.report(net)
    rows = [row for row in report.rows if row.became == "stair weights"]
    assert len(rows) == len(quantised)
    assert all("reads int" in row.stair or "embed" in row.name for row in rows)
    assert report.freezes is False
    net.eval()
    again = ss.quantise(model, bits).eval()
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    with torch.no_grad():
        expected = net(**batch)
        assert torch.equal(again(**batch).logits, expected.logits)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    data = [{key: value[n] for key, value in batch.items()} for n in range(2)]
    callback = AnnealerCallback("blended", float_share=0.5)
    before = copy.deepcopy(net.state_dict())
    transformers.Trainer(net, arguments, train_dataset=data, callbacks=[callback]).train()
    assert callback.annealer is not None
    assert callback.annealer.steps == 2
    assert any(
        not torch.equal(before[k], v)
        for k, v in net.state_dict().items()
        if "proj" in k or "dense" in k or "c_fc" in k or "layer" in k
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_network_has_the_same_values_and_gradients() -> None:
    """One graph serves every share of the blend."""
    from softstair.models.llama import Llama, LlamaConfig

    sizes = {key: TEXT[key] for key in TEXT}
    torch.manual_seed(0)
    net = ss.quantise(Llama(LlamaConfig(**sizes)), "ternary/int8:token", skip="lm_head")
    tokens = torch.randint(50, (2, 8))
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=counted, fullgraph=True)
    annealer = ss.Annealer(net, ss.Schedule.blended(net, steps=4, start=0, end=1))
    for _ in range(3):
        annealer.step()
        results = []
        for network in (net, compiled):
            net.zero_grad()
            loss = network(tokens).logsumexp(-1).mean()
            loss.backward()
            grads = [p.grad.clone() for p in net.parameters()]
            results.append([loss, *grads])
        for eager, own in zip(*results, strict=True):
            torch.testing.assert_close(own, eager)
    assert len(graphs) == 1
