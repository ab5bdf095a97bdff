"""How many units train at a time: as many as measure fastest, found while they train."""

import time
from collections.abc import Callable
from typing import Any

from softstair.train.progress import Event

__all__ = ["Pace"]

WINDOW = 20.0
"""Seconds in which steps are counted, once as many units train as should."""
GAIN = 1.03
"""One more at a time must raise the steps a second by so much, or it is not worth its memory."""


class Pace:
    """Counts the steps of all units together, adds one unit after the other as long as that helps,
    and stays with the best number.

    >>> now = 0.0
    >>> pace = Pace(first=1, most=4, clock=lambda: now)
    >>> for second in range(200):
    ...     now, speed = float(second), {1: 10, 2: 18, 3: 18}[pace()]
    ...     for unit in range(pace()):
    ...         pace.hear(unit, {"kind": "step", "done": speed * second / pace()})
    >>> pace()
    2
    """

    def __init__(self, first: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._number = min(first, most)
        self._best: tuple[float, int] | None = None
        self._settled = False
        self._done: dict[Any, float] = {}
        self._steps = 0.0
        self._since: tuple[float, float] | None = None
        self._asked: float | None = None

    def begin(self, number: int) -> None:
        """Starts from another number, before anything was measured."""
        if self._best is None and self._since is None:
            self._number = min(max(1, number), self.most)

    def hear(self, unit: Any, news: Event) -> None:
        """What a unit says of itself; its steps are counted from the first that it tells of."""
        if "done" in news and news["kind"] in ("begin", "step", "epoch"):
            self._steps += max(0.0, news["done"] - self._done.get(unit, news["done"]))
            self._done[unit] = news["done"]
        elif news["kind"] in ("done", "failed", "stopped"):
            self._done.pop(unit, None)

    def __call__(self) -> int:
        """How many should train now."""
        if self._settled:
            return self._number
        now = self._clock()
        self._asked = now if self._asked is None else self._asked
        if self._since is None:
            # Short units may never all be at it: then the window opens after a while.
            late = self._done and now - self._asked >= 2 * WINDOW
            if len(self._done) >= self._number or late:
                self._since = (now, self._steps)
        elif now - self._since[0] >= WINDOW:
            speed = (self._steps - self._since[1]) / (now - self._since[0])
            self._judge(speed)
        return self._number

    def _judge(self, speed: float) -> None:
        self._since = self._asked = None
        if self._best is None or speed > GAIN * self._best[0]:
            self._best = (speed, self._number)
            self._settled = self._number >= self.most
            self._number = min(self._number + 1, self.most)
        else:
            self._number, self._settled = self._best[1], True
