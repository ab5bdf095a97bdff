"""`python -m softstair`: the same as the command, once the package is imported."""

import sys

from softstair.cli import main

if __name__ == "__main__":
    sys.exit(main())
