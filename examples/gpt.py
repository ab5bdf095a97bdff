"""A ternary GPT on one page: a third of the steps in float, then weights that are blended in.

    python examples/gpt.py [--text FILE] [--bits ternary/int8:token] [--steps 2000] [--width 256]

It trains on the first 90 % of the bytes of a text, by default tinyshakespeare, prints bits per byte
of the last 5 % and a sample, and saves network.safetensors. ``--bits float`` is the float twin.
"""

import argparse
import hashlib
import math
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

import softstair as ss
from softstair.models import Llama, LlamaConfig

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
DIGEST = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NUMBERS = {"steps": 2000, "width": 256, "layers": 4, "context": 128, "batch": 32, "seed": 0}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=Path, default=Path("tinyshakespeare.txt"))
parser.add_argument("--bits", default="ternary/int8:token")
parser.add_argument("--out", type=Path, default=Path("network.safetensors"))
for name, default in {**NUMBERS, "rate": 2e-3, "float_share": 1 / 3}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
flags = parser.parse_args()
if not flags.text.exists():
    flags.text.write_bytes(urllib.request.urlopen(ADDRESS).read())
    assert hashlib.sha256(flags.text.read_bytes()).hexdigest() == DIGEST, "another text"
torch.manual_seed(flags.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.tensor(list(flags.text.read_bytes()))
sizes = {"vocab_size": 256, "hidden_size": flags.width, "intermediate_size": 3 * flags.width}
sizes |= {"num_hidden_layers": flags.layers, "num_attention_heads": max(1, flags.width // 64)}
net = Llama(LlamaConfig(**sizes, max_position_embeddings=flags.context))
if flags.bits != "float":
    net = ss.quantise(net, flags.bits, skip="lm_head")
    annealer = ss.Annealer(net, ss.Schedule.blended(net, flags.steps, flags.float_share))
    print(ss.report(net).headline)
run = torch.compile(net.to(device)) if device.type == "cuda" else net


def loss_of(starts: torch.Tensor) -> torch.Tensor:
    tokens = text[starts[:, None] + torch.arange(flags.context + 1)].to(device)
    with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
        logits = run(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / math.log(2)


optimiser = torch.optim.AdamW(net.parameters(), flags.rate, betas=(0.9, 0.95), weight_decay=0.1)
decay = lambda t: min(1, 20 * t + 0.01) * (1 + math.cos(math.pi * t)) / 2  # over both stages
rates = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda k: decay(k / flags.steps))
for step in range(flags.steps):
    annealer.step() if flags.bits != "float" else None
    loss = loss_of(torch.randint(int(0.9 * len(text)) - flags.context, (flags.batch,)))
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimiser.step()
    rates.step()
    if step % 100 == 99:
        print(f"step {step + 1}: {loss.item():.3f} bits per byte in training", flush=True)
net.eval()
with torch.no_grad():
    parts = torch.arange(int(0.95 * len(text)), len(text) - flags.context, flags.context).split(64)
    total = sum(float(loss_of(part)) * len(part) for part in parts)
    print(f"test: {total / sum(map(len, parts)):.4f} bits per byte")
    sample = torch.tensor([[10]], device=device)
    while sample.shape[1] < flags.context:
        chances = net(sample)[0, -1].div(0.8).softmax(0)
        sample = torch.cat([sample, chances.multinomial(1)[None]], 1)
print(bytes(sample[0].tolist()).decode(errors="replace"))
ss.zoo.save(net.cpu(), flags.out, "softstair.models:Llama", (flags.context,), mean=0, std=1)
