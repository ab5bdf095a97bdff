"""Where the command ``softstair`` begins: beside the package, whose import takes seconds.

Whoever interrupts it in that time gets a sentence, as at any other.
"""

import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        from softstair.cli import main as run
    except KeyboardInterrupt:
        print(
            "softstair: interrupted before it began: give the same command again.", file=sys.stderr
        )
        return 130
    return run()
