"""Pickles as plain data: what CIFAR-10's batches hold can be read, and nothing can be run.

The pickle module cannot be made safe by choosing what ``find_class`` returns. Five bytes that
name a place in its memo make it allocate gigabytes, a tuple nested a million deep overflows the
stack when it becomes a key, and BUILD sets attributes of whatever it is given. So here the opcodes
that such files need are carried out on plain values: a global is a name, and calling it is a
look-up in a table of six. Arrays are of integers and as large as their bytes, keys are strings, and
everything else is refused.
"""

import pickletools
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from softstair.data.dataset import DataError

__all__ = ["load"]

# An official batch takes 30,000; this many take a fraction of a second.
MOST_OPCODES = 2**17

VALUES = frozenset(  # opcodes whose argument is the value
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
OTHERS = frozenset(
    "PROTO FRAME STOP MARK SHORT_BINSTRING BINSTRING EMPTY_LIST EMPTY_DICT TUPLE APPEND APPENDS "
    "SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE "
    "BUILD".split()
)
NAMES = VALUES | CONSTANTS.keys() | TUPLES.keys() | OTHERS
OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
GLOBALS = {
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "_codecs.encode",  # bytes of Python 3 in protocol 2
    "__builtin__.bytes",  # and where there are none
}


@dataclass(slots=True, frozen=True, eq=False)
class _Global:
    name: str


@dataclass(slots=True, eq=False)
class _Dtype:
    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


@dataclass(slots=True, eq=False)
class _Array:
    value: np.ndarray[Any, Any] | None = None


def load(data: bytes, path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary in a pickle of protocol 2 to 5, written by Python 2 or 3.

    Its keys are strings whichever Python wrote it (b"data" becomes "data"); among its values,
    strings of Python 2 are bytes.

    >>> import pickle
    >>> load(pickle.dumps({b"labels": [6, 9]}, protocol=2), Path("batch"), "fetch it again")
    {'labels': [6, 9]}
    >>> load(pickle.dumps({b"labels": eval}), Path("batch"), "fetch it again")
    Traceback (most recent call last):
    softstair.data.dataset.DataError: 'batch' is not a plain pickle (it names 'builtins.eval'): ...
    """
    try:
        value = _run(data)
        if type(value) is not dict:
            raise ValueError("it holds no dictionary")
        return {
            key: entry.value if isinstance(entry, _Array) else entry for key, entry in value.items()
        }
    except (AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        reason = str(error)[:200] if type(error) is ValueError else "its opcodes make no sense"
        raise DataError(path, f"is not a plain pickle ({reason})", remedy) from error


def _run(data: bytes) -> object:
    stream = BytesIO(data)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    encoded = 0

    def marked() -> list[Any]:
        mark = marks.pop()
        if not 0 <= mark <= len(stack):
            raise ValueError("it takes more values than it has")
        values = stack[mark:]
        del stack[mark:]
        return values

    for _ in range(MOST_OPCODES):
        opcode = OPCODES.get(stream.read(1))
        if opcode is None:
            raise ValueError("it ends too early or has an unknown opcode")
        if opcode.name not in NAMES:
            raise ValueError(f"it has the opcode {opcode.name}, which plain data do not need")
        argument: Any = None
        if opcode.arg and opcode.name != "GLOBAL":  # whose lines pickletools would unescape
            argument = opcode.arg.reader(stream)
        match opcode.name:
            case name if name in VALUES:
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument.encode("latin-1"))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name if name in TUPLES:
                marks.append(len(stack) - TUPLES[name])
                stack.append(tuple(marked()))
            case "TUPLE":
                stack.append(tuple(marked()))
            case "MARK":
                marks.append(len(stack))
            case "APPEND" | "APPENDS":
                values = [stack.pop()] if opcode.name == "APPEND" else marked()
                _of(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                if opcode.name == "SETITEM":
                    marks.append(len(stack) - 2)
                values = marked()
                keys = [_text(key) for key in values[::2]]
                _of(dict, stack[-1]).update(zip(keys, values[1::2], strict=True))
            case "GLOBAL":
                module, name = (stream.readline(256).decode("latin-1") for _ in range(2))
                stack.append(_global(module.removesuffix("\n"), name.removesuffix("\n")))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_global(_of(str, module), _of(str, name)))
            case "REDUCE":
                arguments, function = _of(tuple, stack.pop()), _of(_Global, stack.pop())
                stack.append(_call(function.name, arguments))
                if isinstance(stack[-1], bytes):
                    # Each stretch of the file is encoded once, unless it is a bomb.
                    encoded += len(stack[-1])
                    if encoded > len(data):
                        raise ValueError("it holds more bytes than it has")
            case "BUILD":
                state = _of(tuple, stack.pop())
                _build(stack[-1], state)
            case "STOP":
                if len(stack) != 1 or stream.read(1):
                    raise ValueError("it does not end where it should")
                return stack[0]
            case _:  # PROTO, FRAME: they say nothing of the values
                pass
    raise ValueError(f"it has more than {MOST_OPCODES:,} opcodes")


def _of(kind: type[Any], value: object) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _text(value: object) -> str:
    """A key or a code: short, since one long string could be decoded again and again."""
    if isinstance(value, bytes | str) and len(value) > 256:
        raise ValueError("it has a key of more than 256 characters")
    return value.decode("latin-1") if isinstance(value, bytes) else str(_of(str, value))


def _global(module: str, name: str) -> _Global:
    whole = f"{module.replace('numpy._core.', 'numpy.core.')}.{name}"
    if whole not in GLOBALS:
        raise ValueError(f"it names {whole[:80]!a}")
    return _Global(whole)


def _call(name: str, arguments: tuple[Any, ...]) -> object:
    match name, arguments:
        case "_codecs.encode", (str() as text, "latin1"):
            return text.encode("latin-1")
        case "__builtin__.bytes", ():
            return b""
        case "numpy.dtype", (code, *_) if re.fullmatch("[iu][1248]", _text(code)):
            return _Dtype(_text(code))
        case "numpy.core.multiarray._reconstruct", (_Global("numpy.ndarray"), _, _):
            return _Array()
        case "numpy.core.multiarray.scalar", (_Dtype() as dtype, bytes() as data):
            return int(_array(data, dtype, (1,), "C")[0])
        case "numpy.core.numeric._frombuffer", (data, _Dtype() as dtype, shape, "C" | "F" as order):
            return _Array(_array(data, dtype, shape, order))
    raise ValueError(f"it calls {name} in a way that makes no array of integers")


def _build(target: object, state: tuple[Any, ...]) -> None:
    match target, state:
        case _Dtype(), (_, order, None, None, None, -1, -1, 0) if _text(order) in tuple("<>|="):
            target.order = _text(order)
        case _Array(), (1, shape, _Dtype() as dtype, bool() as fortran, data):
            target.value = _array(data, dtype, shape, "F" if fortran else "C")
        case _:
            raise ValueError("it has a state for something else than an array of integers")


def _array(data: object, dtype: _Dtype, shape: object, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes | bytearray):
        raise ValueError("it has an array without bytes")
    size = dtype.dtype().itemsize
    axes = _of(tuple, shape)
    for axis in axes[:8]:
        size *= max(0, _of(int, axis))
    if not 0 < size == len(data) or len(axes) > 8:
        raise ValueError("it has an array of another size than its shape takes")
    return np.frombuffer(data, dtype.dtype()).reshape(axes, order=order)
