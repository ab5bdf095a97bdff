"""``python -m softstair``: the command ``softstair``."""

import sys

from softstair_command import main

if __name__ == "__main__":
    sys.exit(main())
