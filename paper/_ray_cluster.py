"""A Ray cluster: joined, or started on this machine for as long as it is needed."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from softstair._errors import SoftstairError, first_line, import_extra
from softstair.train import Interrupted, RunError

TIMEOUT = 20.0
"""Seconds for a cluster to answer."""
LONGEST_FOLDER = 30
"""Characters of a folder in which Ray has room for the names of its sockets."""
OWN_CLUSTER = {
    # Tasks have the priority of this process.
    "RAY_worker_niceness": "0",
    # Nobody else may use it; Ray would keep a token for it, and for others, in the user's home.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""Environment of a cluster that is started here."""
TRY = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
ray.nodes()
"""


@contextlib.contextmanager
def joined(address: str | None, cpus: int) -> Iterator[Any]:
    """Yield the module ray, connected to a cluster; with no address, to one that is started here
    and ends with the block. If the caller is connected already, that connection is used."""
    options: dict[str, Any] = {}
    with _environment({"RAY_USAGE_STATS_ENABLED": "0"}), contextlib.ExitStack() as ending:
        ray = import_extra("ray", "ray")
        if ray.is_initialized():
            yield ray
            return
        if address is None:
            ending.enter_context(_environment(OWN_CLUSTER))
            parent = tempfile.gettempdir()
            parent = parent if len(parent) <= LONGEST_FOLDER else "/tmp"
            folder = tempfile.mkdtemp(prefix="ray-", dir=parent)
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            options = {
                "_temp_dir": folder,
                "include_dashboard": False,
                "object_store_memory": 100_000_000,  # bytes; only text goes through it
                "num_cpus": cpus,
                "num_gpus": torch.cuda.device_count(),
            }
        else:
            check_reachable(address)
        # A thread of Ray's prints what becomes of workers, though ``log_to_driver`` be False.
        worker = ray._private.worker
        worker._worker_logs_enabled = False
        ending.callback(setattr, worker, "_worker_logs_enabled", True)
        ending.callback(ray.shutdown)
        _connect(ray, address, options)
        yield ray


@contextlib.contextmanager
def token_in(folder: Path) -> Iterator[str]:
    """A file in the grid's folder, by which a machine knows that it sees the same folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, token = tempfile.mkstemp(prefix=".seen-", dir=folder.absolute())
        os.close(handle)
    except OSError as error:
        raise RunError(
            f"`out` must be a directory that can be written, but {str(folder)!r} cannot be "
            f"({error.strerror}): give another `out`."
        ) from None
    try:
        yield token
    finally:
        Path(token).unlink(missing_ok=True)


def check_reachable(address: str) -> None:
    """Raise SoftstairError if no cluster answers at an address.

    Ray would try for minutes, print from several threads, and end the process. So a connection is
    tried first, and then Ray in a process of its own. Its client, for ray://, gives up by itself.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _check_listens(address)
    if address.startswith("ray://"):
        return
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", TRY, address],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            start_new_session=True,  # this process handles Ctrl-C
        )
    except subprocess.TimeoutExpired as late:
        reason = f"no cluster answered within {TIMEOUT:.0f} seconds"
        if "InvalidAuthToken" in str(late.stderr):
            reason = "it asks for a token, for which Ray has the variable RAY_AUTH_MODE"
        raise _error(address, reason) from None
    if trial.returncode:
        lines = [line for line in trial.stderr.splitlines() if line and not line.startswith(" ")]
        reason = lines[-1] if lines else f"it ended with code {trial.returncode}"
        if address == "auto" and "Could not find" in reason:
            reason = "none runs on this machine"
        raise _error(address, reason)


def _check_listens(address: str) -> None:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("", "ray") or not host or port is None:
            raise ValueError
    except ValueError:
        raise SoftstairError(
            "the address of a Ray cluster must be auto, host:port or ray://host:port, but "
            f"{address!r} was given.",
            field="address",
        ) from None
    try:
        socket.create_connection((host, port), timeout=TIMEOUT / 4).close()
    except OSError as error:
        raise _error(address, error.strerror or str(error)) from None


def _connect(ray: Any, address: str | None, options: dict[str, Any]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address or "local", log_to_driver=False, logging_level="CRITICAL", **options)
    except SystemExit as stop:
        if stop.code == signal.SIGTERM:  # what Ray makes of that signal
            raise Interrupted(signal.SIGTERM) from None
        raise _error(address, f"it ended with code {stop.code}") from None
    except (RuntimeError, OSError, ValueError) as error:
        raise _error(address, first_line(error)) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray would handle SIGTERM itself
                signal.signal(number, handler)


def _error(address: str | None, reason: str) -> SoftstairError:
    reason = reason.rstrip(".").replace(". ", "; ")[:300]
    if address is None:
        return SoftstairError(
            f"Ray could not be started on this machine ({reason}): free memory or disk space, or "
            "train with the local engine.",
            field="engine",
        )
    return SoftstairError(
        f"no Ray cluster can be joined at {address!r} ({reason}): start one with Ray's own "
        "command, ray start, or give no `address` to use this machine alone.",
        field="address",
    )


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set; at the end remove them and those that Ray has set."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
                del os.environ[name]
