"""Archives unpacked whole or not at all, and not a byte outside the folder, whatever they hold."""

import gzip
import io
import os
import random
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from softstair.data.dataset import DataError
from softstair.data.fetch import archive
from softstair.data.fetch.archive import extract

MEMBERS, SIZE = 20, 20_000
Change = Callable[[tarfile.TarInfo], None]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT, **more) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, **more) as whole:
        for info, data in members:
            whole.addfile(info, io.BytesIO(data))
    return file.getvalue()


def raw(name: str, kind: bytes, size: int, data: bytes = b"") -> bytes:
    """A header that says what tarfile would not write, its checksum right, and some data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, max(size, 0)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:
        header[124:136] = size.to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + b"\0" * (-len(data) % 512)


HONEST = (
    member("./", kind=tarfile.DIRTYPE),
    member("./words/", kind=tarfile.DIRTYPE, mode=0o700),
    member("./words/yes_0.wav", b"yes" * 300),
    member("words/no-1.wav", b"no" * 512),
    member("LICENSE", b"text"),
    member("deep/er/empty.txt"),
)


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with what is in it."""
    found = sorted(folder.rglob("*"))
    return {str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None
            for one in found}  # fmt: skip


class Room:
    """A folder to unpack in, and everything around it, which must stay as it is."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "canary" / "inner" / "out"
        self.folder.parent.mkdir(parents=True)
        (root / "canary" / "bird.txt").write_text("alive")
        self.file, self.root = root / "one.tar.gz", root
        self.before = listing(root / "canary")

    def unpack(self, data: bytes, members: int = MEMBERS, size: int = SIZE) -> None:
        self.file.write_bytes(data)
        extract(self.file, self.folder, members, size)

    def outside(self) -> dict[str, bytes | None]:
        found = listing(self.root / "canary")
        return {path: data for path, data in found.items() if not path.startswith("inner/out")}

    def refuse(self, data: bytes, **limits: int) -> str:
        with pytest.raises(DataError) as caught:
            self.unpack(data, **limits)
        assert listing(self.root / "canary") == self.before
        sentence = str(caught.value)
        assert sentence.startswith(repr(str(self.file)))
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert len(sentence) < 500
        return sentence


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_honest_archive_is_unpacked_as_tarfile_would(room: Room, form: int) -> None:
    whole = tar(*HONEST, form=form)
    room.unpack(gzip.compress(whole))
    twin = room.root / "twin"
    with tarfile.open(fileobj=io.BytesIO(whole)) as file:
        file.extractall(twin, filter="data") if hasattr(tarfile, "data_filter") else (
            file.extractall(twin)
        )
    assert listing(room.folder) == listing(twin)
    assert listing(room.folder)["words/no-1.wav"] == b"no" * 512
    assert room.outside() == room.before


def test_without_the_filter_of_newer_pythons_the_same_is_refused(room: Room, monkeypatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    room.refuse(gzip.compress(tar(member("../bird.txt", b"dead"))))
    room.refuse(gzip.compress(tar(member("/bird.txt", b"dead"))))
    room.unpack(gzip.compress(tar(*HONEST)))


def test_modes_owners_and_times_are_our_own(room: Room) -> None:
    old = os.umask(0o022)
    try:
        room.unpack(gzip.compress(tar(member("a", b"x", mode=0o7777, uid=0, gid=0, mtime=1))))
    finally:
        os.umask(old)
    found = (room.folder / "a").stat()
    assert stat.S_IMODE(found.st_mode) == 0o644
    assert found.st_mtime > 1e9


def test_a_folder_that_is_there_is_left_alone(room: Room) -> None:
    room.folder.mkdir()
    (room.folder / "mine").write_text("mine")
    with pytest.raises(FileExistsError):
        room.unpack(gzip.compress(tar(*HONEST)))
    assert listing(room.folder) == {"mine": b"mine"}


LINK = {"linkname": "../../bird.txt"}
HOSTILE = {
    "absolute": tar(member("/tmp/x", b"x")),
    "parent": tar(member("../bird.txt", b"dead")),
    "parent within": tar(member("a/../../bird.txt", b"dead")),
    "parent only": tar(member("..", kind=tarfile.DIRTYPE)),
    "dot within": tar(member("a/./b", b"x")),
    "empty part": tar(member("a//b", b"x")),
    "backslash": tar(member("..\\bird.txt", b"x")),
    "drive": tar(member("C:x", b"x")),
    "line end": tar(member("a\nb", b"x")),
    "escape": tar(member("\x1b[2Ja", b"x")),
    "letters alike": tar(member("ﬁle", b"x")),
    "trailing dot": tar(member("a.", b"x")),
    "no name": tar(member("", b"x")),
    "file named dot": tar(member(".", b"x")),
    "long part": tar(member("a" * 101, b"x")),
    "long path": tar(member("/".join(["ab"] * 3000), b"x")),
    "deep": tar(member("/".join("a" * 9), b"x")),
    "symbolic link": tar(member("a", kind=tarfile.SYMTYPE, **LINK)),
    "link within": tar(member("b", b"x"), member("a", kind=tarfile.SYMTYPE, linkname="b")),
    "hard link": tar(member("a", kind=tarfile.LNKTYPE, **LINK)),
    "through a link": tar(
        member("a", kind=tarfile.SYMTYPE, linkname="../.."), member("a/bird.txt", b"dead")
    ),
    "fifo": tar(member("a", kind=tarfile.FIFOTYPE)),
    "character device": tar(member("a", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block device": tar(member("a", kind=tarfile.BLKTYPE, devmajor=8)),
    "unknown kind": tar(member("a", b"x", kind=b"Z")),
    "twice": tar(member("a", b"x"), member("a", b"y")),
    "twice in another way": tar(member("a", b"x"), member("./a", b"y")),
    "twice in capitals": tar(member("a", b"x"), member("A", b"y")),
    "folders in capitals": tar(member("a/b", b"x"), member("A/c", b"y")),
    "file as a folder": tar(member("a", b"x"), member("a/b", b"y")),
    "folder as a file": tar(member("a/b", b"x"), member("a", b"y")),
    "folder with bytes": raw("a/", tarfile.DIRTYPE, 512, b"x" * 512) + bytes(1024),
    "negative size": raw("a", tarfile.REGTYPE, -512) + bytes(1024),
    "sparse": raw("a", tarfile.GNUTYPE_SPARSE, 0) + bytes(1024),
    "pax path": tar(member("a", b"x", pax_headers={"path": "../bird.txt"})),
    "pax size": tar(member("a", b"x", pax_headers={"size": "99999999999"})),
    "pax size below 0": tar(member("a", b"x", pax_headers={"size": "-1024"})),
    "pax sparse": tar(
        member("a", b"1\n0\n512\n" + b"\0" * 600, pax_headers={
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0",
            "GNU.sparse.name": "../bird.txt", "GNU.sparse.realsize": "9999999999"}),
    ),
    "pax for all": tar(member("a", b"x"), pax_headers={"path": "../bird.txt"}),
    "big header": raw("a", tarfile.XHDTYPE, 10**9, b"x" * 2000) + bytes(1024),
    "big name": raw("a", tarfile.GNUTYPE_LONGNAME, 10**10, b"x" * 2000) + bytes(1024),
    "endless headers": raw("a", tarfile.XHDTYPE, 0) * 4000,
    "endless names": raw("a", tarfile.GNUTYPE_LONGNAME, 4, b"abc\0") * 4000,
    "too many": tar(*(member(f"a{number}") for number in range(MEMBERS + 1))),
    "too big": tar(member("a", bytes(SIZE + 1))),
    "too big together": tar(member("a", bytes(SIZE - 9)), member("b", bytes(10))),
    "big after its end": tar(member("a", b"x")) + bytes(3_000_000),
    "damaged after a while": tar(*HONEST)[:2600] + b"\xff" * 512 + tar(*HONEST)[3112:],
    "cut short": tar(member("a", b"x" * 5000))[:2000],
    "cut in a header": tar(member("a", b"x"))[:100],
    "empty": b"",
    "no tar": b"not an archive at all" * 100,
    "zeros without end": bytes(20_000_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_at_once(room: Room, name: str) -> None:
    data = gzip.compress(HOSTILE[name], compresslevel=1)
    start = time.monotonic()
    if name in ("empty", "zeros without end"):
        # Nothing but an end: tarfile takes both for archives or not, by version.
        try:
            room.unpack(data)
        except DataError:
            assert listing(room.root / "canary") == room.before
        else:
            assert listing(room.folder) == {}
    else:
        room.refuse(data)
    assert time.monotonic() - start < 1


def test_a_size_that_overflows_is_refused_without_reading_on(room: Room) -> None:
    whole = raw("a", tarfile.REGTYPE, 8**11 - 1) + bytes(1024)
    assert "more bytes than may come" in room.refuse(gzip.compress(whole))


def test_what_is_not_gzip_is_refused(room: Room) -> None:
    good = gzip.compress(tar(*HONEST))
    for data in (b"", b"\x1f\x8b", b"PK\x03\x04" + bytes(100), tar(*HONEST), good[:-1], good[:-9]):
        room.refuse(data)
    wrong = bytearray(good)
    wrong[-6] ^= 1  # in the checksum, which is behind all members
    assert "damaged" in room.refuse(bytes(wrong))
    assert "damaged" in room.refuse(good + b"junk behind it")


def test_a_bomb_is_refused_before_it_fills_the_memory(room: Room) -> None:
    import tracemalloc

    bomb = gzip.compress(raw("a", tarfile.XHDTYPE, 2 * 10**8, bytes(10**8)), compresslevel=1)
    tracemalloc.start()
    room.refuse(bomb, size=10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_full_disk_is_one_sentence_and_leaves_nothing(room: Room, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_copy", full)
    with pytest.raises(DataError, match="no room left: make room for 20,000 bytes"):
        room.unpack(gzip.compress(tar(*HONEST)))
    assert listing(room.root / "canary") == room.before


def test_an_interruption_leaves_nothing(room: Room) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    room.file.write_bytes(gzip.compress(tar(*HONEST)))
    with pytest.raises(KeyboardInterrupt):
        extract(room.file, room.folder, MEMBERS, SIZE, interrupt)
    assert listing(room.root / "canary") == room.before


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        kind, at = chance.randrange(5), chance.randrange(len(changed) + 1)
        if kind == 0:
            changed[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            changed[at : at + chance.randrange(1, 600)] = b""
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randrange(1, 40))
        elif kind == 3:
            other = chance.randrange(len(data))
            changed[at:at] = data[other : other + 512]
        else:
            # In a header, and its checksum right again: what a forger would do.
            start = chance.randrange(len(changed) // 512 + 1) * 512
            block = changed[start : start + 512]
            if len(block) == 512:
                block[chance.choice((0, 1, 124, 130, 135, 156, 157, 345, 482))] = chance.choice(
                    b"/.\0 017255LKxgSZ\x80\xff"
                )
                block[148:156] = b" " * 8
                block[148:156] = b"%06o\0 " % sum(block)
                changed[start : start + 512] = block
    return bytes(changed)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: making and removing folders is slow."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.nightly
def test_ten_thousand_mutations_are_unpacked_or_refused(quick: Path) -> None:
    chance = random.Random(0)
    room = Room(quick)
    bases = (
        tar(HONEST[1], HONEST[2], form=tarfile.GNU_FORMAT),
        tar(member("n" * 90 + "/" + "m" * 90, b"x"), HONEST[4], form=tarfile.GNU_FORMAT),
        tar(member("a", b"x", pax_headers={"path": "b/c", "comment": "é"}), HONEST[4]),
    )
    # Without the zeros that fill an archive to ten kilobytes: chance would hit little else.
    bases = tuple(base.rstrip(b"\0") for base in bases)
    bases = tuple(base + bytes(-len(base) % 512 + 1024) for base in bases)
    unpacked = refused = 0
    slowest = 0.0
    for number in range(10_000):
        base = chance.choice(bases)
        if number % 5 == 0:
            data = mutated(gzip.compress(base, compresslevel=1), chance)
        else:
            data = gzip.compress(mutated(base, chance), compresslevel=1)
        start = time.monotonic()
        try:
            room.unpack(data)
        except DataError:
            refused += 1
            assert not room.folder.exists()
        else:
            unpacked += 1
            found = sorted(room.folder.rglob("*"))
            assert not any(one.is_symlink() for one in found)
            assert all(one.is_file() or one.is_dir() for one in found)
            assert sum(one.stat().st_size for one in found if one.is_file()) <= SIZE
            shutil.rmtree(room.folder)
        slowest = max(slowest, time.monotonic() - start)
        if number % 100 == 0:
            assert room.outside() == room.before
    assert listing(quick / "canary") == room.before
    assert sorted(one.name for one in quick.iterdir()) == ["canary", "one.tar.gz"]
    assert slowest < 1
    assert unpacked > 500
    assert refused > 3000
