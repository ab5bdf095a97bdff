"""Pickles as plain data: what Python's own pickle reads, and nothing that would run."""

import copyreg
import pickle
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest

from softstair.data import DataError
from softstair.data.formats import unpickle

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 12), dtype=np.uint8)


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2(pixels: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """A batch as Python 2's cPickle and numpy 1 wrote the official ones, opcode by opcode."""
    rows, columns = pixels.shape
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03",
            short(b"labels") + b"q\x04]q\x05(",
            *(b"K" + bytes([label]) for label in labels),
            b"e" + short(b"data") + b"q\x06",
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85" + short(b"b") + b"\x87Rq\x09",
            b"(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86",
            b"cnumpy\ndtype\nq\x0a" + short(b"u1") + b"K\x00K\x01\x87Rq\x0b",
            b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<L", pixels.size) + pixels.tobytes() + b"tb",
            short(b"filenames") + b"q\x0c]q\x0d(",
            *(short(b"tabby_s_%06d.png" % row) + b"q\x0e" for row in range(rows)),
            b"eu.",
        ]
    )


def load(data: bytes) -> dict[str, Any]:
    return unpickle.load(data, Path("batch"), "fetch it again")


def test_python_2_wrote_it() -> None:
    data = python2(PIXELS, [6, 9])
    found, truth = load(data), pickle.loads(data, encoding="bytes")
    assert found.keys() == {key.decode() for key in truth}
    np.testing.assert_array_equal(found.pop("data"), truth.pop(b"data"))
    assert found == {key.decode(): value for key, value in truth.items()}
    assert found["filenames"] == [b"tabby_s_000000.png", b"tabby_s_000001.png"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_python_3_wrote_it(protocol: int) -> None:
    plain = {
        "label_names": ["cat", "déjà"],
        "more": {"none": None, "yes": True, "no": False, "pair": (1, 2.5), "empty": [(), {}, []]},
        "bytes": [b"", b"\x00\xff", b"long" * 100],
        "numbers": [0, 255, 256, 65536, -1, 2**31, -(2**40), 10**30],
        "scalars": [np.uint8(200), np.int64(-3), np.int16(7)],
        "long": "x" * 300,
        "four": (1, 2, 3, 4),
    }
    shared = ["one", "list"]
    found = load(pickle.dumps(plain | {"twice": [shared, shared]}, protocol))
    assert found.pop("twice") == [shared, shared]
    assert found == plain
    assert all(type(number) is int for number in found["scalars"])
    arrays = {
        "C": PIXELS,
        "F": np.asfortranarray(PIXELS),
        "strided": PIXELS[:, ::2],
        "big": np.arange(5, dtype=">i4"),
        "cube": np.arange(24).reshape(2, 3, 4),
    }
    for name, array in load(
        pickle.dumps({k.encode(): v for k, v in arrays.items()}, protocol)
    ).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


def test_both_homes_of_numpy() -> None:
    data = python2(PIXELS, [6, 9])
    moved = data.replace(b"numpy.core.multiarray", b"numpy._core.multiarray")
    np.testing.assert_array_equal(load(moved)["data"], PIXELS)


class Reduced:
    """Pickled as a call of that function with those arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def canary(*_: object) -> None:
    raise SystemExit("the canary was called")


class Stateful:
    def __setstate__(self, state: object) -> None:
        canary()


def hostile() -> dict[str, bytes]:
    import os

    calls = {
        "system": Reduced(os.system, "exit 1"),
        "eval": Reduced(eval, "canary()"),
        "exec": Reduced(exec, "canary()"),
        "import": Reduced(__import__, "antigravity"),
        "canary": Reduced(canary),
        "getattr": Reduced(getattr, Reduced(__import__, "os"), "system"),
        "chain": Reduced(Reduced(getattr, Reduced(__import__, "os"), "system"), "exit 1"),
        "numpy.load": Reduced(np.load, "batch", None, True),
        "numpy.fromfile": Reduced(np.fromfile, "batch"),
        "numpy.zeros": Reduced(np.zeros, 2**40),
        "ndarray": Reduced(np.ndarray, (2**40,)),
        "frombuffer": Reduced(np.frombuffer, b"12345678", "O"),
        "pickle.loads": Reduced(pickle.loads, b"."),
        "bytearray": Reduced(bytearray, 2**40),
        "codec": Reduced(__import__("_codecs").encode, "x", "rot13"),
        "objects": np.array([{}, {}]),
        "text": np.array(["a"]),
        "float": np.array([1.0]),
        "records": np.zeros(2, "u1,u1"),
        "state": Stateful(),
        "class": Reduced,
        "slots": struct.Struct("<L"),
        "set": {1, 2},
        "key": {(1, 2): 3},
        "number": {1: 2},
    }
    pickles = {}
    for name, value in calls.items():
        for protocol in range(6):
            try:
                pickles[f"{name} {protocol}"] = pickle.dumps({"data": value}, protocol)
            except (TypeError, pickle.PicklingError):
                continue
    return pickles


def test_hostile_calls() -> None:
    pickles = hostile()
    assert len(pickles) > 120
    with pytest.raises(SystemExit, match="canary"):  # they are what they should be
        pickle.loads(pickles["canary 2"])
    for name, data in pickles.items():
        with pytest.raises(
            DataError, match=r"'batch' is not a plain pickle .*: fetch it again"
        ) as caught:
            load(data)
        assert str(caught.value).isprintable(), name
    assert "antigravity" not in sys.modules


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
BY_HAND = {
    "nothing": b"",
    "no stop": b"\x80\x02}",
    "no dictionary": b"\x80\x02].",
    "global": b"\x80\x02}U\x01acposix\nsystem\ns.",
    "called": b"\x80\x02cposix\nsystem\nU\x04true\x85R.",
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "odd global": b"\x80\x04K\x01K\x02\x93.",
    "dotted": b"\x80\x04\x8c\x05numpy\x8c\x0cdtype.mro__x\x93.",
    "inst": b"(S'true'\niposix\nsystem\n.",
    "obj": b"\x80\x02(cposix\nsystem\nU\x04trueo.",
    "newobj": b"\x80\x02cnumpy\nndarray\nK\x01\x85\x85\x81.",
    "newobj_ex": b"\x80\x04cnumpy\nndarray\n)}\x92.",
    "persistent": b"\x80\x02U\x01aQ.",
    "persistent text": b"Pname\n.",
    "extension 1": b"\x80\x02\x82\xf0.",
    "extension 2": b"\x80\x02\x83\xf0\xf0.",
    "extension 4": b"\x80\x02\x84\xf0\xf0\xf0\x00.",
    "out of band": b"\x80\x05\x97.",
    "escape": b"S'\\d'\n.",
    "long text": b"L" + b"9" * 5000 + b"L\n.",
    "long 4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "long 4 negative": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "bytes 4": b"\x80\x03B\xff\xff\xff\xff.",
    "bytes 8": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "bytes 8 most": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "unicode 8": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    "bytearray 8": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
    "string negative": b"\x80\x02T\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "memo absent": b"\x80\x02h\x07.",
    "memo huge": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo of nothing": b"\x80\x02q\x00.",
    "no mark": b"\x80\x02t.",
    "append to dictionary": b"\x80\x02}K\x01a.",
    "item of list": b"\x80\x02]U\x01aK\x01s.",
    "odd items": b"\x80\x02}(U\x01au.",
    "underflow": b"\x80\x02K\x01\x86.",
    "reduce of text": b"\x80\x02U\x04true)R.",
    "reduce of list": b"\x80\x02" + DTYPE[:13] + b"]R.",
    "build of global": b"\x80\x02cnumpy\ndtype\nN}U\x0c__defaults__)s\x86b.",
    "build of list": b"\x80\x02])b.",
    "unicode": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "rest": b"\x80\x02}.}.",
    "two": b"\x80\x02}}.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_hostile_opcodes(name: str) -> None:
    with pytest.raises(DataError, match="'batch' is not a plain pickle"):
        load(BY_HAND[name])


SHAPES = {
    "huge": b"J\xff\xff\xff\x7f\x85",
    "many axes": b"(" + b"K\x01" * 99 + b"t",
    "negative": b"J\xff\xff\xff\xff\x85",
    "negative twice": b"J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86",
    "nothing": b"K\x00\x85",
    "another": b"K\x02\x85",
    "of lists": b"]\x85",
    "true": b"\x88\x85",
    "no tuple": b"K\x01",
}


@pytest.mark.parametrize("name", SHAPES)
def test_hostile_shapes(name: str) -> None:
    def one(shape: bytes) -> bytes:
        array = ARRAY + b"(K\x01" + shape + DTYPE + b"\x89U\x017tb"
        return b"\x80\x02}U\x04data" + array + b"s."

    assert load(one(b"K\x01\x85"))["data"].tolist() == [ord("7")]
    with pytest.raises(DataError, match=r"another size than its shape|where a (int|tuple) belongs"):
        load(one(SHAPES[name]))


def test_the_extension_registry_is_not_asked() -> None:
    copyreg.add_extension(__name__, "canary", 0xF0)
    try:
        with pytest.raises(DataError, match="opcode EXT1"):
            load(pickle.dumps({"a": Reduced(canary)}, 2))
    finally:
        copyreg.remove_extension(__name__, "canary", 0xF0)


def test_states_leave_no_trace() -> None:
    """BUILD on a global would set attributes of what it names; here there is nothing to set."""
    for name in ("numpy\ndtype", "numpy\nndarray", "_codecs\nencode"):
        with pytest.raises(DataError, match="a state for something else"):
            load(b"\x80\x02c" + name.encode() + b"\nN}U\x05traceK\x01s\x86b.")
    np.testing.assert_array_equal(load(python2(PIXELS, [1, 2]))["data"], PIXELS)


BOMBS = {
    "nested tuples as a key": b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.",
    "nested tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "nested lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "lists": b"\x80\x02" + b"]" * 2**20 + b".",
    "memo": b"\x80\x02}" + b"r\xff\xff\xff\x7f" * 10**6 + b".",
    "one text encoded again and again": b"\x80\x02X\x00\x00\x10\x00"
    + b"a" * 2**20
    + b"q\x00X\x06\x00\x00\x00latin1q\x01c_codecs\nencode\nq\x02]"
    + b"h\x02h\x00h\x01\x86Ra" * 1000
    + b".",
    "one key decoded again and again": b"\x80\x02T\x00\x00\x10\x00"
    + b"a" * 2**20
    + b"q\x00]"
    + b"}h\x00K\x01sa" * 1000
    + b".",
    "doubling": b"\x80\x02](" + b"2" * 100 + b"e.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    data = BOMBS[name]
    start = time.process_time()
    with pytest.raises(DataError, match="'batch' is not a plain pickle"):
        load(data)
    assert time.process_time() - start < 1
    if "again" in name:
        tracemalloc.start()
        with pytest.raises(DataError, match=r"more bytes than it has|key of more than 256"):
            load(data)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_mutated_pickles(protocol: int) -> None:
    data = pickle.dumps({b"data": PIXELS, "labels": [1, np.int64(2)], "name": "x"}, protocol)
    read, refused = mutations.outcomes(load, data, 10_000)
    assert read > 200
    assert refused > 2_000


def test_mutated_pickles_of_python_2() -> None:
    read, refused = mutations.outcomes(load, python2(PIXELS, [6, 9]), 10_000)
    assert read > 200
    assert refused > 2_000
