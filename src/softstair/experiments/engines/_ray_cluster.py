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
from typing import Any
from urllib.parse import urlsplit

import torch

from softstair._errors import import_extra
from softstair.train.interrupt import Interrupted

__all__ = ["joined", "nodes"]

PATIENCE = 20.0
"""Seconds that a cluster has to answer."""
LONGEST = 30
"""Characters of a folder in which Ray has room for the names of its sockets."""
STORE = 100_000_000
"""Bytes of its object store: what travels is words."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
HERE = {
    # Tasks are as urgent as this process is.
    "RAY_worker_niceness": "0",
    # Nobody else may use it; Ray would keep a token for it, and for others, in the user's home.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""What holds for a cluster that is started here."""
TRY = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
ray.nodes()
"""


@contextlib.contextmanager
def joined(address: str | None, cpus: int) -> Iterator[Any]:
    """The module ray, connected to a cluster; None starts one here with so many CPUs.

    One that was started here ends with it. Where the caller is connected already, that is used, and
    left as it is.
    """
    given: dict[str, Any] = {}
    with _handlers_kept(), _environment(QUIET), contextlib.ExitStack() as ending:
        ray = import_extra("ray", "ray")
        if ray.is_initialized():
            yield ray
            return
        if address is None:
            ending.enter_context(_environment(HERE))
            place = _short_folder()
            ending.callback(shutil.rmtree, place, ignore_errors=True)
            given |= {"_temp_dir": place, "include_dashboard": False, "object_store_memory": STORE}
            given |= {"num_cpus": cpus, "num_gpus": torch.cuda.device_count()}
        else:
            refuse_unreachable(address)
        ending.enter_context(_silence(ray))
        ending.callback(ray.shutdown)
        with _handlers_kept():  # Ray would take SIGTERM for itself
            try:
                _connect(ray, address, given)
            except SystemExit as stop:
                if stop.code == signal.SIGTERM:  # what it makes of that
                    raise Interrupted(signal.SIGTERM) from None
                raise _unstarted(f"it ended with code {stop.code}") from None
        yield ray


def nodes(ray: Any) -> list[dict[str, float]]:
    """What each machine of the cluster has: CPU, GPU."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def refuse_unreachable(address: str) -> None:
    """Refuses an address where no cluster answers.

    Ray would try for minutes, print from several threads, and end the process. So a connection is
    tried first, and then Ray in a process of its own, of which nothing is left. Its client, for
    ray://, gives up by itself.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _refuse_silent(address)
    if address.startswith("ray://"):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRY, address],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            start_new_session=True,  # Ctrl-C is ours to deal with
        )
    except subprocess.TimeoutExpired as late:
        reason = f"no cluster answered within {PATIENCE:.0f} seconds"
        if "InvalidAuthToken" in str(late.stderr):
            reason = "it asks for a token, for which Ray has the variable RAY_AUTH_MODE"
        raise _unreachable(address, reason) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        reason = said[-1].rstrip(".") if said else f"it ended with code {done.returncode}"
        if address == "auto" and "Could not find" in reason:
            reason = "none runs on this machine"
        raise _unreachable(address, reason.replace(". ", "; "))


def _refuse_silent(address: str) -> None:
    """Refuses an address at which nothing listens."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("", "ray") or not host or port is None:
            raise ValueError
    except ValueError:
        raise ValueError(
            "the address of a Ray cluster must be auto, host:port or ray://host:port, but "
            f"{address!r} was given."
        ) from None
    try:
        socket.create_connection((host, port), timeout=PATIENCE / 4).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None


def _unreachable(address: str, reason: str) -> ValueError:
    return ValueError(
        f"a Ray cluster must run at the address {address!r}, but it cannot be joined "
        f"({' '.join(reason.split())[:300]}): start one with ray start --head, or give no "
        "--address to use this machine alone."
    )


def _connect(ray: Any, address: str | None, given: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address or "local", log_to_driver=False, logging_level="CRITICAL", **given)
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0].rstrip(".").replace(". ", "; ")
        if address is not None:
            raise _unreachable(address, reason) from None
        raise _unstarted(reason) from None


def _unstarted(reason: str) -> ValueError:
    return ValueError(
        f"Ray could not be started on this machine ({reason[:300]}): make room for it, or train "
        "with --engine local."
    )


@contextlib.contextmanager
def _silence(ray: Any) -> Iterator[None]:
    """A thread of Ray's prints what becomes of workers, though ``log_to_driver`` be False: what
    matters of that is told by us, and stdout is not for the rest."""
    worker = ray._private.worker
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = True


def _short_folder() -> str:
    """A new folder for Ray's files; the names of sockets may not be long."""
    place = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ray-", dir=place if len(place) <= LONGEST else "/tmp")


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Whoever had SIGINT and SIGTERM has them again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Environment variables for a while, where nobody has set them; those that Ray sets go too."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
                del os.environ[name]
