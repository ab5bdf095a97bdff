"""A process that has imported everything, and runs each command line in a child that it forks.

Starting Python and torch takes seconds; a child of this one begins at once and can be killed.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


class Warm:
    """The parent's end: :meth:`start` a command line, strike the child by its id, :meth:`wait`."""

    def __enter__(self) -> "Warm":
        words = [sys.executable, __file__]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def start(self, words: list[str], errors: Path, **settings: Any) -> int:
        """The id of a child that runs ``softstair`` with these words.

        errors        where its stderr goes
        begun         a file that is there once the training itself begins
        every         save a checkpoint at every so-many-th step, not once a second
        at            strike itself with SIGKILL at the so-many-th opening, renaming or removal of a
                      file
        narrow        whether the network for digits is that of `helpers.narrow`
        environment   variables that it has besides
        """
        return int(self._ask({"words": words, "errors": str(errors), **settings}))

    def wait(self) -> list[int]:
        """The exit codes of all that were started; minus the signal's number if one killed it."""
        return [int(word) for word in self._ask(None).split()]

    def run(self, words: list[str], errors: Path, **settings: Any) -> int:
        self.start(words, errors, **settings)
        return self.wait()[0]

    def _ask(self, request: dict[str, Any] | None) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def serve() -> None:
    import torch

    torch.set_num_threads(1)
    import filelock  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo  # which an optimiser imports, in three seconds

    import softstair.cli.train
    import softstair.train.fit  # noqa: F401

    print("ready", flush=True)
    children: list[int] = []
    for line in sys.stdin:
        if (request := json.loads(line)) is None:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            print(*codes, flush=True)
            children.clear()
            continue
        children.append(os.fork())
        if not children[-1]:
            _obey(request)
        print(children[-1], flush=True)


def _obey(request: dict[str, Any]) -> None:
    from softstair import cli

    code = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        silent = os.open(os.devnull, os.O_RDWR)
        for mine, inherited in ((silent, 0), (silent, 1), (errors, 2)):
            os.dup2(mine, inherited)
        _prepare(request)
        code = cli.main(request["words"])
        sys.stderr.flush()
    except KeyboardInterrupt:
        code = 130  # before the command could take it
    finally:
        os._exit(code)


def _prepare(request: dict[str, Any]) -> None:
    import softstair.cli.train

    os.environ.update(request.get("environment", {}))
    # To draw a picture takes as long as a short training.
    softstair.cli.train._draw = lambda metrics, title, out: out.touch()
    if "begun" in request:
        _tell(Path(request["begun"]))
    if "every" in request:
        _hasten(request["every"])
    if request.get("narrow"):
        sys.path.append(str(Path(__file__).parents[1]))
        from helpers.narrow import narrow_entry
        from softstair.models import NETWORKS

        NETWORKS["digits"] = narrow_entry()
    if "at" in request:
        _strike_at(request["at"])


def _tell(begun: Path) -> None:
    module = import_module("softstair.train.fit")
    step = module.Step

    def told(*given: Any) -> Any:
        begun.touch()
        return step(*given)

    module.Step = told  # type: ignore[attr-defined]


def _hasten(every: int) -> None:
    from softstair.train.run import Run

    keep, calls = Run.keep, [0]

    def sooner(self: Run, *given: Any) -> None:
        calls[0] += 1
        if calls[0] % every == 0:
            self._saved_at = float("-inf")
        keep(self, *given)

    Run.keep = sooner  # type: ignore[method-assign]


def _strike_at(number: int) -> None:
    import signal

    events = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
    left = [number]

    def listen(event: str, _: Any) -> None:
        if event in events:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(listen)


if __name__ == "__main__":
    serve()
