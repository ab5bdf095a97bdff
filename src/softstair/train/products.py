"""In which numbers torch takes products of float32.

By itself it rounds the factors of convolutions to TF32, on a GPU that has it, and those of other
products not. There are two ways to say otherwise, by torch as a whole and by operation, since 2.9;
whoever has used the second finds that the first cannot be read any more. So both are said here,
and what could be read is given back.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["products_in"]

T = TypeVar("T")


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Convolutions and other products in float32 or tf32, and afterwards as they were.

    >>> with products_in("float32"):
    ...     torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    (False, 'highest')
    """
    short = precision == "tf32"
    convolutions = _read(lambda: torch.backends.cudnn.allow_tf32)
    others = _read(torch.get_float32_matmul_precision)
    operations = [(one, _own(one, above)) for one, above in _operations()]
    _say(short, "high" if short else "highest")
    for one, _ in operations:
        one.fp32_precision = "tf32" if short else "ieee"
    try:
        yield
    finally:
        _say(convolutions, others)
        for one, before in operations:
            one.fp32_precision = before


def _say(convolutions: bool | None, others: str | None) -> None:
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    if others is not None:
        torch.set_float32_matmul_precision(others)


def _read(setting: Callable[[], T]) -> T | None:
    try:
        return setting()
    except RuntimeError:  # torch was told by operation
        return None


def _operations() -> list[tuple[Any, Any]]:
    """The operations that can be told, each with what it follows until it is."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return []
    cudnn, onednn = backends.cudnn, backends.mkldnn
    on_gpu = [(one, cudnn) for one in (backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
    return [*on_gpu, *((one, onednn) for one in (onednn.matmul, onednn.conv, onednn.rnn))]


def _own(operation: Any, above: Any) -> str:
    """What an operation was told; if that is what it would follow anyway, that it follows."""
    told: str = operation.fp32_precision
    return "none" if told == above.fp32_precision else told
