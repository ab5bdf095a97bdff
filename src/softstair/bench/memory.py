"""How much memory a call holds at its peak."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from softstair.bench.clock import synchronise

__all__ = ["peak", "size"]


def peak(run: Callable[[], object], device: torch.device, known: Iterable[Tensor] = ()) -> int:
    """The most bytes that a call holds at once beyond what was there before; ``known`` was.

    On CUDA its allocator knows; elsewhere every result of every operation is watched, also those
    that a backward pass makes.

    >>> x = torch.zeros(1000)
    >>> peak(lambda: x + 1 + 1, torch.device("cpu"), known=[x])
    8000
    """
    if device.type == "cuda":
        gc.collect()  # what is freed on the way would be counted as room
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Watch(known) as watch:
        run()
    return watch.most


def size(tensors: Iterable[Tensor]) -> int:
    """The bytes of some tensors, each storage counted once.

    >>> x = torch.zeros(10)
    >>> size([x, x[2:], torch.zeros(3)])
    52
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class _Watch(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until nobody holds them any more."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.held: dict[int, int] = {}
        self.now, self.most = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if place in self.known or place in self.held:
            return
        self.held[place] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        self.now -= self.held.pop(place, 0)
