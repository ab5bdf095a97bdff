"""The command ``softstair``: choose the verb, run it, and turn errors into one line on stderr.

Exit codes: 0 for yes, 1 if the answer is no, 2 for an error. This module is outside the package,
which imports torch: help and version are shown at once.
"""

import contextlib
import difflib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VERBS: dict[str, str] = {
    "train": "train a quantised network; without flags, a ternary one on the embedded digits",
    "export": "write a trained network as ONNX, QONNX or C, in integers",
    "verify": "compare the deployed network with the trained one, number by number",
    "zoo": "list, evaluate and export the trained networks that are part of softstair",
    "data": "download data sets, and show which are there",
}

EXTRA = ("rich", "matplotlib", "sklearn", "scipy", "safetensors", "filelock")
"""Packages of ``pip install '.[cli]'``, which only the command needs."""
HELP = """\
usage: softstair VERB [FLAGS]

Train quantised neural networks by additive noise annealing.

{verbs}

softstair VERB --help lists the flags of a verb; softstair --version, the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, given without the program's name, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-V", "--version"):
        source = Path(__file__).parent / "softstair" / "__init__.py"
        version = re.search(r'__version__ = "(.+)"', source.read_text(encoding="utf-8"))
        print(f"softstair {version and version[1]}")
        return 0
    return dispatch("softstair", "softstair.cli", VERBS, HELP, words)


def dispatch(
    program: str, package: str, verbs: Mapping[str, str], about: str, words: Sequence[str]
) -> int:
    """Run the verb that the words begin with, a module of ``package``, or print the help."""
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        listed = "\n".join(f"  {verb:<11}  {purpose}" for verb, purpose in verbs.items())
        print(about.format(verbs=listed), end="")
        return 0
    if verb not in verbs:
        # As softstair._check.ending says it, without importing the package.
        close = difflib.get_close_matches(verb, verbs)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        allowed = f"one of {', '.join(verbs)}"
        return _fail(f"{program}: the verb must be {allowed}, but {verb!r} was given{hint}")
    return call(f"{program} {verb}", f"{package}.{verb}", words[1:])


def call(name: str, module: str, words: Sequence[str]) -> int:
    """Run the ``Command`` of a module, which is called by this name, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without λ gets a question mark
    try:
        return _run(name, module, words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except KeyboardInterrupt:
        again = f"begin again with {shlex.join([*name.split(), *words])}"
        return _fail(f"{name}: interrupted before anything was saved; {again}", code=130)
    except BrokenPipeError:
        # `softstair zoo | head`: nobody reads on, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from softstair._errors import MissingExtraError

        if isinstance(error, ValueError | OSError | MissingExtraError):
            return _fail(f"{name}: {_message(error)}")
        if os.environ.get("SOFTSTAIR_TRACEBACK"):
            raise
        return _fail(
            f"{name}: internal error: {type(error).__name__}: {error}. Please report it "
            "with the command you ran and what it prints with SOFTSTAIR_TRACEBACK=1."
        )


def _run(name: str, module_name: str, words: Sequence[str]) -> int:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        return _fail(
            f"{name}: the command needs the package {missing}, which is not installed: "
            "run pip install '.[cli]' in the clone of softstair."
        )
    from softstair.cli._args import parse

    with getattr(module, "parsing", contextlib.nullcontext)():
        command = parse(module.Command, words, name)
    return int(command.run())


def _fail(sentence: str, code: int = 2) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)
    return code


def _message(error: Exception) -> str:
    """Return the message of an error, with flags instead of the library's parameters."""
    from softstair.cli._args import flags_in, spelling

    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"cannot use {str(error.filename)!r}: {error.strerror}."
    text = flags_in(str(error))
    if (field := getattr(error, "field", None)) and text.startswith(f"{field} "):
        return f"{spelling(field)}{text.removeprefix(field)}"
    return text
