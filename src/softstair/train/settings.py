"""Where and how precisely training steps run: device, threads, precision, random numbers."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from softstair import _check, kernels
from softstair._errors import SoftstairError, is_out_of_memory
from softstair.kernels import triton
from softstair.train.recipe import Recipe

HALF = ("bfloat16", "float8")
"""Precisions with autocast to bfloat16."""
SMALL_NETWORK = 1 << 25
"""Products per forward pass of linear layers below which one thread is fastest."""

_TRAINING = threading.RLock()  # torch's random numbers and settings belong to the process

SettingT = TypeVar("SettingT")


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return an available device; of several processes on a machine, each uses its own GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = ""
    if local_rank is not None and name != "cpu":
        if name not in ("auto", "cuda"):
            problem = "torchrun gives each process its own GPU"
        elif 0 < gpus <= local_rank:
            problem = f"torchrun started more than one process per GPU (torch sees {gpus})"
        name = f"cuda:{local_rank}" if gpus else name
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if name.startswith("cuda") and not gpus:
        problem = problem or "torch sees no CUDA device"
    try:
        device = torch.device(name)
        if device.type in ("cpu", "cuda") and not problem:
            torch.zeros((), device=device)
            return device
    except (RuntimeError, AssertionError, NotImplementedError):
        pass
    allowed = "must be auto, cpu, cuda or cuda:N, and be available"
    raise _check.invalid("device", f"{allowed}, but {name!r} was given{problem and ': '}{problem}")


def check_kernels(recipe: Recipe, device: torch.device) -> None:
    """Raise SoftstairError if the recipe or the environment asks for Triton where it cannot run."""
    choice = kernels.selected() if recipe.run.kernels == "auto" else recipe.run.kernels
    if choice == "triton" and (reason := triton.unavailable(device)) is not None:
        raise SoftstairError(f"kernels must be auto or reference: {reason}.", field="kernels")


def choose_threads(network: nn.Module, batch: int) -> int:
    """Return the number of threads with which a network trains fastest on a CPU."""
    # The operations of a small network end before a second thread has started.
    has_convolutions = any(isinstance(layer, nn.Conv1d | nn.Conv2d) for layer in network.modules())
    products = batch * sum(parameter.numel() for parameter in network.parameters())
    is_small = not has_convolutions and products < SMALL_NETWORK
    return 1 if is_small else torch.get_num_threads()


@contextlib.contextmanager
def training_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Use our own random numbers, threads and precision; restore the caller's afterwards."""
    cudnn = torch.backends.cudnn
    if not _TRAINING.acquire(blocking=False):
        raise SoftstairError(
            "another thread of this process is training, and both would draw from the same random "
            "numbers: train in one after the other, or in several processes."
        )
    with contextlib.ExitStack() as settings:
        settings.callback(_TRAINING.release)
        settings.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        settings.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        settings.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        if recipe.run.precision == "bfloat16" and device.type == "cpu" and not _has_bfloat16():
            # At the first product oneDNN would disable itself with a warning, and what was
            # computed before would differ in the last bits.
            torch._C._set_mkldnn_enabled(False)
        # All batches have one shape, so cuDNN searches for its fastest kernels once.
        cudnn.benchmark = True
        if recipe.run.kernels != "auto":
            settings.enter_context(kernels.use(recipe.run.kernels))
        precision = recipe.run.precision_on(device)
        if precision not in HALF:
            settings.enter_context(matmul_precision(precision))
        if device.type == "cuda":
            settings.enter_context(torch.cuda.device(device))
        yield


def _has_bfloat16() -> bool:
    """Whether oneDNN is available and multiplies bfloat16 on this CPU."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def memory_errors(message: str) -> Iterator[None]:
    """Raise SoftstairError with a message if an allocator runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SoftstairError(message, field="batch") from None


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Compute float32 convolutions and matrix products in float32 or tf32; restore it afterwards.

    By default torch rounds the factors of convolutions to TF32 on a GPU, and those of other
    products not. Since 2.9 this can be set for all of torch or per operation; once the second was
    used, the first can no longer be read. So both are set, and what could be read is restored.
    """
    tf32 = precision == "tf32"
    convolutions = _read(lambda: torch.backends.cudnn.allow_tf32)
    products = _read(torch.get_float32_matmul_precision)
    operations = [(setting, _own(setting, parent)) for setting, parent in _operations()]
    _set_precision(tf32, "high" if tf32 else "highest")
    for setting, _ in operations:
        setting.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        _set_precision(convolutions, products)
        for setting, before in operations:
            setting.fp32_precision = before


def _set_precision(convolutions: bool | None, products: str | None) -> None:
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    if products is not None:
        torch.set_float32_matmul_precision(products)


def _read(setting: Callable[[], SettingT]) -> SettingT | None:
    try:
        return setting()
    except RuntimeError:  # it was set per operation
        return None


def _operations() -> list[tuple[Any, Any]]:
    """Return the settings per operation, each with the one that it follows until it is set."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return []
    cudnn, onednn = backends.cudnn, backends.mkldnn
    on_gpu = [(setting, cudnn) for setting in (backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
    return [*on_gpu, *((setting, onednn) for setting in (onednn.matmul, onednn.conv, onednn.rnn))]


def _own(setting: Any, parent: Any) -> str:
    """Return a setting's own value: none if it follows its parent."""
    value: str = setting.fp32_precision
    return "none" if value == parent.fp32_precision else value
