"""Fine-tune a trained tiny Llama to INT4 on stories that it wrote itself, beside Q4_0 by rounding.

    python -m benchmarks.stories DATA [--out FOLDER]

DATA holds stories260K.bin and tok512.bin of llama2.c. The layers but w2, whose rows of 172 weights
fit no block, go to Q4_0: by gguf.quants.quantize from the float weights, by the start of INT4, and
trained. Printed are the loss and KL(float ‖ quantised) on other stories, in nats a token. With
--out, the float network, INT8 and INT4 are written as GGUF and verified.
"""

import argparse
import copy
import importlib
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import gguf
from softstair.models import Llama, LlamaConfig

STORIES, HELD_OUT, LENGTH = 160, 40, 192
STEPS, BATCH, RATE = 400, 8, 5e-4
FLOAT = {"*down_proj": "float", "lm_head": "float"}
HALF = ss.QuantiseOptions(half=True)


def load(folder: Path) -> tuple[Any, gguf.Vocabulary]:
    """Return the network and the vocabulary of the files of llama2.c."""
    data = (folder / "stories260K.bin").read_bytes()
    width, inside, blocks, heads, groups, size, length = struct.unpack("<7i", data[:28])
    config = LlamaConfig(
        vocab_size=abs(size), hidden_size=width, intermediate_size=inside,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=groups,
        max_position_embeddings=length, tie_word_embeddings=size > 0,
    )  # fmt: skip
    net: Any = Llama(config)
    numbers, place = torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy()), 0
    layers = net.model.layers
    attention = [[getattr(x.self_attn, f"{n}_proj") for x in layers] for n in "qkvo"]
    gated = [[getattr(x.mlp, f"{n}_proj") for x in layers] for n in ("gate", "down", "up")]
    norms = [[x.input_layernorm for x in layers], [x.post_attention_layernorm for x in layers]]
    order = [[net.model.embed_tokens], norms[0], *attention, norms[1], *gated, [net.model.norm]]
    for module in (module for group in order for module in group):
        count = module.weight.numel()
        part = numbers[place : place + count].reshape(module.weight.shape)
        if module in attention[0] or module in attention[1]:  # its heads turn in pairs
            part = part.unflatten(0, (-1, width // heads // 2, 2)).transpose(1, 2).flatten(0, 2)
        module.weight.data, place = part.clone(), place + count
    if not config.tie_word_embeddings:
        net.lm_head.weight.data = numbers[-config.vocab_size * width :].reshape(-1, width).clone()
    return net.eval(), vocabulary(folder / "tok512.bin", config.vocab_size)


def vocabulary(file: Path, size: int) -> gguf.Vocabulary:
    """Return the tokens of llama2.c's file: SentencePiece with 3 special tokens and 256 bytes."""
    data, place, tokens, scores = file.read_bytes(), 4, [], []
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, place)
        tokens.append(data[place + 8 : place + 8 + length].decode().replace(" ", "▁"))
        scores.append(score)
        place += 8 + length
    tokens[:259] = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    fields = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    types = [2, 3, 3, *[6] * 256, *[1] * (size - 259)]
    return gguf.Vocabulary("llama", tokens, types, {**fields, "add_bos_token": True})


@torch.no_grad()
def write_stories(net: nn.Module, count: int) -> Tensor:
    """Return stories (count, LENGTH) that the network draws."""
    tokens = torch.ones(count, 1, dtype=torch.long)
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat((tokens, net(tokens)[:, -1].softmax(-1).multinomial(1)), dim=1)
    return tokens


@torch.no_grad()
def judge(net: nn.Module, reference: nn.Module, stories: Tensor) -> tuple[float, float]:
    """Return the loss, and the divergence from the float network, in nats a token."""
    own, expected = (each.eval()(stories[:, :-1]).log_softmax(-1) for each in (net, reference))
    loss = F.nll_loss(own.flatten(0, 1), stories[:, 1:].flatten())
    return float(loss), float((expected.exp() * (expected - own)).sum(-1).mean())


def rounded(net: nn.Module) -> nn.Module:
    """Return the network with the weights of gguf's own Q4_0."""
    package: Any = importlib.import_module("gguf")
    kind = package.GGMLQuantizationType.Q4_0
    copied = copy.deepcopy(net)
    for name, module in copied.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(("down_proj", "lm_head")):
            blocks = package.quants.quantize(module.weight.detach().numpy(), kind)
            module.weight.data = torch.from_numpy(package.quants.dequantize(blocks, kind))
    return copied


def train(net: nn.Module, reference: nn.Module, stories: Tensor) -> None:
    """Fine-tune towards the probabilities of the float network, at a rate that falls to 0."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / STEPS)
    for step in range(STEPS):
        x = stories[torch.randint(len(stories), (BATCH,))][:, :-1]
        with torch.no_grad():
            expected = reference(x).log_softmax(-1)
        own = net.train()(x).log_softmax(-1)
        loss = (expected.exp() * (expected - own)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: KL {loss:.4f}", flush=True)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of stories260K.bin and tok512.bin")
    parser.add_argument("--out", type=Path, help="folder for GGUF files, which are verified")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    net, words = load(options.data)
    stories = write_stories(net, STORIES + HELD_OUT)
    print(
        f"{len(stories)} stories of {LENGTH} tokens, {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    held_out = stories[STORIES:]
    int4 = ss.quantise(net, {**FLOAT, "*": "int4:32/float"}, options=HALF, quanta="learned")
    int8 = ss.quantise(net, {**FLOAT, "*": "int8:32/float"}, options=HALF)
    rows = {"float": net, "Q8_0, not trained": int8, "Q4_0 of gguf": rounded(net)}
    rows["Q4_0, not trained"] = copy.deepcopy(int4)
    train(int4, net, stories[:STORIES])
    rows["Q4_0, trained"] = int4
    print("| network | loss | KL |\n|---|---|---|")
    for name, each in rows.items():
        loss, divergence = judge(each, net, held_out)
        print(f"| {name} | {loss:.4f} | {divergence:.5f} |")
    for name, each in (("q8_0", int8), ("q4_0", int4)) if options.out else ():
        path = options.out / f"{name}.gguf"
        keep = {"blk.*.ffn_down": "f16"}
        gguf.write(each, path, tokenizer=words, keep=keep)
        print(f"{name}: {gguf.verify(each, path, held_out[0].tolist())}", flush=True)


if __name__ == "__main__":
    main()
