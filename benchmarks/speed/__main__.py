"""``python -m benchmarks.speed``: see ``command.py``."""

import sys

from softstair_command import call

if __name__ == "__main__":
    sys.exit(call("python -m benchmarks.speed", "benchmarks.speed.command", sys.argv[1:]))
