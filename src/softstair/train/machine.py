"""The machine: which device, how many threads, whose settings, and what when memory runs out."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from softstair import kernels
from softstair.kernels import triton
from softstair.train.products import products_in
from softstair.train.recipe import Recipe
from softstair.train.run import AGAIN, RunError

__all__ = [
    "device_named",
    "enough_memory",
    "own_settings",
    "refuse_absent_kernels",
    "threads_for",
]

SMALL = 1 << 25
"""Products in a forward pass of linear layers."""


def device_named(name: str, local: int | None = None) -> torch.device:
    """A device that is there; auto: a GPU if there is one. ``local`` is given where torchrun has
    started several processes: this one's number on its machine, and that of its GPU."""
    if local is not None and name != "cpu":
        name = _own_gpu(name, local)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that is there, but {name!r} was given, and torch sees no CUDA "
            "device: give --device cpu."
        )
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"device must be auto, cpu, cuda or cuda:N, and be there, but {name!r} was given."
        ) from None
    return device


def _own_gpu(name: str, local: int) -> str:
    if name not in ("auto", "cuda"):
        raise ValueError(
            "device must be auto, cpu or cuda under torchrun, which gives each process a GPU of "
            f"its own, but {name!r} was given."
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus <= local:
        raise ValueError(
            f"torchrun must start no more processes than there are GPUs, but torch sees {gpus} "
            "here: lower --nproc-per-node, or give --device cpu."
        )
    return f"cuda:{local}" if gpus else name


def refuse_absent_kernels(recipe: Recipe, device: torch.device) -> None:
    """Refuses kernels in Triton where they cannot run, whether recipe or environment asks."""
    asked = kernels.asked() if recipe.kernels == "auto" else recipe.kernels
    if asked == "triton" and (reason := triton.lacking(device)) is not None:
        raise ValueError(reason)


def threads_for(network: nn.Module, batch: int) -> int:
    """How many threads a network trains fastest with on a CPU.

    The operations of a small one are over before a second thread is awake, and where something else
    runs beside, the threads wait for one another: one thread, then. Otherwise as torch has it.

    >>> threads_for(nn.Linear(64, 10), batch=64)
    1
    """
    convolutions = any(isinstance(one, nn.Conv1d | nn.Conv2d) for one in network.modules())
    products = batch * sum(one.numel() for one in network.parameters())
    return 1 if not convolutions and products < SMALL else torch.get_num_threads()


@contextlib.contextmanager
def own_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Random numbers, threads, kernels of the CPU and products of a GPU of our own; the caller's
    are given back untouched."""
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    measures = torch.backends.cudnn.benchmark
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            if recipe.precision == "bfloat16" and device.type == "cpu" and not _has_bfloat16():
                # oneDNN would find out at the first product, and switch itself off with a warning;
                # what had been computed until then would differ in its last bits.
                torch._C._set_mkldnn_enabled(False)
            # Batches have one shape: which of its kernels is fastest is found out once.
            torch.backends.cudnn.benchmark = True
            with contextlib.ExitStack() as settings:
                precision = recipe.precision_on(device)
                if precision != "bfloat16":
                    settings.enter_context(products_in(precision))
                if device.type == "cuda":
                    settings.enter_context(torch.cuda.device(device))
                yield
        finally:
            torch.backends.cudnn.benchmark = measures
            torch.set_num_threads(threads)
            torch._C._set_mkldnn_enabled(onednn)


def _has_bfloat16() -> bool:
    """Whether oneDNN is there and multiplies bfloat16 on this CPU."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def enough_memory(recipe: Recipe) -> Iterator[None]:
    """Turns what an allocator says into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("not enough memory", "allocate memory")  # the CPU's allocator raises no other kind
        gone = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not gone and not any(word in str(error) for word in words):
            raise
        raise RunError(
            f"there is not enough memory for batches of {recipe.batch}: lower --batch in a new "
            f"run, or make room and go on with {AGAIN}."
        ) from None
