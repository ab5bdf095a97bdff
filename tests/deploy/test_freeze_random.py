"""Random PyTorch networks: either ExportError, or the levels of eval() and numpy's integers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from freezes import frozen_of
from random_modules import BLOCKS, HEADS, generate, inputs
from test_rows import calls_of

from softstair.convert.ops import OPERATORS
from softstair.deploy.nodes import ExportError

NETWORKS = 840
"""Of which about six in ten have an integer form."""
NOT_EXPORTED = {"slice", "view", "written view"}
"""Constructs without an integer form."""
SLICE = 70


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("first", [14, *range(100, 100 + NETWORKS, SLICE)])
def test_random_networks_raise_or_are_equal(first: int) -> None:
    count = 14 if first == 14 else SLICE
    generated, accepted = Counter[str](), Counter[str]()
    for seed in range(first, first + count):
        network = generate(seed)
        generated.update(network.constructs)
        x = inputs(network)
        with torch.no_grad():
            net = network.quantised(x)
        try:
            frozen_of(net, network.shape, x, exact=network.exact_sums)
        except ExportError:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}: {sorted(network.constructs)}")
            raise
        accepted.update([*network.constructs, "networks"])
    assert accepted["networks"] >= 0.35 * count
    for name in (*BLOCKS, *HEADS):
        if name not in NOT_EXPORTED:
            assert accepted[name] > 0 or generated[name] < 9, name


@pytest.mark.nightly
def test_every_row_of_the_operator_table_is_frozen() -> None:
    missing = {row.name for row in OPERATORS if row.exports}
    for seed in range(10**4):
        network = generate(seed)
        if missing & (rows := {kind for kind, _ in calls_of(network.model)}):
            x = inputs(network)
            try:
                with torch.no_grad():
                    frozen_of(network.quantised(x), network.shape, x, exact=network.exact_sums)
                missing -= rows
            except ExportError:
                continue
        if not missing:
            return
    raise AssertionError(f"never frozen: {missing}")
