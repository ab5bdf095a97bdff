"""``python -m softstair``: the command ``softstair``."""

import sys

from softstair.cli import main

if __name__ == "__main__":
    sys.exit(main())
