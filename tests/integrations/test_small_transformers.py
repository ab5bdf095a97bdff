"""Small transformers: quantise, train, report, save and load, compile; Hugging Face's Trainer."""

from __future__ import annotations

import copy
import subprocess
import sys
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


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec.*is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*`litlogger`")
def test_lightning_trains_it_in_float_and_then_blends(tmp_path: Path) -> None:
    """A run that is interrupted in the float part is the same run."""
    pl = pytest.importorskip("lightning.pytorch")
    from softstair.integrations.lightning import AnnealerCallback

    model, batch, bits = made("llama")
    batch.pop("labels")

    class Module(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = ss.quantise(model, bits)

        def training_step(self, rows: Tensor, _: int) -> Tensor:
            loss: Tensor = self.net(input_ids=rows, labels=rows).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(module: Any, epochs: int, start: Path | None = None) -> Any:
        loader = torch.utils.data.DataLoader(batch["input_ids"].repeat(4, 1), 2)
        settings = {"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": tmp_path,
                    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                    "enable_model_summary": False}  # fmt: skip
        schedule = ss.Schedule.blended(module.net, steps=4, float_share=0.5)
        trainer = pl.Trainer(callbacks=[AnnealerCallback(schedule)], **settings)
        trainer.fit(module, loader, ckpt_path=start)
        return trainer

    whole, half, rest = Module(), Module(), Module()
    fit(whole, 4)
    fit(half, 1).save_checkpoint(tmp_path / "half.ckpt")
    fit(rest, 4, tmp_path / "half.ckpt")
    for key, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[key], value), key
    assert float(whole.net.model.layers[0].mlp.up_proj.weight_stair.blend) == 1
    by_name = Module()
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    callbacks = [AnnealerCallback("blended")]
    trainer = pl.Trainer(callbacks=callbacks, default_root_dir=tmp_path, **settings)
    trainer.fit(by_name, torch.utils.data.DataLoader(batch["input_ids"], 1))
    assert trainer.callbacks[0].annealer.schedule.float_until == 0
    assert trainer.callbacks[0].annealer.schedule.end == pytest.approx(1)


SCRIPT = """
import os, sys, torch, softstair as ss
from softstair.models import Llama, LlamaConfig
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
model = Llama(LlamaConfig(**sizes, num_attention_heads=2))
net = ss.quantise(model, "ternary/int8:token", skip="lm_head")
parallel = torch.nn.parallel.DistributedDataParallel(net)
annealer = ss.Annealer(parallel, ss.Schedule.blended(net, 6, float_share=1 / 3))
optimiser, rank = torch.optim.SGD(net.parameters(), 0.1), torch.distributed.get_rank()
for step in range(6):
    annealer.step()
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
    own = tokens[2 * rank: 2 * rank + 2] if torch.distributed.get_world_size() == 2 else tokens
    optimiser.zero_grad()
    parallel(own).logsumexp(-1).mean().backward()
    optimiser.step()
torch.save(net.state_dict(), f"{sys.argv[1]}/{torch.distributed.get_world_size()}{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_two_processes_of_torchrun_train_the_same_network(tmp_path: Path) -> None:
    """As one process with both halves of each batch, but for the order of sums."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for count in (1, 2):
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
        ]
        subprocess.run([*run, str(script), str(tmp_path)], check=True, capture_output=True)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("10", "20", "21"))
    for key, value in first.items():
        assert torch.equal(second[key], value), key
        torch.testing.assert_close(alone[key], value, rtol=1e-3, atol=1e-4)
