"""Weights with a quantum for each group: their quanta, values, gradients and state."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from softstair._grouped import GroupedWeight
from softstair.convert.options import stair_named

LEVELS = {"ternary": (-1, 1), "int2": (-2, 1), "int4": (-8, 7)}


def made(
    bits: str, shape: tuple[int, int] = (6, 256), **options: bool
) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    return linear, ss.quantise(nn.Sequential(linear), bits, options=ss.QuantiseOptions(**options))


def least_error(row: np.ndarray, levels: tuple[int, int]) -> float:
    """The squared error of the best of many quanta, in float64."""
    quanta = np.linspace(0.02, 2.2, 4000)[:, None] * np.abs(row).max() / levels[1]
    rounded = np.clip(np.floor(row / quanta + 0.5), *levels) * quanta
    return float(((rounded - row) ** 2).sum(1).min())


@pytest.mark.parametrize("group", ["row", "tensor", "32", "64", "128", "256"])
@pytest.mark.parametrize("name", ["ternary", "int4"])
def test_each_group_of_weights_has_the_quantum_of_least_error(name: str, group: str) -> None:
    linear, net = made(f"{name}:{group}/float")
    integers, quanta = net[0].integers_and_quanta()
    size = {"row": 256, "tensor": 6 * 256}.get(group) or int(group)
    assert quanta.shape == ((1, 1) if group == "tensor" else (6, 256 // size))
    assert integers.dtype == torch.int16
    low, high = LEVELS[name]
    assert low <= int(integers.min()) < int(integers.max()) <= high
    weight = (integers.reshape(*quanta.shape, -1) * quanta[..., None]).reshape(6, 256)
    rows, rounded = (w.detach().double().reshape(-1, size).numpy() for w in (linear.weight, weight))
    for own, row in zip(((rounded - rows) ** 2).sum(1), rows, strict=True):
        assert own <= least_error(row, LEVELS[name]) * 1.005
    x = torch.randn(2, 3, 256)
    torch.testing.assert_close(net.eval()(x), F.linear(x, weight, linear.bias))
    torch.testing.assert_close(net.train()(x), F.linear(x, weight, linear.bias))


def test_quanta_are_numbers_of_float16_on_demand() -> None:
    exact, rounded = (
        made("ternary:64/float", half=half)[1][0].integers_and_quanta().quanta.numpy()
        for half in (False, True)
    )
    assert (rounded == exact.astype(np.float16).astype(np.float32)).all()
    assert (rounded != exact).any()
    _, net = made("int4:32/float", half=True)
    ratio = net[0].weight_stair.learn_quantum()
    ratio.data.uniform_(-0.3, 0.3)
    in_training = net.train()[0].quantised_weight()
    assert in_training.square().sum().backward() is None
    assert ratio.grad is not None
    assert ratio.grad.abs().min() > 0
    quanta = net.eval()[0].integers_and_quanta().quanta.numpy()
    assert (quanta == quanta.astype(np.float16).astype(np.float32)).all()
    torch.testing.assert_close(net[0].quantised_weight(), in_training)


def plain(w: Tensor, quantum: float, share: float) -> Tensor:
    """Ternary weights blended in by hand: the line to two quanta, and its gradient."""
    line = (w / quantum).clamp(-2, 2)
    hard = torch.where(line >= 0.5, 1.0, torch.where(line < -0.5, -1.0, 0.0))
    return quantum * (line + share * (hard - line).detach())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_values_are_blended_in_and_gradients_reach_one_quantum_beyond_the_ends(
    share: float,
) -> None:
    _, net = made("ternary:tensor/float", (4, 64))
    layer, quantum = net[0], float(net[0].weight_stair.quantum)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-3, 3, 256).reshape(4, 64) * quantum)
    layer.weight_stair.blend.fill_(share)
    expected, grad = layer.weight.detach().clone().requires_grad_(), torch.randn(4, 64)
    (plain(expected, quantum, share) * grad).sum().backward()
    value = layer.quantised_weight()
    torch.testing.assert_close(value, plain(expected, quantum, share))
    (value * grad).sum().backward()
    assert expected.grad is not None
    torch.testing.assert_close(layer.weight.grad, expected.grad)
    assert 0 < int((layer.weight.grad == 0).sum()) < 256


def test_other_noise_gives_the_gradient_of_the_operator() -> None:
    for noise, forward in (("logistic", "expectation"), (ss.ste.identity(), "mode")):
        _, net = made("ternary:32/float", (4, 64))
        model = nn.Sequential(nn.Linear(64, 4))
        other = ss.quantise(model, "ternary:32/float", noise=noise, forward=forward)[0]
        assert not other.weight_stair.is_static
        other.load_state_dict(net[0].state_dict() | {"weight_stair.std": other.weight_stair.std})
        x = (other.weight.detach().reshape(-1, 32) / other.weight_stair.quanta()).requires_grad_()
        kind = other.weight_stair
        longer = kind.longer_stair(in_quanta=True) or kind.unit_stair
        other.quantised_weight().sum().backward()
        std, strategy = float(kind.std), kind.strategy
        ss.regularise(x, longer, kind.noise, 0.0, std, strategy).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(other.weight.grad, x.grad.reshape(4, 64))


def test_a_checkpoint_of_the_float_network_fits_the_quanta_again() -> None:
    linear, net = made("ternary:32/int8:token")
    state = {key: 3 * value for key, value in nn.Sequential(linear).state_dict().items()}
    before = net[0].integers_and_quanta()
    net.load_state_dict(state)
    after = net[0].integers_and_quanta()
    assert torch.equal(before.integers, after.integers)
    torch.testing.assert_close(after.quanta, 3 * before.quanta)
    _, other = made("ternary:32/int8:token")
    other.load_state_dict(net.state_dict())
    assert torch.equal(other[0].integers_and_quanta().quanta, after.quanta)


def test_levels_at_thresholds_are_those_of_the_stair() -> None:
    stair = stair_named("int4")
    weight = torch.tensor(stair.thresholds).reshape(1, -1)
    below = torch.nextafter(weight, torch.full_like(weight, -torch.inf))
    for w in (weight, below, torch.tensor([[-100.0, 100.0, 0.49999997, -0.5]])):
        grouped = GroupedWeight(stair, w, fitted=False).eval()
        assert torch.equal(grouped(w), stair(w))


@pytest.mark.parametrize(
    ("bits", "options", "match"),
    [
        ("ternary:64", {}, r"^bits must be weights with :row, .* but 'ternary:64' was given"),
        ("ternary:60/float", {}, "^bits must be weights with"),
        ("ternary/int8:tokens", {}, "^bits must be weights with"),
        ("ternary:128/float", {}, "^weights in groups of 128 must divide .* '0' has 192"),
        ("ternary/int8:256", {}, "^weights in groups of 256 must divide .* '0' has 192"),
        ("int4", {"half": True}, "^half needs weights in groups"),
        ("int4:32/float", {"init": "thresholds"}, "^init must be 'keep'"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    bits: str, options: dict[str, object], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        ss.quantise(nn.Sequential(nn.Linear(192, 4)), bits, options=ss.QuantiseOptions(**options))


def test_a_network_in_half_precision_keeps_its_quanta() -> None:
    _, net = made("int4:32/int8:32", half=True)
    quanta = net[0].integers_and_quanta().quanta
    assert torch.equal(net.half()[0].integers_and_quanta().quanta, quanta)
    assert net[0].weight_stair.half()(net[0].weight).dtype == torch.float16
