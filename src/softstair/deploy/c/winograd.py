"""Winograd's algorithm: where it is exact, fits into memory and is faster.

F(4×4, 3×3) is for bit planes, and F(2×2, 3×3) for bytes with weights of up to 4 bits; formulas are
in softstair_winograd.h. Tiles are processed in strips of whole rows, and each strip transforms the
weights again.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.layout import Features
from softstair.deploy.target import Cpu

SCRATCH = 2**20  # bytes that a layer may use while it runs
SCRATCH_OF: dict[Cpu, int] = {"arm": SCRATCH, "x86": 2**14}  # by default; tiles are slow on x86
LANES, GAP, BLOCK = 16, 64, 64  # as in softstair_winograd.h and softstair_vector.h
CYCLES_COUNTED, CYCLES_MULTIPLIED = 0.0135, 0.05
"""Cycles of a Neoverse-N1 per product of a feature and a bit of a weight, if bits are counted; per
product of bytes in windows."""
CYCLES_PRODUCT, CYCLES_FEATURE, CYCLES_WEIGHT, CYCLES_SUM = 0.036, 0.4, 0.14, 1.1
"""Cycles per product of bytes; per point of a tile and input, input and output, tile and output."""


class Scheme(NamedTuple):
    """F(tile × tile, 3 × 3): row sums of |Bᵀ| and |G|, and |Aᵀ|.

    In each dimension, features and weights of −1, 0 and 1 become at most as large as these sums.
    """

    tile: int
    features: tuple[int, ...]
    filters: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def points(self) -> int:
        """Products of a tile."""
        return len(self.features) ** 2


LARGE = Scheme(
    4,
    (10, 10, 10, 6, 6, 10),
    (1, 3, 3, 7, 7, 1),
    ((6, 4, 4, 1, 1, 0), (0, 2, 2, 1, 1, 0), (0, 1, 1, 1, 1, 0), (0, 1, 1, 2, 2, 6)),
)
SMALL = Scheme(2, (2, 2, 2, 2), (2, 3, 3, 2), ((1, 1, 1, 0), (0, 1, 1, 1)))


class Tiling(NamedTuple):
    """Rows and columns of a tile, rows of tiles of a strip, and the bytes of its buffers."""

    tile: int
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
    node: nodes.Sum, x: Features, output: Features, span: tuple[int, int], bits: int, scratch: int
) -> Tiling | None:
    """Return the largest strips in ``scratch`` bytes, or None if not exact or not faster."""
    scheme = LARGE if x.planes else SMALL
    down = -(-output.height // scheme.tile)
    if not _is_exact(scheme, node, x, span):
        return None
    for strips in range(1, down + 1):
        buffers = _buffers(scheme, -(-down // strips), x, output)
        if buffers.scratch <= scratch:
            return buffers if is_faster(scheme, strips, x, output, bits) else None
    return None


def _is_exact(scheme: Scheme, node: nodes.Sum, x: Features, span: tuple[int, int]) -> bool:
    """Whether windows are 3 × 3 with stride 1, and no number leaves its byte, nor a sum 32 bits."""
    window = (*node.weight.shape[2:], *node.stride, *node.dilation, node.groups)
    if window != (3, 3, 1, 1, 1, 1, 1) or x.bias or (not x.planes and x.channels % LANES):
        return False
    feature, weight = max(-span[0], span[1]), int(node.weight.long().abs().max())
    products = np.array(scheme.features) * scheme.filters
    largest = x.channels * int((np.array(scheme.outputs) @ products).max()) ** 2
    in_bytes = max(max(scheme.features) ** 2 * feature, max(scheme.filters) ** 2 * weight) <= 127
    return in_bytes and largest * feature * weight < nodes.INT32_LIMIT


def _buffers(scheme: Scheme, strip: int, x: Features, output: Features) -> Tiling:
    inputs, tiles = _padded(x.channels), _padded(strip * -(-output.width // scheme.tile), 4)
    points = (tiles * inputs + GAP, LANES * inputs + GAP, 4 * LANES * tiles + GAP)
    features, filters, products = (scheme.points * size for size in points)
    sums = 4 * scheme.tile * output.width * BLOCK
    return Tiling(scheme.tile, strip, features, filters, products, sums)


def is_faster(scheme: Scheme, strips: int, x: Features, output: Features, bits: int) -> bool:
    """Whether Winograd takes fewer cycles than counting bits or multiplying bytes."""
    inputs, outputs = _padded(x.channels), _padded(output.channels)
    tiles = -(-output.height // scheme.tile) * -(-output.width // scheme.tile)
    each = CYCLES_COUNTED * bits * 32 * x.words if x.planes else CYCLES_MULTIPLIED * inputs
    products = CYCLES_PRODUCT * _padded(tiles, 4) * inputs * outputs
    weights = CYCLES_WEIGHT * strips * inputs * outputs
    others = tiles * (CYCLES_FEATURE * inputs + CYCLES_SUM * outputs)
    direct = each * 9 * output.channels * output.positions
    return scheme.points * (products + weights + others) < direct


def _padded(size: int, multiple: int = LANES) -> int:
    return -(-size // multiple) * multiple


def pack(weight: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], int]:
    """Pack weights from −8 to 7, (outputs, 9, channels), for softstair_winograd.h.

    Returns the bytes and the bits per weight: 1 if all are −1 or 1, 2 from −2 to 1, or 4.
    """
    outputs, taps, channels = weight.shape
    bits = weight_bits(weight)
    code = np.pad(weight, ((0, -outputs % LANES), (0, 0), (0, -channels % LANES)))
    code = (code < 0 if bits == 1 else code & (2**bits - 1)).astype(np.uint8)
    # (blocks of outputs, fours, output; taps; input fours, input) → fours of inputs and of outputs
    code = code.reshape(-1, 4, 4, taps, code.shape[2] // 4, 4).transpose(0, 4, 1, 3, 2, 5)
    code = code.reshape(-1, 8 // bits, taps, LANES)
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)[:, None, None]
    return (code << shifts).sum(1).astype(np.uint8).reshape(-1), bits


def weight_bits(weight: npt.NDArray[np.int64]) -> int:
    """Return the bits in which :func:`pack` stores weights, or 8 if it cannot."""
    if bool((np.abs(weight) == 1).all()):
        return 1
    return next((n for n in (2, 4) if -(2**n) <= 2 * weight.min() and 2 * weight.max() < 2**n), 8)
