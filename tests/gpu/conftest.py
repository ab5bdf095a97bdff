"""Skip the tests of this folder where there is no CUDA."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # Of what has no kernel, and is compared all the same.
            item.add_marker(pytest.mark.filterwarnings("ignore:Triton (computes|needs)"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
