"""The measurements on CUDA: steps are captured, and a byte per element is saved."""

import torch
from standalone import main

from benchmarks.speed import Effort, measure_operator, measure_partition, measure_step

SMALL = Effort(repeats=2, calls=10, seconds=0.0, elements=1 << 16, quick=True)


def test_operator() -> None:
    rows = measure_operator("cuda", SMALL, dtypes=[torch.bfloat16, torch.float32])
    assert len(rows) == 32
    for row in rows:
        size = {"bfloat16": 2, "float32": 4}[row.dtype]
        kept = 1 if row.noise == "uniform" else size
        assert row.kept == kept, row
        assert row.backward_bytes == (2 * size + kept) * row.elements
        assert 0 < row.forward_share < 3
        assert 0 < row.backward_share < 3


def test_step() -> None:
    report = measure_step("cuda", "digits", batch=32, effort=SMALL)
    treatments = {row.name: row.treatment for row in report.rows}
    assert not set(report.skipped) - {"Brevitas"}, report.skipped
    assert treatments["float compiled"] == "compiled, captured"
    assert treatments["float"] == "captured"
    assert treatments["naive"] == "eager"
    assert all("captured" in treatments[name] for name in ("expectation", "mode", "random", "hard"))
    assert all(row.memory > 0 for row in report.rows)


def test_partition() -> None:
    report = measure_partition("cuda", "digits", batch=32, effort=SMALL)
    assert [phase.annealed for phase in report.phases] == [(), (0,), (0, 1)]
    assert all(phase.capture > 0 for phase in report.phases)
    assert "captured" in report.treatment


if __name__ == "__main__":
    main(globals())
