"""Let the tests of this folder use the networks of tests/deploy."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "deploy"))
