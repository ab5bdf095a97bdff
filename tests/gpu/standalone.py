"""Runs the tests of a file where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_…``."""

import sys
from collections.abc import Mapping


def main(names: Mapping[str, object]) -> None:
    """Run every test function, or those whose names contain an argument of the command line."""
    failures, selected = 0, sys.argv[1:] or ["test_"]
    for name, function in list(names.items()):
        if not name.startswith("test_") or not any(part in name for part in selected):
            continue
        try:
            function()  # type: ignore[operator]
            print("passed", name, flush=True)
        except Exception as error:
            failures += 1
            print("FAILED", name, type(error).__name__, str(error)[:1500], flush=True)
    sys.exit(failures > 0)
