"""Downloads from a local server that stops early, ignores ranges or sends the wrong bytes."""

import gzip
import hashlib
import http.server
import io
import random
import re
import resource
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from softstair._errors import SoftstairError
from softstair.data import DataError
from softstair.data.fetch import Download, Source, fetch

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)

Behaviour = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
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
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = [serve()]
        self.ranges: list[str | None] = []
        self.address = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        pass  # the client closed the connection


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def serve(content: bytes = CONTENT, stop: int | None = None, ranges: bool = True) -> Behaviour:
    """Send the range that was asked for, up to byte ``stop``, and close the connection."""

    def answer(handler: Handler) -> None:
        requested = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(requested[1]) if requested and ranges else 0
        headers = {"Content_Length": len(content) - start}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.begin(206 if start else 200, **headers)
        handler.wfile.write(content[start:stop])

    return answer


def status(code: int, **headers: object) -> Behaviour:
    return lambda handler: handler.begin(code, Content_Length=0, **headers)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def plain(server: Server, content: bytes = CONTENT) -> dict[str, Source]:
    """A data set of one file."""
    address = f"{server.address}/toy.bin"
    download = Download(address, len(content), digest(content), "toys/toy.bin")
    return {"toy": Source("a toy", "free", (download,))}


def packed(server: Server, content: bytes) -> dict[str, Source]:
    """A data set of one archive."""
    server.behaviours = [serve(content)]
    address, sha256 = f"{server.address}/toys.tar.gz", digest(content)
    download = Download(address, len(content), sha256, "toys", folder="toys")
    return {"toy": Source("toys", "free", (download,))}


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


TOYS = tar_of({"toys/a.bin": b"one", "toys/sub/b.wav": b"two", "README": b"three"})
OUTSIDE = tar_of({"toys/a.bin": b"one", "../outside": b"x"})


def fails(root: Path, sources: dict[str, Source]) -> str:
    """Return the message of the error, after which nothing is in place."""
    with pytest.raises(DataError) as raised:
        fetch("toy", root, sources=sources)
    assert not (root / "toys").exists()
    return str(raised.value)


def fetched(root: Path, server: Server) -> bytes:
    fetch("toy", root, sources=plain(server))
    return (root / "toys" / "toy.bin").read_bytes()


def part(root: Path) -> bytes | None:
    path = root / ".fetch" / "toy.bin.part"
    return path.read_bytes() if path.exists() else None


def test_a_file_is_downloaded_once(server, tmp_path):
    root, calls = tmp_path / "new" / "data", []
    for _ in range(2):
        fetch("toy", root, sources=plain(server), progress=lambda *call: calls.append(call))
    assert (root / "toys" / "toy.bin").read_bytes() == CONTENT
    assert len(server.ranges) == 1
    assert part(root) is None
    assert calls[-1] == ("toy.bin", 300_000, 300_000)


def test_an_archive_becomes_a_folder(server, tmp_path):
    sources = packed(server, TOYS)
    unpacked = tmp_path / ".fetch" / "unpacked"
    unpacked.mkdir(parents=True)
    (unpacked / "half").write_text("of a process that was killed")
    for _ in range(2):
        fetch("toy", tmp_path, sources=sources)
    paths = sorted(path for path in (tmp_path / "toys").rglob("*") if path.is_file())
    assert [path.name for path in paths] == ["a.bin", "b.wav"]
    assert [path.read_bytes() for path in paths] == [b"one", b"two"]
    assert not list((tmp_path / ".fetch").glob("[!l]*"))
    assert len(server.ranges) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_the_next_command_resumes_a_broken_download_or_starts_again(server, tmp_path, ranges):
    server.behaviours = [serve(stop=1000), serve(ranges=ranges)]
    assert "the connection was closed" in fails(tmp_path, plain(server))
    assert part(tmp_path) == CONTENT[:1000]
    assert fetched(tmp_path, server) == CONTENT
    assert server.ranges == ["bytes=0-", "bytes=1000-"]


@pytest.mark.parametrize("code", [404, 500])
def test_http_errors_are_reported_with_their_status(server, tmp_path, code):
    server.behaviours = [status(code)]
    assert str(code) in fails(tmp_path, plain(server))


def test_another_file_does_not_replace_what_was_downloaded(server, tmp_path):
    server.behaviours = [serve(stop=1000), serve(b"<html>log in</html>", ranges=False)]
    fails(tmp_path, plain(server))
    assert "19 bytes instead of 300000" in fails(tmp_path, plain(server))
    assert part(tmp_path) == CONTENT[:1000]


def test_a_wrong_digest_removes_the_download(server, tmp_path):
    server.behaviours = [serve(OTHER)]
    message = fails(tmp_path, plain(server))
    assert digest(OTHER) in message
    assert digest(CONTENT) in message
    assert part(tmp_path) is None


def test_a_file_that_cannot_be_written_to_is_an_error_and_is_kept(server, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        message = fails(tmp_path, plain(server))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in message
    fetch("toy", tmp_path, sources=plain(server))
    assert server.ranges[-1] == "bytes=10000-"


def test_two_processes_cannot_fetch_into_one_folder(server, tmp_path):
    (tmp_path / ".fetch").mkdir()
    with filelock.FileLock(tmp_path / ".fetch" / "lock"):
        assert "in use" in fails(tmp_path, plain(server))
    fetch("toy", tmp_path, sources=plain(server))


def test_what_is_there_already_is_kept(server, tmp_path):
    path = tmp_path / "toys" / "toy.bin"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    assert fetched(tmp_path, server) == b"mine"
    assert server.ranges == []


def test_an_archive_writes_nothing_outside_of_its_folder(server, tmp_path):
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch("toy", tmp_path / "data", sources=packed(server, OUTSIDE))
    assert [path.name for path in tmp_path.rglob("outside")] == []
    assert not (tmp_path / "data" / "toys").exists()


def test_unknown_names_and_unusable_folders_are_errors(tmp_path):
    with pytest.raises(SoftstairError, match=r"data must be one of .*'mnist' was given"):
        fetch("mnist", tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be written"):
        fetch("svhn", tmp_path / "file")
