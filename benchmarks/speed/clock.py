"""Time and memory of calls, and the machine they were measured on.

Functions are timed in turns (A B A B ...), so that a change of the clock rate affects all of them.
"""

import contextlib
import gc
import inspect
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import softstair
from softstair import _check
from softstair.train.run import source_commit

REPEATS = (1, 1000)
"""Smallest and largest number of samples."""
MAX_CALLS = 1000  # per sample on a CPU
GRAPH_CALLS = 10  # per CUDA graph, so that gaps between launches are not measured


class Record:
    """Base class of results, which are dataclasses."""

    def to_json(self) -> dict[str, Any]:
        """Return fields and properties as plain data: times in seconds, memory in bytes."""
        properties = [name for name, _ in inspect.getmembers(type(self), inspect.isdatadescriptor)]
        names = [*vars(self), *(name for name in properties if not name.startswith("_"))]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value.to_json() if isinstance(value, Record) else value


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    repeats: int  # samples of each function
    calls: int  # per sample on CUDA
    seconds: float  # shortest duration of a sample on a CPU
    elements: int  # of the tensor of measure_operator
    quick: bool = False  # whether to measure fewer stairs and dtypes

    def __post_init__(self) -> None:
        _check.integer("repeats", self.repeats, *REPEATS)

    @classmethod
    def on(cls, device: torch.device, quick: bool = False, repeats: int | None = None) -> "Effort":
        """Return the usual effort on a device; ``quick`` is for trying it out only."""
        if device.type == "cuda":
            effort = cls(3, 50, 0.0, 1 << 22, True) if quick else cls(7, 50, 0.0, 1 << 25)
        else:
            effort = cls(2, 1, 0.01, 1 << 14, True) if quick else cls(5, 1, 0.1, 1 << 20)
        return effort if repeats is None else replace(effort, repeats=repeats)


@dataclass(frozen=True)
class Times(Record):
    """Seconds per call, one number per sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def most(self) -> float:
        return max(self.samples)


def race(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    effort: Effort,
    before: Callable[[str], None] = lambda name: None,
    each: int = 1,
) -> dict[str, Times]:
    """Time functions in turns, after a first call of each that is not counted.

    ``before`` is called with a function's name before each of its samples, and is not timed. Times
    are divided by ``each``, the number of operations that a call runs.
    """
    calls = dict.fromkeys(functions, effort.calls)
    for name, function in functions.items():
        before(name)
        function()
        if device.type != "cuda":
            once = max(_seconds(function, 1, device), 1e-9)
            calls[name] = min(max(1, round(effort.seconds / once)), MAX_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(effort.repeats):
        for name, function in functions.items():
            before(name)
            seconds = _seconds(function, calls[name], device)
            samples[name].append(seconds / (calls[name] * each))
    return {name: Times(tuple(seconds)) for name, seconds in samples.items()}


def _seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of several calls, until the last has finished on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(calls):
        function()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(function: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of a call, until the device has finished."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def graph_of(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays ``GRAPH_CALLS`` calls; on a CPU, the function itself."""
    if device.type != "cuda":
        return function
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(GRAPH_CALLS):
            function()

    # A graph only knows addresses: `function` keeps the tensors alive.
    def replay(function: Callable[[], object] = function) -> None:
        graph.replay()

    return replay


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Use a new CUDA stream: backward passes run on the stream of their forward pass, and the
    default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def peak_memory(
    function: Callable[[], object], device: torch.device, known: Iterable[Tensor] = ()
) -> int:
    """Return the most bytes that a call allocates at once, not counting tensors in ``known``.

    On CUDA the allocator is asked; on a CPU every result of every operation is counted, those of
    backward passes included.
    """
    if device.type == "cuda":
        gc.collect()  # memory freed during the call would hide allocations
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _AllocationCounter(known) as counter:
        function()
    return counter.most


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, counting each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class _AllocationCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        # Sizes by address; known storages have none.
        self.sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}
        self.now, self.most = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            address = storage.data_ptr()
            if address not in self.sizes:
                self.sizes[address] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._remove, address)
        return result

    def _remove(self, address: int) -> None:
        self.now -= self.sizes.pop(address, 0)


def about(device: torch.device) -> dict[str, Any]:
    """Return the machine, the versions and the commit of softstair as plain data."""
    cuda = device.type == "cuda"
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    packages: dict[str, str | None] = {"triton": None, "brevitas": None}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cores,
        "threads": torch.get_num_threads(),
        "softstair": softstair.__version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        **packages,
    }
