"""NVIDIA's Multi-Process Service (MPS), with which kernels of several processes overlap on a GPU.

Without it, a GPU switches between processes in time slices. Processes connect to the daemon whose
directory their environment names, and run without MPS if they find none.
"""

import contextlib
import errno
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = "nvidia-cuda-mps-control"
DEFAULT_PIPE = Path("/tmp/nvidia-mps/control")
"""Where processes look for a daemon if their environment names no directory."""
DEVICE = re.compile(r"\d+|GPU-[0-9a-f-]+")
"""A whole GPU in CUDA_VISIBLE_DEVICES. Other entries hide GPUs, or are parts of one."""
MAX_CLIENTS = 48
"""Most processes that may connect to the server of a GPU."""
START_TIMEOUT = 10.0
"""Seconds for the daemon and its server to start."""
ANSWER_TIMEOUT = 5.0
"""Seconds for a daemon that was there before to answer."""
END_TIMEOUT = 30
"""Seconds for processes to end before the daemon is killed: they may be saving checkpoints."""

SCRIPT = f"""
trap '' HUP INT TERM
"$0" -f </dev/null >/dev/null &
daemon=$!
for _ in $(seq 200); do
    [ -e "$1/control" ] && break
    kill -0 $daemon || exit
    sleep 0.05
done
echo start_server -uid $(id -u) | "$0" >/dev/null
echo get_server_list | "$0"
exec >/dev/null
read -r line
(sleep {END_TIMEOUT}; kill -KILL $daemon) &
echo quit | "$0"
wait $daemon
rm -rf "$1"
kill -KILL 0
"""
"""Runs the daemon until stdin is closed, which happens even if this process is killed. It prints
the ID of the server's process, ignores the signals that a scheduler sends to all processes of a
job, and at the end kills what is left of its process group."""


@contextlib.contextmanager
def started(processes: int) -> Iterator[dict[str, str]]:
    """Start MPS for several processes, and yield the variables that their environment needs.

    There are none if MPS is not available or not wanted, or if it does not start. The processes
    must end before the context does.
    """
    daemon = _start() if _is_wanted(processes) else None
    try:
        yield daemon.environment if daemon else {}
    finally:
        if daemon:
            daemon.end()


def _is_wanted(processes: int) -> bool:
    return (
        sys.platform == "linux"
        and 1 < processes <= MAX_CLIENTS
        and os.environ.get("SOFTSTAIR_MPS") != "0"
        and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        and all(map(DEVICE.fullmatch, _visible_devices() or ()))
        and shutil.which(PROGRAM) is not None
        and not _answers(DEFAULT_PIPE)
    )


def _answers(pipe: Path) -> bool:
    """Return whether a daemon listens at its pipe, which stays there if the daemon is killed."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(pipe).st_mode)
    except OSError:
        return False  # nothing is there, or only for another user
    settings: Any = {"capture_output": True, "timeout": ANSWER_TIMEOUT, "check": False}
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe.parent)}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([PROGRAM], input=b"get_server_list\n", env=environment, **settings)
        if done.returncode == 0 and b"Cannot find" not in done.stdout + done.stderr:
            return True
    # The daemon of another user may take processes, but not commands.
    return is_socket and _accepts(pipe)


def _accepts(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_TIMEOUT)
        try:
            client.connect(str(path))
        except OSError as error:
            return error.errno in (errno.EPROTOTYPE, errno.EAGAIN)  # of another type, or busy
    return True


def _visible_devices() -> list[str] | None:
    """Return the devices of the environment; None if it names none, so that all are visible."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if devices is None else devices.split(",")


def _start() -> "_Daemon | None":
    try:
        daemon = _Daemon()
    except OSError:
        return None
    if daemon.is_ready():
        return daemon
    daemon.kill()
    return None


class _Daemon:
    """A daemon in a directory of its own, and the shell that ends it."""

    def __init__(self) -> None:
        # Paths of sockets have at most 107 characters, which another folder may exceed.
        self._folder = tempfile.mkdtemp(prefix="softstair-mps-", dir="/tmp")
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        self.environment = dict.fromkeys(names, self._folder)
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", SCRIPT, PROGRAM, self._folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C must not end it before the runs are saved
            )
        except OSError:
            os.rmdir(self._folder)
            raise
        self._input: Any = self._shell.stdin
        self._output: Any = self._shell.stdout
        if (devices := _visible_devices()) is not None:
            # The daemon shows the devices that it sees to its clients, numbered from 0.
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(len(devices))))

    def is_ready(self) -> bool:
        deadline, text = time.monotonic() + START_TIMEOUT, b""
        with self._output:
            while not text.endswith(b"\n"):
                left = max(0.0, deadline - time.monotonic())
                ready, _, _ = select.select([self._output], [], [], left)
                part = os.read(self._output.fileno(), 100) if ready else b""
                if not part:
                    return False
                text += part
        return text.strip().isdigit()

    def end(self) -> None:
        self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(END_TIMEOUT + 5)
        if os.path.exists(self._folder):  # the shell did not end, or was killed
            self.kill()

    def kill(self) -> None:
        self._input.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
