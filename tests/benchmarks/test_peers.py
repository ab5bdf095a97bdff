"""`benchmarks/peers.py`, with softstair alone."""

import csv
from pathlib import Path

import pytest

from benchmarks import peers

SMALL = """
from collections import OrderedDict
from torch import nn

def network(classes, shape):
    block = nn.Sequential(nn.Conv2d(1, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    body = nn.Sequential(block, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    return nn.Sequential(OrderedDict(features=body, classifier=nn.Linear(4, classes)))
"""


def test_two_steps_give_a_row_and_an_exact_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "small_network_of_peers.py").write_text(SMALL)
    monkeypatch.setitem(peers.NETWORKS, "digits", ("small_network_of_peers:network", "none"))
    out, starts = tmp_path / "peers.csv", tmp_path / "starts"
    size = ("--limit", 64, "--batch", 16, "--epochs", 1, "--float-epochs", 1)
    only = ("--methods", "softstair", "--bits", "int4", "ternary", "--seeds", 0, "--folds", 0)
    assert peers.main([*map(str, (*only, *size, "--out", out, "--starts", starts))]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["bits"] for row in rows] == ["int4", "ternary"]
    for row in rows:
        assert (row["deployed"], row["differ"]) == ("integers", "0")
        assert int(row["compared"]) == 32 * 4 * 7 * 7
        assert 0 <= float(row["trained"]) <= 100
    assert len(list(starts.iterdir())) == 1  # both start from one float network
