"""The parent's end of a process that trains; the other end is :mod:`softstair.train.child`."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from softstair.train.news import News
from softstair.train.recipe import Recipe

__all__ = ["Worker"]

BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from softstair.train.child import main
main(int(sys.argv[2]))
"""
"""A new interpreter, not a fork: CUDA and threads do not survive one. Nor is the user's own script
run again, as multiprocessing would; and a file in the current directory that has the name of a
module is not taken for it (-P), unless the parent would take it."""


class Worker:
    """A process that trains what it is given; what it says is put into ``said``, at last None.

    ``run`` is the name of what it trains, ``has_begun`` whether its first step is behind it, and
    ``is_free`` whether it may be given something.
    """

    def __init__(self, said: "queue.SimpleQueue[tuple[Worker, News | None]]") -> None:
        self.run: Any = None
        self.has_begun, self.is_free = False, True
        # Torch takes as many threads in it as here, for networks that are not small.
        given = [json.dumps(sys.path), str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C reaches every process of a session; this one is told by its parent, once.
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._listener.start()

    def _listen(self, said: "queue.SimpleQueue[tuple[Worker, News | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # half a line: it was killed
                said.put((self, json.loads(line)))
        said.put((self, None))

    def give(self, name: Any, recipe: Recipe, out: Path, settings: dict[str, Any]) -> None:
        """Lets it train a run, and calls it by a name."""
        assert self.process.stdin is not None
        self.run, self.has_begun, self.is_free = name, False, False
        task = {"recipe": recipe.to_json(), "out": str(out), **settings}
        with contextlib.suppress(OSError):  # it is dead, and its end will be heard
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        """It will be given nothing more: if it is free, it ends."""
        assert self.process.stdin is not None
        if self.is_free:
            self.is_free = False
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, patience: float) -> int:
        """Waits so many seconds for it to end, then kills it; returns its exit code."""
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        return self.process.returncode
