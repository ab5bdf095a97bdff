"""softstair with learned quanta, those of features fitted before training: see ``ours.py``."""

from benchmarks.baselines import ours
from benchmarks.baselines.harness import Run

WEIGHT_DECAY = ours.WEIGHT_DECAY
RATES = {bits: ours.RATES[bits] for bits in ("ternary", "ternary/uint2", "int2", "int4")}


def train(run: Run, bits: str) -> None:
    ours.train(run, bits, learned=True)
