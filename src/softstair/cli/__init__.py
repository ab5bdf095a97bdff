"""The command ``softstair``: one file a verb, and this one to choose between them.

To add a verb, write ``cli/<verb>.py`` with a frozen dataclass ``Command`` whose fields are the
flags and whose ``run()`` returns the exit code, and add a line to :data:`VERBS`. Exit codes: 0 for
yes, 1 where the answer is no, 2 for an error, which is one sentence on stderr, never a traceback.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence

import softstair

__all__ = ["VERBS", "main"]

VERBS: dict[str, str] = {
    "train": "train a quantised network; without flags, a ternary one on the embedded digits",
    "grid": "train a whole design, such as the paper's, on every fold; here or on a cluster",
    "report": "one page of what came of a grid: claims, curves, tables; it opens offline",
    "export": "a trained network as ONNX, QONNX or C, in whole numbers alone",
    "verify": "is what is deployed what was trained? Counts mismatches, layer by layer",
    "check": "does a schedule anneal its layers in order, and what does the theorem say of it?",
    "bench": "how fast is it here? The operator, the training step, and what truncation saves",
    "data": "fetch data sets from their official addresses, and see which are there",
}

EXTRA = ("tyro", "rich", "matplotlib", "sklearn", "safetensors", "filelock")
"""What ``pip install 'softstair[cli]'`` brings, and only the command needs."""


PARAMETER = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`\s]+))?`")
"""A parameter in a message of the library: `name` or `name=value`."""

LONGEST = 200
"""Characters of a name that one sentence has room for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, without the program's name; returns the exit code."""
    _speak_any_language()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"softstair {softstair.__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        known = ", ".join(VERBS)
        return _refuse(f"softstair: the verb must be one of {known}, but {verb!r} was given.")
    try:
        return _run(verb, words[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except KeyboardInterrupt:
        return _refuse(
            f"softstair {verb}: interrupted before anything was kept: give the same command again.",
            code=130,
        )
    except BrokenPipeError:
        # `softstair check | head`: nobody reads on, and Python must not complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        return _refuse(f"softstair {verb}: {_told(error)}")
    except Exception as error:
        return _refuse(_confess(verb, error))


def _run(verb: str, words: list[str]) -> int:
    try:
        from softstair.cli._arguments import parse

        module = importlib.import_module(f"softstair.cli.{verb}")
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in EXTRA:
            raise
        return _refuse(
            f"softstair {verb}: the command line needs {', '.join(EXTRA)}, but {missing} is not "
            "installed: run pip install 'softstair[cli]'."
        )
    # A verb whose flags depend on one another reads them itself.
    own = getattr(module, "parse", None)
    prog = f"softstair {verb}"
    command = own(words, prog) if own else parse(module.Command, words, prog)
    return int(command.run())


def _refuse(sentence: str, code: int = 2) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)
    return code


def _told(error: Exception) -> str:
    """What was refused; by the system, with as much of a name as can be read."""
    if not isinstance(error, OSError) or error.filename is None or not error.strerror:
        return flags_of(str(error))
    name = str(error.filename)
    shown = name if len(name) <= LONGEST else f"{name[:LONGEST]}…"
    return f"{shown!r} cannot be used ({error.strerror}): mend that, or give another path."


def flags_of(message: str) -> str:
    """Return a message of the library with its parameters as flags.

    >>> flags_of("choose another `data_dir`, or pass `device=cpu`")
    'choose another --data-dir, or pass --device cpu'
    """
    return PARAMETER.sub(
        lambda match: f"--{match[1].replace('_', '-')}{' ' if match[2] else ''}{match[2] or ''}",
        message,
    )


def _confess(verb: str, error: Exception) -> str:
    """A mistake of ours: still one sentence, and a way to see more."""
    if os.environ.get("SOFTSTAIR_TRACEBACK"):
        raise error
    return (
        f"softstair {verb}: stopped by a mistake of its own ({type(error).__name__}: {error}): "
        "run it again with SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )


def _speak_any_language() -> None:
    # A terminal that cannot print λ gets a question mark, not an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {purpose}" for verb, purpose in VERBS.items()]
    return "\n".join(
        [
            "usage: softstair VERB [FLAGS]",
            "",
            "Trains quantised neural networks by additive noise annealing.",
            "",
            *lines,
            "",
            "softstair VERB --help lists the flags of a verb; softstair --version, the version.",
        ]
    )
