"""Where Triton is not installed, the files that import it cannot be searched for examples."""

from importlib.util import find_spec

collect_ignore_glob: list[str] = []
if find_spec("triton") is None:
    collect_ignore_glob += ["src/softstair/kernels/triton/[!_]*.py", "src/softstair/fused/[!_]*.py"]


def pytest_report_header() -> str | None:
    """Says what is left out."""
    return (
        f"triton is not installed: {collect_ignore_glob} left out" if collect_ignore_glob else None
    )
