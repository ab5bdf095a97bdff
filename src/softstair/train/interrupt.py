"""Signals that ask a training to stop: it completes its step, saves a checkpoint, and ends."""

import signal
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "StopRequest"]


class Interrupted(Exception):
    """A signal stopped the training, which has saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """A context in which SIGINT and SIGTERM set ``number``; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python handles no signals, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, raise_second: bool = True) -> None:
        self.number: int | None = None
        self._raise_second = raise_second
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
        if self.number is not None and self._raise_second:
            raise KeyboardInterrupt
        self.number = number
