"""Downloads from a server that breaks off, lies, stalls and never ends, each to the right end."""

import gzip
import hashlib
import http.server
import io
import random
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from softstair.data.dataset import DataError
from softstair.data.fetch import fetch
from softstair.data.fetch import http as downloads
from softstair.data.fetch.http import Patience
from softstair.data.fetch.sources import SOURCES, Archive, Download, Known, Source

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
ONCE = Patience(timeout=5, waits=())
THRICE = Patience(timeout=5, waits=(0, 0))

Behaviour = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
        self.server.versions.append(self.headers.get("If-Range"))
        behaviours = self.server.behaviours
        (behaviours.pop(0) if len(behaviours) > 1 else behaviours[0])(self)

    def begin(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = [honest()]
        self.ranges: list[str | None] = []
        self.versions: list[str | None] = []
        self.over = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        pass  # the client hung up, as it should on some


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.over.set()
        one.shutdown()
        thread.join()


# What a server may do


def honest(content: bytes = CONTENT, tag: str | None = '"a"', stop: int | None = None) -> Behaviour:
    """Ranges, versions and lengths by the book; with a stop, the connection ends there."""

    def answer(handler: Handler) -> None:
        told = {"ETag": tag} if tag else {}
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked and handler.headers.get("If-Range", tag) == tag else 0
        if start:
            told["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.begin(206 if start else 200, Content_Length=len(content) - start, **told)
        handler.wfile.write(content[start:stop])

    return answer


def whole(content: bytes = CONTENT, **headers: object) -> Behaviour:
    """All of it, whatever was asked for."""

    def answer(handler: Handler) -> None:
        handler.begin(200, **headers)
        handler.wfile.write(content)

    return answer


def status(code: int, **headers: object) -> Behaviour:
    return lambda handler: handler.begin(code, Content_Length=0, **headers)


def endless(begin: bytes) -> Behaviour:
    def answer(handler: Handler) -> None:
        handler.begin(200)
        handler.wfile.write(begin)
        while not handler.server.over.is_set():
            handler.wfile.write(bytes(1 << 16))

    return answer


def stalling(count: int) -> Behaviour:
    def answer(handler: Handler) -> None:
        handler.begin(200, Content_Length=len(CONTENT), ETag='"a"')
        handler.wfile.write(CONTENT[:count])
        handler.wfile.flush()
        handler.server.over.wait(10)

    return answer


def ranged(told: str, content: bytes, **headers: object) -> Behaviour:
    """A 206 that says what it likes."""

    def answer(handler: Handler) -> None:
        handler.begin(206, Content_Range=told, Content_Length=len(content), **headers)
        handler.wfile.write(content)

    return answer


# What is fetched


def known(path: str, content: bytes) -> Known:
    md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
    return Known(path, len(content), md5, sha256)


def plain(server: Server, content: bytes = CONTENT) -> dict[str, Source]:
    item = Download(f"{server.address}/toy.bin", known("toy.bin", content), "toys/toy.bin")
    return {"toy": Source("a toy", "free", (item,))}


def packed(
    server: Server, content: bytes, files: tuple[Known, ...] = (), recordings: int = 0
) -> dict[str, Source]:
    archive = Archive("toys", 10, 10_000, files, recordings)
    item = Download(f"{server.address}/toys.tar.gz", known("toys.tar.gz", content), "toys", archive)
    return {"toy": Source("toys", "free", (item,))}


def tar_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"toys/{name.replace('__', '/').replace('_', '.')}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def refused(root: Path, sources: dict[str, Source], patience: Patience = ONCE) -> str:
    """The one sentence, after which nothing is there under its own name."""
    with pytest.raises(ValueError, match=r"\.$") as caught:
        fetch("toy", root, sources=sources, patience=patience)
    assert not (root / "toys").exists()
    assert not list(root.rglob("*.unpacked"))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def part(root: Path) -> bytes | None:
    file = root / ".fetch" / "toy.bin.part"
    return file.read_bytes() if file.exists() else None


# A good server


def test_a_file_comes_whole_and_a_second_time_nothing_is_asked_for(server, tmp_path) -> None:
    root, lines, seen = tmp_path / "new" / "data", [], []
    for _ in range(2):
        fetch("toy", root, sources=plain(server), tell=lines.append,
              moved=lambda *what: seen.append(what))  # fmt: skip
    assert (root / "toys" / "toy.bin").read_bytes() == CONTENT
    assert server.ranges == [None]
    assert sorted(one.name for one in (root / ".fetch").iterdir()) in (["lock"], [])
    assert ("toy.bin", len(CONTENT), len(CONTENT)) in seen
    assert "fetching" in lines[0]
    assert lines[1].endswith("is there, verified by its digests.")
    assert lines[3].endswith("is there already, verified by its digests.")


def test_an_archive_becomes_a_folder(server, tmp_path) -> None:
    content = tar_of(a_bin=b"one", sub__b_wav=b"two")
    sources = packed(server, content, (known("a.bin", b"one"),), recordings=1)
    server.behaviours = [honest(content)]
    (tmp_path / "toys").mkdir()  # empty, so it stands in nobody's way
    left = tmp_path / ".fetch" / "toys.unpacked"
    left.mkdir(parents=True)
    (left / "half").write_text("of a fetch that was killed")
    for _ in range(2):
        fetch("toy", tmp_path, sources=sources)
    assert (tmp_path / "toys" / "a.bin").read_bytes() == b"one"
    assert (tmp_path / "toys" / "sub" / "b.wav").read_bytes() == b"two"
    assert sorted(one.name for one in tmp_path.iterdir()) == [".fetch", "toys"]
    assert [one for one in (tmp_path / ".fetch").iterdir() if one.name != "lock"] == []
    assert len(server.ranges) == 1


def test_a_redirection_within_http_is_followed_with_its_range(server, tmp_path) -> None:
    moved = status(302, Location=f"{server.address}/elsewhere")
    server.behaviours = [honest(stop=1000), moved, honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=1000-"]


# One that breaks off


def test_a_broken_connection_is_taken_up_where_it_broke(server, tmp_path) -> None:
    server.behaviours = [honest(stop=70_000), honest(stop=200_000), honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-", "bytes=200000-"]
    assert server.versions == [None, '"a"', '"a"']


def test_after_the_last_attempt_the_rest_is_for_the_next_command(server, tmp_path) -> None:
    server.behaviours = [honest(stop=1000), honest(stop=1500), honest(stop=1700), honest()]
    sentence = refused(tmp_path, plain(server), THRICE)
    assert "1,700 of 300,000 bytes" in sentence
    assert "run the same command again" in sentence
    assert part(tmp_path) == CONTENT[:1700]
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)
    assert server.ranges[-1] == "bytes=1700-"
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_attempts_that_bring_much_do_not_count(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(downloads, "GAIN", 20_000)
    server.behaviours = [honest(stop=30_000 * number) for number in range(1, 10)] + [honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=Patience(5, (0,)))
    assert len(server.ranges) == 10


@pytest.mark.parametrize("patience", [ONCE, THRICE])
def test_waits_are_as_many_as_said(server, tmp_path, patience) -> None:
    server.behaviours = [honest(stop=0)]
    refused(tmp_path, plain(server), patience)
    assert len(server.ranges) == 1 + len(patience.waits)


def test_a_server_that_stalls_is_left_and_asked_again(server, tmp_path) -> None:
    server.behaviours = [stalling(5000), honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=Patience(0.2, (0,)))
    assert server.ranges == [None, "bytes=5000-"]
    server.behaviours = [lambda handler: handler.server.over.wait(10) and None]
    sentence = refused(tmp_path / "b", plain(server), Patience(0.2, ()))
    assert "no answer in time" in sentence


def test_nobody_listens(server, tmp_path) -> None:
    sources = plain(server)
    server.server_close()
    assert "0 of 300,000 bytes" in refused(tmp_path, sources)


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_passing_refusal_is_outlived(server, tmp_path, code) -> None:
    server.behaviours = [status(code), honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    server.behaviours = [status(code)]
    assert str(code) in refused(tmp_path / "b", plain(server))


@pytest.mark.parametrize("code", [404, 403, 410, 416])
def test_a_lasting_refusal_is_one_sentence_after_one_request(server, tmp_path, code) -> None:
    server.behaviours = [status(code)]
    assert f"the answer being {code}" in refused(tmp_path, plain(server), THRICE)
    assert len(server.ranges) == 1


# One that lies


@pytest.mark.parametrize("length", [len(CONTENT) - 1, len(CONTENT) + 1, 10**15])
def test_another_length_than_the_known_one_is_refused(server, tmp_path, length) -> None:
    server.behaviours = [honest(stop=1000), whole(Content_Length=length)]
    sentence = refused(tmp_path, plain(server), THRICE)
    assert f"must have 300,000 bytes, but {length} are announced" in sentence
    assert part(tmp_path) == CONTENT[:1000]  # it may still be of use


def test_a_server_that_ignores_ranges_begins_again(server, tmp_path) -> None:
    server.behaviours = [honest(stop=1000), whole(Content_Length=len(CONTENT))]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "lie",
    [
        status(416),
        ranged("bytes 0-299999/300000", CONTENT),
        ranged("bytes 999-299999/300000", CONTENT[999:]),
        ranged("bytes 1000-299999/300001", CONTENT[1000:]),
        ranged("bytes 1000-300000/*", CONTENT[1000:]),
        ranged("bytes -5", CONTENT[1000:]),
        ranged("", CONTENT[1000:]),
        ranged("bytes 1000-299999/300000", OTHER[1000:], ETag='"b"'),
    ],
)
def test_a_range_that_was_not_asked_for_begins_again(server, tmp_path, lie) -> None:
    server.behaviours = [honest(stop=1000), lie, honest()]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert server.ranges == [None, "bytes=1000-", None]
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_a_range_of_unknown_length_is_good_enough(server, tmp_path) -> None:
    server.behaviours = [honest(stop=1000), ranged("bytes 1000-299999/*", CONTENT[1000:])]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_a_file_that_changes_in_between_is_not_spliced(server, tmp_path) -> None:
    server.behaviours = [honest(OTHER, '"old"', stop=1000), honest(CONTENT, '"new"')]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert server.versions == [None, '"old"']
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_a_splice_that_no_version_tells_is_told_by_the_digest(server, tmp_path) -> None:
    server.behaviours = [honest(OTHER, None, stop=1000), honest(CONTENT, None)]
    sentence = refused(tmp_path, plain(server), THRICE)
    spliced = hashlib.md5(OTHER[:1000] + CONTENT[1000:]).hexdigest()
    assert spliced in sentence
    assert part(tmp_path) is None
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)


def test_a_wrong_digest_is_named_with_the_right_one_and_the_file_is_gone(server, tmp_path) -> None:
    server.behaviours = [honest(OTHER)]
    sentence = refused(tmp_path, plain(server), THRICE)
    assert hashlib.md5(OTHER).hexdigest() in sentence
    assert hashlib.md5(CONTENT).hexdigest() in sentence
    assert part(tmp_path) is None
    assert len(server.ranges) == 1


def test_every_published_digest_is_checked(server, tmp_path) -> None:
    right = known("toy.bin", CONTENT)
    for wrong in (Known("toy.bin", right.size, right.md5, "0" * 64),
                  Known("toy.bin", right.size, "0" * 32, right.sha256)):  # fmt: skip
        item = Download(f"{server.address}/toy.bin", wrong, "toys/toy.bin")
        assert "0000 is published" in refused(tmp_path, {"toy": Source("", "", (item,))})


def test_a_wrong_archive_is_not_unpacked(server, tmp_path, monkeypatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr("softstair.data.fetch.extract", never)
    good = tar_of(a_bin=b"one")
    bad = good[:-1] + bytes([good[-1] ^ 1])
    server.behaviours = [honest(bad)]
    assert "is published" in refused(tmp_path, packed(server, good))
    assert not list((tmp_path / ".fetch").glob("*.part"))


@pytest.mark.parametrize("right", [True, False])
def test_a_server_that_never_ends_is_cut_off(server, tmp_path, right) -> None:
    server.behaviours = [endless(CONTENT if right else b"")]
    seen: list[int] = []
    try:
        fetch("toy", tmp_path, sources=plain(server), patience=ONCE,
              moved=lambda what, done, total: seen.append(done))  # fmt: skip
    except DataError:
        assert not right
        assert part(tmp_path) is None
    else:
        assert right
        assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT
    assert max(seen) == len(CONTENT)


def test_headers_without_end_are_one_sentence(server, tmp_path) -> None:
    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n")

    server.behaviours = [answer]
    assert "headers" in refused(tmp_path, plain(server))
    server.behaviours = [lambda handler: handler.wfile.write(b"\xff\x1b[2J what?\r\n" * 3) and None]
    assert refused(tmp_path, plain(server)).isprintable()


def test_a_page_instead_of_a_file_does_not_cost_what_has_come(server, tmp_path) -> None:
    page = whole(b"<html>log in</html>", Content_Type="text/html")
    server.behaviours = [honest(stop=1000), page]
    assert "log in" in refused(tmp_path, plain(server), THRICE)
    assert part(tmp_path) == CONTENT[:1000]


@pytest.mark.parametrize("where", ["file://{}", "ftp://127.0.0.1/{}", "data:,x", "FILE://{}"])
def test_redirections_out_of_http_are_refused(server, tmp_path, where) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    server.behaviours = [status(302, Location=where.format(secret))]
    sentence = refused(tmp_path / "data", plain(server), THRICE)
    assert "not allowed" in sentence or "the answer being" in sentence
    assert part(tmp_path / "data") is None


def test_a_redirection_in_circles_is_one_sentence(server, tmp_path) -> None:
    server.behaviours = [status(302, Location=f"{server.address}/round")]
    assert "302" in refused(tmp_path, plain(server))


def test_a_version_that_is_no_header_is_not_sent(server, tmp_path) -> None:
    server.behaviours = [honest(tag='W/"weak"', stop=1000), honest(tag=None)]
    fetch("toy", tmp_path, sources=plain(server), patience=THRICE)
    assert server.versions == [None, None]
    room = tmp_path / "b" / ".fetch"
    room.mkdir(parents=True)
    (room / "toy.bin.part").write_bytes(CONTENT[:10])
    (room / "toy.bin.part.version").write_bytes(b'"a"\r\nX-Evil: \xff')
    fetch("toy", tmp_path / "b", sources=plain(server), patience=ONCE)
    assert server.versions[-1] is None


# This side


def test_a_part_that_is_too_long_is_begun_again(server, tmp_path) -> None:
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch" / "toy.bin.part").write_bytes(CONTENT + b"more")
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)
    assert server.ranges == [None]


def test_a_part_that_is_whole_needs_no_server(server, tmp_path) -> None:
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch" / "toy.bin.part").write_bytes(CONTENT)
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)
    assert server.ranges == []
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_a_full_disk_is_one_sentence_and_the_part_is_kept(server, tmp_path, monkeypatch) -> None:
    class Small(io.FileIO):
        def write(self, data) -> int:
            if self.tell() >= 10_000:
                raise OSError(28, "No space left on device")
            return super().write(bytes(data)[: 10_000 - self.tell()])

    with monkeypatch.context() as patch:
        patch.setattr(downloads, "open", lambda path, mode, buffering: Small(path, mode),
                      raising=False)  # fmt: skip
        sentence = refused(tmp_path, plain(server), THRICE)
    assert "the disk is full, with 10,000 bytes" in sentence
    assert part(tmp_path) == CONTENT[:10_000]
    assert len(server.ranges) == 1
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)
    assert server.ranges == [None, "bytes=10000-"]


def test_an_interruption_keeps_what_has_come(server, tmp_path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("toy", tmp_path, sources=plain(server), patience=ONCE, moved=interrupt)
    assert len(part(tmp_path) or b"") > 1000
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)
    assert (server.ranges[1] or "").startswith("bytes=")
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == CONTENT


def test_two_at_a_time_are_one_too_many(server, tmp_path) -> None:
    (tmp_path / ".fetch").mkdir()
    with filelock.FileLock(tmp_path / ".fetch" / "lock"):
        assert "another softstair data fetch" in refused(tmp_path, plain(server))
    fetch("toy", tmp_path, sources=plain(server), patience=ONCE)


@pytest.mark.parametrize("mine", ["toys", "toys/toy.bin"])
def test_what_is_there_and_wrong_is_named_and_left_alone(server, tmp_path, mine) -> None:
    path = tmp_path / mine
    toys = packed(server, tar_of(a_bin=b"one"), (known("a.bin", b"one"),))
    sources = plain(server) if mine.endswith(".bin") else toys
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    for _ in range(2):
        with pytest.raises(DataError, match="move it elsewhere"):
            fetch("toy", tmp_path, sources=sources)
    assert path.read_text() == "mine"
    assert server.ranges == []


def test_a_file_of_the_right_size_and_the_wrong_bytes_is_told(server, tmp_path) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "toy.bin").write_bytes(OTHER)
    with pytest.raises(DataError, match=hashlib.md5(OTHER).hexdigest()):
        fetch("toy", tmp_path, sources=plain(server))
    assert (tmp_path / "toys" / "toy.bin").read_bytes() == OTHER


@pytest.mark.parametrize(
    ("files", "recordings", "words"),
    [
        ((known("b.bin", b"one"),), 0, "lacks b.bin"),
        ((Known("a.bin", 4),), 0, "has 3 bytes in a.bin, where 4 are known"),
        ((known("a.bin", b"two"),), 0, "is published"),
        ((), 2, "has 1 of 2 recordings"),
    ],
)
def test_an_archive_without_what_it_should_hold_is_told(
    server, tmp_path, files, recordings, words
) -> None:
    content = tar_of(a_bin=b"one", sub__b_wav=b"two")
    server.behaviours = [honest(content)]
    assert words in refused(tmp_path, packed(server, content, files, recordings))


def test_a_hostile_archive_with_the_right_digest_is_refused(server, tmp_path) -> None:
    content = tar_of(__bird_txt=b"dead")
    server.behaviours = [honest(content)]
    assert "no path of plain names" in refused(tmp_path, packed(server, content))


def test_names_and_folders_that_cannot_be(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"must be one of digits, cifar10.*'mnist' was given"):
        fetch("mnist", tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot hold data sets"):
        fetch("svhn", tmp_path / "file")


# What is published


def test_every_download_has_an_address_a_size_and_a_sha256() -> None:
    for source in SOURCES.values():
        assert source.terms
        for item in source.downloads:
            assert re.fullmatch(r"https?://[a-z.]+/[\w/~.-]+", item.address)
            assert item.size > 10**7
            assert re.fullmatch(r"[0-9a-f]{64}", item.known.sha256 or "")
            assert item.known.path == item.file
            files = (item.known, *(item.archive.files if item.archive else ()))
            for md5 in (one.md5 for one in files if one.md5 is not None):
                assert re.fullmatch(r"[0-9a-f]{32}", md5)


def test_cifar10_has_ten_thousand_images_a_file() -> None:
    (item,) = SOURCES["cifar10"].downloads
    assert item.archive is not None
    assert [one.size for one in item.archive.files] == [10_000 * (1 + 3 * 32 * 32)] * 6
    assert len({one.sha256 for one in item.archive.files}) == 6
