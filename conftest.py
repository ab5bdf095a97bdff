"""Test lanes, and which source files are searched for examples."""

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

# These modules have no examples, and the frameworks that they import take seconds.
collect_ignore_glob = ["src/softstair/integrations/[!_]*.py"]
# Without Triton, the modules that import it cannot be searched for examples.
WITHOUT_TRITON = [
    "src/softstair/kernels/triton/[!_]*.py",
    "src/softstair/_accelerate/[!_]*.py",
]
HAS_TRITON = find_spec("triton") is not None
if not HAS_TRITON:
    collect_ignore_glob += WITHOUT_TRITON


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--lane``."""
    parser.addoption(
        "--lane",
        choices=("quick", "default", "nightly"),
        default="default",
        help="quick: tests marked quick; default: all but nightly ones; nightly: everything",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set how many examples hypothesis tries: all of them in the nightly lane alone."""
    nightly = config.getoption("lane") == "nightly"
    settings.register_profile("lane", deadline=None, max_examples=100 if nightly else 8)
    settings.load_profile("lane")


def pytest_report_header(config: pytest.Config) -> str:
    """Name the lane and what is left out."""
    left_out = "" if HAS_TRITON else f"; triton is not installed: {WITHOUT_TRITON} left out"
    return f"lane: {config.getoption('lane')}{left_out}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without quick tests in the quick lane: importing them takes most of its time."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.getoption("lane") != "quick" or not is_test:
        return None
    return None if "mark.quick" in collection_path.read_text(encoding="utf-8") else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other lanes; tests named by a node id always run.

    ``@pytest.mark.nightly`` puts a test into the nightly lane. ``@pytest.mark.nightly(keep=n)``
    leaves n of its parameter sets, evenly spaced, in the default lane.
    """
    lane = config.getoption("lane")
    if lane == "nightly" or any("::" in argument for argument in config.args):
        return
    selected: list[pytest.Item] = []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        selected += _default_lane(list(group))
    if lane == "quick":
        selected = [item for item in selected if item.get_closest_marker("quick")]
    if len(selected) < len(items):
        chosen = set(selected)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = selected


def _default_lane(group: list[pytest.Item]) -> list[pytest.Item]:
    """Return the parameter sets of one test that are in the default lane."""
    nightly = [item for item in group if item.get_closest_marker("nightly")]
    if not nightly:
        return group
    keep = max(item.get_closest_marker("nightly").kwargs.get("keep", 0) for item in nightly)  # type: ignore[union-attr]
    keep = min(keep, len(nightly))
    kept = {id(nightly[index * len(nightly) // keep]) for index in range(keep)}
    return [item for item in group if id(item) in kept or not item.get_closest_marker("nightly")]
