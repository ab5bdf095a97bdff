"""``python -m paper``: the verbs of the paper, a file of ``paper/cli`` each; from a clone."""

import sys
from collections.abc import Sequence

from softstair_command import dispatch

VERBS = {
    "grid": "train a design of many runs, such as the paper's, here or on a cluster",
    "report": "write one HTML page about a grid: claims, curves, tables",
    "check": "check a schedule: does it anneal its layers in order? What does the theorem say?",
}
HELP = """\
usage: python -m paper VERB [FLAGS]

Reproduce the paper's experiments, and check its theorems.

{verbs}

python -m paper VERB --help lists the flags of a verb.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, given without the program's name, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return dispatch("python -m paper", "paper.cli", VERBS, HELP, words)


if __name__ == "__main__":
    sys.exit(main())
