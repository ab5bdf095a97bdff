"""A frozen network: a torch module that computes with integers alone, and its file."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softstair import __version__, _check
from softstair._errors import SoftstairError, first_line, import_extra
from softstair._files import replacing
from softstair.deploy import combining, nodes
from softstair.deploy.nodes import Input, Node, Scores, Shape

FORMAT = 1
MAX_BYTES = 1 << 30
KINDS = {
    kind.__name__: kind
    for part in (nodes, combining)
    for kind in vars(part).values()
    if isinstance(kind, type) and issubclass(kind, Node)
}
WRONG = (LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError, ValueError)
"""What reading a file that lies may raise."""


class FrozenNetwork(nn.Module):
    """A network of integers: uint8, int8 or int16 in, int32 scores out, the same bits everywhere.

    :func:`softstair.freeze` and :func:`softstair.load_frozen` return it.

    Attributes:
        nodes: The operations in order of execution; the first is the input.
        sizes: Shape of each node's result, without the batch.
        stairs: Nodes that give the outputs of the trained network's stairs, under their names.
        classes: Names of the classes or outputs; empty if none were given.
        outputs: ``"classes"``, or ``"values"`` of a network that is no classifier.
        returns: The name of the node that gives the scores, or a tuple or a dictionary of names.
        report: What :func:`softstair.freeze` measured; None for a network that was loaded.
    """

    nodes: tuple[Node, ...]
    report: Any = None

    def __init__(
        self,
        nodes: Sequence[Node],
        sizes: Mapping[str, Shape],
        stairs: Sequence[str] = (),
        classes: Sequence[str] = (),
        outputs: str = "classes",
        returns: Any = None,
    ) -> None:
        super().__init__()
        self.nodes, self.sizes, self.stairs = tuple(nodes), dict(sizes), tuple(stairs)
        self.classes, self.outputs = tuple(classes), outputs
        self.returns = self.nodes[-1].name if returns is None else mapped(returns, str)
        for node in self.nodes:
            for field, tensor in node.tensors.items():
                self.register_buffer(_key(node, field), tensor)
        self._bind()

    def _bind(self) -> None:
        """Give the nodes the tensors of the buffers."""
        bound: list[Node] = []
        for node in self.nodes:
            own: Any = {name: self._buffers[_key(node, name)] for name in node.tensors}
            bound.append(replace(node, **own))
        self.nodes = tuple(bound)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenNetwork":
        # Scales stay float64, whatever precision is asked for.
        keep = lambda x: fn(x) if not x.is_floating_point() else x.to(fn(x).device)
        super()._apply(keep, recurse)
        self._bind()
        return self

    def forward(self, x: Tensor) -> Any:
        """Return the scores, int32, of a batch of what the device reads.

        Of a network with several outputs, these are a tuple or a dictionary of scores, and so are
        the results of :meth:`predict` and :meth:`values`.
        """
        return self._returned(x, lambda head, scores: scores)

    def _returned(self, x: Tensor, result: Callable[[Scores, Tensor], Tensor]) -> Any:
        """Return a result of each output, as the trained network returns its outputs."""
        last_use = {name: node for node in self.nodes for name in node.inputs}
        results = self._run(x, last_use)
        heads = {head.name: head for head in self.heads.values()}
        return mapped(self.returns, lambda name: result(heads[name], results[name]))

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the result of every node, int32, by its name."""
        return self._run(x, last_use={})

    def _run(self, x: Tensor, last_use: Mapping[str, Node]) -> dict[str, Tensor]:
        """Return the results of nodes, but of those that no node reads after ``last_use``."""
        self.input.check(x)
        results: dict[str, Tensor] = {}
        for node in self.nodes:
            results[node.name] = node.run(*[results[name] for name in node.inputs] or [x])
            for name in {*node.inputs}:
                if last_use.get(name) is node:
                    del results[name]
        return results

    def predict(self, x: Tensor) -> Any:
        """Return the class of each example or position, int64."""
        return self._returned(x, Scores.classes)

    def answers(self, scores: Tensor, head: Scores) -> Tensor:
        """Return what scores stand for: classes, or the values of a network of values."""
        return head.classes(scores) if self.outputs == "classes" else head.values(scores)

    def values(self, x: Tensor) -> Any:
        """Return the outputs in the unit of the float network, float64."""
        return self._returned(x, Scores.values)

    def extra_repr(self) -> str:
        rows = [("name", "node", "inputs", "shape", "from", "to")]
        for node in self.nodes:
            shape = "×".join(map(str, self.sizes[node.name]))
            ends = (str(node.low), str(node.high))
            rows.append((node.name, type(node).__name__, ", ".join(node.inputs), shape, *ends))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [map(str.ljust, row, widths) for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in cells)

    @property
    def input(self) -> Input:
        """The first node."""
        first = self.nodes[0]
        assert isinstance(first, Input)
        return first

    @property
    def heads(self) -> dict[str, Scores]:
        """The nodes that give the scores of each output, in the order of these.

        The names are "" for a single output, "_0" and "_1" in a tuple, "_mask" in a dictionary.
        """
        paths = _paths(self.returns)
        names = [re.sub(r"[^A-Za-z0-9]", "_", "_".join(["", *map(str, path)])) for path in paths]
        for number, name in enumerate(names):
            while name in names[:number]:
                name += "_"
            names[number] = name
        nodes = {node.name: node for node in self.nodes if isinstance(node, Scores)}
        return {key: nodes[name] for key, name in zip(names, leaves(self.returns), strict=True)}

    @property
    def last(self) -> Scores:
        """The node that gives the scores, of several outputs the first."""
        return next(iter(self.heads.values()))

    @property
    def digest(self) -> str:
        """The SHA-256 of all that it computes with."""
        about, tensors = self._parts()
        return _digest(about, tensors)

    def node(self, name: str) -> Node:
        """Return the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def users(self, name: str) -> list[Node]:
        """Return the nodes that read the result of a node."""
        return [node for node in self.nodes if name in node.inputs]

    def save(self, file: Path | str) -> Path:
        """Write the network to a file, in place of one that exists.

        Each tensor is named ``node:field``. The metadata, ``softstair``, is JSON: the nodes with
        their kind, inputs and other fields, the sizes of results, and a digest of everything.
        """
        about, tensors = self._parts()
        text = json.dumps({**about, "digest": _digest(about, tensors)}, allow_nan=False)
        arrays = {key: torch.from_numpy(array) for key, array in tensors.items()}
        data = import_extra("safetensors.torch").save(arrays, metadata={"softstair": text})
        with replacing(Path(file)) as partial:
            partial.write_bytes(data)
        return Path(file)

    def _parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Return what a file holds: facts for JSON, and arrays."""
        rows, tensors = [], {}
        for node in self.nodes:
            rows.append({"kind": type(node).__name__, **node.plain})
            for name, tensor in node.tensors.items():
                tensors[f"{node.name}:{name}"] = tensor.detach().cpu().contiguous().numpy()
        is_single = isinstance(self.returns, str)
        names = ("sizes", "stairs", "classes", "outputs", *([] if is_single else ["returns"]))
        about = {name: getattr(self, name) for name in names}
        facts = {"frozen": FORMAT, "version": __version__, "nodes": rows, **about}
        return json.loads(json.dumps(facts)), tensors


def load_frozen(file: Path | str) -> FrozenNetwork:
    """Return the network of a file that :meth:`FrozenNetwork.save` wrote.

    Raises:
        SoftstairError: If there is no such file, or if it is damaged.
    """
    safetensors = import_extra("safetensors")
    try:
        if Path(file).stat().st_size > MAX_BYTES:
            raise ValueError("it is too long")
        with safetensors.safe_open(file, "numpy") as opened:
            about = json.loads((opened.metadata() or {}).get("softstair", "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if about.get("frozen") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if about.pop("digest") != _digest(about, tensors):
            raise ValueError("its digest differs")
        rows = [_node(row, tensors) for row in about["nodes"]]
        sizes = {name: tuple(size) for name, size in about["sizes"].items()}
        given = (about["stairs"], about["classes"], about["outputs"], about.get("returns"))
        network = FrozenNetwork(rows, sizes, *given)
        _check.choice("outputs", network.outputs, ("classes", "values"))
        network(torch.zeros(0, *network.input.shape, dtype=getattr(torch, network.input.dtype)))
    except FileNotFoundError:
        raise SoftstairError(f"there is no file {str(file)!r}.", field="file") from None
    except (*WRONG, OSError, AssertionError, safetensors.SafetensorError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        problem = f"{str(file)!r} is no frozen network of softstair, or is damaged ({reason})"
        raise SoftstairError(f"{problem}.", field="file") from None
    return network


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return tuples and dictionaries of the results of a function; lists become tuples."""
    if isinstance(tree, dict):
        return {key: mapped(part, function) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(mapped(part, function) for part in tree)
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    """Return what tuples, lists and dictionaries hold, in order."""
    found: list[Any] = []
    mapped(tree, found.append)
    return found


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    """Return the indices and keys that lead to each name of a structure."""
    if isinstance(tree, str):
        return [()]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [(key, *path) for key, part in items for path in _paths(part)]


def _node(row: dict[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> Node:
    """Return the node of a row of a file."""
    own: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    for key, array in tensors.items():
        name, _, field = key.rpartition(":")
        if name == own["name"]:
            own[field] = torch.from_numpy(array)
    return KINDS[own.pop("kind")](**own)


def _digest(about: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return a digest of what a file holds, but for the version that wrote it."""
    known = {key: value for key, value in about.items() if key != "version"}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for key in sorted(tensors):
        array = tensors[key]
        digest.update(f"{key} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _key(node: nodes.Node, field: str) -> str:
    """Return the name of a buffer; torch allows no dots in it."""
    return f"{node.name}:{field}".replace(".", "/")
