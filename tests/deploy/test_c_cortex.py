"""Generated C on an emulated Cortex-M4: the same bits as on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from c_networks import NETWORKS
from compiled import differing, emulated, needs_compiler, needs_cortex

from softstair.deploy.c import from_trace, write

ROOT = Path(__file__).parents[2]


# Of the default lane's, the first has the products of a Cortex-M4.
@pytest.mark.nightly(keep=1)
@needs_cortex
@pytest.mark.parametrize("name", ["packed", "bits", "bytes", "shared", "scores", "units", "large"])
def test_every_node_is_equal(name: str, tmp_path: Path) -> None:
    builder = NETWORKS[name]()
    network, x = builder.network(), builder.bytes[:1]
    write(network, tmp_path, cpu="arm")
    # The words of all nodes precede the class.
    words = [line for line in emulated(tmp_path, x, trace=True) if " " not in line]
    values = np.array([int(word, 16) for word in words], dtype=np.uint32).view(np.int32)
    expected = {name: result[:1] for name, result in builder.results.items()}
    assert differing(expected, from_trace(values[None], network)) == {}


@pytest.mark.nightly(keep=1)
@needs_cortex
@pytest.mark.parametrize(("name", "outputs"), [("scores", "classes"), ("lines", "values")])
def test_scores_are_printed_and_other_files_are_refused(
    name: str, outputs: str, tmp_path: Path
) -> None:
    builder = NETWORKS[name]()
    network = builder.network(outputs)
    write(network, tmp_path, cpu="arm")
    *lines, ticks = emulated(tmp_path, builder.bytes)
    expected = network(builder.bytes)
    if outputs == "classes":
        expected = torch.cat([network.predict(builder.bytes)[:, None], expected], 1)
    assert [[*map(int, line.split())] for line in lines] == expected.tolist()
    assert re.fullmatch(r"ticks [1-9]\d*", ticks)
    (tmp_path / "long.bin").write_bytes(builder.bytes[:1].numpy().tobytes() + b"abc")
    size = builder.bytes[0].numel()
    for file, why in {
        "long.bin": f"the last example has 3 bytes and should have {size}.",
        "none.bin": "none.bin cannot be read",
    }.items():
        command = ["make", "-s", "emulated", f"EXAMPLES={file}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert why in done.stdout
        assert "ticks" not in done.stdout


@pytest.mark.nightly(keep=1)
@needs_cortex
@pytest.mark.parametrize("name", ["bits", "units"])
def test_object_file_needs_only_integers_of_the_compiler(name: str, tmp_path: Path) -> None:
    write(NETWORKS[name]().network(), tmp_path, cpu="arm")
    flags = "-std=c99 -O2 -fno-builtin -mcpu=cortex-m4 -mthumb".split()
    command = ["arm-none-eabi-gcc", *flags, "-ffreestanding", "-c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = ["arm-none-eabi-nm", "-u", "network.o"]
    symbols = subprocess.check_output(command, cwd=tmp_path, text=True)
    unknown = {line.split()[-1] for line in symbols.splitlines()}
    assert unknown <= {"__aeabi_lmul", "__aeabi_lasr", "__aeabi_llsl", "__aeabi_ldivmod"}, unknown


@pytest.mark.nightly
@needs_cortex
@needs_compiler
def test_own_model_to_c_runs_and_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files and commands of afternoon.md; numbers may be those of another machine."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    text = (ROOT / "docs/afternoon.md").read_text(encoding="utf-8")
    printed, accuracies = "", []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block, "utf-8")
        elif language == "sh":
            assert not printed
            command = ["bash", "-e", "-o", "pipefail", "-c", block]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            printed = done.stdout
            accuracies += re.findall(r"test accuracy (.+)%", printed)
        else:
            assert without_numbers(block) == without_numbers(printed)
            printed = ""
    frozen, on_cortex = accuracies[2:]
    assert on_cortex == frozen
    assert float(frozen) > 90


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"\b[0-9a-f]{4,}\b|[\d,.]*\d%?|─+", "0", text).split())
