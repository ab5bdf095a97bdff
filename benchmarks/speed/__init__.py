"""Speed and memory, measured: the operator, the training step, truncation, exact convolutions.

Every figure stands beside a reference that was timed in turns with it, in the same process. The
functions return records; ``python -m benchmarks.speed`` prints them.
"""

from benchmarks.speed.clock import Effort, Times, about, race
from benchmarks.speed.operators import measure_exact, measure_operator
from benchmarks.speed.training_step import measure_partition, measure_step

__all__ = [
    "Effort",
    "Times",
    "about",
    "measure_exact",
    "measure_operator",
    "measure_partition",
    "measure_step",
    "race",
]
