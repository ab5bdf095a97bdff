"""softstair: the preset ``best-cifar10-ternary`` with other bits, without a teacher.

Rates, clipping and static noise are those of the preset; data, augmentation, batch, epochs and the
float start are those of the baselines. Quanta are fixed: those of int4 as in its preset, that of
uint2 at the least squared error for normal features. ``learned`` quanta are learned, as in LSQ.
"""

import tempfile
from dataclasses import replace
from typing import Any

from benchmarks.baselines.harness import Run
from softstair.train import fit as train_run, preset, trained_network

PRESET, INT4 = preset("best-cifar10-ternary"), preset("best-cifar10-int4")
UINT2: dict[str, Any] = {"features": "uint2", "feature_quantum": 0.65}
CHANGES: dict[str, dict[str, Any]] = {
    "ternary": {},
    "ternary/float": {"features": "float"},
    "ternary/uint2": UINT2,
    "int2": {"weights": "int2", "weight_quantum": 0.5, **UINT2},
    "int4": {name: INT4[name] for name in PRESET.differences(INT4)},
}
RATES = dict.fromkeys(CHANGES, PRESET.optimiser.learning_rate)
WEIGHT_DECAY = PRESET.optimiser.weight_decay


def train(run: Run, bits: str, learned: bool = False) -> None:
    changes = {"bits": bits, "quanta": "learned"} if learned else CHANGES[bits]
    if run.first_layer == "float":
        changes = {**changes, "first_layer": "float"}
    given = run.recipe
    steps = replace(PRESET.run, epochs=given.run.epochs, batch=given.run.batch, seed=given.run.seed)
    steps = replace(steps, precision=given.run.precision, statistics=given.run.statistics)
    network = replace(PRESET.network, model=given.network.model)
    recipe = replace(PRESET, data=given.data, network=network, run=steps).replace(
        learning_rate=run.rate,
        weight_decay=run.weight_decay,
        init_from=None if run.start is None else str(run.start),
        teacher=None,
        **changes,
    )
    with tempfile.TemporaryDirectory() as out:
        summary = train_run(recipe, out, device=str(run.device), dataset=run.dataset)
        run.network = trained_network(out, run.dataset).to(run.device)
    run.seconds = summary["seconds"]
