"""Signals that ask a training to stop: it goes on to the next step, keeps itself, and ends."""

import signal
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "StopRequest"]


class Interrupted(Exception):
    """The training was asked to stop, and has been kept."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """Within its ``with``, SIGINT and SIGTERM are noted in ``number``; a second one strikes.

    Outside the main thread, where Python takes no signals, it notes nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            self._before.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
