"""What a generated program consists of: results in memory, constants, and operations.

A result is stored as bit planes, bytes or 32-bit words. Features of −1, 0 and 1 are bit planes if
all layers that read them count bits: those with ternary or binary weights over enough channels to
fill words. Other features are bytes, with a bias if they would not fit otherwise, halves of a word,
or words.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.combining import Multiply, Subtract
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError, Node, Shape, Stair
from softstair.deploy.target import Cpu

PLANES = {"SS_TERNARY": 2, "SS_SIGN": 1, "SS_BIT": 1}
WIDTHS = {"SS_BYTES": 1, "SS_HALVES": 2, "SS_WORDS": 4}
BIT_NODES = (nodes.Steps, nodes.Concat, nodes.Pad)
"""Nodes that choose how to store their results; poolings keep what they read."""
MAX_BITS_PER_CHANNEL = 1.5
"""Bits are counted if the words of a position have at most so many bits per channel."""


@dataclass(frozen=True)
class Features:
    """A result in memory, as in softstair_features.h."""

    kind: str
    channels: int
    height: int
    width: int
    bias: int = 0
    is_turned: bool = False
    """Whether the channels are the last axis of the result, not the first."""

    @property
    def positions(self) -> int:
        return self.height * self.width

    @property
    def planes(self) -> int:
        """Number of bit planes, 0 for bytes and words."""
        return PLANES.get(self.kind, 0)

    @property
    def words(self) -> int:
        """Words per position and plane."""
        return -(-self.channels // 32)

    @property
    def size(self) -> int:
        """Size in bytes."""
        if self.planes:
            return 4 * self.planes * self.positions * self.words
        return self.positions * self.channels * WIDTHS[self.kind]


@dataclass(frozen=True)
class MemoryLayout:
    """The layout of every node's result, by the node's name."""

    features: dict[str, Features]  # a Flatten without a copy has its input's
    home: dict[str, str]  # the node in whose memory it lies
    cpu: Cpu = "arm"
    turned: dict[int, Features] = field(default_factory=dict)
    """Copies with channels first or last, by numbers after those of the nodes."""


def layout(network: FrozenNetwork, cpu: Cpu) -> MemoryLayout:
    """Choose the layout of every node's result: for x86 without bit planes, bytes unsigned."""
    memory, is_signed = MemoryLayout({}, {}, cpu), cpu != "x86"
    for node in network.nodes:
        is_turned = _is_turned(network, node, memory)
        size = _size(node.name, network.sizes[node.name], is_turned)
        memory.home[node.name] = node.name
        if isinstance(node, nodes.Flatten) and _needs_no_copy(network, node):
            is_turned = False  # of the input, if at all
            home = memory.home[node.inputs[0]]
            memory.home[node.name], features = home, memory.features[home]
        elif isinstance(node, nodes.Sum | Multiply):
            features = Features("SS_WORDS", *size)
        elif isinstance(node, nodes.MaxPool | nodes.Select | nodes.PixelShuffle):
            before = memory.features[node.inputs[0]]
            features = Features(before.kind, *size, before.bias)
        elif is_signed and isinstance(node, BIT_NODES) and (kind := _planes(network, node)):
            features = Features(kind, *size)
        else:
            kind, bias = _numbers(node, is_signed)
            features = Features(kind, *size, bias)
        memory.features[node.name] = replace(features, is_turned=features.is_turned or is_turned)
    return memory


def is_over_places(network: FrozenNetwork, node: Node) -> bool:
    """Return whether a node is a linear layer that is applied to the last of several axes."""
    is_linear = isinstance(node, nodes.Sum) and node.weight.dim() == 2
    return is_linear and len(network.sizes[node.inputs[0]]) > 1


def turned(x: Features, shape: Shape, is_turned: bool) -> Features:
    """Return a copy of a node's result with the channels last, or first."""
    channels, height, width = _size("", shape, is_turned)
    return replace(x, channels=channels, height=height, width=width, is_turned=is_turned)


def _is_turned(network: FrozenNetwork, node: Node, memory: MemoryLayout) -> bool:
    """Return whether the channels of a result are its last axis."""
    axes = len(network.sizes[node.name])
    if isinstance(node, Stair):
        return node.axis == axes > 1
    if isinstance(node, nodes.Add | Multiply | Subtract | nodes.Lookup):
        same = len({network.sizes[name] for name in node.inputs}) == 1
        return same and axes > 1 and memory.features[node.inputs[0]].is_turned
    return is_over_places(network, node)


def first_places(network: FrozenNetwork) -> dict[str, int]:
    """Return the place of the first number of each output, by the name of its node."""
    places, at = {}, 0
    for head in network.heads.values():
        places[head.name] = at
        at += math.prod(network.sizes[head.name])
    return places


def _size(name: str, shape: Shape, is_turned: bool) -> tuple[int, int, int]:
    """Return channels, height and width."""
    shape = (shape[-1], *shape[:-1]) if is_turned else shape
    if len(shape) > 3 or any(not 0 < size < 2**31 for size in shape):
        raise ExportError.of(name, f"C has no features of shape {shape}", "Flatten before it")
    height, width = (1, 1, *shape[1:])[-2:]
    return int(shape[0]), int(height), int(width)


def _needs_no_copy(network: FrozenNetwork, node: nodes.Flatten) -> bool:
    """Whether no reader needs the flattened order: weights can be reordered instead."""
    if math.prod(network.sizes[node.inputs[0]][1:]) == 1:
        return True
    return all(isinstance(user, nodes.Sum) for user in network.users(node.name))


def _planes(network: FrozenNetwork, node: nodes.Steps | nodes.Concat | nodes.Pad) -> str | None:
    """Return the kind of bit planes for the values of a node, or None."""
    levels = set(node.levels) if isinstance(node, nodes.Steps) else {node.low, 0, node.high}
    if not levels <= {-1, 0, 1}:
        return None
    sums = list(_sums_over(network, node.name))
    if not sums or not all(_counts_bits(network, total) for total in sums):
        return None
    if levels == {-1, 1}:
        return "SS_SIGN"
    return "SS_BIT" if levels == {0, 1} else "SS_TERNARY"


def _sums_over(network: FrozenNetwork, name: str) -> Iterator[nodes.Sum]:
    """Yield the sums over these features, pooled or flattened before or not."""
    for user in network.users(name):
        if isinstance(user, nodes.Sum):
            yield user
        same = isinstance(user, nodes.Flatten) and _needs_no_copy(network, user)
        if isinstance(user, nodes.MaxPool) or same:
            yield from _sums_over(network, user.name)


def _counts_bits(network: FrozenNetwork, node: nodes.Sum) -> bool:
    source = network.node(node.inputs[0])
    while isinstance(source, nodes.Flatten):
        source = network.node(source.inputs[0])
    channels = network.sizes[source.name][-1 if is_over_places(network, node) else 0]
    full = -(-channels // 32) * 32 <= MAX_BITS_PER_CHANNEL * channels
    return full and node.groups == 1 and bool((node.weight.long().abs() <= 1).all())


def _numbers(node: nodes.Node, is_signed: bool) -> tuple[str, int]:
    """Return the kind and bias of integers: bytes if they hold them and 0, else halves or words."""
    low, high = min(node.low, 0), max(node.high, 0)
    if high - low > 255:
        return "SS_HALVES" if nodes.bits(low, high) <= 16 else "SS_WORDS", 0
    fits = low >= -128 and high <= 127
    return "SS_BYTES", low if not is_signed else 0 if fits else low + 128


@dataclass(frozen=True)
class Constant:
    """An array in flash; ``part`` is "weights" or "thresholds", where the memory plan counts it."""

    name: str
    values: npt.NDArray[Any]
    part: str

    def text(self) -> str:
        """Return its definition."""
        values = self.values.reshape(-1)
        is_bits = values.dtype == np.uint32
        literals = (f"0x{value:08x}U" if is_bits else str(value) for value in values.tolist())
        head = f"static const {values.dtype.name}_t {self.name}[{len(values)}]"
        return f"{head} = {{\n{chr(10).join(in_lines(literals))}\n}};"


def in_lines(literals: Iterable[str]) -> Iterator[str]:
    """Yield lines of literals, each followed by a comma."""
    line = "   "
    for literal in literals:
        if len(line) + len(literal) + 2 > 100:
            yield line
            line = "   "
        line += f" {literal},"
    yield line


def structure(kind: str, name: str, /, **fields: Any) -> str:
    """Return the definition of a constant structure; fields that are None stay 0."""
    lines = [f"    .{field} = {value}," for field, value in fields.items() if value is not None]
    return "\n".join([f"static const {kind} {name} = {{", *lines, "};"])


@dataclass(frozen=True)
class Operation:
    """A call of the generated program; nodes are given by their numbers."""

    number: int  # the node whose result it writes; its C names begin with layer_<number>
    nodes: tuple[int, ...]  # all nodes that it computes
    reads: tuple[int, ...]  # the nodes whose results it reads
    calls: tuple[str, ...]  # lines of C
    how: str  # description for the memory plan
    constants: tuple[Constant, ...] = ()
    structures: tuple[str, ...] = ()  # definitions of the structures that the calls take
    scratch: int = 0  # bytes of memory that it needs while it runs
    weights: int = 0  # number of weights

    def part(self, name: str) -> int:
        """Return the bytes of one kind of constants."""
        return sum(constant.values.nbytes for constant in self.constants if constant.part == name)


def window_fields(
    x: Features,
    output: Features,
    kernel: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape = (1, 1),
) -> dict[str, int]:
    """Return the fields of ss_window in order; a window of one axis has the height 1."""
    names = "height width rows columns kernel_y kernel_x stride_y stride_x padding_y padding_x"
    sizes = (x.height, x.width, output.height, output.width)
    windows = ((1, *kernel), (1, *stride), (0, *padding), (1, *dilation))
    numbers = map(int, (*sizes, *(size for window in windows for size in window[-2:])))
    return dict(zip([*names.split(), "dilation_y", "dilation_x"], numbers, strict=True))
