"""A process that trains one run after the other: the parent's :class:`Worker`, the child's main.

Both send lines of JSON: the parent runs to train, the child :class:`events
<softstair.train.progress.EventSender>`. When the child's input ends, the parent has closed it or
was killed: the child saves its run and ends.
"""

import _thread
import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from softstair.train.interrupt import Interrupted
from softstair.train.loop import train
from softstair.train.progress import Event, EventSender, TensorBoardEvents
from softstair.train.recipe import Recipe

__all__ = ["Worker", "error_message", "free_memory", "main"]

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from softstair.train.worker import main
main(int(sys.argv[2]))
"""
"""A new interpreter, since CUDA and threads do not survive a fork. Unlike multiprocessing it does
not run the user's script again; with -P, files in the current directory do not hide modules."""


class Worker:
    """The parent's end of a process that trains.

    Args:
        events: Queue of (worker, event); an event of None says that the process ended.

    Attributes:
        task: What it trains now; None if nothing.
        is_free: Whether it can be given a run.
    """

    def __init__(self, events: "queue.SimpleQueue[tuple[Worker, Event | None]]") -> None:
        self.task: Any = None
        self.is_free = True
        # Networks that are not small take as many threads as torch has here.
        arguments = [json.dumps(sys.path), str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C reaches all processes of a session; here the parent passes it on, once.
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._listener.start()

    def _listen(self, events: "queue.SimpleQueue[tuple[Worker, Event | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # an incomplete line: the process was killed
                events.put((self, json.loads(line)))
        events.put((self, None))

    def give(self, task: Any, recipe: Recipe, out: Path, settings: dict[str, Any]) -> None:
        """Let it train a run."""
        assert self.process.stdin is not None
        self.task, self.is_free = task, False
        message = {"recipe": recipe.to_json(), "out": str(out), **settings}
        with contextlib.suppress(OSError):  # it has ended, which the listener will tell
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        """Let it end if it is free."""
        assert self.process.stdin is not None
        if self.is_free:
            self.is_free = False
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, timeout: float) -> None:
        """Wait for its end; kill it after ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def main(threads: int) -> None:
    """Train what the parent sends, with so many threads of torch, until there is no more."""
    torch.set_num_threads(threads)
    incoming, outgoing = os.dup(0), os.dup(1)
    # A user's model may read and print: neither must reach the pipes to the parent.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    inbox = _Inbox()
    with contextlib.suppress(KeyboardInterrupt):
        # Until a training handles signals itself, SIGTERM unwinds the stack as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threading.Thread(target=inbox.listen, args=(incoming,), daemon=True).start()
        while (message := inbox.get()) is not None and _train(message, outgoing):
            inbox.rest()
        inbox.rest()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Inbox:
    """What the parent sent, and whether the parent is still there."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = self._ended = False

    def listen(self, incoming: int) -> None:
        """Receive messages; at the end of the input, stop the run that is training."""
        with os.fdopen(incoming, "rb", 0) as file:
            for line in file:
                self._messages.put(json.loads(line))
        with self._lock:
            self._ended = True
            if self._busy:
                _thread.interrupt_main(signal.SIGTERM)
        self._messages.put(None)

    def get(self) -> dict[str, Any] | None:
        """Return the next run to train; None at the end of the input."""
        try:
            message = self._messages.get(timeout=0.2)
        except queue.Empty:
            # Optimisers import it, which takes seconds: better while there is nothing to do.
            importlib.import_module("torch._dynamo")
            message = self._messages.get()
        with self._lock:
            self._busy = message is not None and not self._ended
        return message if self._busy else None

    def rest(self) -> None:
        """Nothing trains now that the end of the input would have to stop."""
        with self._lock:
            self._busy = False


def _train(message: dict[str, Any], outgoing: int) -> bool:
    """Train a run and send its events; return whether the process can train another one."""

    def send(event: Event) -> None:
        line = json.dumps(event).encode() + b"\n"
        with contextlib.suppress(OSError):  # the parent has ended, and this run is being stopped
            while line:
                line = line[os.write(outgoing, line) :]

    try:
        with contextlib.ExitStack() as stack:
            recipe, out = Recipe.from_json(message.pop("recipe")), Path(message.pop("out"))
            sender = EventSender(send)
            watchers: list[Any] = [sender]
            if message.pop("tensorboard", False):
                watchers.append(stack.enter_context(TensorBoardEvents(out / "events")))
            train(recipe, out, watchers=watchers, loading=sender.loading, **message)
    except (Interrupted, KeyboardInterrupt):
        send({"kind": "stopped"})
        return False
    except Exception as error:
        if os.environ.get("SOFTSTAIR_TRACEBACK"):
            traceback.print_exception(error)
        send({"kind": "failed", "why": error_message(error)})
        return False
    free_memory()
    send({"kind": "done"})
    return True


def free_memory() -> None:
    """Free what a run has left, the device's memory included, for the next run."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def error_message(error: Exception) -> str:
    """Return an error as one line; for an internal error, with how to report it."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError):
        return text
    return (
        f"internal error ({type(error).__name__}: {text[:200]}): run it again with "
        "SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )
