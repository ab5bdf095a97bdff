"""Winograd's F(4×4, 3×3) over bit planes: where it is exact, fits into memory and is faster.

softstair_winograd.h has the formulas. The tiles of a layer are processed in strips of whole rows;
each strip transforms the weights again.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.layout import Features

SCRATCH = 2**20
"""Bytes that a layer may use while it runs, by default."""
TILE, LANES, POINTS, GAP, BLOCK = 4, 16, 36, 64, 64
"""As in softstair_winograd.h and softstair_vector.h."""
FEATURES, FILTERS = (10, 10, 10, 6, 6, 10), (1, 3, 3, 7, 7, 1)
"""Row sums of |Bᵀ| and |G|: in each dimension, −1, 0 and 1 become at most so large."""
OUTPUTS = ((6, 4, 4, 1, 1, 0), (0, 2, 2, 1, 1, 0), (0, 1, 1, 1, 1, 0), (0, 1, 1, 2, 2, 6))
"""|Aᵀ|."""
CYCLES_COUNTED = 0.0135
"""Cycles of a Neoverse-N1 per product of a feature and a bit of a weight, if bits are counted."""
CYCLES_PRODUCT, CYCLES_FEATURE, CYCLES_WEIGHT, CYCLES_SUM = 0.036, 14.0, 5.0, 40.0
"""Cycles per product of bytes, per tile and input, per input and output, per tile and output."""


class Tiling(NamedTuple):
    """Rows of tiles of a strip, and the bytes of its buffers."""

    strip: int
    features: int
    filters: int
    products: int
    sums: int

    @property
    def scratch(self) -> int:
        """Bytes of all buffers."""
        return self.features + self.filters + self.products + self.sums


def tiling(
    node: nodes.Sum, x: Features, output: Features, bits: int, scratch: int
) -> Tiling | None:
    """Return the strips of a layer with weights of 1 or 2 bits, or None if it is to count bits.

    They are as large as ``scratch`` bytes allow.
    """
    down = -(-output.height // TILE)
    if not _is_exact(node, x):
        return None
    for strips in range(1, down + 1):
        buffers = _buffers(-(-down // strips), x, output)
        if buffers.scratch <= scratch:
            return buffers if is_faster(strips, x, output, bits) else None
    return None


def _is_exact(node: nodes.Sum, x: Features) -> bool:
    """Whether windows are 3 × 3 with stride 1, and no intermediate result leaves 32 bits."""
    window = (*node.weight.shape[2:], *node.stride, *node.dilation, node.groups)
    products = np.array(FEATURES) * FILTERS
    largest = x.channels * int((np.array(OUTPUTS) @ products).max()) ** 2
    return window == (3, 3, 1, 1, 1, 1, 1) and largest < nodes.INT32_LIMIT


def _buffers(strip: int, x: Features, output: Features) -> Tiling:
    inputs, tiles = _padded(x.channels), _padded(strip * -(-output.width // TILE), 4)
    points = (tiles * inputs + GAP, LANES * inputs + GAP, 4 * LANES * tiles + GAP)
    features, filters, products = (POINTS * size for size in points)
    return Tiling(strip, features, filters, products, 4 * TILE * output.width * BLOCK)


def is_faster(strips: int, x: Features, output: Features, bits: int) -> bool:
    """Whether Winograd takes fewer cycles than counting bits."""
    inputs, outputs = _padded(x.channels), _padded(output.channels)
    tiles = -(-output.height // TILE) * -(-output.width // TILE)
    counted = CYCLES_COUNTED * bits * 9 * 32 * x.words * output.channels * output.positions
    products = CYCLES_PRODUCT * POINTS * _padded(tiles, 4) * inputs * outputs
    weights = CYCLES_WEIGHT * strips * inputs * outputs
    return products + weights + tiles * (CYCLES_FEATURE * inputs + CYCLES_SUM * outputs) < counted


def _padded(size: int, multiple: int = LANES) -> int:
    return -(-size // multiple) * multiple


def pack(weight: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], int]:
    """Pack weights of −1, 0 and 1, (outputs, 9, channels), for softstair_winograd.h.

    Returns the bytes and the bits per weight: 2, or 1 where no weight is 0. For 16 outputs, 4
    inputs (8 if a weight has one bit) and a tap, byte 4k + c has input c and outputs k, 4 + k, …
    """
    outputs, taps, channels = weight.shape
    is_binary = bool((weight != 0).all())
    code = np.pad(weight, ((0, -outputs % LANES), (0, 0), (0, -channels % LANES)))
    code = (code < 0 if is_binary else code & 3).astype(np.uint8)
    # (blocks of outputs, fours, output; taps; bytes, input fours of a byte, input)
    fours = 2 if is_binary else 1
    code = code.reshape(-1, 4, 4, taps, code.shape[2] // (4 * fours), fours, 4)
    code = code.transpose(0, 4, 3, 2, 6, 5, 1)
    bits = 1 if is_binary else 2
    shifts = (bits * np.arange(4 * fours, dtype=np.uint8)).reshape(fours, 4)
    return (code << shifts).sum((-1, -2)).astype(np.uint8).reshape(-1), bits
