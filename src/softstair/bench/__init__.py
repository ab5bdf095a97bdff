"""How fast it is, measured: the operator, the training step, and what truncation saves.

Every figure stands beside a twin that was measured in turns with it, in the same run. The functions
here return plain records; ``softstair bench`` shows them.
"""

from softstair.bench.clock import Times, race
from softstair.bench.effort import Effort
from softstair.bench.exact import measure as measure_exact
from softstair.bench.machine import about
from softstair.bench.operator import measure as measure_operator
from softstair.bench.partition import measure as measure_partition
from softstair.bench.step import measure as measure_step

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
