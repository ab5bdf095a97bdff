"""What each layer of a trained network alone costs at fewer bits, and what is proposed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from helpers.narrow import WIDTH, narrow_entry
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum
from softstair._sensitivity import Cost, _proposal, _Trial
from softstair.convert.options import parse_layers, stair_named
from softstair.data import load
from softstair.models import ResidualBlock
from softstair.nn import stair_modules

NAMES = ["features.1", "features.4", "features.7"]
FLOAT_BYTES = 4 * (64 * WIDTH + 2 * WIDTH * WIDTH + 10 * WIDTH)
SIZE = 4500  # of three layers in INT3 too little, in INT2 enough


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load("digits")
    return data.x[:400].float() / 255, data.y[:400]


@pytest.fixture(scope="module")
def net(digits: tuple[Tensor, Tensor]) -> nn.Module:
    """A trained float network."""
    torch.manual_seed(0)
    net = narrow_entry().make(10, 1)
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(30):
        optimiser.zero_grad()
        F.cross_entropy(net(digits[0]), digits[1]).backward()
        optimiser.step()
    return net.eval()


@pytest.fixture(scope="module")
def int4(net: nn.Module, digits: tuple[Tensor, Tensor]) -> nn.Module:
    quantised = ss.quantise(net, "int4", skip="classifier").eval()
    ss.calibrate(quantised, digits[0].chunk(8))
    return quantised


def scores_of(net: nn.Module, examples: tuple[Tensor, Tensor]) -> object:
    with torch.no_grad():
        scores = net(examples[0])
    right = (scores.argmax(1) == examples[1]).double().mean().item()
    return pytest.approx((F.cross_entropy(scores, examples[1]).item(), right))


def test_one_layer_of_a_float_network_is_quantised_at_a_time(
    net: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    before = copy.deepcopy(net.state_dict())
    done: list[tuple[int, int]] = []
    count = lambda *numbers: done.append(numbers)
    widths = ["int4", "int2/float"]
    measured = ss.sensitivity(net, digits, widths, skip="classifier", progress=count)
    assert done == [(number, 7) for number in range(1, 8)]
    assert measured[0][:3] == ("*", "float", FLOAT_BYTES)
    assert measured[0][3:] == scores_of(net, digits)
    assert [(cost.name, cost.bits) for cost in measured[1:]] == [
        (name, bits) for name in NAMES for bits in widths
    ]
    for cost in measured[1:3]:
        alone = ss.quantise(net, {cost.name: cost.bits, "*": "float"})
        ss.calibrate(alone.eval(), digits[0].chunk(8))
        assert cost[3:] == scores_of(alone, digits)
    saved = [measured[0].bytes - cost.bytes for cost in measured[1:3]]
    assert saved == [64 * WIDTH * 7 // 2, 64 * WIDTH * 15 // 4]
    assert measured[1].loss < measured[2].loss
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_quantised_network_keeps_the_layers_that_have_no_more_levels(
    int4: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    examples = digits[0][:200], digits[1][:200]
    few = digits[0][200:]
    as_is, *costs = ss.sensitivity(int4, examples, ["int4", "int8", "int2/float"], calibration=few)
    assert as_is[3:] == scores_of(int4, examples)
    for name, same, wide, narrow in zip(NAMES, costs[::3], costs[1::3], costs[2::3], strict=True):
        assert same[2:] == wide[2:] == pytest.approx(as_is[2:])
        narrowed = copy.deepcopy(int4)
        layer = narrowed.get_submodule(name)
        with torch.no_grad():
            layer.weight.copy_(layer.weight_stair.stair(layer.weight))
        layer.weight_stair.stair = fit_quantum(layer.weight, stair_named("int2"), True)
        ss.refresh_statistics(narrowed.eval(), few.chunk(8))
        assert narrow[3:] == scores_of(narrowed, examples)


def test_features_of_a_quantised_network_are_calibrated_alone(
    int4: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    with torch.no_grad():
        net = _Trial(int4, digits, digits[0])._narrowed("features.4=float/uint2,*=float")
    alike = copy.deepcopy(int4)
    chosen = net.get_submodule("features.6")
    with torch.no_grad():
        for layer in (alike.get_submodule(name) for name in NAMES):
            layer.weight.copy_(layer.weight_stair.stair(layer.weight))
    before = {name: stair.stair for name, stair in stair_modules(alike)}
    quantum = ss.calibrate(alike, digits[0].chunk(8), weights=None)["features.6"]
    assert chosen.stair.levels[1:] == tuple(k * chosen.stair.quantum for k in (1, 2, 3))
    assert chosen.stair.quantum > quantum  # four levels for the values of sixteen
    for name, stair in stair_modules(net):
        assert stair is chosen or stair.stair == before[name]


def test_shortcuts_of_a_quantised_network_keep_their_stair(digits: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    model = nn.Sequential(*stem, ResidualBlock(4, 4, 1), *last)
    for bits, shortcuts, count in (("int4", "uint6", 64), ("int8", None, 4)):
        net = ss.quantise(model, bits, skip="6", options=ss.QuantiseOptions(shortcuts=shortcuts))
        with torch.no_grad():
            narrow = _Trial(net, digits, digits[0])._narrowed("int2")
        levels = {name: len(stair.stair) for name, stair in stair_modules(narrow)}
        assert levels == {**dict.fromkeys(levels, 4), "2": count}
        assert ("3.sums.0.input_stair" in levels) == (shortcuts is not None)


def test_the_proposal_fits_and_is_measured_as_a_whole(
    net: nn.Module, int4: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    options = {"widths": ["int3/float", "int2/float"], "size": SIZE}
    as_is, *_, proposal = ss.sensitivity(net, digits, **options, skip="classifier")
    mixed = ss.quantise(net, parse_layers(proposal.bits), skip="classifier").eval()
    ss.calibrate(mixed, digits[0].chunk(8))
    rows = ss.report(mixed).rows
    others = 4 * sum(row.parameters - row.weights for row in rows)  # biases and normalisations
    assert sum(row.bytes for row in rows) - others == proposal.bytes <= SIZE < as_is.bytes
    assert proposal[3:] == scores_of(mixed, digits)
    as_is, *_, proposal = ss.sensitivity(int4, digits, **options)
    assert proposal.bytes <= SIZE < as_is.bytes


def test_bytes_are_saved_where_they_cost_least() -> None:
    trained = Cost("*", "float", 3200, 0.1, 0.9)
    costs = [
        Cost(name, bits, 3200 - saved, 0.1 + added, 0.9)
        for name, factor in (("a", 0.01), ("b", 1.0), ("c", 0.02), ("d", 0.5))
        for bits, saved, added in (
            ("int8", 600, 0.0),
            ("int4", 700, factor),
            ("int2", 750, 3 * factor),
        )
    ]
    assert _proposal(trained, *costs, size=800) == "*=int8"
    assert _proposal(trained, *costs, size=700) == "a=int4,*=int8"
    assert _proposal(trained, *costs, size=500) == "b=int8,d=int8,*=int2"
    assert _proposal(trained, *costs, size=200) == "*=int2"
    with pytest.raises(SoftstairError, match="at least 200 bytes") as caught:
        _proposal(trained, *costs, size=199)
    assert caught.value.field == "size"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": ["int4", "int9"]}, "widths must be float, ternary"),
        ({"widths": ["int2/float"], "size": 10}, "size must be at least"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], words: str, int4: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(SoftstairError, match=words):
        ss.sensitivity(int4, digits, **options)


def test_a_kept_activation_is_measured_with_the_levels_of_its_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    net, x = ss.quantise(model, "int8").eval(), torch.randn(64, 8)
    ss.calibrate(net, [x])
    trial = _Trial(net, (x, torch.zeros(64, dtype=torch.long)), x)
    with torch.no_grad():
        narrow, ternary = (trial._narrowed(f"0={bits},*=float") for bits in ("int4", "ternary"))
    assert len(narrow.get_submodule("1").stair) == 16
    assert isinstance(narrow.get_submodule("1").function, nn.GELU)
    assert ternary.get_submodule("1").function is None
