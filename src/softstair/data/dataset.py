"""The type of a data set, its folds, and how its files are read.

Every example is in the validation part of exactly one fold. Files may be damaged: sizes are
limited, and whatever a parser raises becomes a DataError.
"""

import hashlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from softstair import _check
from softstair._errors import SoftstairError, first_line

Array = np.ndarray[Any, Any]
Expected = tuple[type[Any], tuple[int | str, ...]]
"""Dtype and shape of an array; "N" stands for a size that is the same in all arrays of a file."""

LIMIT = 512 * 2**20
"""Bytes of a file, and of the arrays in it."""


class DataError(SoftstairError):
    """A file or download that is missing, damaged or not what was expected.

    The message is "<path> <problem>: <remedy>.", where path may be an address.
    """

    def __init__(self, path: Path | str, problem: str, remedy: str) -> None:
        message = f"{str(path)!r} {problem}: {remedy}."
        # Problems may quote the content of a file or the answer of a server.
        super().__init__("".join(char if char.isprintable() else "?" for char in message))


@dataclass(frozen=True)
class Dataset:
    """A training partition, from which folds are made, and a test set where there is one.

    Examples, labels and groups may be given as NumPy arrays.

    Args:
        name: Name of the data set.
        x: Examples, (N, C, H, W) of uint8.
        y: Labels, (N,) of int64, indices into ``classes``.
        classes: Names of the classes.
        mean: Zero point of the input, in units of x: a network gets (x − mean)/std. One number for
            all channels.
        std: Scale of the input, in units of x.
        groups: (N,) of int64, or None. Examples of one group, such as one speaker, are all in the
            training part or all in the validation part of a fold.
        test_x: Examples of the test set, or None.
        test_y: Labels of the test set, or None.
        centred: (zero point, scale) of a centred input, if ``mean`` and ``std`` do not centre x.
        version: Release of the data in a few words, for records; None if unknown.

    >>> x, y = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
    >>> len(Dataset("blank", x, y, ("no", "yes"), mean=0.0, std=1.0))
    2
    """

    name: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    mean: float
    std: float
    groups: Tensor | None = None
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    centred: tuple[float, float] | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "groups", "test_x", "test_y"):
            object.__setattr__(self, name, _as_tensor(name, getattr(self, name)))
        self._check_examples("x", self.x, "y", self.y)
        if self.test_x is not None and self.test_y is not None:
            self._check_examples("test_x", self.test_x, "test_y", self.test_y)
            if self.test_x.shape[1:] != self.x.shape[1:]:
                raise _invalid("test_x", f"(N, {str(tuple(self.x.shape[1:]))[1:]}", self.test_x)
        elif self.test_x is not None or self.test_y is not None:
            raise SoftstairError("test_x and test_y must be given together.", field="test_y")
        if self.groups is not None and getattr(self.groups, "shape", None) != self.y.shape:
            raise _invalid("groups", f"of shape {tuple(self.y.shape)}, like y", self.groups)
        for name in ("mean", "std"):
            if np.ndim(getattr(self, name)):
                raise _check.wrong(name, getattr(self, name), "one number for all channels")
        _check.number("mean", self.mean)
        _check.number("std", self.std, above=0)
        if 0 < self.mean < 1 and self.std < 1 and len(self.x) and self.x.float().mean() > 4:
            raise _check.invalid(
                "mean",
                f"and std must be in units of x, from 0 to 255, but {self.mean:g} and {self.std:g} "
                "were given: multiply those of a range from 0 to 1 by 255",
            )
        if self.centred is not None:
            _check.number("centred[0]", self.centred[0])
            _check.number("centred[1]", self.centred[1], above=0)

    def _check_examples(self, x_name: str, x: Tensor, y_name: str, y: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() != 4:
            raise _invalid(x_name, "(N, C, H, W) of uint8", x)
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise _invalid(y_name, f"({len(x)},) of int64", y)
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
            allowed = f"from 0 to {len(self.classes) - 1}, as there are {len(self.classes)} classes"
            given = f"{int(y.min())} to {int(y.max())} was given"
            raise _check.invalid(y_name, f"must be {allowed}, but {given}")

    def __len__(self) -> int:
        return len(self.y)

    def numbers(self, integer: bool = False, centre: bool = False) -> tuple[float, float]:
        """Return the zero point and the scale of the input: a network gets (x − zero)/scale.

        With ``integer``, they are rounded to an integer and a power of two. With ``centre``,
        ``centred`` is used instead of ``mean`` and ``std`` if the data set has it.

        >>> x, y = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
        >>> Dataset("blank", x, y, ("no", "yes"), mean=120.7, std=63.8).numbers(integer=True)
        (121.0, 64.0)
        """
        zero, scale = self.mean, self.std
        if centre and self.centred is not None:
            zero, scale = self.centred
        if not integer:
            return zero, scale
        return float(min(max(round(zero), 0), 255)), 2.0 ** round(math.log2(scale))

    def sample(self, count: int | None, seed: int = 0) -> "Dataset":
        """Return at most ``count`` random examples, and as many of the test set; None: all.

        >>> x, y = torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64)
        >>> len(Dataset("blank", x, y, ("no", "yes"), mean=0.0, std=1.0).sample(5))
        5
        """
        if count is None:
            return self
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self), generator=generator)[:count].sort().values
        groups = None if self.groups is None else self.groups[chosen]
        sampled = replace(self, x=self.x[chosen], y=self.y[chosen], groups=groups)
        if self.test_x is None or self.test_y is None:
            return sampled
        chosen = torch.randperm(len(self.test_y), generator=generator)[:count].sort().values
        return replace(sampled, test_x=self.test_x[chosen], test_y=self.test_y[chosen])


def _as_tensor(name: str, value: Any) -> Any:
    """Return an array of bytes, or of labels of any integer type, as a tensor."""
    if isinstance(value, np.ndarray):
        dtype = np.dtype(np.uint8 if name.endswith("x") else np.int64)
        if value.dtype == dtype or (dtype.kind == "i" and value.dtype.kind in "iu"):
            return torch.from_numpy(np.require(value, dtype, ["C", "W"]))
    return value


def _invalid(name: str, allowed: str, given: Any) -> SoftstairError:
    is_array = isinstance(given, Tensor | np.ndarray)
    text = f"{tuple(given.shape)} of {given.dtype}" if is_array else f"a {type(given).__name__}"
    return _check.invalid(name, f"must be {allowed}, but {text} was given")


@contextmanager
def guard(path: Path, action: str, remedy: str) -> Iterator[None]:
    """Turn any exception into a DataError which says that ``path`` cannot be read, listed, ..."""
    try:
        yield
    except SoftstairError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"cannot be {action} ({reason or first_line(error)})"
        raise DataError(path, problem, remedy) from error


def check_file(path: Path, remedy: str, limit: int = LIMIT) -> None:
    """Raise DataError unless ``path`` is a regular file of at most ``limit`` bytes."""
    with guard(path, "read", remedy):
        if not path.is_file():  # opening a named pipe would block
            raise DataError(path, "is not a file" if path.exists() else "is missing", remedy)
        if path.stat().st_size > limit:
            raise DataError(path, f"is larger than {limit:,} bytes", remedy)


def check_digest(path: Path, expected: str, remedy: str) -> None:
    """Raise DataError unless the file at ``path`` has the published digest."""
    check_file(path, remedy)
    with guard(path, "read", remedy), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        problem = f"is not the published file (its SHA-256 is {digest}, not {expected})"
        raise DataError(path, problem, remedy)


def read_bytes(path: Path, remedy: str, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes."""
    check_file(path, remedy, limit)
    with guard(path, "read", remedy):
        return path.read_bytes()


def read_arrays(path: Path, expected: Mapping[str, Expected], remedy: str) -> dict[str, Array]:
    """Return the arrays of an .npz file that ``expected`` names; none may be empty."""
    check_file(path, remedy)
    sizes: dict[str, int] = {}
    with guard(path, "read as an .npz file", remedy):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > LIMIT:
                raise ValueError(f"its arrays have more than {LIMIT:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _checked(name, arrays[name], expected[name], sizes) for name in expected}


def _checked(name: str, array: Array, expected: Expected, sizes: dict[str, int]) -> Array:
    dtype, shape = expected
    if not np.issubdtype(array.dtype, dtype):
        raise ValueError(f"array {name!r} has dtype {array.dtype} instead of {dtype.__name__}")
    pairs = zip(shape, array.shape, strict=array.ndim == len(shape))
    allowed = [sizes.setdefault(n, size) if isinstance(n, str) else n for n, size in pairs]
    if array.ndim != len(shape) or list(array.shape) != allowed or not array.size:
        raise ValueError(f"array {name!r} has shape {array.shape} instead of {shape}, {sizes}")
    if array.dtype.kind == "U":
        array.tolist()  # raises ValueError if there are invalid code points
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def split(
    dataset: Dataset, fold: int | Literal["all"], folds: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the indices (training, validation) of one fold.

    The seed determines a permutation of the examples. The validation part is every ``folds``-th
    example of it from number ``fold`` (0, 1, ...) on; the training part is the rest. With
    ``fold="all"`` the training part is all of them, and the validation part is empty.

    If the data set has groups, no group is in both parts: groups are assigned in order of
    decreasing size (random among equal sizes), each to the fold with the fewest examples so far.
    """
    if fold == "all":
        every = torch.arange(len(dataset))
        return every, every[:0]
    groups = dataset.groups
    count = len(dataset) if groups is None else len(groups.unique())
    _check.integer("folds", folds, 2)
    if folds > count:
        unit = "examples" if groups is None else "groups"
        allowed = f"at most the number of {unit}, {count} in {dataset.name!r}"
        raise _check.wrong("folds", folds, allowed)
    _check.integer("fold", fold, 0, folds - 1)
    _check.integer("seed", seed, 0, 2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(dataset), generator=generator)
    if groups is None:
        fold_of = torch.arange(len(dataset)) % folds
    else:
        fold_of = _assign_groups(groups.cpu(), folds, generator)[permutation]
    return permutation[fold_of != fold], permutation[fold_of == fold]


def held_out(
    dataset: Dataset, fold: int | Literal["all"], folds: int, limit: int | None = None
) -> tuple[str, Tensor, Tensor]:
    """Return the name, examples and labels of the test set, or of the fold if there is none.

    With ``limit``, the data set is first cut to so many examples, as training does. Raises
    SoftstairError if there is no test set and ``fold`` is "all".
    """
    dataset = dataset.sample(limit)
    if dataset.test_x is not None and dataset.test_y is not None:
        return f"test set of {dataset.name}", dataset.test_x, dataset.test_y
    if fold == "all":
        raise _check.wrong("fold", fold, f"a number for {dataset.name!r}, which has no test set")
    chosen = split(dataset, fold, folds)[1]
    return f"fold {fold} of {dataset.name}", dataset.x[chosen], dataset.y[chosen]


def _assign_groups(groups: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Return the fold of each example."""
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(sizes), generator=generator)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    fold_of_group = torch.empty_like(sizes)
    fold_sizes = [0] * folds
    for group in order.tolist():
        smallest = fold_sizes.index(min(fold_sizes))
        fold_of_group[group] = smallest
        fold_sizes[smallest] += int(sizes[group])
    return fold_of_group[group_of]
