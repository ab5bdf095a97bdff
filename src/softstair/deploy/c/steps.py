"""Where the sums of a layer go: to words, or through thresholds to levels."""

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.features import Features
from softstair.deploy.c.pack import narrowest
from softstair.deploy.c.text import Constant, structure
from softstair.deploy.integer import ExportError

__all__ = ["kept", "stepped"]


def kept(number: int) -> str:
    """The sink of sums that are kept as they are."""
    fields = {"keep": "ss_keep_sums", "out": f"&layer_{number}"}
    return structure("ss_sink", f"layer_{number}_sink", **fields)


def stepped(
    number: int,
    node: nodes.Steps,
    out: Features,
    beside: int | None,
    traced: int | None,
) -> tuple[tuple[Constant, ...], str]:
    """The thresholds of a stair, and the sink that sums go into.

    beside  the number of the node that chooses among them; traced: of the sums that a traced build
    keeps
    """
    table, levels = node.thresholds.numpy().astype(np.int64), np.array(node.levels)
    counts_bits = bool(out.planes) and beside is None
    if counts_bits:
        table = table.T  # all channels for the first step, then for the next
    else:
        table, levels = _halving(table, levels)
    thresholds = narrowest(table)
    if thresholds is None:
        raise ExportError(f"the thresholds of {node.name} do not fit into 32 bits.")
    keep = "ss_keep_planes" if counts_bits else "ss_keep_levels"
    name = f"layer_{number}"
    constants = [Constant(f"{name}_thresholds", thresholds, "thresholds")]
    if not counts_bits:
        stored = (levels - out.bias).astype(np.int32)
        constants.append(Constant(f"{name}_levels", stored, "thresholds"))
    text = structure(
        "ss_sink",
        f"{name}_sink",
        keep=keep if beside is None else "ss_keep_beside",
        out=f"&{name}",
        sums=None if traced is None else f"SS_TRACED(&layer_{traced})",
        thresholds=f"{name}_thresholds",
        width=thresholds.itemsize,
        steps=len(node.levels) - 1 if counts_bits else len(levels) - 1,
        levels=None if counts_bits else f"{name}_levels",
        beside=None if beside is None else f"&layer_{beside}",
        first=None if beside is None else int(node.first),
        values=None if beside is None else table.shape[1],
    )
    return tuple(constants), text


def _halving(
    thresholds: npt.NDArray[np.int64], levels: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One less than a power of two of thresholds: whoever reaches the last reaches its copies too,
    which lead to the same level.

    >>> _halving(np.array([[3, 5]]), np.array([0, 1, 2]))
    (array([[3, 5, 5]]), array([0, 1, 2, 2]))
    """
    more = 2 ** (len(levels) - 1).bit_length() - len(levels)
    copies = np.repeat(thresholds[..., -1:], more, axis=-1)
    last = np.repeat(levels[-1:], more)
    return np.concatenate([thresholds, copies], axis=-1), np.concatenate([levels, last])
