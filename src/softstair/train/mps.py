"""NVIDIA's Multi-Process Service (MPS), with which processes use a GPU at the same time.

Without it, a GPU runs the kernels of one process at a time, and small networks leave most of it
idle. The results are the same.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Variable that names the folder of a service's pipes; processes without it use ``DEFAULT``."""
DEFAULT = Path("/tmp/nvidia-mps")
TIMEOUT = 60.0
"""Seconds for the service to start, and to end."""

GUARD = """
if "$0" -d </dev/null >/dev/null 2>&1; then
    echo started
    cat >/dev/null
    echo quit | "$0" >/dev/null 2>&1
fi
rm -rf "$1"
"""
"""Starts the service, and ends it when the input ends: when the parent closes it or is killed."""

PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
sys.exit(f"CUDA error {code}" if code else 0)
"""
"""Uses the GPU through the service, without torch, which takes seconds to import."""


@contextlib.contextmanager
def service() -> Iterator[dict[str, str]]:
    """Start MPS, and yield the environment variables of processes that use it; end it afterwards.

    It does nothing if MPS is not installed, if it runs already, or if the variable
    ``CUDA_MPS_PIPE_DIRECTORY`` is set. If it cannot be started, a warning says why.
    """
    program = shutil.which(PROGRAM)
    if program is None or PIPES in os.environ or (DEFAULT / "control").exists():
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="softstair-mps-")
    variables = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    # The service knows all GPUs; each process chooses among them.
    environment = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"} | variables
    guard = subprocess.Popen(
        ["sh", "-c", GUARD, program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the parent alone
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        problem = "" if guard.stdout.readline() else f"{PROGRAM} -d failed"
        problem = problem or _probe(variables)
        if problem:
            guard.stdin.close()
            warnings.warn(
                f"MPS cannot be used ({problem}): runs take turns on the GPU, which is slower. Set "
                f"{PIPES} to an empty folder to try it no more.",
                stacklevel=3,
            )
        yield {} if problem else variables
    finally:
        guard.stdin.close()
        guard.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(TIMEOUT)


def _probe(variables: dict[str, str]) -> str:
    """Return why a process cannot use the GPU through the service; empty if it can."""
    command, environment = [sys.executable, "-c", PROBE], {**os.environ, **variables}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "the service does not answer"
    return "" if result.returncode == 0 else " ".join(result.stderr.split())[-200:]
