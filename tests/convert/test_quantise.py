"""quantise() on common architectures, against the same networks quantised by hand."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import networks
import softstair as ss

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
NAMES = list(networks.ZOO)
TRACED = [name for name in NAMES if name not in ("branching", "functional")]
"""Networks of which torch.fx traces all: not those whose code asks for a value or for the mode."""


def soft(x: Tensor) -> Tensor:
    """The ternary stair and, for its gradient, uniform noise that fills half a quantum: by hand."""
    value = (x >= 0.5).to(x.dtype) - (x < -0.5).to(x.dtype)
    slope = ((x >= -1) & (x < 1)).to(x.dtype)  # [−1, 0) and [0, 1), the densities' supports
    return value + (x - x.detach()) * slope.detach()


def conv(m: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, soft(m.weight), m.bias, m.stride, m.padding, m.dilation, m.groups)


def conv1d(m: nn.Conv1d, x: Tensor) -> Tensor:
    return F.conv1d(x, soft(m.weight), m.bias, m.stride, m.padding, m.dilation, m.groups)


def linear(m: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, soft(m.weight), m.bias)


def hand_resnet(m, x):
    x = soft(m.bn1(conv(m.conv1, x)))
    for block in m.blocks if hasattr(m, "blocks") else (m.layer1[0], m.layer2[0]):
        shortcut, branch = x, getattr(block, "downsample", None) or getattr(block, "shortcut", None)
        if branch:
            shortcut = soft(branch[1](conv(branch[0], x)))
        h = soft(block.bn1(conv(block.conv1, x)))
        x = soft(block.bn2(conv(block.conv2, h)) + shortcut)
    return linear(m.fc if hasattr(m, "fc") else m.linear, x.mean([2, 3]))


def hand_mobilenet(m, x):
    for group in m.features:
        for start in range(0, len(group), 3):
            x = soft(group[start + 1](conv(group[start], x)))
    return linear(m.classifier[1], m.classifier[0](x.mean([2, 3])))


def hand_mobilenetv2(m, x):
    x = soft(m.features[0][1](conv(m.features[0][0], x)))
    for block in m.features[1:5]:
        h = x
        for start in (0, 3):
            h = soft(block.conv[start + 1](conv(block.conv[start], h)))
        h = block.conv[7](conv(block.conv[6], h))
        x = soft(x + h if block.is_residual else h)
    x = soft(m.features[5][1](conv(m.features[5][0], x)))
    return linear(m.classifier[1], m.classifier[0](x.mean([2, 3])))


def hand_mlp(m, x):
    for start in range(0, len(m) - 1, 3):
        x = soft(m[start + 1](linear(m[start], x)))
    return linear(m[-1], x)


def hand_functional(m, x):
    x = F.dropout(soft(linear(m.fc1, x)), 0.25, m.training)
    return linear(m.fc4, soft(linear(m.fc3, soft(linear(m.fc2, x)))))


def hand_transformer(m, x):
    y = m.norm1(x)
    x = x + m.attention(y, y, y, need_weights=False)[0]
    x = x + linear(m.mlp[2], soft(linear(m.mlp[0], m.norm2(x))))
    return linear(m.head, x.mean(1))


def hand_conv1d(m, x):
    x = soft(conv1d(m.net[2], soft(conv1d(m.net[0], x))))
    return linear(m.fc, F.max_pool1d(x, 2).flatten(1))


def hand_chain(layers, x):
    for layer in layers[:-1]:
        x = soft(linear(layer, x))
    return linear(layers[-1], x)


HANDS = {
    "resnet": hand_resnet,
    "plain resnet": hand_resnet,
    "functional resnet": hand_resnet,
    "mobilenet": hand_mobilenet,
    "mobilenetv2": hand_mobilenetv2,
    "mlp": hand_mlp,
    "functional": hand_functional,
    "transformer": hand_transformer,
    "conv1d": hand_conv1d,
    "branching": lambda m, x: hand_chain([m.fc1, m.fc2, m.fc3], x),
    "disordered": lambda m, x: hand_chain([m.fc1, m.fc2, m.last], x),
    "shared": lambda m, x: hand_chain([m.enter, m.twice, m.twice, m.leave], x),
}

# (name, layer) in order of execution; names of functional activations are the converter's own.
LAYERS: dict[str, list[tuple[str | None, int]]] = {
    "resnet": [
        ("conv1", 0), ("relu", 0),
        ("layer1.0.conv1", 1), ("layer1.0.relu", 1),
        ("layer1.0.conv2", 2), ("layer1.0.relu.2", 2),
        ("layer2.0.downsample.0", 3), ("layer2.0.downsample.1.stair", 3),
        ("layer2.0.conv1", 4), ("layer2.0.relu", 4),
        ("layer2.0.conv2", 5), ("layer2.0.relu.2", 5), ("fc", 6),
    ],
    "plain resnet": [
        ("conv1", 0), ("relu", 0),
        ("blocks.0.conv1", 1), ("blocks.0.relu", 1), ("blocks.0.conv2", 2), ("blocks.0.relu.2", 2),
        ("blocks.1.conv1", 3), ("blocks.1.relu", 3), ("blocks.1.conv2", 4), ("blocks.1.relu.2", 4),
        ("fc", 5),
    ],
    "functional resnet": [
        ("conv1", 0), (None, 0), ("layer1.0.conv1", 1), (None, 1), ("layer1.0.conv2", 2), (None, 2),
        ("layer2.0.conv1", 3), (None, 3), ("layer2.0.conv2", 5), ("layer2.0.shortcut.0", 4),
        ("layer2.0.shortcut.1.stair", 4), (None, 5), ("linear", 6),
    ],
    "mobilenet": [
        ("features.0.0", 0), ("features.0.2", 0), ("features.1.0", 1), ("features.1.2", 1),
        ("features.1.3", 2), ("features.1.5", 2), ("features.2.0", 3), ("features.2.2", 3),
        ("features.2.3", 4), ("features.2.5", 4), ("classifier.1", 5),
    ],
    "mobilenetv2": [
        ("features.0.0", 0), ("features.0.2", 0),
        *[
            (f"features.{block}.{name}", 3 * block - 2 + number // 2)
            for block, stair in enumerate(("conv.7.stair", "stair_add", "stair_add_1",
                                           "conv.7.stair"), 1)
            for number, name in enumerate(("conv.0", "conv.2", "conv.3", "conv.5", "conv.6", stair))
        ],
        ("features.5.0", 13), ("features.5.2", 13), ("classifier.1", 14),
    ],
    "mlp": [("0", 0), ("2", 0), ("3", 1), ("5", 1), ("6", 2)],
    "functional": [
        ("fc1", 0), (None, 0), ("fc2", 1), (None, 1), ("fc3", 2), (None, 2), ("fc4", 3)
    ],
    "transformer": [("mlp.0", 0), ("mlp.1", 0), ("mlp.2", 1), ("head", 2)],
    "conv1d": [("net.0", 0), ("net.1", 0), ("net.2", 1), ("net.3", 1), ("fc", 2)],
    "branching": [("fc1", 0), ("act1", 0), ("fc2", 1), ("act2", 1), ("fc3", 2)],
    "disordered": [("fc1", 0), ("act1", 0), ("fc2", 1), ("act2", 1), ("last", 2)],
    "shared": [
        ("enter", 0), ("act0", 0), ("twice", 1), ("act1", 1), ("act2", 2), ("leave", 3)
    ],
}  # fmt: skip


def converted(name: str, seed: int = 0, **settings) -> tuple[nn.Module, nn.Module, Tensor]:
    """The float network, its stair network and an input."""
    model, x = networks.make(name, seed)
    torch.manual_seed(seed + 2)
    example = x if name == "branching" else None
    skip = ("attention",) if name == "transformer" else ()
    stairs = {"weights": TERNARY, "features": TERNARY, "skip": skip, **settings}
    return model, ss.quantise(model, **stairs, example_inputs=example), x


def float_twin(model: nn.Module, net: nn.Module) -> nn.Module:
    """A copy of the float network with the stair network's weights and statistics."""
    twin = copy.deepcopy(model).train(net.training)
    state = net.state_dict()
    twin.load_state_dict({key: state[key] for key in twin.state_dict()}, strict=True)
    return twin


def gradients(net: nn.Module, run, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    torch.manual_seed(7)
    out = run(x)
    weight = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    (out * weight).sum().backward()
    return {k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_report_lists_layers_in_order_of_execution(name):
    """Layers by execution; weights join the next activation, shared weights that of their first
    use; each call of a shared activation is one of its own."""
    model, net, _ = converted(name)
    table = ss.report(net)
    rows = [(row.name, row.layer) for row in table.rows if row.layer is not None]
    assert len(rows) == len(LAYERS[name])
    for (row_name, layer), (expected, number) in zip(rows, LAYERS[name], strict=True):
        assert layer == number
        assert expected is None or row_name == expected
    assert table.layers == ss.nn.layer_count(net) == 1 + max(n for _, n in LAYERS[name])
    modules = dict(net.named_modules())
    for row_name, layer in rows:
        module = modules[row_name]
        stair = module if isinstance(module, ss.nn.StairActivation) else module.weight_stair
        assert stair.layer == layer
    printed = str(table)
    for row in table.rows:
        assert row.name in printed
        assert row.became in printed
        if row.layer is None:
            assert row.became.startswith("float: ")
    norms = {k for k, m in model.named_modules() if "Norm" in type(m).__name__}
    assert norms <= {row.name for row in table.rows if row.layer is None}


def test_report_says_why_modules_stay_in_float():
    floats = {
        r.name: r.became for r in ss.report(converted("transformer")[1]).rows if r.layer is None
    }
    assert set(floats) == {"norm1", "attention", "norm2"}
    floats = {
        r.name: r.became for r in ss.report(converted("functional")[1]).rows if r.layer is None
    }
    assert floats == {"unused": "float: never called as a module"}
    net = converted("mlp", skip=("6", "2"))[1]
    floats = {r.name: r.became for r in ss.report(net).rows if r.layer is None}
    assert floats["6"] == floats["2"] == "float: skipped"
    net = converted("mlp", weights=None)[1]
    assert {r.became for r in ss.report(net).rows if r.kind == "Linear"} == {
        "float: no stair for weights"
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_equal_a_network_quantised_by_hand(name, training):
    """And every quantised weight has a gradient that is not zero."""
    model, net, x = converted(name)
    net.train(training)
    hand = float_twin(model, net)
    torch.manual_seed(3)
    actual = net(x)
    torch.manual_seed(3)
    expected = HANDS[name](hand, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    for key, value in hand.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value)
    if not training:
        return
    expected = gradients(hand, lambda x: HANDS[name](hand, x), x)
    actual = gradients(net, net, x)
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)
    for module_name, module in net.named_modules():
        if isinstance(module, ss.nn.StairLayer):
            assert actual[f"{module_name}.weight"].abs().sum() > 0


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_are_independent(name, clone):
    _, net, x = converted(name)
    twin = clone(net)
    assert str(ss.report(twin)) == str(ss.report(net))
    of_twin = gradients(twin, twin, x)
    for key, gradient in gradients(net, net, x).items():
        assert torch.equal(gradient, of_twin[key])
    with torch.no_grad():
        for _, stair in ss.nn.stair_modules(twin):
            stair.std.fill_(0.5)
    assert all(float(stair.std) != 0.5 for _, stair in ss.nn.stair_modules(net))
    assert torch.equal(clone(twin).eval()(x), twin.eval()(x))


@pytest.mark.nightly
def test_a_pickled_network_runs_in_another_process(tmp_path):
    _, net, x = converted("functional resnet")
    torch.save((net.eval(), x, net(x)), tmp_path / "net.pt")
    code = "import sys, torch; net, x, y = torch.load(sys.argv[1], weights_only=False); "
    code += "sys.exit(not torch.equal(net(x), y))"
    roots = [str(Path(networks.__file__).parent), str(Path(ss.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    command = [sys.executable, "-c", code, str(tmp_path / "net.pt")]
    subprocess.run(command, env=environment, check=True, timeout=300)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("rare", [{}, {"init": "keep"}, {"init": "keep", "fit": "channel"}])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:all weights that are loaded")
def test_checkpoints_load_strictly(name, rare, tmp_path):
    """The network's own, quanta included, and that of the float network."""
    options = ss.QuantiseOptions(**rare)
    model, net, x = converted(name, options=options)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    other = converted(name, seed=9, options=options)[1]
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "net.safetensors"), strict=True)
    assert torch.equal(other.eval()(x), net.eval()(x))
    of_other = gradients(other.train(), other, x)
    for key, gradient in gradients(net.train(), net, x).items():
        assert torch.equal(gradient, of_other[key])
    other.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(other.state_dict()[key], v) for key, v in model.state_dict().items())


def test_each_call_of_an_activation_has_its_own_stair_and_noise():
    net = converted("plain resnet")[1]
    assert ss.Schedule.for_network(net, period=1).layers == 6
    block = net.blocks[0]
    assert block.relu.get_submodule("2") is not block.relu
    ss.Annealer(net, lambda layer, t: (0.0, 0.0 if layer == 1 else 0.5)).step()
    assert (float(block.relu.std), float(block.relu.get_submodule("2").std)) == (0.0, 0.5)


@pytest.mark.parametrize("name", ["resnet", "functional", "branching"])
def test_model_is_unchanged(name):
    model, x = networks.make(name)
    model.eval()
    state = copy.deepcopy(model.state_dict())
    modules = {key: (type(m), m.training) for key, m in model.named_modules()}
    before = model(x)
    net = ss.quantise(model, TERNARY, TERNARY, example_inputs=x)
    assert {key: (type(m), m.training) for key, m in model.named_modules()} == modules
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    pointers = {p.data_ptr() for p in model.parameters()}
    assert not pointers & {p.data_ptr() for p in net.parameters()}
    assert not net.training


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRACED)
def test_compiled_equals_eager(name):
    """Whole graph, values and gradients. Dropout is left out of it."""
    torch._dynamo.reset()
    _, net, x = converted(name)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    actual, expected = gradients(twin, compiled, x), gradients(net, net, x)
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=1e-5)
    twin.eval(), net.eval()
    torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=1e-5)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("name", TRACED)
def test_a_graph_of_torch_fx_computes_the_same(name):
    """In both modes, whichever it was traced in: stairs and layers are one node each."""
    _, net, x = converted(name)
    traced = torch.fx.symbolic_trace(net)
    for training in (True, False):
        torch.manual_seed(0)
        actual = traced.train(training)(x)
        torch.manual_seed(0)
        assert torch.equal(actual, net.train(training)(x))
    modules = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    stairs = [row.name for row in ss.report(net).rows if row.layer is not None]
    assert modules >= set(stairs)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.nightly), "functional"])
def test_an_exported_program_computes_the_same(name):
    _, net, x = converted(name)
    program = torch.export.export(net.eval(), (x,), strict=False)
    assert torch.equal(program.module()(x), net(x))


@pytest.mark.nightly
def test_an_annealed_network_is_compiled_once_if_nothing_is_truncated():
    torch._dynamo.reset()
    graphs = []
    _, net, x = converted("mlp")
    compiled = torch.compile(net, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    schedule = ss.Schedule.for_network(net, period=1)
    annealer = ss.Annealer(net, schedule, truncate=False)
    for _ in range(4):
        annealer.step()
        compiled(x).sum().backward()
    assert annealer.annealed == (0, 1, 2)
    assert len(graphs) == 1


def flattening(code) -> nn.Module:
    """Flattens as most scripts do."""
    return networks.Code(code, a=nn.Conv2d(3, 8, 3), b=nn.Linear(8 * 36, 3, bias=False))


@pytest.mark.parametrize(
    "model",
    [
        flattening(lambda m, x: m.b((h := m.r(m.a(x))).view(h.size(0), -1))),
        flattening(lambda m, x: m.b((h := m.r(m.a(x))).reshape(h.shape[0], -1))),
        networks.ResNet(),
    ],
)
def test_layers_know_the_quantum_of_features_that_were_only_moved(model):
    net = ss.quantise(model, INT4, UINT4)
    layers = [module for module in net.modules() if isinstance(module, ss.nn.StairLayer)]
    moved = layers[1:] if isinstance(model, networks.Code) else layers[1:-1]
    assert {layer.input_quantum for layer in moved} == {0.07}
    assert layers[0].input_quantum is None  # that of images


def integer_sums(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer's sums must be: INT4 weights and multiples of 0.07, in float64 integers."""
    integers = (x.double() / 0.07).round()
    assert (integers * 0.07 - x.double()).abs().max() < 1e-5
    weight = (layer.weight.detach().double() / 0.07 + 0.5).floor().clamp(-8, 7)
    if isinstance(layer, nn.Linear):
        return F.linear(integers, weight)
    return layer._conv_forward(integers, weight, None)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("build", "floats"),
    [
        (lambda: networks.ResNet(16), {"conv1", "fc"}),
        (lambda: networks.FunctionalResNet(16), {"conv1", "linear"}),
        (networks.MobileNet, {"features.0.0", "classifier.1"}),
    ],
    ids=["resnet", "functional resnet", "mobilenet"],
)
def test_sums_in_eval_are_exact_integers(build, floats):
    """INT4 and UINT4 at ε = 0.07, residual additions included: one integer gives one float.

    ``floats`` names the layers whose inputs are no multiples of a quantum: images and averages.
    """
    torch.manual_seed(0)
    net = ss.quantise(build(), INT4, UINT4).eval()
    seen = []

    def watch(name):
        return lambda module, inputs, output: seen.append((name, module, inputs[0], output))

    for name, module in net.named_modules():
        if isinstance(module, ss.nn.StairLayer) and name not in floats:
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        net(torch.randn(16, 3, 8, 8))
    assert seen
    for name, module, x, output in seen:
        sums = integer_sums(module, x)
        assert sums.abs().max() > 5, name
        torch.testing.assert_close(output.double(), sums * 0.07 * 0.07, rtol=1e-5, atol=1e-5)
        pairs = {}
        for n, y in zip(sums.flatten().tolist(), output.flatten().tolist(), strict=True):
            assert pairs.setdefault(n, y) == y, f"{name}: {n} is {y} and {pairs[n]}"


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h + 0.5,
        lambda h: 1.0 - h,
        lambda h: h - 0.033,
        lambda h: torch.add(h, h, alpha=0.3),
        lambda h: h.add(h, alpha=0.3),
        lambda h: F.pad(h, (1, -1), value=0.31),
        lambda h: h * 0.5,
        lambda h: h + torch.ones(8) * 0.3,
        lambda h: torch.cat([h[:, :4], torch.full((4, 4), 0.3)], 1),
        lambda h: h.masked_fill(h > 0.3, 0.5),
        lambda h: F.max_pool1d(h[:, None], 3, 1, 1)[:, 0] + h,
        lambda h: torch.stack([h, h + 0.01], 1)[:, 1],
    ],
)
def test_evaluation_does_not_round_other_values_to_the_quantum(between):
    """Constants are no multiples of the quantum, but must be summed as they are."""
    torch.manual_seed(0)
    code = lambda m, x: m.b(between(m.r(m.a(x))))
    # Without stairs on sums, which would round them on purpose.
    options = ss.QuantiseOptions(sums=None)
    net = ss.quantise(networks.Code(code), INT4, UINT4, options=options).eval()
    x = torch.randn(4, 6)
    a, b = net.a, net.b
    hidden = UINT4(F.linear(x, INT4(a.weight), a.bias))
    expected = F.linear(between(hidden), INT4(b.weight), b.bias)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


def test_hooks_attributes_modes_and_frozen_parameters_survive():
    model = networks.mlp(6, 8, 3)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(True))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model.classes = 3
    net = ss.quantise(model, TERNARY, TERNARY)
    net(torch.randn(4, 6))
    assert calls
    assert net.classes == 3
    assert not net[0].weight.requires_grad
    assert (net.training, net[0].training, net[1].training) == (True, True, False)


def test_noise_is_on_the_device_of_the_network():
    """Also on the meta device."""
    net = ss.quantise(networks.mlp(6, 8, 3).to("meta"), TERNARY, TERNARY)
    assert {buffer.device.type for buffer in net.buffers()} == {"meta"}


class Functions(nn.Module):
    """One activation that is called twice, so that the forward pass is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))))


def test_hooks_on_activations_and_on_the_network_are_kept():
    """In training and in evaluation; once for each call, and apart from the float model's."""
    for model, name, count in ((networks.mlp(6, 8, 3), "1", 1), (Functions(), "act", 2)):
        calls = []
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, calls=calls: calls.append("after"))
        handle = module.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before"))
        hook = lambda module, args, kwargs, y, calls=calls: calls.append("network")
        model.register_forward_hook(hook, with_kwargs=True)
        net = ss.quantise(model, TERNARY, TERNARY)
        handle.remove()
        for training in (True, False):
            calls.clear()
            net.train(training)(torch.randn(4, 6))
            assert calls == ["before", "after"] * count + ["network"]
        ss.calibrate(net, [torch.randn(8, 6)])
        assert not net.get_submodule(name)._forward_hooks.keys() - module._forward_hooks.keys()
        calls.clear()
        model(torch.randn(4, 6))
        assert calls == ["after"] * count + ["network"]
