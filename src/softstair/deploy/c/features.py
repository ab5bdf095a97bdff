"""How the result of each node lies in memory: as planes of bits, as bytes or as words.

Features of −1, 0 and 1 are planes of bits where the layers that take them count bits: those whose
weights are ternary or binary, over enough channels to fill words. Everything else is bytes, with a
bias if they would not fit otherwise, or words of 32 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from softstair.deploy import nodes
from softstair.deploy.integer import ExportError
from softstair.deploy.network import IntegerNetwork

__all__ = ["Features", "Layout", "layout"]

PLANES = {"SS_TERNARY": 2, "SS_SIGN": 1, "SS_BIT": 1}
SPARE = 1.5
"""Bits of words over channels, up to which bits are counted."""


@dataclass(frozen=True)
class Features:
    """As softstair_features.h has them."""

    kind: str
    channels: int
    height: int
    width: int
    bias: int = 0

    @property
    def places(self) -> int:
        return self.height * self.width

    @property
    def planes(self) -> int:
        """How many there are, 0 for bytes and words."""
        return PLANES.get(self.kind, 0)

    @property
    def words(self) -> int:
        """Of a place, in one plane."""
        return -(-self.channels // 32)

    @property
    def size(self) -> int:
        """In bytes."""
        if self.planes:
            return 4 * self.planes * self.places * self.words
        return self.places * self.channels * (1 if self.kind == "SS_BYTES" else 4)


@dataclass(frozen=True)
class Layout:
    """features  of each node, by its name; a flattening that only looks otherwise has its input's
    home      the node in whose memory the result of each lies
    """

    features: dict[str, Features]
    home: dict[str, str]


def layout(network: IntegerNetwork) -> Layout:
    """Where whole numbers are bits, bytes or words."""
    found = Layout({}, {})
    for node in network.nodes:
        size = _size(node.name, network.sizes[node.name])
        home = node.name
        if isinstance(node, nodes.Flatten) and _only_looks(network, node):
            home = found.home[node.inputs[0]]
            found.features[node.name] = found.features[home]
        elif isinstance(node, nodes.Sum):
            found.features[node.name] = Features("SS_WORDS", *size)
        elif isinstance(node, nodes.MaxPool | nodes.Expand):
            before = found.features[node.inputs[0]]
            found.features[node.name] = Features(before.kind, *size, before.bias)
        else:
            kind = _planes(network, node) if isinstance(node, nodes.Steps) else None
            bias = 0
            if kind is None:
                kind, bias = _numbers(node)
            found.features[node.name] = Features(kind, *size, bias)
        found.home[node.name] = home
    return found


def _size(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) not in (1, 3) or any(not 0 < one < 2**31 for one in shape):
        raise ExportError(
            f"{name} gives features of shape {tuple(shape)}, which C is not written for: give it "
            "channels, or channels, height and width."
        )
    channels, height, width = (*shape, 1, 1)[:3]
    return int(channels), int(height), int(width)


def _users(network: IntegerNetwork, name: str) -> Iterator[nodes.Node]:
    return (node for node in network.nodes if name in node.inputs)


def _only_looks(network: IntegerNetwork, node: nodes.Flatten) -> bool:
    """Whether nobody needs the flattened order: weights can be put into another at no cost."""
    if len(network.sizes[node.inputs[0]]) == 1:
        return True
    linear = (nodes.Sum, nodes.Scores)
    return all(isinstance(user, linear) for user in _users(network, node.name))


def _planes(network: IntegerNetwork, node: nodes.Steps) -> str | None:
    levels = set(node.levels)
    if not levels <= {-1, 0, 1}:
        return None
    sums = list(_sums(network, node.name))
    if not sums or not all(_counts_bits(network, one) for one in sums):
        return None
    if levels == {-1, 1}:
        return "SS_SIGN"
    return "SS_BIT" if levels == {0, 1} else "SS_TERNARY"


def _sums(network: IntegerNetwork, name: str) -> Iterator[nodes.Sum]:
    """The sums that are over these features, be they pooled or looked at otherwise before."""
    for user in _users(network, name):
        if isinstance(user, nodes.Sum):
            yield user
        looks = isinstance(user, nodes.Flatten) and _only_looks(network, user)
        if isinstance(user, nodes.MaxPool) or looks:
            yield from _sums(network, user.name)


def _counts_bits(network: IntegerNetwork, node: nodes.Sum) -> bool:
    taken = node.inputs[0]
    producer = next(one for one in network.nodes if one.name == taken)
    while isinstance(producer, nodes.Flatten):
        taken = producer.inputs[0]
        producer = next(one for one in network.nodes if one.name == taken)
    channels = network.sizes[taken][0]
    full = -(-channels // 32) * 32 <= SPARE * channels
    return full and node.groups == 1 and bool((node.weight.abs() <= 1).all())


def _numbers(node: nodes.Node) -> tuple[str, int]:
    """Bytes if they and 0 have room there, from a bias on; else words."""
    low, high = min(node.low, 0), max(node.high, 0)
    if isinstance(node, nodes.Scores | nodes.Rescaled):
        return "SS_WORDS", 0
    if low >= -128 and high <= 127:
        return "SS_BYTES", 0
    if high - low <= 255:
        return "SS_BYTES", low + 128
    return "SS_WORDS", 0
