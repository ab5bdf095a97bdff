"""One run in two processes: the run of the whole batch, and as hard to lose as a run in one."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short import RECIPE, files, is_sentence, metrics_of
from torch import Tensor, nn
from warm import Warm

from softstair.cli import main
from softstair.data import load
from softstair.data.batches import Examples
from softstair.models import build
from softstair.train import Recipe, RunError, checkpoint, train, trained_network
from softstair.train.execution import choose_device
from softstair.train.metrics import evaluate
from softstair.train.parallel import ALONE, Several, Team, joined, launcher

RANDOM = replace(RECIPE, augment="crop", forward="random", model="test_parallel:witness")
"""Where every process draws numbers of its own, and they matter."""


def words(recipe: Recipe, out: Path, *more: str) -> list[str]:
    """The command that trains by a recipe."""
    given = [f"--{name.replace('_', '-')}={getattr(recipe, name)}" for name in changed(recipe)]
    return ["train", *given, "--device", "cpu", "--threads", "1", "--out", str(out), *more]


def changed(recipe: Recipe) -> list[str]:
    return [*recipe.differences(Recipe().rescaled(recipe.epochs)), "epochs"]


# Two processes as torchrun starts them: it does little more than to set their environment.


class Pair:
    """Two children of one server, which train together."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.errors = warm, [folder / "errors0", folder / "errors1"]

    def start(self, words: list[str], environment: Any = (), **settings: Any) -> list[int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        requests = []
        for rank, errors in enumerate(map(str, self.errors)):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **meeting}
            mine = {**place, **dict(environment)}
            requests.append({"words": words, "errors": errors, "environment": mine, **settings})
        return self.warm.start_together(requests)

    def wait(self) -> list[int]:
        return self.warm.wait_together()

    def run(self, words: list[str], **settings: Any) -> list[int]:
        """Both exit codes."""
        self.start(words, **settings)
        return self.wait()

    @property
    def said(self) -> list[str]:
        return [errors.read_text() for errors in self.errors]


@pytest.fixture(scope="module")
def pair(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(warm, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def whole(pair: Pair, notes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert pair.run(words(RANDOM, out), environment={"NOTES": str(notes)}) == [0, 0], pair.said
    return out


class Witness(nn.Sequential):
    """A network that notes what it holds when it is evaluated, and can be told to strike: the
    process of that rank, or its launcher, by a signal in the so-many-th step."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        rank, whom, number, step = os.environ.get("STRIKE", "none own 0 0").split()
        if self.training and rank == os.environ.get("RANK") and self.steps == int(step):
            os.kill(os.getppid() if whom == "launcher" else os.getpid(), int(number))
            time.sleep(1.0)  # until the launcher has passed it on
        if not self.training and (folder := os.environ.get("NOTES")):
            held = b"".join(one.detach().numpy().tobytes() for one in self.state_dict().values())
            with open(Path(folder, os.environ["RANK"]), "a", encoding="utf-8") as file:
                file.write(hashlib.sha256(held).hexdigest() + "\n")
        return super().forward(x)


def witness() -> nn.Module:
    normal = nn.BatchNorm1d(32)
    return Witness(nn.Flatten(), nn.Linear(64, 32), normal, nn.ReLU(), nn.Linear(32, 10))


def plain() -> nn.Module:
    """Without a batch normalisation an example's gradient does not depend on the others."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


class Fickle(nn.Sequential):
    """In the second process it learns in other layers than in the first."""

    def forward(self, x: Tensor) -> Tensor:
        other = self.training and os.environ.get("RANK") == "1"
        return self[1 + other](self[0](x))


def fickle() -> nn.Module:
    return Fickle(nn.Flatten(), nn.Linear(64, 10), nn.Linear(64, 10))


# What comes of it


@pytest.mark.nightly
def test_two_processes_train_the_whole_batch(pair: Pair, tmp_path: Path) -> None:
    """Their steps are those of the batch that one process would have had."""
    recipe = replace(RECIPE, model="test_parallel:plain", weights="float", features="float")
    recipe = replace(recipe, optimiser="sgd", learning_rate=0.1)
    assert pair.run(words(recipe, tmp_path / "two")) == [0, 0], pair.said
    train(recipe, tmp_path / "one", device="cpu", threads=1)
    data = load("digits").sample(200)
    one, two = (trained_network(tmp_path / name, data, plain()) for name in ("one", "two"))
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.seed)
        first = plain()
    for name, alone in one.state_dict().items():
        assert (alone - first.state_dict()[name]).abs().max() > 1e-3
        torch.testing.assert_close(two.state_dict()[name], alone, rtol=1e-4, atol=1e-6)
    alone, together = (lines(tmp_path / name) for name in ("one", "two"))
    for mine, other in zip(alone, together, strict=True):
        assert other == {key: pytest.approx(value, rel=1e-4) for key, value in mine.items()}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics_of(out).splitlines()]


@pytest.mark.nightly
def test_both_hold_the_same_network(whole: Path, notes: Path) -> None:
    """Their draws differ, and so do the examples that their normalisations see."""
    first, second = ((notes / rank).read_text().split() for rank in "01")
    assert second[-1] == first[-1]
    # Both look at the stairs after each epoch, and the first evaluates besides.
    assert len(set(first)) >= RANDOM.epochs
    assert len(set(second)) >= RANDOM.epochs


@pytest.mark.nightly
def test_they_learn(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(Recipe().rescaled(4), limit=800)
    assert pair.run(words(recipe, out, "--freeze")) == [0, 0], pair.said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["valid_accuracy"] > 0.8
    assert summary["config"]["processes"] == 2
    assert set(files(out)) >= {"config.json", "metrics.jsonl", "network.txt", "picture.png"}
    assert set(lines(out)[0]) == {*keys_of_one(tmp_path)}


def keys_of_one(folder: Path) -> dict[str, Any]:
    train(replace(RECIPE, epochs=1), folder / "one", device="cpu", threads=1)
    return lines(folder / "one")[0]


# What survives


@pytest.mark.nightly
def test_one_that_is_asked_to_stop_stops_both(pair: Pair, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strike = {"STRIKE": f"1 own {int(signal.SIGTERM)} 8"}
    assert pair.run(words(RANDOM, out), environment=strike, every=3) == [143, 143], pair.said
    assert pair.said[0].startswith("softstair train: stopped by SIGTERM, and kept: go on with tor")
    assert pair.said[1] == ""
    assert not (out / "summary.json").exists()
    assert pair.run(words(RANDOM, out, "--resume"), every=4) == [0, 0], pair.said
    assert metrics_of(out) == metrics_of(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_killed_ends_both(rank: int, pair: Pair, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strike = {"STRIKE": f"{rank} own {int(signal.SIGKILL)} 9"}
    codes = pair.run(words(RANDOM, out), environment=strike, every=2)
    assert codes == ([-9, 2], [2, -9])[rank]
    assert pair.said[1] == ""
    if rank:
        assert "one of the run's 2 processes is gone" in pair.said[0]
        assert is_sentence(pair.said[0])
        return
    assert pair.run(words(RANDOM, out, "--resume")) == [0, 0], pair.said
    assert metrics_of(out) == metrics_of(whole)


@pytest.mark.nightly
def test_torchrun_itself(pair: Pair, whole: Path, tmp_path: Path) -> None:
    """It is struck while it trains, passes it on, and the run goes on where it stood."""
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "softstair", *words(RANDOM, out)],
        env={**os.environ, "STRIKE": f"0 launcher {int(signal.SIGTERM)} 8"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("softstair")]
    assert len(said) == 1, done.stderr
    assert "stopped by SIGTERM, and kept: go on with torchrun --nproc-per-node 2 -m" in said[0]
    assert pair.run(words(RANDOM, out, "--resume")) == [0, 0], pair.said
    assert metrics_of(out) == metrics_of(whole)


# What is refused: in one sentence, by the first process alone, and both end


@pytest.mark.nightly
def test_refusals_are_said_once(pair: Pair, whole: Path, tmp_path: Path) -> None:
    new, one = tmp_path / "new", tmp_path / "one"
    train(replace(RECIPE, epochs=1), one, device="cpu", threads=1)
    (one / "summary.json").unlink()
    small = replace(RECIPE, epochs=1)
    refused = {
        "'forty' was given": words(RECIPE, new, "--epochs", "forty"),
        "multiple of the number of processes, 2": words(replace(small, batch=33), new),
        "two examples or more for each": words(replace(small, batch=2), new),
        "capture must be auto or never": words(small, new, "--capture", "always"),
        "but torchrun started 2": words(small, new, "--every-fold"),
        "must be auto, cpu or cuda under": words(small, new, "--device", "cuda:0"),
        "holds a run already": words(RANDOM, whole),
        "was begun without torchrun, and would not be the same in 2": words(small, one, "--resume"),
        "must be at most the number of training examples": words(replace(small, batch=1024), new),
        "must be a directory": words(small, whole / "config.json"),
    }
    for part, given in refused.items():
        assert pair.run(given) == [2, 2], (part, pair.said)
        assert part in pair.said[0]
        assert is_sentence(pair.said[0]), pair.said[0]
        assert pair.said[1] == ""
        assert not new.exists()


@pytest.mark.nightly
def test_gradients_that_not_all_of_them_have(pair: Pair, tmp_path: Path) -> None:
    recipe = replace(RECIPE, model="test_parallel:fickle", weights="float", features="float")
    assert pair.run(words(recipe, tmp_path / "run")) == [2, 2], pair.said
    assert "must have the same gradients, but '1.bias'" in pair.said[0]
    assert is_sentence(pair.said[0])
    assert pair.said[1] == ""


@pytest.mark.nightly
def test_one_process_does_not_go_on_with_a_run_of_two(whole: Path, tmp_path: Path) -> None:
    before = files(whole)
    (whole / "summary.json").unlink()
    refusal = r"with torchrun in 2 processes, and .* the same in 1"
    with pytest.raises(RunError, match=refusal) as said:
        train(RANDOM, whole, device="cpu", resume=True)
    assert is_sentence(str(said.value))
    (whole / "summary.json").write_bytes(before["summary.json"])
    assert files(whole) == before
    assert train(RANDOM, whole, device="cpu", resume=True)["epochs"] == RANDOM.epochs


def test_a_checkpoint_of_another_number_of_processes(tmp_path: Path) -> None:
    """What config.json says may have been edited; the checkpoint has generators for each."""
    train(replace(RECIPE, epochs=1), tmp_path, device="cpu", threads=1)
    held = checkpoint.load(tmp_path / "checkpoint")
    assert held is not None
    assert "others" not in held
    checkpoint.save(tmp_path / "checkpoint", {**held, "others": [held["generators"]]})
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ValueError, match="it is of 2 processes") as said:
        train(replace(RECIPE, epochs=1), tmp_path, device="cpu", resume=True)
    assert is_sentence(str(said.value))


# A team of one


def test_a_team_of_one_is_a_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RANDOM, epochs=2, model="auto")
    assert main(words(recipe, tmp_path / "plain")) == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(words(recipe, tmp_path / "one")) == 0
    assert not torch.distributed.is_initialized()
    one, plain = (newest(tmp_path / name) for name in ("one", "plain"))
    assert one == plain
    assert metrics_of(tmp_path / "one") == metrics_of(tmp_path / "plain")


def newest(out: Path) -> bytes:
    return max((out / "checkpoint").glob("*.safetensors")).read_bytes()


def test_the_environment_is_believed_only_where_it_makes_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # alone, it may be somebody else's
    with joined() as team:
        assert team is ALONE
    assert launcher() == []
    monkeypatch.setenv("RANK", "first")
    assert main(["train", "--epochs", "1"]) == 2
    said = capsys.readouterr().err
    assert "RANK=first" in said
    assert is_sentence(said)


def test_the_command_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launcher() == "torchrun --nnodes 2 --nproc-per-node 3 -m".split()


# Its parts, without a second process


class Half(Team):
    """One of two processes, whose sums are told to the test."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def add(self, tensor: Tensor) -> None:
        self.sums = tensor.clone()
        tensor += 1  # so that it is not taken for the whole


@pytest.mark.parametrize("examples", [1797, 900, 300])
def test_evaluation_in_parts_is_that_of_one(examples: int) -> None:
    data = load("digits").sample(examples)
    net = build("digits", 10, (1, 8, 8))
    given = Examples(data.x, data.y, data.mean, data.std)
    halves, calls = (Half(0), Half(1)), [0, 0]
    for half in halves:

        def count(rank: int = half.rank) -> None:
            calls[rank] += 1

        evaluate(net, given, count, half)
    sums = halves[0].sums + halves[1].sums
    loss = right = 0.0
    for row in sums.tolist():
        loss, right = loss + row[0], right + row[1]
    assert evaluate(net, given) == (loss / examples, right / examples)
    assert calls[0] == calls[1] == -(-examples // 1000)
    assert not torch.any((halves[0].sums != 0) & (halves[1].sums != 0))


def test_a_mean_of_tensors_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they lie in memory, and whatever their type; the other process has twice as much."""
    kept: list[Tensor] = []

    def add_other(flat: Tensor) -> None:
        kept.append(flat.clone())
        flat += 2 * kept[0]

    monkeypatch.setattr(torch.distributed, "all_reduce", add_other)
    torch.manual_seed(0)
    convolution = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    given = [convolution, torch.randn(5, 6).T, torch.randn(()), torch.randn(3).bfloat16()]
    before = [one.clone() for one in given]
    count = torch.tensor(7)
    Several(0, 2, 0).average(given, count)
    for one, was in zip(given, before, strict=True):
        assert one.dtype == was.dtype
        assert one.stride() == was.stride()
        torch.testing.assert_close(one, (1.5 * was.float()).to(one.dtype))
    assert int(count) == 21
    assert len(kept) == 1
    kept.clear()
    fine = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    Several(0, 2, 0).average([torch.ones(1), fine], count)
    assert float(fine) == 1.5 * (1 + 2.0**-40)


def test_parts_make_the_batch_and_seeds_differ() -> None:
    batch = torch.randperm(12)
    team = [Several(rank, 3, rank) for rank in range(3)]
    assert torch.equal(torch.cat([one.part(batch) for one in team]), batch)
    assert {len(one.part(batch)) for one in team} == {4}
    seeds = {one.seed(seed) for one in team for seed in (0, 1, 2**63 - 1)}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert team[0].seed(5) == ALONE.seed(5) == 5


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda:1")
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ValueError, match="at most one process per GPU") as said:
        choose_device("auto", 2)
    assert is_sentence(str(said.value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 1) == torch.device("cpu")
