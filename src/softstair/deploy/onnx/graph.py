"""An ONNX graph that grows by one operator at a time; its names are plain whatever it is told."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import softstair
from softstair._errors import import_extra
from softstair.deploy.network import IntegerNetwork

__all__ = ["Described", "Graph", "plain_names", "unique"]

IR_VERSION = 8
"""Of 2023: readers that are older than the package that writes take the file too."""
Described = tuple[str, str, Sequence[int | str]]
"""A tensor's name, type and shape."""


class Graph:
    """Operators, constants and the names that are taken.

    >>> graph = Graph({"scores"})
    >>> graph.constant("0.weight/x", np.zeros(1))
    'layer_0_weight_x'
    >>> graph.apply("Identity", ["layer_0_weight_x"], "scores")
    'scores_2'
    """

    def __init__(self, taken: set[str]) -> None:
        self.onnx = import_extra("onnx", "onnx")
        import_extra("onnx.numpy_helper", "onnx")
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.taken = set(taken)

    def constant(self, hint: str, values: Any) -> str:
        """An array that the file holds, under a name like the one that is asked for."""
        name = unique(hint, self.taken)
        array = np.asarray(values, order="C")
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def whole(self, hint: str, values: Any, kind: str) -> str:
        """Whole numbers of that kind, of which the file holds no more bytes than they need."""
        sizes = (np.int8, np.int16, np.int32)
        ends = (values.min(), values.max())
        least = next(
            one for one in sizes if np.iinfo(one).min <= ends[0] and ends[1] <= np.iinfo(one).max
        )
        return self.cast(self.constant(hint, values.astype(least)), kind, hint)

    def apply(
        self, kind: str, inputs: Sequence[str], name: str, domain: str = "", **attributes: Any
    ) -> str:
        """What an operator makes of its inputs, under a name like the one that is asked for."""
        return self.give(kind, inputs, unique(name, self.taken), domain, **attributes)

    def give(
        self, kind: str, inputs: Sequence[str], name: str, domain: str = "", **attributes: Any
    ) -> str:
        """As :meth:`apply`, under exactly that name, which was taken beforehand."""
        make = self.onnx.helper.make_node
        self.nodes.append(make(kind, [*inputs], [name], name, domain=domain, **attributes))
        return name

    def cast(self, x: str, kind: str, hint: str) -> str:
        """Another type of number: FLOAT, DOUBLE, INT32, UINT8 …"""
        to = getattr(self.onnx.TensorProto, kind)
        return self.apply("Cast", [x], f"{hint}_{kind.lower()}", to=to)

    def model(
        self,
        inputs: Sequence[Described],
        outputs: Sequence[Described],
        opsets: Mapping[str, int],
        about: Mapping[str, str],
        between: Sequence[Described] = (),
    ) -> Any:
        """The whole of it; ``between`` are tensors whose shape ONNX cannot infer by itself."""
        helper = self.onnx.helper

        def described(tensors: Sequence[Described]) -> list[Any]:
            kinds = self.onnx.TensorProto
            make = helper.make_tensor_value_info
            return [make(name, getattr(kinds, kind), [*shape]) for name, kind, shape in tensors]

        graph = helper.make_graph(
            self.nodes,
            "softstair",
            described(inputs),
            described(outputs),
            self.constants,
            value_info=described(between),
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(*one) for one in opsets.items()],
            ir_version=IR_VERSION,
            producer_name="softstair",
            producer_version=softstair.__version__,
        )
        helper.set_model_props(model, dict(about))
        return model


def plain_names(network: IntegerNetwork, taken: set[str], suffix: str) -> dict[str, str]:
    """A name for each node that is a word in every language, free with that suffix as well; all of
    them are then taken."""
    names = {}
    for node in network.nodes:
        name = unique(node.name, taken, suffix)
        taken |= {name, name + suffix}
        names[node.name] = name
    return names


def unique(hint: str, taken: set[str], suffix: str = "") -> str:
    """The hint in letters, digits and underscores, with a number if it is taken."""
    word = re.sub(r"[^A-Za-z0-9_]", "_", hint)[:200]
    word = word if re.match(r"[A-Za-z]", word) else f"layer_{word}"
    name, number = word, 1
    while name in taken or name + suffix in taken:
        number += 1
        name = f"{word}_{number}"
    taken.add(name)
    return name
