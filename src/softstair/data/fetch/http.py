"""One file over HTTP, as far as the connection lasts, and from there on the next time.

What has come lies in a ``.part`` file; beside it, what the server calls this version of the file
(its ETag, or its date), so that two versions are never spliced. A server is believed in nothing:
the size is known beforehand, and not a byte more is written; whether they are the right bytes is
for the digest to say (:mod:`softstair.data.fetch`).
"""

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from softstair.data.fetch.archive import FULL

__all__ = ["PATIENT", "Patience", "download", "forget", "size_of"]

BLOCK = 256 << 10
GAIN = 1 << 20
"""An attempt that brought so many bytes was not in vain, and all further attempts are left."""
PASSING = (408, 425, 429)
"""Refusals that are worth another attempt, as are those of 500 and above."""
VERSION = re.compile(r'"[\x21\x23-\x7e]{1,200}"|[A-Z][a-z]{2}, [\x20-\x7e]{1,40}')
"""A strong ETag or a date, as If-Range takes them."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server: seconds without a byte, and seconds before each new attempt.

    >>> len(Patience().waits)
    4
    """

    timeout: float = 30.0
    waits: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)


PATIENT = Patience()


class _Again(Exception):
    """What went wrong with an attempt, where another one may do better."""


def download(
    address: str,
    size: int,
    part: Path,
    patience: Patience = PATIENT,
    moved: Callable[[int], None] = lambda done: None,
) -> None:
    """Brings the part file to its full size, or says in one sentence why not and how to go on."""
    waits = list(patience.waits)
    while (have := size_of(part)) != size:
        if have > size:
            forget(part)
            continue
        try:
            _attempt(address, size, part, patience.timeout, moved)
        except _Again as why:
            if size_of(part) - have >= GAIN:
                waits = list(patience.waits)
            if not waits:
                raise ValueError(
                    f"{address} broke off ({why}) with {size_of(part):,} of {size:,} bytes here, "
                    f"in {str(part)!r}: run the same command again to go on from there."
                ) from None
            time.sleep(waits.pop(0))


def size_of(part: Path) -> int:
    """Bytes that have come so far."""
    return part.stat().st_size if part.exists() else 0


def forget(part: Path) -> None:
    """Removes what has come, and the version that it was of."""
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def _attempt(
    address: str, size: int, part: Path, timeout: float, moved: Callable[[int], None]
) -> None:
    from softstair import __version__

    have, version = size_of(part), _version_of(part)
    headers = {"User-Agent": f"softstair/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version
    request = urllib.request.Request(address, headers=headers)
    try:
        answer = _opener().open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(address, error, part, resumed=bool(have)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Again(_reason(error)) from None
    with answer:
        if answer.status == 206:
            _check_range(answer.headers, have, size, version, part)
        else:
            _check_whole(address, answer, size)
            forget(part)
            if (version := _version_in(answer.headers)) is not None:
                _version_file(part).write_text(version, encoding="ascii")
        _receive(answer, size, part, moved)


def _refusal(
    address: str, error: urllib.error.HTTPError, part: Path, resumed: bool
) -> _Again | ValueError:
    told = f"{error.code} {_printable(error.reason)}"
    if error.code == 416 and resumed:
        forget(part)
        return _Again(f"{told}: it will not go on from there")
    if error.code >= 500 or error.code in PASSING:
        return _Again(told)
    return ValueError(
        f"{address} cannot be fetched, the answer being {told}: look with a browser whether it is "
        "still there, and put the file in its place by hand."
    )


def _check_range(headers: Message, have: int, size: int, version: str | None, part: Path) -> None:
    """What is sent must begin where we left off, in the same version; else from the beginning."""
    told = str(headers.get("Content-Range", ""))
    found = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)", told.strip())
    fits = (
        found is not None
        and int(found[1]) == have
        and int(found[2]) < size
        and found[3] in ("*", str(size))
    )
    sent = _version_in(headers)
    if not fits or (version is not None and sent not in (None, version)):
        forget(part)
        raise _Again(f"it sent the range {_printable(told)!r} when asked for byte {have:,} on")


def _check_whole(address: str, answer: Any, size: int) -> None:
    # Before what has come is given up: a hotel's log-in page is not worth two gigabytes.
    kind = _printable(answer.headers.get("Content-Type", ""))
    length = _printable(answer.headers.get("Content-Length", size))
    if answer.status != 200 or "html" in kind.lower():
        raise ValueError(
            f"{address} must send a file, but it answered {answer.status} with {kind or 'nothing'}"
            ": look at it with a browser, since the network may want you to log in."
        )
    if length != str(size):
        raise ValueError(
            f"{address} must have {size:,} bytes, but {length} are announced: it is another file "
            "than the one whose digest is known, so fetch it by hand if you trust it."
        )


def _receive(answer: Any, size: int, part: Path, moved: Callable[[int], None]) -> None:
    done = size_of(part)
    with open(part, "ab", buffering=0) as file:
        while done < size:
            try:
                block = answer.read1(min(BLOCK, size - done))
            except (OSError, http.client.HTTPException) as error:
                raise _Again(_reason(error)) from None
            if not block:
                raise _Again("the connection ended")
            _write(file, block, part, size - done)
            done += len(block)
            moved(done)


def _write(file: IO[bytes], block: bytes, part: Path, needed: int) -> None:
    view = memoryview(block)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ValueError(
            f"the disk is full, with {size_of(part):,} bytes in {str(part)!r}: make room for "
            f"{needed:,} bytes more, and run the same command again to go on from there."
        ) from None


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return _printable(inner) or type(inner).__name__


def _printable(told: object) -> str:
    """What a server says, without what would do something to a terminal, and in one line."""
    text = "".join(letter if letter.isprintable() else " " for letter in str(told)[:500])
    return " ".join(text.split())[:120]


def _version_file(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _version_of(part: Path) -> str | None:
    file = _version_file(part)
    told = file.read_text(encoding="ascii", errors="replace") if file.exists() else ""
    return told if VERSION.fullmatch(told) else None


def _version_in(headers: Message) -> str | None:
    for name in ("ETag", "Last-Modified"):
        told = str(headers.get(name, ""))
        if VERSION.fullmatch(told):
            return told
    return None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """From http to http or https, and nowhere else."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith(("http://", "https://")):
            told = f"a redirection to {newurl!r}, which is not allowed"
            raise urllib.error.HTTPError(newurl, code, told, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    # Not urllib's own, which opens file:// and ftp:// as well.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener
