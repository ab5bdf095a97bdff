"""Flash, memory and instructions of trained networks on a Cortex-M4 that QEMU emulates.

    python -m benchmarks.cortex RUN [RUN ...] [--examples 3] [--data-dir data] [--json figures.json]

RUN is a run directory, its file, or the name of one of the zoo. The scores must equal those of
the program for this machine. Needs arm-none-eabi-gcc, qemu-system-arm and a C
compiler.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.sentence import tell
from softstair.deploy.c import build, write
from softstair.train.network import deployed, examples_of

TICK = 40
"""Instructions per tick: QEMU executes one per nanosecond, and the timer runs at 25 MHz."""


def measure(run: Path, count: int, data_dir: Path) -> dict[str, Any]:
    """Return the figures of one network."""
    network = deployed(run)
    _, x, _ = examples_of(network.about, data_dir, count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = write(network.frozen, folder, scratch=2**14, cpu="arm")
        board, figures = emulate(folder, x)
        host = _output([str(build(folder)), "--bits", "examples.bin"], folder)
    if board.strip() != host.strip():
        raise SystemExit(f"{run}: the Cortex-M4 says\n{board}and this machine\n{host}")
    more = {"examples with the host's scores": len(x), "of it constants": plan.flash}
    return {"network": run.name, **more, **figures}


def emulate(folder: Path, x: Tensor, *variables: str) -> tuple[str, dict[str, int]]:
    """Return what a program prints and its figures, given variables of the Makefile."""
    (folder / "examples.bin").write_bytes(x.contiguous().numpy().tobytes())
    output = _output(["make", "-s", "emulated", *variables], folder)
    printed, _, ticks = output.partition("ticks")
    sizes = _output(["arm-none-eabi-size", "cortex-m4/network.elf"], folder)
    text, data, bss = map(int, sizes.splitlines()[1].split()[:3])
    figures = {"flash, bytes": text + data, "RAM, bytes": data + bss}
    return printed, {**figures, "instructions": int(ticks) * TICK}


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[:500]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = [measure(run, given.examples, given.data_dir) for run in given.runs]
    for row in figures:
        print(
            "  ".join(
                f"{name}: {value:,}" if isinstance(value, int) else value
                for name, value in row.items()
            )
        )
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    tell(main)
