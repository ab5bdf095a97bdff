"""Nodes become operations of the generated program."""

from dataclasses import replace

import numpy as np
import torch

from softstair.deploy import nodes
from softstair.deploy.c.features import Features, Layout
from softstair.deploy.c.operation import Operation, Window
from softstair.deploy.c.steps import kept, stepped
from softstair.deploy.c.sums import summed
from softstair.deploy.c.text import Constant, structure
from softstair.deploy.integer import ExportError
from softstair.deploy.network import IntegerNetwork

__all__ = ["lower"]


def lower(network: IntegerNetwork, layout: Layout) -> list[Operation]:
    """The operations of a network in the order in which they run."""
    lowering = _Lowering(network, layout)
    made = [lowering.operation(number) for number in range(len(network.nodes))]
    return [one for one in made if one is not None]


class _Lowering:
    def __init__(self, network: IntegerNetwork, layout: Layout) -> None:
        self.network, self.layout = network, layout
        self.number = {node.name: i for i, node in enumerate(network.nodes)}
        last = network.nodes[-1]
        if not isinstance(last, nodes.Scores | nodes.Rescaled):
            raise ExportError(
                f"the network must end in scores to be written as C, but {last.name} is a "
                f"{type(last).__name__}."
            )

    def operation(self, number: int) -> Operation | None:
        node = self.network.nodes[number]
        if self.layout.home[node.name] != node.name:
            return None
        if isinstance(node, nodes.Input):
            call = f"ss_input(input, &layer_{number});"
            return Operation(number, (number,), (), (call,), "bytes with their channels together")
        if isinstance(node, nodes.Sum):
            return None if self._flows(node) else self._sum(number, node)
        if isinstance(node, nodes.Steps):
            return self._steps(number, node)
        if isinstance(node, nodes.MaxPool | nodes.SumPool):
            return self._pool(number, node)
        if isinstance(node, nodes.Expand):
            return self._expand(number, node)
        if isinstance(node, nodes.Add | nodes.Flatten):
            if isinstance(node, nodes.Add):
                self._refuse_shapes(node)
            taken = tuple(self._home(one) for one in node.inputs)
            given = "".join(f"&layer_{one}, " for one in taken)
            call = f"ss_{type(node).__name__.lower()}({given}&layer_{number});"
            how = "added" if isinstance(node, nodes.Add) else "put into another order"
            return Operation(number, (number,), taken, (call,), how)
        if isinstance(node, nodes.Scores):
            return self._scores(number, node)
        if isinstance(node, nodes.Rescaled):
            return self._rescaled(number, node)
        raise ExportError(f"{node.name} is a {type(node).__name__}, which C is not written for.")

    def _home(self, name: str) -> int:
        return self.number[self.layout.home[name]]

    def _features(self, name: str) -> Features:
        return self.layout.features[name]

    def _flows(self, node: nodes.Sum) -> bool:
        """Whether its sums meet thresholds at once, and need not be kept."""
        users = [one for one in self.network.nodes if node.name in one.inputs]
        return len(users) == 1 and isinstance(users[0], nodes.Steps)

    def _summed(self, node: nodes.Sum, sink: int) -> Operation:
        taken = node.inputs[0]
        source = self.network.nodes[self.number[taken]]
        reach = max(abs(source.low), abs(source.high), 1)
        number, home = self.number[node.name], self._home(taken)
        features = self._features(taken)
        if node.weight.dim() == 2 and len(self.network.sizes[taken]) != 1:
            raise ExportError(
                f"{node.name} is a linear layer over places, which C is not written for: flatten "
                "before it."
            )
        made = summed(number, node, features, reach, home, sink)
        more = (made.constants, (made.structure,), made.scratch, node.weight.numel())
        return Operation(number, (number,), (home,), (made.call,), made.how, *more)

    def _sum(self, number: int, node: nodes.Sum) -> Operation:
        made = self._summed(node, sink=number)
        return replace(made, structures=(kept(number), *made.structures))

    def _steps(self, number: int, node: nodes.Steps) -> Operation:
        self._refuse_shapes(node)
        source = self.network.nodes[self.number[node.inputs[0]]]
        out = self._features(node.name)
        beside = self._home(node.inputs[1]) if len(node.inputs) == 2 else None
        also = () if beside is None else (beside,)
        clear = (f"ss_clear(&layer_{number});",) if out.planes else ()
        if isinstance(source, nodes.Sum) and self._flows(source):
            inner = self.number[source.name]
            constants, sink = stepped(number, node, out, beside, traced=inner)
            made = self._summed(source, sink=number)
            return replace(
                made,
                number=number,
                nodes=(inner, number),
                reads=(*made.reads, *also),
                calls=(*clear, *made.calls),
                constants=(*made.constants, *constants),
                structures=(sink, *made.structures),
            )
        home = self._home(node.inputs[0])
        if self._features(node.inputs[0]).kind != "SS_WORDS":
            raise ExportError(
                f"{node.name} has thresholds on what are no sums, which C is not written for."
            )
        constants, sink = stepped(number, node, out, beside, traced=None)
        call = f"ss_steps(&layer_{home}, &layer_{number}_sink);"
        reads, calls = (home, *also), (*clear, call)
        return Operation(number, (number,), reads, calls, "thresholds", constants, (sink,))

    def _pool(self, number: int, node: nodes.MaxPool | nodes.SumPool) -> Operation:
        home = self._home(node.inputs[0])
        taken, given = self._features(node.inputs[0]), self._features(node.name)
        if isinstance(node, nodes.MaxPool):
            window = Window(taken, given, node.kernel, node.stride, node.padding)
            function = "ss_max_pool_planes" if taken.planes else "ss_max_pool"
        else:
            window = Window(taken, given, node.kernel, node.stride)
            function = "ss_sum_pool"
        name = f"layer_{number}_window"
        call = f"{function}(&{name}, &layer_{home}, &layer_{number});"
        how = "the largest" if isinstance(node, nodes.MaxPool) else "the sum"
        text = (window.structure(name),)
        return Operation(number, (number,), (home,), (call,), f"{how} of each window", (), text)

    def _expand(self, number: int, node: nodes.Expand) -> Operation:
        home, given = self._home(node.inputs[0]), self._features(node.name)
        taken = self._features(node.inputs[0])
        clear = (f"ss_clear(&layer_{number});",) if given.planes else ()
        # How far apart the rows, columns and channels of the input are; 0 along axes of length 1.
        rows = taken.width if taken.height > 1 else 0
        strides = (rows, int(taken.width > 1), int(taken.channels > 1))
        steps = ", ".join(map(str, (given.width, *strides)))
        call = f"ss_expand(&layer_{home}, &layer_{number}, {steps});"
        return Operation(number, (number,), (home,), (*clear, call), "repeated")

    def _refuse_shapes(self, node: nodes.Node) -> None:
        """Raises ExportError if a node takes features of another shape than it gives."""
        size = self.network.sizes[node.name]
        for name in node.inputs:
            if self.network.sizes[name] != size:
                raise ExportError(
                    f"{node.name} gives features of shape {size} but takes {name} of shape "
                    f"{self.network.sizes[name]}: put an Expand between them."
                )

    def _scores(self, number: int, node: nodes.Scores) -> Operation:
        home, taken = self._home(node.inputs[0]), self._features(node.inputs[0])
        self._finite(node.name, node.weight, node.bias, torch.tensor(node.unit))
        name = f"layer_{number}"
        shape = (len(node.weight), taken.channels, taken.places)
        weight = node.weight.float().reshape(shape).permute(2, 1, 0).contiguous()
        constants = [Constant(f"{name}_weights", weight.numpy(), "weights")]
        if node.bias is not None:
            constants.append(Constant(f"{name}_bias", node.bias.float().numpy(), "thresholds"))
        text = structure(
            "ss_last",
            f"{name}_last",
            classes=shape[0],
            unit=f"{float(np.float32(node.unit)).hex()}F",
            weights=f"{name}_weights",
            bias=None if node.bias is None else f"{name}_bias",
            totals="totals",
            **{"in": f"&layer_{home}"},
        )
        call = f"ss_scores(&{name}_last, scores);"
        how, weights = "floats", node.weight.numel()
        every = (tuple(constants), (text,), 0, weights)
        return Operation(number, (number,), (home,), (call,), how, *every)

    def _rescaled(self, number: int, node: nodes.Rescaled) -> Operation:
        home, taken = self._home(node.inputs[0]), self._features(node.inputs[0])
        self._finite(node.name, node.scale, node.bias)
        if taken.places != 1:
            raise ExportError(f"{node.name} gives scores for each place, not for the whole.")
        name = f"layer_{number}"
        scale, bias = node.scale.float().contiguous(), node.bias.float().contiguous()
        constants = (
            Constant(f"{name}_scale", scale.numpy(), "thresholds"),
            Constant(f"{name}_bias", bias.numpy(), "thresholds"),
        )
        call = f"ss_rescale(&layer_{home}, {name}_scale, {name}_bias, scores);"
        return Operation(number, (number,), (home,), (call,), "floats", constants)

    def _finite(self, name: str, *values: torch.Tensor | None) -> None:
        for value in values:
            if value is not None and not bool(torch.isfinite(value).all()):
                raise ExportError(f"{name} has weights that are no finite numbers: train it again.")
