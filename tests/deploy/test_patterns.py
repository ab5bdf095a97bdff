"""Networks as people write them: trained a little, then exported and compared bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled import needs_compiler, program_of, run_in_program
from patterns import PATTERNS
from test_random_modules import by_onnx
from torch import Tensor

from softstair.deploy import IntegerNetwork, integerise, verify


def differing(network: IntegerNetwork, x: Tensor, results: dict[str, Tensor]) -> list[str]:
    """Return the nodes whose results differ from the integer network's."""
    expected = network.features(x)
    return [name for name in expected if not torch.equal(expected[name], results[name])]


@pytest.fixture(scope="module")
def networks() -> dict[str, IntegerNetwork]:
    """The integer networks of all patterns, which were compared with the trained ones."""
    integers = {}
    for name, pattern in PATTERNS.items():
        net, x = pattern.trained(), pattern.inputs()
        integers[name] = integerise(net, pattern.shape, pattern.zero, pattern.scale)
        comparison = verify(net, integers[name], x)["integer network"]
        assert comparison.mismatches == 0, f"{name}: {comparison}"
    return integers


def test_patterns_are_exact_in_onnx(networks: dict[str, IntegerNetwork]) -> None:
    for name, network in networks.items():
        x = PATTERNS[name].inputs()
        assert differing(network, x, by_onnx(network, x)) == [], name


@needs_compiler
def test_patterns_are_exact_in_c(networks: dict[str, IntegerNetwork], tmp_path: Path) -> None:
    program = program_of(dict(enumerate(networks.values())), tmp_path)
    for number, (name, network) in enumerate(networks.items()):
        x = PATTERNS[name].inputs()
        results = run_in_program(program, number, network, x)
        assert differing(network, x, results) == [], name
