"""``softstair export --to gguf`` and ``softstair verify model.gguf``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import softstair as ss
from softstair.cli import main
from softstair.models import Llama, LlamaConfig

pytest.importorskip("gguf", reason="gguf is not installed")


def tiny() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return Llama(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def saved(folder: Path) -> Path:
    options = ss.QuantiseOptions(half=True)
    net = ss.quantise(tiny(), {"lm_head": "float", "*": "int4:row/float"}, options=options)
    return ss.zoo.save(net, folder / "net.safetensors", "tiny", (16,), 0, 1)


def test_a_network_of_an_own_loop_is_exported_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(__file__, tmp_path / "own_llama.py")
    network, file = str(saved(tmp_path)), "net.gguf"
    flags = ["--model", "own_llama:tiny"]
    export = ["export", network, "--to", "gguf", "--out", file, *flags]
    assert main(export) == 2
    assert "multiple of 32 (Q4_0), but are 48 long" in " ".join(capsys.readouterr().err.split())
    keep = ["--keep", "blk.*.ffn_down=f16"]
    assert main([*export, *keep]) == 0
    out = capsys.readouterr().out
    assert "weights: 0 of " in out
    assert "ffn_down is rounded to F16" in out
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    (tmp_path / "text.txt").write_text("hello")
    verify = ["verify", file, "--against", network, "--text", "text.txt", *flags]
    assert main(verify) == 0
    assert capsys.readouterr().out.count("passed") == 2
    data = bytearray(Path(file).read_bytes())
    data[-100] ^= 0x10
    Path(file).write_bytes(data)
    assert main(verify) == 1
    assert "output: 1" in capsys.readouterr().out
    assert main(["verify", file]) == 2
    assert "--against" in capsys.readouterr().err
