"""What the figures were measured on and with; and a sentence where its memory does not suffice."""

import contextlib
import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import softstair

__all__ = ["about", "enough_room", "is_out_of_memory", "reason"]


def about(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, as plain data.

    >>> about(torch.device("cpu"))["torch"] == torch.__version__
    True
    """
    cuda = device.type == "cuda"
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cores,
        "threads": torch.get_num_threads(),
        "softstair": softstair.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": _version("triton"),
        "brevitas": _version("brevitas"),
    }


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def enough_room(device: torch.device, batch: int) -> Iterator[None]:
    """Turns what an allocator says into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"there is not enough memory on {device} for the measurement: give a lower --batch "
            f"than {batch}, or --quick."
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator says so; the CPU's raises no other kind of error for it."""
    words = ("not enough memory", "allocate memory")
    gone = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return gone or any(word in str(error) for word in words)


def reason(error: BaseException) -> str:
    """Why something could not be measured, in a line."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
