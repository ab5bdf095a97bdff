"""Graphs of networks: their functions, and the memory that their results share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import networks
import softstair as ss
from softstair.convert.graph import SHARING_FUNCTIONS, trace
from softstair.convert.ops import OPERATORS, UNKNOWN, Effect, operator_named, operator_of

pytestmark = pytest.mark.quick


def test_functions_have_their_bare_names():
    class Net(nn.Module):
        def forward(self, x):
            return F.relu(torch.relu(x).relu()) + x.relu_().tanh()

    names = [step.function for step in trace(Net())[0].steps if step.function]
    assert names.count("relu") == 4
    assert "tanh" in names


def test_every_view_of_torch_is_known_to_share_memory():
    """By the schemas of torch's operators: what returns an alias of an argument, unwritten."""
    views = set()
    for schema in torch._C._jit_get_all_schemas():
        written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        tensors = [r for r in schema.returns if str(r.type) in ("Tensor", "List[Tensor]")]
        if schema.name.startswith("aten::") and any(r.alias_info for r in tensors) and not written:
            views.add(schema.name.removeprefix("aten::").strip("_"))
    rare = ("nested", "sparse", "indices", "dual", "autocast", "ncf", "fw_primal", "test_", "keys")
    views = {view for view in views if not any(word in view for word in rare)}
    assert len(views) > 50
    assert views - {"grad_sum_to_size"} <= SHARING_FUNCTIONS


def _first_half(x):
    return x[:, :2]


SHARED = {
    "slice": _first_half,
    "view of a view": lambda x: _first_half(x.view(-1, 4)).unsqueeze(1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "transpose": lambda x: x.transpose(0, 1),
    "attribute": lambda x: x.T,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "dropout in evaluation": lambda x: F.dropout(x, training=False),
    "module": nn.Flatten(),
    "itself": lambda x: x,
}
COPIED = {
    "sum": lambda x: x + 1,
    "clone": lambda x: x.clone(),
    "concatenation": lambda x: torch.cat([x, x]),
    "product": lambda x: x @ torch.ones(4, 4),
    "module": nn.ReLU(),
}


def _iadd(x):
    x += 1


WRITES = {
    "method": lambda x: x.mul_(0.5),
    "operator": _iadd,
    "function": lambda x: torch.relu_(x),
    "flag": lambda x: F.relu(x, True),
    "out": lambda x: torch.add(x, 1, out=x),
    "overload": lambda x: torch.ops.aten.mul_.Tensor(x, 0.5),
    "list": lambda x: torch._foreach_mul_([x], 0.5),
    "module": nn.ReLU(inplace=True),
}


def write_into_view(m, x):
    """Writes into a view or a copy of h."""
    h = torch.tanh(x)
    m.write(m.view(h))
    return h


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", [*SHARED, *(f"copied: {name}" for name in COPIED)])
def test_a_write_reaches_what_shares_the_memory_and_nothing_else(view, write):
    shares = view in SHARED
    derive = SHARED[view] if shares else COPIED[view.removeprefix("copied: ")]
    model = networks.Code(write_into_view, view=derive, write=WRITES[write])
    graph = trace(model)[0]
    source = next(n for n, step in enumerate(graph.steps) if step.function == "tanh")
    writers = [n for n, step in enumerate(graph.steps) if step.written]
    assert len(writers) == 1
    assert (source in graph.steps[writers[0]].written) is shares
    assert graph.is_read_elsewhere(writers[0]) or not shares


def test_reading_a_size_is_not_reading_the_values():
    class Net(nn.Module):
        def forward(self, x):
            h = torch.tanh(x)
            y = h.relu_()
            return y.view(h.size(0), h.shape[1], -1)

    graph = trace(Net())[0]
    (writer,) = (n for n, step in enumerate(graph.steps) if step.written)
    assert not graph.is_read_elsewhere(writer)


def test_operators_are_found_by_module_subclass_and_name():
    names = [name for row in OPERATORS for name in (row.name, *row.aliases)]
    modules = [module for row in OPERATORS for module in row.modules]
    assert len(names) == len(set(names))
    assert len(modules) == len(set(modules))
    assert operator_of(nn.MaxPool2d(2)) is operator_named("max_pool2d")
    assert operator_of(type("Own", (nn.Linear,), {})(2, 2)) is operator_named("linear")
    assert operator_of(nn.ReLU6()) is not operator_of(nn.Hardtanh())
    assert operator_named("relu").effect_if_kept is Effect.MOVE
    assert operator_named("einsum") is operator_named(None) is UNKNOWN


def test_error_names_the_line_whose_control_flow_depends_on_a_tensor() -> None:
    source = Path(networks.__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(source) if "if h.sum() > -1e9:" in text)
    ternary = ss.Stair.ternary()
    place = rf"control flow depends on .*, at line {line} of .*networks.py \(if h.sum\(\)"
    with pytest.raises(ValueError, match=rf"example_inputs must .*{place}.*torch\.where"):
        ss.quantise(networks.Branching(), ternary, ternary)
    net = ss.quantise(networks.Branching(), ternary, ternary, example_inputs=torch.zeros(2, 6))
    with pytest.raises(ss.SoftstairError, match=place):
        ss.freeze(net, (6,))


def test_error_names_the_layer_that_pads_by_the_size_of_its_input() -> None:
    """As timm's Conv2dSame does; the same layer with a padding of its own is quantised."""

    class SamePadding(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = x.size()[-1]
            more = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
            return super().forward(F.pad(x, (more // 2, more - more // 2) * 2))

    build = lambda *stem: nn.Sequential(*stem, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = build(SamePadding(1, 4, 3, 2))
    layer = r"in '0' \(SamePadding\), its control flow depends on .* size, at line \d+ of .*max"
    with pytest.raises(ValueError, match=rf"^example_inputs must .*{{'input': …}}.*{layer}"):
        ss.quantise(model, "int4")
    padded = build(nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(1, 4, 3, 2)))
    ss.freeze(ss.quantise(padded, "int4"), (1, 8, 8))
