"""What becomes of each activation: kept before the stair, or replaced by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair._errors import SoftstairError
from softstair.convert.ops import OPERATORS, Effect
from softstair.deploy.nodes import ExportError
from softstair.deploy.writing import export
from softstair.nn import StairActivation

ACTIVATIONS = [row.modules[0] for row in OPERATORS if row.effect is Effect.ACTIVATION]
DECREASING = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
    "x * sigmoid(x)": (lambda x: x * torch.sigmoid(x), nn.SiLU()),
    "sigmoid(x) * x": (lambda x: F.sigmoid(x).mul(x), nn.SiLU()),
    "x *= sigmoid(x)": (lambda x: x.mul_(x.sigmoid()), nn.SiLU()),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), nn.GELU(approximate="tanh")),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.3, True), nn.LeakyReLU(0.3)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, max_val=2.0), nn.Hardtanh(-0.5, 2.0)),
    "rrelu": (lambda x: F.rrelu(x, training=False), nn.RReLU()),
    "softplus": (lambda x: F.softplus(x, beta=2.0), nn.Softplus(2.0)),
    "logsigmoid": (lambda x: F.logsigmoid(x), nn.LogSigmoid()),
    "tanh": (lambda x: x.tanh(), nn.Tanh()),
}


def model_of(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Linear(32, 4)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), activation, head)
    model(3 * torch.randn(512, 8))
    return model.eval()


def error_of(net: nn.Module, stair: nn.Module, activation: nn.Module, x: Tensor) -> float:
    """The relative error of the features, given the same sums."""
    sums: list[Tensor] = []
    hook = stair.register_forward_pre_hook(lambda _, inputs: sums.append(inputs[0].clone()))
    with torch.no_grad():
        net(x)
        hook.remove()
        expected, y = activation.eval()(sums[0]), stair(sums[0])
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_features_of_eight_bits_keep_the_activation(kind: type[nn.Module], tmp_path: Path) -> None:
    model, x = model_of(kind()), torch.randint(256, (512, 8), dtype=torch.uint8)
    net, floats = ss.quantise(model, "int8").eval(), (x.float() - 128) / 64
    ss.calibrate(net, [floats])
    assert error_of(net, net[2], model[2], floats) <= 0.02
    if kind is not nn.ReLU:
        assert ss.report(net).rows[2].became == f"{kind.__name__}, then a stair"
    frozen = ss.freeze(net, (8,), zero=128, scale=64.0, examples=x)
    assert export(frozen, tmp_path / "network.onnx", "onnx", x).mismatches == 0
    ((compared, differing),) = [(row.compared, row.differing) for row in frozen.report.layers]
    assert compared == 512 * 32
    if kind in DECREASING:
        with torch.no_grad():
            expected = model[2](net[:2](floats))
        features = frozen.features(x)["2"] * net[2].stair.quantum
        assert float((features - expected).norm() / expected.norm()) <= 0.03
    else:
        assert differing == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_kept_with_their_settings(name: str) -> None:
    function, module = FUNCTIONS[name]
    torch.manual_seed(0)
    code = lambda m, x: m.b(function(m.a(x)))
    model, x = Code(code, a=nn.Linear(8, 32), b=nn.Linear(32, 4)).eval(), 3 * torch.randn(512, 8)
    net = ss.quantise(model, "int8").eval()
    ss.calibrate(net, [x])
    stairs = [each for each in net.modules() if isinstance(each, StairActivation)]
    assert len(stairs) == 1
    assert error_of(net, stairs[0], module, x) <= 0.02


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_other_stairs_take_the_place_of_the_activation(kind: type[nn.Module]) -> None:
    net = ss.quantise(model_of(kind()), "ternary").eval()
    became = ss.report(net).rows[2].became
    if isinstance(net[2], StairActivation):
        assert became == f"ternary stair instead of {kind.__name__}"
        assert net[2].function is None
    else:
        assert "gate" in became


def test_activation_overrides_what_the_names_say() -> None:
    model, ternary = model_of(nn.Tanh()), ss.Stair.ternary()
    assert ss.quantise(model, "int8", activation="replace")[2].function is None
    kept = ss.quantise(model, ternary, ternary, activation="keep").eval()
    x = torch.randn(64, 8)
    assert torch.equal(kept[:3](x), ternary(torch.tanh(kept[:2](x))))
    with pytest.raises(SoftstairError, match="activation"):
        ss.quantise(model, "int8", activation="no")


def test_each_layer_keeps_its_activation_by_its_own_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    net = ss.quantise(model, {"0": "int8", "2": "ternary", "*": "int8/float"})
    assert isinstance(net[1].function, nn.GELU)
    assert net[3].function is None


def test_float_weights_of_prelu_load() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 2))
    net = ss.quantise(model, "int8")
    model[1].weight.data = torch.tensor([0.1, 0.2, 0.3, 0.4])
    net.load_state_dict(model.state_dict())
    assert torch.equal(net[1].function.weight, model[1].weight)
    again = ss.quantise(model, "int8")
    ss.calibrate(net, [torch.randn(64, 4)])
    again.load_state_dict(net.state_dict())
    x = torch.randn(32, 4)
    assert torch.equal(again.eval()(x), net.eval()(x))


def test_prelu_decreases_in_all_channels_or_in_none() -> None:
    net = ss.quantise(model_of(nn.PReLU(init=-0.1)), "int8").eval()
    ss.freeze(net, (8,), zero=128, scale=64.0)
    activation = nn.PReLU(32)
    activation.weight.data[3] = -0.1
    with pytest.raises(ExportError, match="PReLU"):
        ss.freeze(ss.quantise(model_of(activation), "int8").eval(), (8,), zero=128, scale=64.0)


def test_gates_at_the_end_stay_in_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid())
    net = ss.quantise(model, "int8").eval()
    assert type(net[3]) is nn.Sigmoid
    assert ss.report(net, (4,)).freezes


def test_shortcuts_of_a_kept_activation_reach_its_least_value() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = F.elu(self.a(x))
            return self.c(F.elu(self.b(x) + x))

    torch.manual_seed(0)
    net, x = (
        ss.quantise(Residual(), "int4", options=ss.QuantiseOptions(shortcuts="uint8")).eval(),
        3 * torch.randn(256, 16),
    )
    ss.calibrate(net, [x])
    second = [m for name, m in net.named_modules() if name.endswith("input_stair")]
    assert len(second) == 1
    assert second[0].stair.levels[0] < 0


def test_a_kept_activation_has_gradients_and_learned_quanta() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    net = ss.quantise(model, "int4", quanta="learned")
    ss.calibrate(net, [torch.randn(64, 4)])
    net(torch.randn(16, 4)).sum().backward()
    assert float(net[0].weight.grad.abs().sum()) > 0
    assert net[1].log_ratio.grad is not None


@pytest.mark.parametrize("bits", ["int8", "ternary"])
def test_a_kept_activation_is_named_by_fused_training(bits: str) -> None:
    fuse = pytest.importorskip("softstair._accelerate.fuse", reason="needs triton")
    layers = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh()
    net = ss.quantise(nn.Sequential(*layers, nn.Linear(16, 2)), bits)
    assert bool(fuse.not_fused(net)) is (bits == "int8")


def test_a_hook_on_a_kept_activation_runs_once_with_the_features() -> None:
    model, seen = model_of(nn.Tanh()), []
    model[2].register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    net, x = ss.quantise(model, "int8").eval(), torch.randn(16, 8)
    net(x)
    assert len(seen) == 1
    assert torch.equal(seen[0], net[:3](x))


def features_of(net: nn.Module) -> dict[str, StairActivation]:
    return {name: m for name, m in net.named_modules() if isinstance(m, StairActivation)}


def two_branches(join: Callable[[list[Tensor]], Tensor]) -> nn.Module:
    torch.manual_seed(1)
    code = lambda m, x: m.c(join([m.b(x), F.gelu(m.a(x))]))
    layers = {"a": nn.Linear(8, 16), "b": nn.Linear(8, 16), "c": nn.LazyLinear(4)}
    model = Code(code, **layers).eval()
    model(torch.zeros(2, 8))
    return model


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_features_beside_a_sum_keep_their_own_range(bits: str) -> None:
    model, x = two_branches(lambda parts: torch.cat(parts, 1)), 3 * torch.randn(512, 8)
    net = ss.quantise(model, bits).eval()
    ss.calibrate(net, [x])
    stairs = features_of(net)
    assert len({stair.stair.quantum for stair in stairs.values()}) == 1
    assert error_of(net, stairs["stair_gelu"], nn.GELU(), x) < (0.2 if bits == "int4" else 0.02)


@pytest.mark.parametrize("quanta", ["fixed", "learned"])
def test_joined_features_share_a_quantum_from_the_start(quanta: str) -> None:
    model = two_branches(lambda parts: torch.cat([F.relu(parts[0]), torch.tanh(parts[1])], 1))
    net = ss.quantise(model, "int4", quanta=quanta)
    relu, tanh = (features_of(net)[name] for name in ("stair_relu", "stair_tanh"))
    assert relu.stair.quantum == tanh.stair.quantum == net.c.input_quantum
    assert relu.log_ratio is tanh.log_ratio
    assert tanh.stair.levels[0] < 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_prelu_of_another_dtype_is_kept(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 4)).to(dtype)
    assert ss.quantise(model, "int8")[1].function.weight.dtype == dtype


def test_the_weight_of_a_functional_prelu_is_a_parameter_of_the_float_network() -> None:
    layers = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 4), "w": nn.PReLU(16)}
    model = Code(lambda m, x: m.b(F.prelu(m.a(x), m.w.weight)), **layers)
    net = ss.quantise(model, "int8")
    model.w.weight.data = torch.rand(16)
    net.load_state_dict(model.state_dict())
    assert torch.equal(features_of(net)["stair_prelu"].function.weight, model.w.weight)
    computed = Code(lambda m, x: m.b(F.prelu(m.a(x), m.w.weight.abs())), **layers)
    with pytest.raises(SoftstairError, match="stair_prelu"):
        ss.quantise(computed, "int8")


def test_a_second_call_keeps_the_activation_where_the_first_is_in_float() -> None:
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "act": nn.PReLU()}
    model = Code(lambda m, x: m.b(m.act(m.a(m.act(x)))), **layers)
    net = ss.quantise(model, {"act.2": "int8", "act": "float", "*": "int8"})
    again = ss.quantise(model, {"act.2": "int8", "act": "float", "*": "int8"})
    again.load_state_dict(net.state_dict())
    assert list(features_of(net)) == ["act.2"]
    assert features_of(net)["act.2"].function.weight is net.act.weight


def test_gates_without_a_kept_stair_stay_in_float() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)
    )
    net = ss.quantise(model, {"0": "int8", "*": "ternary"})
    assert type(net[3]) is nn.Sigmoid
    assert "gate" in ss.report(net).rows[3].became


@pytest.mark.parametrize(
    "end", [lambda p: p[:, 0], lambda p: 1 - p, lambda p: p.clamp(0.1, 0.9), lambda p: (p, p * p)]
)
def test_gates_stay_in_float_where_only_functions_follow(end: Callable[[Tensor], object]) -> None:
    model = Code(lambda m, x: end(torch.sigmoid(m.a(F.gelu(x)))), a=nn.Linear(8, 4))
    assert list(features_of(ss.quantise(model, "int8"))) == ["stair_gelu"]


def test_a_sigmoid_that_writes_into_its_input_is_no_swish() -> None:
    model = Code(
        lambda m, x: m.b((y := m.a(x)).mul(y.sigmoid_())), a=nn.Linear(8, 8), b=nn.Linear(8, 4)
    )
    with pytest.raises(SoftstairError, match="in place"):
        ss.quantise(model, "int8")


def test_gated_linear_units_are_named() -> None:
    net = ss.quantise(nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 4)), "int8")
    assert "product" in ss.report(net).rows[1].became
