"""Entry point of the command, outside the package: importing the package takes seconds.

Ctrl-C during the import ends with a message and exit code 130.
"""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from softstair.cli import main as run
    except KeyboardInterrupt:
        print("softstair: interrupted before it began.", file=sys.stderr)
        return 130
    return run()
