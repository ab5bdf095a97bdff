"""The graphs that quantise traces and a network keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import softstair as ss
from softstair import zoo
from softstair._accelerate.fuse import fused, not_fused
from softstair.convert.conversion import traces_of
from softstair.convert.graph import Tracer

pytestmark = pytest.mark.quick
TERNARY = ss.Stair.ternary()
COPIES = [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]


class Plain(nn.Module):
    """Modules alone but for a function that pickle does not find, a constant and the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        x = torch.clamp(x, -1, 1)[..., :]
        return F.max_pool2d(self.block(x), kernel_size=(6, 6)).view(x.size(0), -1)

    def forward(self, x: Tensor) -> Any:
        y = self.last(self.features(x)) * torch.arange(3.0)
        return (y, x) if self.training else y


class Rewritten(Plain):
    """Activations that are functions."""

    def forward(self, x: Tensor) -> Any:
        h = F.dropout(F.relu(self.features(x)), training=self.training)
        return self.last(h) * torch.arange(3.0)


def run(net: Callable[[Tensor], Any]) -> Any:
    torch.manual_seed(0)
    return net(torch.linspace(-2, 2, 128).view(2, 1, 8, 8))


@pytest.mark.parametrize("copied", COPIES, ids=["itself", "copy", "pickle"])
@pytest.mark.parametrize("model", [Plain, Rewritten])
def test_the_graphs_compute_what_the_network_does(model: type[Plain], copied: Any) -> None:
    net = copied(ss.quantise(model(), TERNARY, TERNARY, skip="last"))
    traces = traces_of(net)
    for training, graph, steps in (
        (True, traces.train, traces.train_steps),
        (False, traces.evaluation, traces.eval_steps),
    ):
        net.train(training)
        expected = run(copy.deepcopy(net))
        torch.testing.assert_close(run(fx.GraphModule(net, graph)), expected, rtol=0, atol=0)
        assert len(graph.nodes) == len(steps.steps)
        stacks = [node.meta["nn_module_stack"] for node in graph.nodes if node.op == "call_module"]
        assert list(stacks[0])[-1] == "block.0"
        assert not list(graph.nodes)[-1].meta


def test_the_graphs_are_copies() -> None:
    net = ss.quantise(Plain(), TERNARY, TERNARY, skip="last")
    graph = traces_of(net).train
    graph.erase_node(next(iter(reversed(graph.nodes))))
    assert len(traces_of(net).train.nodes) == len(graph.nodes) + 1


def test_constants_move_with_the_network() -> None:
    net = ss.quantise(Plain(), TERNARY, TERNARY, skip="last").to("meta")
    x = torch.empty(2, 1, 8, 8, device="meta")
    assert fx.GraphModule(net.eval(), traces_of(net).evaluation)(x).shape == (2, 3)


def test_a_network_that_torch_fx_cannot_trace_says_why() -> None:
    class Branch(Plain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x if x.sum() < 1e9 else -x)

    x = torch.zeros(2, 1, 8, 8)
    net = ss.quantise(Branch(), TERNARY, TERNARY, skip="last", example_inputs=x)
    for each in (net, pickle.loads(pickle.dumps(traces_why(net))), copy.deepcopy(net)):
        why = each if isinstance(each, str) else traces_why(each)
        assert "control flow" in why


def traces_why(net: nn.Module) -> str:
    with pytest.raises(ss.SoftstairError) as raised:
        traces_of(net)
    return str(raised.value)


def _other_block(net: Any) -> None:
    net.block.append(nn.Tanh())


def _other_class(net: Any) -> None:
    net.__class__ = Rewritten


def _other_forward(net: Any) -> None:
    net.block.forward = lambda x: x


@pytest.mark.parametrize("change", [_other_block, _other_class, _other_forward])
def test_graphs_of_other_code_are_refused(change: Callable[[Any], None]) -> None:
    net = ss.quantise(Plain(), TERNARY, TERNARY, skip="last")
    change(net)
    assert "changed" in traces_why(net)


def test_a_layer_that_is_replaced_is_called() -> None:
    net = ss.quantise(Plain(), TERNARY, TERNARY, skip="last").eval()
    net.last = nn.Linear(4, 3)
    assert torch.equal(run(fx.GraphModule(net, traces_of(net).evaluation)), run(net))


def test_a_network_is_traced_once_in_each_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace, modes = Tracer.trace, list[bool]()

    def counted(self: Tracer, root: Any, *args: Any, **kwargs: Any) -> fx.Graph:
        modes.append(root.training)
        return trace(self, root, *args, **kwargs)

    monkeypatch.setattr(Tracer, "trace", counted)
    for model in (Plain(), Rewritten()):
        modes.clear()
        net = ss.quantise(model, "int4", skip="last")
        assert modes == [True, False]
        x = torch.randn(8, 1, 8, 8)
        fused(net)
        not_fused(net)
        ss.calibrate(net.eval(), [x])
        ss.Annealer(net.train(), ss.Schedule(layers=ss.nn.layer_count(net), period=1)).step()
        net.load_state_dict(net.state_dict())
        zoo.save(net, tmp_path / "net.safetensors", "own", (1, 8, 8), mean=0, std=1)
        assert len(modes) == 2
