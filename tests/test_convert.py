"""quantise() on networks nobody wrote for it, against the same networks quantised by hand."""

from __future__ import annotations

import copy
import io
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
    for block in (m.layer1[0], m.layer2[0]):
        shortcut = x
        if block.downsample is not None:
            shortcut = block.downsample[1](conv(block.downsample[0], x))
        h = soft(block.bn1(conv(block.conv1, x)))
        x = soft(block.bn2(conv(block.conv2, h)) + shortcut)
    return linear(m.fc, x.mean([2, 3]))


def hand_functional_resnet(m, x):
    x = soft(m.bn1(conv(m.conv1, x)))
    for block in (m.layer1[0], m.layer2[0]):
        shortcut = x
        if len(block.shortcut):
            shortcut = block.shortcut[1](conv(block.shortcut[0], x))
        h = soft(block.bn1(conv(block.conv1, x)))
        x = soft(block.bn2(conv(block.conv2, h)) + shortcut)
    return linear(m.linear, x.mean([2, 3]))


def hand_mobilenet(m, x):
    for group in m.features:
        for start in range(0, len(group), 3):
            x = soft(group[start + 1](conv(group[start], x)))
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


def hand_branching(m, x):
    return linear(m.fc3, soft(linear(m.fc2, soft(linear(m.fc1, x)))))


def hand_disordered(m, x):
    return linear(m.last, soft(linear(m.fc2, soft(linear(m.fc1, x)))))


def hand_shared(m, x):
    x = soft(linear(m.twice, soft(linear(m.enter, x))))
    return linear(m.leave, soft(linear(m.twice, x)))


HANDS = {
    "resnet": hand_resnet,
    "functional resnet": hand_functional_resnet,
    "mobilenet": hand_mobilenet,
    "mlp": hand_mlp,
    "functional": hand_functional,
    "transformer": hand_transformer,
    "conv1d": hand_conv1d,
    "branching": hand_branching,
    "disordered": hand_disordered,
    "shared": hand_shared,
}

# (name, layer) in order of execution; names of functional activations are the converter's own.
LAYERS: dict[str, list[tuple[str | None, int]]] = {
    "resnet": [
        ("conv1", 0), ("relu", 0),
        ("layer1.0.conv1", 1), ("layer1.0.relu", 1), ("layer1.0.conv2", 1),
        ("layer2.0.downsample.0", 2), ("layer2.0.conv1", 2), ("layer2.0.relu", 2),
        ("layer2.0.conv2", 2), ("fc", 3),
    ],
    "functional resnet": [
        ("conv1", 0), (None, 0), ("layer1.0.conv1", 1), (None, 1), ("layer1.0.conv2", 2), (None, 2),
        ("layer2.0.conv1", 3), (None, 3), ("layer2.0.conv2", 4), ("layer2.0.shortcut.0", 4),
        (None, 4), ("linear", 5),
    ],
    "mobilenet": [
        ("features.0.0", 0), ("features.0.2", 0), ("features.1.0", 1), ("features.1.2", 1),
        ("features.1.3", 2), ("features.1.5", 2), ("features.2.0", 3), ("features.2.2", 3),
        ("features.2.3", 4), ("features.2.5", 4), ("classifier.1", 5),
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
    stairs = {"weights": TERNARY, "features": TERNARY, **settings}
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
def test_table(name):
    """Layers by execution; weights join the next activation; shared modules their first use."""
    model, net, _ = converted(name)
    table = ss.report(net)
    rows = [(row.name, row.layer) for row in table.rows if row.layer is not None]
    assert len(rows) == len(LAYERS[name])
    for (found, layer), (wanted, number) in zip(rows, LAYERS[name], strict=True):
        assert layer == number
        assert wanted is None or found == wanted
    assert table.layers == ss.nn.layer_count(net) == 1 + max(n for _, n in LAYERS[name])
    modules = dict(net.named_modules())
    for found, layer in rows:
        module = modules[found]
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


def test_table_says_what_was_left_in_float_and_why():
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


def test_an_activation_in_code_that_is_only_recorded_is_in_the_table():
    """A user's own activation module, seen by a recorded run, is quantised or said to be float."""

    class Own(nn.Module):
        def forward(self, x):
            return F.relu(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(6, 6), Own(), nn.Linear(6, 3)

        def forward(self, x):
            h = self.act(self.a(x))
            return self.b(h) if h.sum() > -1e9 else h

    net = ss.quantise(Net(), TERNARY, TERNARY, example_inputs=torch.randn(2, 6))
    assert any("act" in row.name or row.kind == "relu" for row in ss.report(net).rows)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_a_network_quantised_by_hand(name, training):
    model, net, x = converted(name)
    net.train(training)
    hand = float_twin(model, net)
    torch.manual_seed(3)
    got = net(x)
    torch.manual_seed(3)
    wanted = HANDS[name](hand, x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    for key, value in hand.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_a_network_quantised_by_hand(name):
    """And every quantised weight has one that is not zero."""
    model, net, x = converted(name)
    hand = float_twin(model, net)
    wanted = gradients(hand, lambda x: HANDS[name](hand, x), x)
    got = gradients(net, net, x)
    assert got.keys() == wanted.keys()
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-4)
    for module_name, module in net.named_modules():
        if isinstance(module, ss.nn.StairLayer):
            assert got[f"{module_name}.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_network_put_together_from_stair_modules_is_the_same(name):
    """Activations and layers of softstair.nn in the place of the float ones, module by module."""
    if name.startswith("functional"):
        pytest.skip("its activations are not modules")
    model, net, x = converted(name, weights=INT4, features=UINT4, noise="normal")
    hand, done = copy.deepcopy(model), {}
    kinds = {nn.Linear: ss.nn.StairLinear, nn.Conv1d: ss.nn.StairConv1d}
    kinds[nn.Conv2d] = ss.nn.StairConv2d
    for parent in list(hand.modules()):
        for key, child in list(parent.named_children()):
            if type(child) in kinds:
                weight = ss.nn.StairWeight(INT4, "normal")
                new = kinds[type(child)].from_float(child, weight)
                setattr(parent, key, done.setdefault(id(child), new))
            elif isinstance(child, nn.ReLU | nn.ReLU6 | nn.GELU | nn.Tanh | nn.Hardtanh):
                new = ss.nn.StairActivation(UINT4, "normal")
                setattr(parent, key, done.setdefault(id(child), new))
    hand.load_state_dict(net.state_dict(), strict=True)
    for training in (True, False):
        torch.manual_seed(0)
        got = net.train(training)(x)
        torch.manual_seed(0)
        torch.testing.assert_close(got, hand.train(training)(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_untouched(name):
    model, x = networks.make(name)
    model.eval()
    state = copy.deepcopy(model.state_dict())
    modules = {key: (type(m), m.training) for key, m in model.named_modules()}
    before = model(x)
    net = ss.quantise(model, TERNARY, TERNARY, example_inputs=x)
    assert {key: (type(m), m.training) for key, m in model.named_modules()} == modules
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    mine = {p.data_ptr() for p in model.parameters()}
    assert not mine & {p.data_ptr() for p in net.parameters()}
    assert not net.training


@pytest.mark.parametrize("name", NAMES)
def test_deepcopy(name):
    _, net, x = converted(name)
    twin = copy.deepcopy(net)
    torch.manual_seed(0)
    got = twin(x)
    torch.manual_seed(0)
    assert torch.equal(got, net(x))
    assert str(ss.report(twin)) == str(ss.report(net))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
        for _, stair in ss.nn.stair_modules(twin):
            stair.std.fill_(0.5)
    assert all(float(s.std) != 0.5 for _, s in ss.nn.stair_modules(net))
    again = copy.deepcopy(pickle.loads(pickle.dumps(twin)))
    assert torch.equal(again.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_pickle_keeps_everything(name):
    _, net, x = converted(name)
    twin = pickle.loads(pickle.dumps(net))
    assert str(ss.report(twin)) == str(ss.report(net))
    assert twin.state_dict().keys() == net.state_dict().keys()
    torch.manual_seed(0)
    got = gradients(twin, twin, x)
    torch.manual_seed(0)
    for key, gradient in gradients(net, net, x).items():
        assert torch.equal(gradient, got[key])


CHILD = """
import sys, torch
sys.path[:0] = [{tests!r}, {source!r}]
import softstair as ss
answers = {{}}
for name, (file, x) in torch.load(sys.argv[1]).items():
    try:
        net = torch.load(file, weights_only=False)
        ss.report(net)
        torch.manual_seed(5)
        train = net(x)
        train.sum().backward()
        answers[name] = (train.detach(), net.eval()(x).detach())
    except Exception as failure:
        print(name, repr(failure))
torch.save(answers, sys.argv[2])
"""


@pytest.mark.nightly
def test_networks_go_to_another_process(tmp_path):
    """Pickled here, loaded there: the same outputs, the table with it."""
    nets, sent, lost = {}, {}, []
    for name in NAMES:
        try:
            _, net, x = converted(name)
            torch.save(net, tmp_path / name)
        except Exception as failure:  # which ones fail is the answer wanted
            lost.append((name, repr(failure)))
            continue
        nets[name], sent[name] = (net, x), (str(tmp_path / name), x)
    torch.save(sent, tmp_path / "sent.pt")
    code = CHILD.format(
        tests=str(Path(__file__).parent), source=str(Path(ss.__file__).parent.parent)
    )
    files = [str(tmp_path / "sent.pt"), str(tmp_path / "answers.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=300)
    answers = torch.load(files[1])
    for name, (net, x) in nets.items():
        torch.manual_seed(5)
        same = name in answers and torch.equal(net(x), answers[name][0])
        if not same or not torch.equal(net.eval()(x), answers[name][1]):
            lost.append((name, "other outputs"))
    assert not lost


@pytest.mark.nightly(keep=10)
@pytest.mark.parametrize("settings", [{}, {"init": "keep"}, {"init": "keep", "fit": "channel"}])
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name, settings):
    """Strict, into a network converted from other weights, quanta included."""
    _, net, x = converted(name, **settings)
    other = converted(name, seed=9, **settings)[1]
    net(x)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer), strict=True)
    assert torch.equal(other.eval()(x), net.eval()(x))
    torch.manual_seed(0)
    got = other.train()(x)
    torch.manual_seed(0)
    assert torch.equal(got, net.train()(x))


@pytest.mark.parametrize("name", NAMES)
def test_safetensors(name, tmp_path):
    _, net, x = converted(name)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    other = converted(name, seed=9)[1]
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "net.safetensors"), strict=True)
    assert torch.equal(other.eval()(x), net.eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_float_checkpoint_loads_strictly(name):
    _, net, _ = converted(name)
    checkpoint = networks.make(name, seed=5)[0].state_dict()
    net.load_state_dict(checkpoint, strict=True)
    for key, value in checkpoint.items():
        assert torch.equal(net.state_dict()[key], value)


FAST = ("mlp",)
COMPILED = [
    n if n in FAST else pytest.param(n, marks=pytest.mark.nightly)
    for n in NAMES
    if n != "branching"
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name):
    """Whole graph, values and gradients. Dropout is left out of it."""
    torch._dynamo.reset()
    _, net, x = converted(name)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    got, wanted = gradients(twin, compiled, x), gradients(net, net, x)
    assert got.keys() == wanted.keys()
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=1e-5)
    if name in FAST:
        twin.eval(), net.eval()
        torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["shared"])
def test_inductor_equals_eager(name):
    torch._dynamo.reset()
    _, net, x = converted(name)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True)
    got, wanted = gradients(twin, compiled, x), gradients(net, net, x)
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-4)
    assert all(g.abs().sum() > 0 for g in got.values() if g.dim() > 1)


# Evaluation


def integer_sums(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer's sums must be: INT4 weights and multiples of 0.07, in float64 integers."""
    whole = (x.double() / 0.07).round()
    assert (whole * 0.07 - x.double()).abs().max() < 1e-5
    weight = (layer.weight.detach().double() / 0.07 + 0.5).floor().clamp(-8, 7)
    if isinstance(layer, nn.Linear):
        return F.linear(whole, weight)
    return layer._conv_forward(whole, weight, None)


class ViewBySize(nn.Module):
    """Flattens as most scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8 * 36, 3, bias=False)

    def forward(self, x):
        h = self.r(self.a(x))
        return self.b(h.view(h.size(0), -1))


class ViewByShape(ViewBySize):
    def forward(self, x):
        h = self.r(self.a(x))
        return self.b(h.reshape(h.shape[0], -1))


def exact_networks():
    yield "resnet", lambda: networks.ResNet(16), {"conv1", "fc"}
    yield "functional resnet", lambda: networks.FunctionalResNet(16), {"conv1", "linear"}
    yield "mobilenet", networks.MobileNet, {"features.0.0", "classifier.1"}
    yield "view(size)", ViewBySize, {"a"}
    yield "reshape(shape)", ViewByShape, {"a"}


@pytest.mark.parametrize(
    ("build", "floats"),
    [(b, f) for _, b, f in exact_networks()],
    ids=[n for n, *_ in exact_networks()],
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


class Offset(nn.Module):
    """Arithmetic with constants between features and the next sum."""

    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.r(self.a(x))))


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
def test_evaluation_rounds_nothing_that_is_no_multiple_of_the_quantum(between):
    """Constants added on the way are no whole quanta: the sum must still be the network's."""
    torch.manual_seed(0)
    net = ss.quantise(Offset(between), INT4, UINT4).eval()
    x = torch.randn(4, 6)
    a, b = net.a, net.b
    hidden = UINT4(F.linear(x, INT4(a.weight), a.bias))
    wanted = F.linear(between(hidden), INT4(b.weight), b.bias)
    torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_eval_is_deterministic(name):
    _, net, x = converted(name, forward="random")
    net.eval()
    state = torch.get_rng_state()
    assert torch.equal(net(x), net(x))
    assert torch.equal(torch.get_rng_state(), state)


# Settings


@pytest.mark.parametrize("name", NAMES)
def test_weights_start_at_thresholds(name):
    _, net, _ = converted(name, weights=INT4)
    for module in net.modules():
        if isinstance(module, ss.nn.StairLayer):
            inputs = module.weight[0].numel() * getattr(module, "groups", 1)
            weight = module.weight.detach() / 0.07
            thresholds = torch.arange(-7, 8) - 0.5
            distance = (weight[..., None] - thresholds).abs().amin(dim=-1)
            assert distance.max() <= inputs**-0.5 + 1e-4


@pytest.mark.parametrize("fit", ["layer", "channel", None])
def test_keep_keeps_the_weights(fit):
    model, net, x = converted("resnet", weights=INT4, features=UINT4, init="keep", fit=fit)
    for key, value in model.state_dict().items():
        assert torch.equal(net.state_dict()[key], value)
    quanta = [
        m.weight_stair.stair.quantum for m in net.modules() if isinstance(m, ss.nn.StairLayer)
    ]
    if fit is None:
        assert set(quanta) == {0.07}
    else:
        assert all(isinstance(q, tuple) == (fit == "channel") for q in quanta)
    assert torch.isfinite(net(x)).all()


def test_a_fit_per_channel_is_as_near_as_one_per_layer():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 1, 32)[:, None])
    error = {}
    for fit in ("layer", "channel"):
        layer = ss.quantise(model, INT4, init="keep", fit=fit)[0]
        kept = layer.weight_stair.stair(layer.weight)
        error[fit] = ((kept - model[0].weight) ** 2).mean(dim=1)
    assert (error["channel"] <= error["layer"] + 1e-12).all()
    assert error["channel"].sum() < error["layer"].sum()


def test_weights_only_and_features_only():
    _, weights, x = converted("mlp", features=None)
    assert [type(m).__name__ for m in weights][:3] == ["StairLinear", "BatchNorm1d", "ReLU"]
    assert [r.layer for r in ss.report(weights).rows if r.layer is not None] == [0, 1, 2]
    model, features, x = converted("mlp", weights=None)
    kinds = [type(m).__name__ for m in features]
    assert kinds == ["Linear", "BatchNorm1d", "StairActivation"] * 2 + ["Linear"]
    assert torch.equal(features[0].weight, model[0].weight)
    wanted = copy.deepcopy(model)
    wanted[2] = wanted[5] = nn.Identity()
    x0 = soft(wanted[1](wanted[0](x)))
    torch.testing.assert_close(features(x), wanted[6](soft(wanted[4](wanted[3](x0)))))
    with pytest.raises(ValueError, match="weights or features"):
        ss.quantise(model)


def test_settings_by_layer():
    stairs = [TERNARY, INT4, UINT4]
    net = ss.quantise(
        networks.mlp(6, 8, 8, 3),
        weights=stairs,
        features=tuple(stairs),
        noise=["normal", ss.noise.Logistic(), ss.ste.clipped_relu()],
        forward=("random", "expectation", "mode"),
    )
    kinds = {0: ss.noise.Normal, 1: ss.noise.Logistic, 2: ss.noise.Uniform}
    forwards = {0: "random", 1: "expectation", 2: "hard"}
    for _, stair in ss.nn.stair_modules(net):
        assert stair.stair == stairs[stair.layer]
        assert type(stair.noise) is kinds[stair.layer]
        assert stair.strategy == forwards[stair.layer]
    assert float(net[6].weight_stair.mean) == 0.5


def test_settings_by_name_and_number():
    """The first key that fits counts."""
    net = ss.quantise(
        networks.mlp(6, 8, 8, 3),
        weights={"3": INT4, "*": TERNARY},
        features={1: UINT4, "*": TERNARY},
        noise={"0": "normal", 2: "logistic", "*": "uniform"},
        forward={"*": "expectation"},
    )
    assert net[0].weight_stair.stair == net[6].weight_stair.stair == TERNARY
    assert net[3].weight_stair.stair == INT4
    assert (net[2].stair, net[5].stair) == (TERNARY, UINT4)
    assert isinstance(net[0].weight_stair.noise, ss.noise.Normal)
    assert isinstance(net[6].weight_stair.noise, ss.noise.Logistic)
    assert isinstance(net[2].noise, ss.noise.Uniform)
    net = ss.quantise(networks.mlp(6, 8, 3), {"0": None, "*": TERNARY}, TERNARY)
    assert type(net[0]) is nn.Linear
    assert type(net[3]) is ss.nn.StairLinear


@pytest.mark.parametrize("weights", [[TERNARY, None, TERNARY], {0: TERNARY, 1: None, 2: TERNARY}])
def test_none_for_one_layer_leaves_its_weights_in_float(weights):
    """None is allowed for all; the refusal of it for one must not say that it is allowed."""
    try:
        net = ss.quantise(networks.mlp(6, 8, 8, 3), weights, TERNARY)
    except ValueError as refusal:
        assert "or None, but None" not in str(refusal)  # noqa: PT017
        return
    kinds = [type(net[i]) for i in (0, 3, 6)]
    assert kinds == [ss.nn.StairLinear, nn.Linear, ss.nn.StairLinear]


def test_the_first_key_counts_also_before_none():
    """{0: a stair, "*": None} is layer 0 alone."""
    try:
        net = ss.quantise(networks.mlp(6, 8, 8, 3), {0: TERNARY, "*": None}, TERNARY)
    except ValueError as refusal:
        assert "weights" in str(refusal)  # noqa: PT017
        return
    assert type(net[0]) is ss.nn.StairLinear
    assert type(net[3]) is nn.Linear


@pytest.mark.parametrize(
    "estimator",
    [
        "clipped_relu",
        "hard_sigmoid",
        "piecewise_polynomial",
        "error_function",
        "sigmoid",
        "identity",
        "relu",
    ],
)
def test_estimators_as_noise(estimator):
    """The hard stair forward; the estimator's own slope, in quanta, backward."""
    noise = getattr(ss.ste, estimator)()
    torch.manual_seed(0)
    net = ss.quantise(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), INT4, UINT4, noise=noise)
    x = torch.randn(8, 6)
    hidden = F.linear(x, INT4(net[0].weight), net[0].bias).detach().requires_grad_()
    wanted = noise(hidden, UINT4)
    got = net(x)
    assert torch.equal(got, UINT4(hidden))
    wanted.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(net[0].bias.grad, hidden.grad.sum(0), rtol=1e-4, atol=1e-5)


def test_skip():
    model = networks.ResNet()
    net = ss.quantise(model, TERNARY, TERNARY, skip=("layer1", "fc", "layer2.*.downsample.*"))
    kinds = {name: type(m).__name__ for name, m in net.named_modules()}
    assert kinds["layer1.0.conv1"] == "Conv2d"
    assert kinds["layer1.0.relu"] == "ReLU"
    assert kinds["fc"] == "Linear"
    assert kinds["layer2.0.downsample.0"] == "Conv2d"
    assert kinds["layer2.0.conv1"] == "StairConv2d"
    assert [r.layer for r in ss.report(net).rows if r.layer is not None] == [0, 0, 1, 1, 1]


# Networks that are awkward


class Plain(nn.Module):
    """Two Linears and whatever a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)


class OptionalMask(Plain):
    def forward(self, x, mask=None):
        h = F.gelu(self.a(x))
        if mask is not None:
            h = h * mask
        return self.b(h)


@pytest.mark.parametrize("example", [False, True])
def test_an_optional_argument_stays_optional(example):
    """``if mask is not None`` must not be frozen into the branch with a mask."""
    x, mask = torch.randn(4, 6), torch.ones(8)
    net = ss.quantise(OptionalMask(), TERNARY, TERNARY, example_inputs=(x,) if example else None)
    torch.testing.assert_close(net(x), net(x, mask))
    a, b = net.a, net.b
    if "gelu" not in {r.kind for r in ss.report(net).rows if r.layer is None}:
        torch.testing.assert_close(net(x), linear(b, soft(linear(a, x))))


class Constant(Plain):
    def forward(self, x):
        return self.b(F.relu(self.a(x)) * torch.arange(8.0))


def test_constants_made_in_forward():
    """They are no parameters: checkpoints keep their keys."""
    model = Constant()
    net = ss.quantise(model, TERNARY, TERNARY)
    net.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(4, 6)
    twin = float_twin(model, net)
    wanted = linear(twin.b, soft(linear(twin.a, x)) * torch.arange(8.0))
    torch.testing.assert_close(net(x), wanted)


class Noisy(Plain):
    def forward(self, x):
        return self.b(F.relu(self.a(x))) + torch.rand(3)


def test_random_numbers_made_in_forward_stay_random():
    try:
        net = ss.quantise(Noisy(), TERNARY, TERNARY)
    except ValueError as refusal:
        assert "self.training" not in str(refusal)  # noqa: PT017
        return
    x = torch.randn(4, 6)
    assert not torch.equal(net(x), net(x))


class TwoNames(nn.Module):
    """One Linear under two names, and functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.again = self.a
        self.b = nn.Linear(6, 3)

    def forward(self, x):
        return self.b(F.relu(self.again(F.relu(self.a(x)))))


def test_a_module_under_two_names_keeps_both():
    model = TwoNames()
    net = ss.quantise(model, TERNARY, TERNARY)
    net.load_state_dict(model.state_dict(), strict=True)
    assert net.again is net.a
    rows = [(r.name, r.layer) for r in ss.report(net).rows if r.became == "stair weights"]
    assert rows == [("a", 0), ("b", 2)]


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(F.relu(self.bn(self.a(x))))


def test_modules_keep_their_own_mode():
    """A batch-norm that the user put into eval() stays there."""
    model = Frozen()
    model.bn.eval()
    net = ss.quantise(model, TERNARY, TERNARY)
    assert net.training
    assert net.a.training
    assert not net.bn.training
    assert not ss.quantise(model.eval(), TERNARY, TERNARY).a.weight_stair.training


class InPlace(Plain):
    def forward(self, x):
        h = self.a(x)
        h.relu_()
        return self.b(h)


class InPlaceFunction(Plain):
    def forward(self, x):
        h = self.a(x)
        F.relu(h, inplace=True)
        return self.b(h)


class InPlaceModule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.a(x)
        self.act(h)
        return self.b(h)


class InPlaceShortcut(Plain):
    """The shortcut takes h after the activation wrote into it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.a(x)
        y = self.act(h)
        return self.b(y + h)


@pytest.mark.parametrize("kind", [InPlace, InPlaceFunction, InPlaceModule, InPlaceShortcut])
def test_activations_in_place(kind):
    """What was written in place is still written, or refused: never lost without a word."""
    torch.manual_seed(0)
    try:
        net = ss.quantise(kind(), TERNARY, TERNARY).eval()
    except ValueError:
        return
    x, fed = torch.randn(4, 6), []
    net.b.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0]))
    net(x)
    assert set(fed[0].flatten().tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}


def without_exact_sums(net):
    """A copy that sums the features as they are, without a quantum that was derived for them."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, ss.nn.StairLayer):
            module.input_quantum = None
    return net


def _multiply(x):
    x *= 0.375


def _assign(h):
    h[:, 0] = 0.375


def _multiply_each(h):
    for column in h.unbind(1):
        column.mul_(0.375)


def _replace_data(h):
    h.data = 0.375 * h


def _share_data(h):
    y = torch.zeros(1)
    y.data = h.data
    y.mul_(0.375)


WRITTEN = {
    "slice": lambda h: h[:, :4].mul_(0.375),
    "view": lambda h: h.view(-1, 2, 4).mul_(0.375),
    "operator": _multiply,
    "operator on a slice": lambda h: _multiply(h[:, 1:3]),
    "chunk": lambda h: h.chunk(2, 1)[1].add_(0.25),
    "split": lambda h: torch.split(h, 3, 1)[0].fill_(0.25),
    "transpose": lambda h: h.transpose(0, 1).mul_(0.375),
    "permute": lambda h: h.permute(1, 0).div_(3),
    "unsqueeze": lambda h: h.unsqueeze(1).clamp_(-0.25, 0.25),
    "detach": lambda h: h.detach().mul_(0.375),
    "data": lambda h: h.data.mul_(0.375),
    "operator on data": lambda h: _multiply(h.data),
    "out": lambda h: torch.mul(h, 0.375, out=h),
    "out, a view": lambda h: torch.mul(h[:, :2], 0.375, out=h[:, :2]),
    "twice": lambda h: h.add_(h).mul_(0.375),
    "assignment": _assign,
    "loop": _multiply_each,
    "new data": _replace_data,
    "data of another tensor": _share_data,
}
NOT_TRACED = ("assignment", "loop", "new data")


class WritesFeatures(Plain):
    """Features that are written into after their stair, and read again."""

    def __init__(self, write, traced: bool) -> None:
        super().__init__()
        self.act, self.write, self.traced = nn.ReLU(), write, traced

    def forward(self, x):
        h = self.act(self.a(x))
        if not self.traced and h.sum() < -1e9:
            return x
        self.write(h)
        return self.b(h)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("kind", WRITTEN)
def test_features_that_were_written_into_are_summed_as_they_are(kind, traced):
    torch.manual_seed(0)
    if traced and kind in NOT_TRACED:
        pytest.skip("torch.fx does not trace it")
    x = 3 * torch.randn(200, 6)
    net = ss.quantise(WritesFeatures(WRITTEN[kind], traced), TERNARY, TERNARY, example_inputs=x)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), without_exact_sums(net)(x))


class KeepsQuantum(Plain):
    def __init__(self, write) -> None:
        super().__init__()
        self.act, self.write, self.again = nn.ReLU(), write, nn.Linear(8, 3)

    def forward(self, x):
        h = self.act(self.a(x))
        y = self.again(h)
        self.write(h)
        return self.b(h) + y


def _double(h):
    h += h


@pytest.mark.parametrize(
    ("write", "quantum", "widest"),
    [
        (lambda h: h[:, :4].neg_(), 1.0, 2),  # a bound: that of an addition
        (_double, 1.0, 2),
        (lambda h: h[:, 1:].add_(h[:, 1:]), 1.0, 2),
        (lambda h: h.add(0.5).mul_(2), 1.0, 1),
        (lambda h: h.mul_(0.5), None, None),
    ],
)
def test_a_write_leaves_the_quantum_that_the_features_have_then(write, quantum, widest):
    """What was read before is not touched; what is read afterwards has the new values."""
    net = ss.quantise(KeepsQuantum(write), TERNARY, TERNARY)
    assert (net.again.input_quantum, net.again.widest_input) == (1.0, 1)
    assert net.b.input_quantum == quantum
    assert quantum is None or net.b.widest_input == widest


class AliasedActivation(Plain):
    """A functional activation in code that adds to an alias of what it reads."""

    def forward(self, x):
        size = x.size(0)
        doubled = size
        doubled += size
        t = self.a(x)
        u = t
        u += x.sum(1, keepdim=True)
        return self.b(F.relu(t)).view(size, 3) + doubled


def test_an_addition_to_an_alias_stays_in_place_where_code_is_rewritten():
    torch.manual_seed(0)
    model, x = AliasedActivation().eval(), torch.randn(8, 6)
    net = ss.quantise(model, TERNARY, TERNARY).eval()
    stair = net.get_submodule("stair_relu")
    wanted = net.b(stair(net.a(x) + x.sum(1, keepdim=True))) + 16
    for tried in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(tried(x), wanted)


class ViewActivation(Plain):
    """An activation in place on a view of what is read afterwards."""

    def forward(self, x):
        h = self.a(x)
        y = F.relu(h.view(-1, 2, 4), inplace=True)
        return self.b(y.flatten(1) + h)


def test_an_activation_in_place_on_a_view_is_refused():
    with pytest.raises(ValueError, match="works in place on a tensor that is used again"):
        ss.quantise(ViewActivation(), TERNARY, TERNARY)


class DropNever(Plain):
    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)), 0.5, training=False))


class DropMode(Plain):
    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)), p=0.5, training=self.training))


def test_functional_dropout_follows_the_mode():
    x = torch.randn(64, 6)
    net = ss.quantise(DropMode().eval(), TERNARY, TERNARY)
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))
    net = ss.quantise(DropNever(), TERNARY, TERNARY)
    assert torch.equal(net(x), net(x))


class ByName(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.b(input=self.act(input=self.a(input=x)))


def test_inputs_given_by_name():
    net = ss.quantise(ByName(), TERNARY, TERNARY)
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x), linear(net.b, soft(linear(net.a, x))))


def test_a_reparametrised_layer_is_left_in_float():
    """Its weight is computed, not a parameter: said in the table, no crash."""
    for wrap in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = nn.Sequential(wrap(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))
        net = ss.quantise(model, TERNARY, TERNARY)
        floats = {r.name: r.became for r in ss.report(net).rows if r.layer is None}
        assert "0" in floats
        assert net(torch.randn(4, 6)).shape == (4, 3)


def test_hooks_and_attributes_survive():
    model = networks.mlp(6, 8, 3)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(True))
    model.classes = 3
    net = ss.quantise(model, TERNARY, TERNARY)
    net(torch.randn(4, 6))
    assert seen
    assert net.classes == 3


class Described(Plain):
    """A functional network with an attribute, a list of modules and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = 3
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        h = F.relu(self.a(x))
        for block in self.blocks:
            h = F.relu(block(h))
        return self.b(h)


def test_a_functional_network_keeps_its_attributes_and_containers():
    """A copy of the model: what the user's code reads from it is still there."""
    net = ss.quantise(Described(), TERNARY, TERNARY)
    assert net.classes == 3
    assert isinstance(net.blocks[0], ss.nn.StairLinear)


def test_frozen_parameters_stay_frozen():
    model = networks.mlp(6, 8, 3)
    model[0].weight.requires_grad_(False)
    net = ss.quantise(model, TERNARY, TERNARY)
    assert not net[0].weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes(dtype):
    model, x = networks.make("resnet")
    net = ss.quantise(model.to(dtype), TERNARY, TERNARY)
    assert net(x.to(dtype)).dtype == dtype
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert {s.std.dtype for _, s in ss.nn.stair_modules(net)} == {torch.float32}


# Bad input


def bad_cases():
    model = lambda: networks.mlp(6, 8, 8, 3)
    yield "model", model, {"model": "resnet"}, "model"
    yield "stair network", lambda: ss.quantise(model(), TERNARY), {}, "model"
    yield "nothing to quantise", lambda: nn.Sequential(nn.BatchNorm1d(3)), {}, "model"
    yield "all skipped", model, {"skip": ("*",)}, "model"
    yield "cannot trace", networks.Branching, {}, "example_inputs"
    yield "no stairs", model, {"weights": None, "features": None}, "weights"
    yield "stair by name", model, {"weights": "ternary"}, "weights"
    yield "features by name", model, {"features": 3}, "features"
    yield "stair in a list", model, {"weights": [TERNARY, "ternary", TERNARY]}, "weights"
    yield "short list", model, {"weights": [TERNARY, TERNARY]}, "weights"
    yield "long noise", model, {"noise": ["uniform"] * 4}, "noise"
    yield "short forward", model, {"forward": ["mode"]}, "forward"
    yield "empty mapping", model, {"noise": {}}, "noise"
    yield "incomplete mapping", model, {"weights": {0: TERNARY}}, "weights"
    yield "unknown noise", model, {"noise": "unifrom"}, "noise"
    yield "noise of no kind", model, {"noise": 3}, "noise"
    yield "noise class", model, {"noise": ss.noise.Uniform}, "noise"
    yield "improper noise", model, {"noise": ss.ste.identity().noise}, "noise|forward"
    yield "unknown forward", model, {"forward": "mod"}, "forward"
    yield "forward of no kind", model, {"forward": 3}, "forward"
    yield "unknown forward in a list", model, {"forward": ["mode", "mod", "mode"]}, "forward"
    yield "unknown skip", model, {"skip": ("7",)}, "skip"
    yield "skip None", model, {"skip": None}, "skip"
    yield "skip number", model, {"skip": 3}, "skip"
    yield "skip numbers", model, {"skip": (3,)}, "skip"
    yield "init", model, {"init": "zeros"}, "init"
    yield "fit", model, {"init": "keep", "fit": "tensor"}, "fit"
    quanta = TERNARY.with_quantum([1.0, 2.0], axis=0)
    yield "channels", model, {"weights": quanta}, "weights|quantum"
    yield "example", networks.Branching, {"example_inputs": 3}, "example_inputs"
    yield (
        "example shape",
        networks.Branching,
        {"example_inputs": (torch.ones(3),)},
        "example_inputs",
    )


@pytest.mark.parametrize(
    ("build", "settings", "name"),
    [case[1:] for case in bad_cases()],
    ids=[case[0] for case in bad_cases()],
)
def test_bad_input(build, settings, name):
    """One sentence that names the parameter; the model stays as it was."""
    model = build()
    settings = {"model": model, "weights": TERNARY, "features": TERNARY, **settings}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=name) as caught:
        ss.quantise(**settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [type(m) for m in model.modules()] == kinds
    assert model.training


def test_report_refuses_a_float_network():
    with pytest.raises(
        ValueError, match=r"net must be a network that softstair\.quantise returned"
    ):
        ss.report(nn.Linear(2, 2))


class Unpredictable(nn.Module):
    """A forward pass that no tracing can follow, with something added to its features."""

    def __init__(self, added) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
        self.p, self.added = nn.Parameter(torch.full((6,), 0.3)), added

    def forward(self, x):
        h = self.act(self.a(x))
        return self.b(self.added(self, h, x) if x.sum() < 1e9 else h)


@pytest.mark.parametrize(
    "added",
    [lambda m, h, x: h + m.p, lambda m, h, x: h + x, lambda m, h, x: h - torch.full((6,), 0.2)],
)
def test_a_recorded_run_knows_what_is_no_feature(added):
    """Parameters, inputs and constants added to features: eval() rounds none of them away."""
    features = ss.Stair.ternary(0.5)
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    net = ss.quantise(Unpredictable(added), TERNARY, features, example_inputs=x).eval()
    hidden = features(F.linear(x, TERNARY(net.a.weight), net.a.bias))
    wanted = F.linear(added(net, hidden, x), TERNARY(net.b.weight), net.b.bias)
    torch.testing.assert_close(net(x), wanted)


def test_a_layer_left_in_float_keeps_the_count_of_the_caller():
    """Sequences count the layers of the model; the network numbers those that are left."""
    model = networks.mlp(6, 8, 8, 3)
    stairs = [TERNARY, None, TERNARY]
    net = ss.quantise(model, stairs, [*stairs[:2], None], noise=["uniform", "normal", "logistic"])
    found = {m.layer: type(m.noise).__name__ for _, m in ss.nn.stair_modules(net)}
    assert found == {0: "Uniform", 1: "Logistic"}


class Keeps(nn.Module):
    """Leaves a hidden result on itself, for a loss elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x):
        self.hidden = self.a(x)
        return self.b(self.act(self.hidden))


def test_what_a_network_keeps_of_itself_is_left_alone():
    net = ss.quantise(Keeps(), TERNARY, TERNARY, skip="b")
    assert not hasattr(net, "hidden")
    annealer = ss.Annealer(net, lambda layer, t: (0.0, 0.0))
    annealer.step()
    net(torch.randn(4, 6))
    assert net.hidden.requires_grad


def test_the_noise_is_where_the_network_is():
    """A model on another device, be it one without data, gets its stairs there."""
    net = ss.quantise(networks.mlp(6, 8, 3).to("meta"), TERNARY, TERNARY)
    assert {buffer.device.type for buffer in net.buffers()} == {"meta"}
