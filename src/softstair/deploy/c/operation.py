"""A step of the generated program: the constants it needs, what it calls, what it reads and writes.

Nodes become operations one to one, but for sums that go into thresholds at once, which are one
operation with these, and flattenings that only look at features otherwise, which are none.
"""

from dataclasses import dataclass, field

from softstair.deploy.c.features import Features
from softstair.deploy.c.text import Constant, structure

__all__ = ["Operation", "Window"]


@dataclass(frozen=True)
class Operation:
    """number     of the node whose result it writes; what it defines is called layer_<number>
    nodes       the numbers of all nodes that it computes
    reads       numbers of the nodes whose results it takes
    constants   arrays
    structures  text of C that defines the structures of its call
    calls       text of C, a line each
    scratch     bytes that it needs while it runs
    how         in a few words
    weights     how many weights it has
    """

    number: int
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    calls: tuple[str, ...]
    how: str
    constants: tuple[Constant, ...] = ()
    structures: tuple[str, ...] = ()
    scratch: int = 0
    weights: int = 0

    def part(self, name: str) -> int:
        """The bytes of one kind of its constants."""
        return sum(one.size for one in self.constants if one.part == name)


@dataclass(frozen=True)
class Window:
    """The windows of a convolution or a pooling, as softstair_window.h has them."""

    taken: Features
    given: Features
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = field(default=(1, 1))

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def places(self) -> int:
        return self.given.places

    @property
    def direct(self) -> bool:
        """Whether all that a window sees lies together."""
        whole = self.kernel == (self.taken.height, self.taken.width) and self.places == 1
        return self.padding == (0, 0) and (self.kernel == (1, 1) or whole)

    def fields(self) -> str:
        """Its initialiser."""
        numbers = (
            (self.taken.height, self.taken.width),
            (self.given.height, self.given.width),
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
        )
        return "{" + ", ".join(str(int(one)) for pair in numbers for one in pair) + "}"

    def structure(self, name: str) -> str:
        """Its definition."""
        names = "height width rows columns kernel_y kernel_x stride_y stride_x padding_y padding_x"
        values = self.fields()[1:-1].split(", ")
        given = zip([*names.split(), "dilation_y", "dilation_x"], values, strict=True)
        return structure("ss_window", name, **dict(given))
