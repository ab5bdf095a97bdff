"""C99 of an integer network: a folder that needs nothing else.

>>> import softstair as ss, tempfile, torch
>>> from pathlib import Path
>>> from torch import nn
>>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32),
...                       nn.ReLU(), nn.Linear(32, 10))
>>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
>>> from softstair.deploy import integerise
>>> with tempfile.TemporaryDirectory() as folder:
...     plan = write(integerise(net, (1, 8, 8)), Path(folder))
...     sorted(path.name for path in Path(folder).iterdir() if "softstair" not in path.name)
['Makefile', 'cortex-m4', 'main.c', 'network.c', 'network.h', 'network_weights.h']
>>> plan.rows[1].weights, plan.rows[1].flash[0]
(2048, 512)
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from softstair import _files
from softstair.deploy.c.names import checked
from softstair.deploy.c.plan import Plan, Row
from softstair.deploy.c.source import sources
from softstair.deploy.network import IntegerNetwork

__all__ = ["Plan", "Row", "write"]


def write(network: IntegerNetwork, folder: Path, name: str = "network") -> Plan:
    """Writes the folder: <name>.h, <name>.c and its constants, the runtime that they include, a
    main.c and a Makefile, and what an emulated Cortex-M4 needs. Returns the memory plan.

    The folder may be a symbolic link. A link in it is replaced if it has the name of a file, and
    raises :class:`LinkError <softstair._files.LinkError>` if it has the name of a folder.
    """
    name = checked(name)
    made, plan = sources(network, name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in made.items():
        _files.write(folder / file, text)
    _copy(files("softstair.deploy.c") / "runtime", folder, name)
    return plan


def _copy(source: Traversable, folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    for one in source.iterdir():
        if one.is_dir():
            _copy(one, _files.refuse_link(folder / one.name), name)
        else:
            text = one.read_text(encoding="ascii")
            text = text.replace("@name@", name).replace("@NAME@", name.upper())
            _files.write(folder / one.name, text)
