"""Lowers and runs saved networks in one process of a Python that has executorch.

    python pte_by_hand.py FOLDER PATH...

Each ``FOLDER/N.safetensors`` is compared with its .pte on ``FOLDER/N.npy``; a line of JSON says
what was compared and how many numbers differ, or why the network was refused. Packages that this
Python lacks are found in the paths.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path += sys.argv[2:]

from softstair import load_frozen
from softstair.deploy import ExportError, pte
from softstair.deploy.comparison import Comparison, results_of
from softstair.deploy.loaders import executorch

for file in sorted(Path(sys.argv[1]).glob("*.safetensors")) if sys.argv[2:] else ():
    network, x = load_frozen(file), torch.from_numpy(np.load(file.with_suffix(".npy")))
    try:
        file.with_suffix(".pte").write_bytes(pte.content(network, trace=True))
    except ExportError as error:
        print(json.dumps([file.stem, 0, str(error)]), flush=True)
        continue
    actual = executorch(str(file.with_suffix(".pte")))(pte.encode(network, x))
    found = Comparison()
    results = pte.decoder(network, file)(actual)
    found.add_results(results_of(network, x), results, torch.arange(len(x)))
    assert {*network.stairs} <= {*found.compared}
    print(json.dumps([file.stem, sum(found.compared.values()), found.mismatches]), flush=True)
