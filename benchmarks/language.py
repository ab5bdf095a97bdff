"""Trains small Llamas on bytes of a text, by softstair and by rivals, at equal steps.

    python -m benchmarks.language float out.jsonl --data-dir data --minutes 20
    python -m benchmarks.language rates,seeds,others,curves out.jsonl --data-dir data --minutes 90
    python -m benchmarks.language table out.jsonl

A plan is a list of trainings. Those that the file has are left out, so that a plan goes on where it
was stopped. `seeds` takes the dropout and the steps that `float` found best for the float twin, and
the rate of each method that `rates` found best, all on validation data; run these two before. On
CUDA networks are compiled and in bfloat16, and `--jobs` trainings share the GPU. `tiny` is a plan
for a CPU, and `speed` measures training steps. The methods are softstair and its variants, and the
rivals of benchmarks/language_rivals.py; `-start` begins in float under the same decay, as softstair
does. Data: tinyshakespeare (of the last 10 %, the first half chooses and the second is reported)
and WikiText-2 (its own three parts), as text/*.txt.
"""

import argparse
import json
import math
import multiprocessing
import queue
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from benchmarks.language_rivals import NAMES, move, replaced, rivals
from softstair.models import Llama, LlamaConfig

TEXTS = ("shakespeare", "wikitext")
THIRD = 1 / 3
COMPARED = (
    "softstair",
    "bitnet",
    *(f"{name}-start" for name in ("bitnet", "plain", "paretoq", "parq")),
)


@dataclass(frozen=True)
class Trial:
    """A training; its name in a file is all of its fields."""

    text: str = "shakespeare"
    method: str = "softstair"
    bits: str = "ternary"
    seed: int = 0
    steps: int = 5000
    rate: float = 1e-3
    dropout: float = 0.0
    float_share: float = THIRD
    start: float = 0.1
    end: float = 0.5
    curve: str = "linear"
    interval: str = "overlapped"
    group: str = "row"
    tokens: str = "int8:token"
    width: int = 512
    inside: int = 1024
    layers: int = 4
    heads: int = 8
    context: int = 256
    batch: int = 64


def texts(folder: Path, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes for training, for choosing and for reporting."""
    read = lambda file: torch.frombuffer(bytearray((folder / file).read_bytes()), dtype=torch.uint8)
    if name == "wikitext":
        train, valid, test = (read(f"wikitext2-{part}.txt") for part in ("train", "valid", "test"))
        return train, valid, test
    whole = read("tinyshakespeare.txt")
    ends = int(0.9 * len(whole)), int(0.95 * len(whole))
    return whole[: ends[0]], whole[ends[0] : ends[1]], whole[ends[1] :]


def network(trial: Trial) -> tuple[nn.Module, Any]:
    """Return the network of a trial, and the function to call before each step, with its number."""
    sizes = {"hidden_size": trial.width, "intermediate_size": trial.inside}
    sizes |= {"num_hidden_layers": trial.layers, "num_attention_heads": trial.heads}
    net: nn.Module = Llama(
        LlamaConfig(vocab_size=256, max_position_embeddings=trial.context, **sizes)
    )
    method, _, variant = trial.method.partition("-")
    share = trial.float_share if method == "softstair" or variant == "start" else 0.0
    before = lambda step: None
    if method == "softstair":
        kind = {"learned": {"quanta": "learned"}, "window": {"options": WINDOW}}.get(variant, {})
        bits = f"{trial.bits}:{trial.group}/{trial.tokens}"
        net = ss.quantise(net, bits, skip="lm_head", **kind)
        times = (trial.steps, share, trial.start, trial.end)
        schedule = ss.Schedule.blended(net, *times, trial.curve, trial.interval)
        annealer = ss.Annealer(net, schedule)
        before = lambda step: annealer.step()
    elif method in NAMES:
        net = replaced(net, method, trial.bits, normed=method == "bitnet" and not share)
        until = share * trial.steps
        before = lambda step: move(net, (step - until) / (trial.steps - until), step < until)
    elif method != "float":
        raise ValueError(f"no method is called {trial.method!r}")
    drop = lambda module, _, y: F.dropout(y, trial.dropout, module.training)
    for name, module in net.named_modules():
        if trial.dropout and name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return net, before


WINDOW = ss.QuantiseOptions(weight_margin=0)


def loss_of(net: Any, tokens: Tensor) -> Tensor:
    """Return nats per byte."""
    cuda = tokens.is_cuda
    with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
        logits = net(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(net: nn.Module, run: Any, text: Tensor, trial: Trial) -> float:
    """Return the loss on a whole text, in contexts one after the other."""
    net.eval()
    count = (len(text) - 1) // trial.context
    rows = text[: count * trial.context + 1].long().unfold(0, trial.context + 1, trial.context)
    losses = [float(loss_of(run, part)) * len(part) for part in rows.split(max(64, trial.batch))]
    net.train()
    return sum(losses) / count / math.log(2)


def mean_quantum(net: nn.Module) -> float | None:
    """Return the mean quantum of quantised weights, in which a rate can be told."""
    own = [m.weight_stair.quantum.mean() for m in net.modules() if isinstance(m, ss.nn.TokenLinear)]
    own += [layer.weight.detach().abs().mean() for layer in rivals(net)]
    return float(torch.stack(own).mean()) if own else None


def make_optimiser(net: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    parts = [
        [p for p in net.parameters() if (p.dim() > 1 and p.shape[1] > 1) == b]
        for b in (True, False)
    ]
    groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "weight_decay": 0.0}]
    is_cuda = next(net.parameters()).is_cuda
    return torch.optim.AdamW(groups, trial.rate, betas=(0.9, 0.95), fused=is_cuda)


def trained(trial: Trial, folder: Path, deadline: float) -> dict[str, Any] | None:
    """Train a network; return what is known of it, or None if the time is over before its end."""
    torch.manual_seed(trial.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, valid, test = (text.to(device) for text in texts(folder, trial.text))
    net, before = network(trial)
    net.to(device)
    run = torch.compile(net) if device.type == "cuda" else net
    optimiser, began = make_optimiser(net, trial), time.perf_counter()
    warm = max(1, min(100, trial.steps // 10))
    decay = lambda k: min(1, (k + 1) / warm) * (1 + math.cos(math.pi * k / trial.steps)) / 2
    rates = torch.optim.lr_scheduler.LambdaLR(optimiser, decay)
    generator = torch.Generator().manual_seed(trial.seed)
    place, curve = torch.arange(trial.context + 1, device=device), []
    for step in range(trial.steps):
        before(step)
        starts = torch.randint(
            len(train) - trial.context - 1, (trial.batch, 1), generator=generator
        )
        loss = loss_of(run, train[starts.to(device) + place].long())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        rates.step()
        if step % max(1, trial.steps // 8) == 0:
            curve.append(round(loss.item() / math.log(2), 4))
        if time.time() > deadline:
            return None
    both = torch.cat((valid, test)) if trial.text == "shakespeare" else test
    scores = [bits_per_byte(net, run, text, trial) for text in (valid, test, both)]
    names = ("valid", "test", "whole")
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"seconds": time.perf_counter() - began, "memory": memory, "machine": machine}
    about["quantum"] = mean_quantum(net)
    return {**asdict(trial), **dict(zip(names, scores, strict=True)), "curve_train": curve, **about}


def best(rows: list[dict[str, Any]], **known: Any) -> dict[str, Any] | None:
    """Return the row with the least loss for choosing, of those with these fields."""
    fitting = [row for row in rows if all(row[key] == value for key, value in known.items())]
    return min(fitting, key=lambda row: row["valid"], default=None)


def plan(name: str, rows: list[dict[str, Any]]) -> Iterator[Trial]:
    """Yield the trainings of a plan; some depend on what was measured before."""
    if name == "tiny":
        tiny = {"width": 64, "inside": 128, "layers": 2, "heads": 2, "context": 64, "batch": 16}
        for seed in range(3):
            for method in ("float", "bitnet", "plain-start", "softstair"):
                yield Trial(method=method, steps=600, rate=3e-3, seed=seed, **tiny)
        return
    if name == "float":
        for text in TEXTS:
            for dropout in (0.0, 0.1, 0.2):
                for steps in (2500, 5000, 10000):
                    yield Trial(text=text, method="float", dropout=dropout, steps=steps)
        return
    for text in TEXTS:
        found = best(rows, text=text, method="float", seed=0) or asdict(Trial(text=text))
        base = Trial(text=text, dropout=found["dropout"], steps=found["steps"])
        known = {"text": text, "steps": base.steps // 4}

        def rate(method: str, known: dict[str, Any] = known, found: Any = found) -> float:
            return float((best(rows, method=method, **known) or found)["rate"])

        if name == "rates":
            for method in ("float", *COMPARED, "quest-start", "lsq-start"):
                for own in (5e-4, 1e-3, 2e-3):
                    yield replace(base, method=method, rate=own, steps=base.steps // 4)
        elif name == "seeds":
            for seed in range(3):
                for method in ("float", *COMPARED):
                    yield replace(base, method=method, rate=rate(method), seed=seed)
        elif text == "shakespeare":
            own = replace(base, rate=rate("softstair"))
            if name == "others":
                yield from (
                    replace(base, method=m, rate=rate(m)) for m in ("quest-start", "lsq-start")
                )
                yield from (replace(own, method=f"softstair-{v}") for v in ("window", "learned"))
                for method in ("softstair", "plain-start", "paretoq-start", "lsq-start"):
                    changed = replace(base, method=method, rate=rate(method))
                    yield from (replace(changed, bits=bits) for bits in ("int2", "int4"))
                yield from (replace(own, group=group) for group in ("tensor", "64", "256"))
                yield from (replace(own, tokens=tokens) for tokens in ("int4:token", "int8:256"))
            elif name == "curves":
                yield from (replace(own, curve=curve) for curve in ("cosine", "sigmoid"))
                yield from (replace(own, float_share=share) for share in (0.0, 0.1, 1 / 6, 0.5))
                yield from (
                    replace(own, start=a, end=b) for a, b in ((0, 0.05), (0.05, 0.5), (0.1, 0.9))
                )
                yield replace(own, interval="partition")
            else:
                raise ValueError(f"no plan is called {name!r}")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def worker(units: Any, results: Any, folder: Path, deadline: float) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            trial = units.get_nowait()
        except queue.Empty:
            return
        try:
            results.put(trained(trial, folder, deadline))
        except Exception as error:
            results.put({**asdict(trial), "error": f"{type(error).__name__}: {error}"})


def work(name: str, out: Path, folder: Path, deadline: float, jobs: int) -> int:
    """Train what the file does not have of a plan, some at a time; return how many are left."""
    key = lambda row: tuple(row[field] for field in asdict(Trial()))
    done = {key(row) for row in read(out)}
    left = [t for t in dict.fromkeys(plan(name, read(out))) if key(asdict(t)) not in done]
    context = multiprocessing.get_context("spawn")
    units, results = context.Queue(), context.Queue()
    for trial in left:
        units.put(trial)
    arguments = (units, results, folder, deadline)
    workers = [context.Process(target=worker, args=arguments) for _ in range(min(jobs, len(left)))]
    for process in workers:
        process.start()
    count = len(left)
    while count and any(process.is_alive() for process in workers):
        try:
            row = results.get(timeout=2)
        except queue.Empty:
            continue
        if row is None:
            break  # the time is over
        if "error" in row:
            print(f"failed: {row}", flush=True)
            continue
        count -= 1
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['text']} {row['method']} {row['bits']}: {row['test']:.4f}", flush=True)
    for process in workers:
        process.terminate()
    return count


def table(rows: list[dict[str, Any]]) -> None:
    """Print the mean over seeds of each kind of training, and its distance from the float twin."""
    fields = [field for field in asdict(Trial()) if field != "seed"]
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[field] for field in fields)].append(row["test"])
    usual = asdict(Trial())
    for key, scores in sorted(groups.items(), key=lambda item: (item[0][0], item[1])):
        own = dict(zip(fields, key, strict=True))
        said = [
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
            for k, v in own.items()
            if v != usual[k]
        ]
        spread = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        twin = groups.get(tuple({**own, **FLOAT}.get(f) if f in FLOAT else own[f] for f in fields))
        over = f" over float {statistics.mean(scores) - statistics.mean(twin):+.4f}" if twin else ""
        print(f"{statistics.mean(scores):.4f}{spread} (n={len(scores)}){over}  {' '.join(said)}")


FLOAT = {"method": "float", "bits": "ternary"}


def speed(seconds: float = 20.0) -> None:
    """Print the time of a training step of softstair and of BitNet's estimator, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = {} if device.type == "cuda" else {"width": 256, "inside": 512, "layers": 2, "batch": 4}
    steps: dict[str, Any] = {}
    for method in ("softstair", "bitnet-start", "float"):
        trial = Trial(method=method, float_share=0.0, steps=10**6, **small)
        net, before = network(trial)
        net.to(device)
        run, optimiser = torch.compile(net), make_optimiser(net, trial)
        tokens = torch.randint(256, (trial.batch, trial.context + 1), device=device)

        def step(run=run, optimiser=optimiser, tokens=tokens, before=before) -> float:
            torch.cuda.synchronize() if tokens.is_cuda else None
            began = time.perf_counter()
            before(10**6 - 1)
            optimiser.zero_grad()
            loss_of(run, tokens).backward()
            optimiser.step()
            torch.cuda.synchronize() if tokens.is_cuda else None
            return time.perf_counter() - began

        [step() for _ in range(3)]
        steps[method] = step
    times: dict[str, list[float]] = {method: [] for method in steps}
    end = time.time() + seconds
    while time.time() < end:
        for method, step in steps.items():
            times[method].append(step())
    middle = {method: statistics.median(own) for method, own in times.items()}
    for method, own in middle.items():
        print(
            f"{method}: {1e3 * own:.2f} ms, {middle['bitnet-start'] / own:.3f} × bitnet ({device})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", help="float, rates, seeds, others, curves, tiny, table or speed")
    parser.add_argument("out", type=Path, nargs="?", default=Path("language.jsonl"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=4 if torch.cuda.is_available() else 1)
    given = parser.parse_args()
    if given.plan in ("table", "speed"):
        table(read(given.out)) if given.plan == "table" else speed()
        return 0
    folder, deadline, left = given.data_dir / "text", time.time() + 60 * given.minutes, 0
    for name in given.plan.split(","):
        left = work(name, given.out, folder, deadline, given.jobs)
        if left:
            print(f"{left} trainings of {name} are left; run the same command again")
            break
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
