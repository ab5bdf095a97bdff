"""The examples run, and say what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import softstair as ss
from softstair.models import Llama, LlamaConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()

    def _run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield _run
    torch.set_num_threads(threads)


def test_each_is_one_page_and_tried_here() -> None:
    pages = sorted(EXAMPLES.glob("*.py"))
    assert [page.name for page in pages] == ["digits.py", "estimators.py", "gpt.py", "noise.py"]
    assert all(len(page.read_text().splitlines()) <= 80 for page in pages)


@pytest.mark.nightly
def test_digits_learns(run) -> None:
    said = run("digits.py", "3")
    mean = re.search(r"\n(\d+\.\d+)% ± \d+\.\d+%\n$", said)
    assert mean is not None, said
    assert float(mean[1]) > 90


@pytest.mark.nightly
def test_every_estimator_learns(run) -> None:
    lines = run("estimators.py", "2", "1").splitlines()
    assert len(lines) == 9
    assert all(float(line.split()[-1].rstrip("%")) > 75 for line in lines), lines


@pytest.mark.nightly
def test_noise_of_ones_own_is_what_it_says_and_trains(run) -> None:
    said = run("noise.py")
    mean, std = map(float, re.search(r"mean (\S+), std (\S+) of", said).groups())
    assert abs(mean) < 0.02
    assert abs(std - 1) < 0.02
    assert "annealed: (0, 1, 2)" in said
    assert float(re.search(r"(\d+\.\d)% of the last", said)[1]) > 80


def test_gpt_trains_and_its_file_is_read_again(run, tmp_path: Path) -> None:
    """A text of two words that alternate; the file holds ternary weights."""
    text, out = tmp_path / "text.txt", tmp_path / "network.safetensors"
    text.write_bytes(b"soft stair " * 400)
    small = ["--steps", "60", "--width", "32", "--layers", "1", "--context", "16", "--batch", "8"]
    torch.manual_seed(0)
    said = run("gpt.py", "--text", str(text), "--out", str(out), "--rate", "1e-2", *small)
    assert float(re.search(r"test: (\d+\.\d+) bits per byte", said)[1]) < 2  # of 8
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    net = ss.zoo.load(out, model=Llama(config))
    tokens = torch.tensor([list(b"soft stair")])
    assert net(tokens).shape == (1, 10, 256)
    weights = net.model.layers[0].mlp.up_proj.integers_and_quanta().integers
    assert set(weights.unique().tolist()) == {-1, 0, 1}
