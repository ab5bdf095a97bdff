"""TWN's weights with DoReFa's features of 2 bits: TWN quantises no features."""

import twn
from dorefa import LEVELS as DOREFA_LEVELS
from dorefa import Features
from harness import Run

LEVELS = {**DOREFA_LEVELS, "weights": twn.LEVELS["weights"], "weight_bits": 1.58}
RATE, WEIGHT_DECAY = twn.RATE, twn.WEIGHT_DECAY


def train(run: Run) -> None:
    twn.train(run, Features)
