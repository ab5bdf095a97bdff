"""What the tests of training share: one thread, a process that forks, a quiet clock."""

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks on a busy machine are fastest so, and sums come out the same.

    torch switches oneDNN off for good where bfloat16 is beyond it, and sums come out otherwise.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(True)
    yield
    torch.set_num_threads(before)
    torch._C._set_mkldnn_enabled(True)


@pytest.fixture(autouse=True, scope="module")
def _narrow(narrow_digits: None) -> None:
    """Networks that cost little, but for children of `warm`, which are struck while they train."""


@pytest.fixture(autouse=True)
def _training_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw and describe networks only where it is looked at: both take as long as a few steps."""
    request.getfixturevalue("blank_picture")
    if request.path.name not in ("test_named_stairs.py", "test_network.py"):
        describe = lambda network, recipe, dataset: ("a network", None)
        monkeypatch.setattr(import_module("softstair.train.fit"), "describe_network", describe)


@pytest.fixture(scope="session")
def warm() -> Iterator["object"]:
    """A process with everything imported, whose children begin at once."""
    from warm import Warm

    with Warm() as server:
        yield server
