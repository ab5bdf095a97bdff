"""A pseudo-terminal in place of a stream."""

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
import threading

__all__ = ["Terminal", "without_escapes"]


class Terminal:
    """A stream that is a terminal; :meth:`close` returns everything that was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.stream = io.TextIOWrapper(os.fdopen(slave, "wb", 0), "utf-8", write_through=True)
        self._written = bytearray()
        self._done = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while not self._done.is_set() or select.select([self._master], [], [], 0)[0]:
            if select.select([self._master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self._written += os.read(self._master, 65536)

    def close(self) -> str:
        self._done.set()
        self._reader.join()
        self.stream.close()
        os.close(self._master)
        return self._written.decode()


def without_escapes(text: str) -> str:
    """Return what a terminal was sent, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
