"""Calibration of quanta, and which activations must share one."""

import copy
import re

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import networks
import softstair as ss
from softstair._errors import SoftstairError
from softstair.convert.units import set_input_units, tied_stairs
from softstair.nn import stair_modules

pytestmark = pytest.mark.quick

TERNARY, UINT4 = ss.Stair.ternary(), ss.Stair.linear(4, quantum=0.25)


class Joined(nn.Module):
    """Features that are added, averaged and added, concatenated, or read by the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(6))
        self.stairs = nn.ModuleList(nn.ReLU() for _ in range(6))
        self.pool, self.shared, self.last = nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = (
            stair(layer(x)) for layer, stair in zip(self.layers, self.stairs, strict=True)
        )
        added = a + b
        smaller = self.pool(c) + d[..., ::2, ::2]  # multiples of a quarter of c's quantum
        last = self.last(torch.cat([added, e], 1))
        return last.mean() + smaller.mean() + self.shared(d).mean() + self.shared(f).mean()


def test_activations_whose_values_meet_are_tied():
    net = ss.quantise(Joined(), TERNARY, UINT4, options=ss.QuantiseOptions(sums=None))
    names = {module: name for name, module in ss.nn.stair_modules(net)}
    groups = [[names[stair][-1] for stair in group] for group in tied_stairs(net)]
    assert groups == [["0", "1", "4"], ["2"], ["3", "5"]]


def test_layers_learn_whether_their_inputs_still_have_one_quantum():
    net = ss.quantise(Joined(), TERNARY, UINT4, options=ss.QuantiseOptions(sums=None))
    assert (net.last.input_quantum, net.last.widest_input) == (0.25, 30)
    for number, expected in ((0, None), (1, None), (4, 0.5)):
        net.stairs[number].set_quantum(0.5)
        set_input_units(net)
        assert net.last.input_quantum == expected


def single(bits: int, signed: bool) -> tuple[nn.Module, Tensor]:
    """One activation on known inputs, and these."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 2))
    nn.init.eye_(model[0].weight)
    torch.manual_seed(0)
    features = ss.Stair.linear(bits, signed)
    return ss.quantise(model, None, features), torch.randn(200, 64).mul(3)


@pytest.mark.parametrize(("bits", "signed"), [(2, False), (4, False), (3, True), (8, False)])
def test_mse_is_the_least_that_scipy_finds(bits, signed):
    net, x = single(bits, signed)
    quantum = ss.calibrate(net.eval(), [x])["1"]
    values = x.double().numpy()
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    target = values if signed else np.maximum(values, 0)
    error = lambda q: float(
        np.square(np.clip(np.floor(values / q + 0.5), low, high) * q - target).sum()
    )
    tried = np.abs(values).max() / high * np.linspace(0.05, 1.2, 60)
    best = tried[np.argmin([error(q) for q in tried])]
    least = minimize_scalar(error, bounds=(0.9 * best, 1.1 * best)).fun
    assert error(quantum) <= 1.001 * least


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("training", [False, True])
def test_modes_and_frozen_statistics_stay_and_residual_networks_are_exact(training):
    torch.manual_seed(0)
    model = ss.models.resnet8()
    net = ss.quantise(model, "int4", skip=ss.models.last_layer(model)).train(training)
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    frozen = norm.running_mean.clone()
    modes = [module.training for module in net.modules()]
    x = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8)
    seen: list[tuple[int, int]] = []
    loader = [((part.float() - 128) / 64, None) for part in x.split(4)]
    quanta = ss.calibrate(net, loader, batches=2, progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(norm.running_mean, frozen) == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    for group in tied_stairs(net):
        assert len({stair.stair.quantum for stair in group}) == 1
    activations = [n for n, m in net.named_modules() if isinstance(m, ss.nn.StairActivation)]
    assert len({quanta[name] for name in activations}) > 3
    net.eval()
    if training:
        integers = ss.freeze(net, (3, 16, 16), zero=128, scale=64.0, examples=x[:2])
        assert integers.report.differing == 0
    again = ss.quantise(model, "int4", skip=ss.models.last_layer(model)).eval()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(loader[0][0]), net(loader[0][0]))


def normed(training: bool = False) -> tuple[nn.Module, list[Tensor]]:
    """A network with ternary weights, and batches far from the statistics of the float one."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    net = ss.quantise(model, "ternary/uint4", skip="6").train(training)
    return net, [20 * torch.randn(16, 6) + 5 for _ in range(4)]


@pytest.mark.parametrize("training", [False, True])
def test_norms_use_the_statistics_of_the_quantised_network(training):
    """Quanta are for batch statistics, and running ones as refresh_statistics estimates them."""
    net, batches = normed(training)
    quanta = ss.calibrate(net, batches)
    assert quanta["2"] == pytest.approx(0.19, rel=0.3)  # as after a normalisation
    assert quanta["5"] == pytest.approx(0.19, rel=0.3)
    other, _ = normed(training=True)
    assert ss.calibrate(other, batches, norms=True) == quanta
    again = copy.deepcopy(net)
    ss.refresh_statistics(again, batches)
    for name, value in again.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def with_statistics(bits: str, size: int = 32) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A float network with statistics of many batches, the same with stairs, and three batches."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    ss.refresh_statistics(model, [torch.randn(512, 6) for _ in range(8)])
    return model, ss.quantise(model, bits, skip="6"), [torch.randn(size, 6) for _ in range(3)]


@torch.no_grad()
@pytest.mark.parametrize(("bits", "share"), [("int8", 0.3), ("int4", 0.9)])
def test_statistics_have_less_sampling_error_than_the_batches(bits: str, share: float) -> None:
    model, net, batches = with_statistics(bits)
    x = torch.randn(256, 6)
    ss.calibrate(net, batches)
    change = (net(x) - model(x)).norm()
    ss.refresh_statistics(net, batches)
    assert change < share * (net(x) - model(x)).norm()


@torch.no_grad()
def test_statistics_of_augmented_examples_are_kept_by_plain_batches() -> None:
    """Augmentation changes the statistics of the first normalisation most."""
    model, _, batches = with_statistics("int8")
    ss.refresh_statistics(model, [1.4 * torch.randn(512, 6) for _ in range(8)])
    net = ss.quantise(model, "int8", skip="6").eval()
    ss.calibrate(net, batches)
    x = torch.randn(256, 6)
    assert (net(x) - model(x)).norm() < 0.05 * model(x).norm()
    ss.refresh_statistics(net, batches)
    assert (net(x) - model(x)).norm() > 0.2 * model(x).norm()


def test_statistics_of_the_quantised_network_are_not_corrected_again() -> None:
    _, net, batches = with_statistics("ternary/uint4", size=512)
    ss.calibrate(net, batches)
    ss.calibrate(net, batches)
    again = copy.deepcopy(net)
    ss.refresh_statistics(again, batches)
    for name, value in again.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_norms_that_are_frozen_keep_their_statistics_and_normalise_by_them():
    net, batches = normed()
    before = copy.deepcopy(net.state_dict())
    quanta = ss.calibrate(net, batches, norms=False)
    assert quanta["2"] > 1  # what the running statistics of the float network make of the batches
    frozen = normed(training=True)[0]
    for norm in (frozen[1], frozen[4]):
        norm.eval()
    assert ss.calibrate(frozen, batches) == quanta
    for name in ("1.running_mean", "4.running_var", "4.num_batches_tracked"):
        assert torch.equal(net.state_dict()[name], before[name])
        assert torch.equal(frozen.state_dict()[name], before[name])


def test_batches_of_one_example_have_no_statistics():
    net, batches = normed()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="two examples or more"):
        ss.calibrate(net, [batches[0][:1]])
    assert torch.equal(net[1].running_mean, before["1.running_mean"])
    assert not net[1].training
    ss.calibrate(net, [batches[0][:1]], norms=False)


def test_batches_of_every_form_give_the_same_quanta():
    torch.manual_seed(0)
    model, x = networks.mlp(6, 8, 8, 3), torch.randn(32, 6)
    forms = (x, (x, torch.zeros(32)), [x], {"input": x, "label": torch.zeros(32)}, {"image": x})
    nets = [ss.quantise(model, "int4") for _ in forms]
    first, *others = (ss.calibrate(net, [form]) for net, form in zip(nets, forms, strict=True))
    assert all(other == first for other in others)
    fixed = ss.quantise(model, TERNARY, UINT4)
    kept = ss.calibrate(fixed, [x], weights=None)
    assert kept["0.weight_stair"] == 1.0
    assert kept["2"] != 0.25


@pytest.mark.parametrize(
    ("loader", "settings", "field"),
    [
        ([], {}, "loader"),
        (["text"], {}, "loader"),
        ([torch.zeros(2, 6)], {"batches": 0}, "batches"),
        ([torch.zeros(2, 6)], {"weights": "tensor"}, "weights"),
        ([torch.zeros(2, 6)], {"norms": None}, "norms"),
    ],
)
def test_a_wrong_argument_is_named(loader, settings, field):
    with pytest.raises(ValueError, match=field):
        ss.calibrate(ss.quantise(networks.mlp(6, 8, 8, 3), "int4"), loader, **settings)


@pytest.mark.parametrize("function", [ss.calibrate, ss.refresh_statistics])
@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (torch.zeros(8, 6, dtype=torch.uint8), r"torch\.uint8 of shape \(8, 6\) it raised Runtime"),
        (torch.zeros(8, 5), r"torch\.float32 of shape \(8, 5\) it raised RuntimeError: mat1"),
    ],
)
def test_a_batch_that_the_network_does_not_take_is_named(function, batch, reason):
    net = normed()[0]
    with pytest.raises(SoftstairError, match=f"batches of loader must be .*{reason}") as caught:
        function(net, [batch])
    assert caught.value.field == "loader"


def test_out_of_memory_is_no_wrong_batch():
    def forward(x):
        raise torch.OutOfMemoryError("out of memory")

    net, batches = normed()
    net[0].forward = forward
    with pytest.raises(torch.OutOfMemoryError):
        ss.refresh_statistics(net, batches)


def test_a_float_network_is_refused():
    with pytest.raises(ValueError, match="net must be"):
        ss.calibrate(networks.mlp(6, 8, 8, 3), [torch.zeros(2, 6)])


def test_a_batch_that_does_not_fit_leaves_the_network_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net = ss.quantise(model, TERNARY, UINT4).eval()
    before = copy.deepcopy(net.state_dict())
    layers = [layer for layer in net.modules() if isinstance(layer, ss.nn.StairLayer)]
    fits = [layer.weight_stair.fit for layer in layers]
    with pytest.raises(
        SoftstairError, match=r"loader must be .*float32 of shape \(16, 5\) it raised"
    ):
        ss.calibrate(net, [torch.randn(16, 6), torch.randn(16, 5)])
    after = net.state_dict()
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[name]), name
    assert [layer.weight_stair.fit for layer in layers] == fits


@pytest.mark.parametrize("function", [ss.calibrate, ss.refresh_statistics])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: {"input": x}, lambda x: {"image": x}])
def test_a_batch_with_nan_is_refused_and_changes_nothing(function, form) -> None:
    net, (first, second, *_) = normed()
    before = copy.deepcopy(net.state_dict())
    second[3, 1] = torch.nan
    with pytest.raises(SoftstairError, match=r"loader .* NaN") as caught:
        function(net, [form(first), form(second)])
    assert caught.value.field == "loader"
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def trained_on_sums() -> tuple[nn.Module, Tensor]:
    """A trained network that tells which of two halves is larger."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    x = torch.randn(512, 16)
    y = (x[:, :8].sum(1) > x[:, 8:].sum(1)).long()
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net, x


def kept_alone(net: nn.Module, quantised: nn.Module, x: Tensor) -> dict[str, float]:
    """The share of classes that networks with one ternary stair keep, found without the warning."""
    quanta = {name: stair.stair.quantum for name, stair in stair_modules(quantised)}
    kept = {}
    for name in "01234":  # of an activation, the layer before has the bits
        layer, bits = (
            (name, "ternary/float") if name in "024" else (str(int(name) - 1), "float/ternary")
        )
        alone = ss.quantise(net, {layer: bits, "*": "float"})
        for own, stair in stair_modules(alone):
            stair.set_quantum(quanta[own])
        same = alone(x[:128]).argmax(1) == net(x[:128]).argmax(1)
        kept[name] = float(same.double().mean())
    return kept


@pytest.mark.filterwarnings("error:the calibrated network keeps")
def test_a_calibration_that_costs_classes_is_a_warning_that_names_the_layer() -> None:
    net, x = trained_on_sums()
    for outputs in ("classes", "values"):
        ss.calibrate(ss.quantise(net, "int8"), x.split(128), outputs=outputs)
    ss.calibrate(ss.quantise(net, "ternary"), x.split(128), outputs=None)
    ternary = ss.quantise(net, "ternary")
    with pytest.warns(UserWarning, match="Alone") as caught:
        ss.calibrate(ternary, x.split(128))
    found = re.search(r"keeps (.+)% of .* Alone, '(.)' .* keeps (.+)%\.", str(caught[0].message))
    assert found is not None
    kept = float((ternary(x).argmax(1) == net(x).argmax(1)).double().mean())
    assert float(found[1]) == pytest.approx(100 * kept, abs=0.06)
    alone = kept_alone(net, ternary, x)
    assert found[2] == min(alone, key=lambda name: alone[name])
    assert float(found[3]) == pytest.approx(100 * min(alone.values()), abs=0.06)
    with pytest.warns(UserWarning, match="of the variance of the values of the float network"):
        ss.calibrate(ss.quantise(net, "ternary"), x.split(128), outputs="values")
    with pytest.raises(SoftstairError, match="outputs"):
        ss.calibrate(ternary, x.split(128), outputs="scores")


def test_the_comparison_leaves_the_network_as_calibration_without_it_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )
    model(torch.randn(64, 3, 8, 8))
    nets = [ss.quantise(model, "int2") for _ in range(2)]
    x = torch.randn(64, 3, 8, 8).split(16)
    with pytest.warns(UserWarning, match="keeps"):
        ss.calibrate(nets[0], x)
    ss.calibrate(nets[1], x, outputs=None)
    pairs = zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [m.training for m in nets[0].modules()] == [m.training for m in nets[1].modules()]
