"""What a checkpoint does to a network's stairs: levels and thresholds belong to the state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import softstair as ss

pytestmark = pytest.mark.quick

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.1)
UINT4 = ss.Stair.linear(4, quantum=0.1)


def network(
    weights: ss.Stair | None, features: ss.Stair | None, seed: int = 0, **settings: Any
) -> nn.Module:
    torch.manual_seed(seed)
    options = ss.QuantiseOptions(**settings)
    return ss.quantise(networks.mlp(6, 8, 8, 3), weights, features, options=options).eval()


def stairs(net: nn.Module) -> list[ss.Stair]:
    return [module.stair for _, module in ss.nn.stair_modules(net)]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "own", "key"),
    [
        ((INT4, TERNARY), (TERNARY, TERNARY), r"0\.weight_stair"),
        ((TERNARY, UINT4), (TERNARY, TERNARY), "2"),
        ((INT4, None), (ss.Stair.linear(4, True, 0.1, "floor"), None), r"0\.weight_stair"),
        ((INT4, None), (ss.Stair.linear(4, False, 0.1), None), r"0\.weight_stair"),
    ],
)
@pytest.mark.filterwarnings("ignore:the weights of .* cannot be negative")
def test_a_state_of_other_levels_or_thresholds_is_refused(saved, own, key, strict):
    net = network(*own)
    before = stairs(net)
    with pytest.raises(RuntimeError, match=rf"\s{key}\.stair must be Stair.*checkpoint has Stair"):
        net.load_state_dict(network(*saved).state_dict(), strict=strict)
    assert stairs(net) == before
    for _, module in ss.nn.stair_modules(net):
        assert torch.equal(module.quantum, torch.tensor(module.stair.quantum))


def test_a_state_has_the_version_that_saved_it_and_loads_without():
    net = network(INT4, UINT4)
    wrapped, float_model = nn.ModuleDict({"inner": net}), networks.mlp(6, 8, 8, 3)
    for prefix, module in (("", net), ("inner.", wrapped), ("", copy.deepcopy(net))):
        state = module.state_dict()
        version = state.pop(f"{prefix}_extra_state")
        assert ".".join(map(str, version.tolist())) == ss.__version__
        for saved in (state, {**state, f"{prefix}_extra_state": torch.tensor([0, 0, 9])}):
            assert module.load_state_dict(saved, strict=True) == ([], [])
        assert torch.equal(module.state_dict()[f"{prefix}_extra_state"], version)
    assert net.load_state_dict(float_model.state_dict(), strict=True) == ([], [])
    assert "_extra_state" not in float_model.state_dict()


def test_a_network_with_extra_state_of_its_own_keeps_it():
    class Counted(nn.Sequential):
        count = 0

        def get_extra_state(self) -> Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: Tensor) -> None:
            self.count = int(state)

    net, other = (ss.quantise(Counted(networks.mlp(6, 8, 8, 3)), TERNARY, TERNARY) for _ in "ab")
    net.count = 5
    assert other.load_state_dict(net.state_dict(), strict=True) == ([], [])
    assert other.count == 5


@pytest.mark.parametrize("quantum", [0.1, 0.3])
def test_a_loaded_network_is_the_saved_one(quantum):
    """Quanta may be others: those of a fit or a calibration, which are float32."""
    saved = network(INT4.with_quantum(0.125), UINT4.with_quantum(0.75))
    net = network(INT4.with_quantum(quantum), UINT4, seed=1)
    pointers = {name: buffer.data_ptr() for name, buffer in net.named_buffers()}
    net.load_state_dict(saved.state_dict(), strict=True)
    assert stairs(net) == stairs(saved)
    x = torch.randn(50, 6)
    assert torch.equal(net(x), saved(x))
    # A captured step reads the buffers where they are.
    assert {name: buffer.data_ptr() for name, buffer in net.named_buffers()} == pointers
    # The layers that read the features know their quantum.
    assert [net[n].input_quantum for n in (0, 3, 6)] == [None, 0.75, 0.75]
    x = torch.randint(256, (50, 6), dtype=torch.uint8)
    frozen = ss.freeze(net, (6,), zero=128, scale=64.0, examples=x)
    assert frozen.report.differing == 0


def test_a_quantum_that_no_float32_holds_is_loaded_exactly():
    saved, net = network(INT4, None), network(INT4.with_quantum(0.3), None)
    net.load_state_dict(saved.state_dict())
    assert net[0].weight_stair.stair.quantum == 0.1
    assert stairs(net) == stairs(saved)


def test_a_quantum_for_each_channel_does_not_replace_one_for_the_layer():
    single, several = (network(INT4, None, init="keep", fit=fit) for fit in ("layer", "channel"))
    for net, other in ((single, several), (several, single)):
        before = stairs(net)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight_stair\.quantum"):
            net.load_state_dict(other.state_dict())
        assert stairs(net) == before


def test_the_report_shows_the_loaded_quantum():
    net = network(INT4, UINT4)
    assert "uint4, quantum 0.1" in str(ss.report(net))
    net.load_state_dict(network(INT4.with_quantum(0.125), UINT4).state_dict())
    rows = {row.name: row.stair for row in ss.report(net).rows if row.layer is not None}
    assert rows["0"] == "int4, quantum 0.125"
    assert rows["2"] == "uint4, quantum 0.1"


def test_a_float_checkpoint_on_another_scale_than_the_stairs_warns():
    """Silently, every weight would be 0."""
    torch.manual_seed(0)
    model = networks.mlp(6, 8, 8, 3)
    net = ss.quantise(model, TERNARY, TERNARY)
    with pytest.warns(UserWarning, match=r"into '0', '3', '6' fall .* init=\"keep\"") as warned:
        net.load_state_dict(model.state_dict())
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.warns(UserWarning, match="all weights of '0', '3', '6' have the same level"):
        ss.freeze(net, (6,), zero=8, scale=8.0)
    kept = ss.quantise(model, TERNARY, TERNARY, options=ss.QuantiseOptions(init="keep"))
    kept.load_state_dict(model.state_dict())
    kept.load_state_dict(net.state_dict())


@pytest.mark.parametrize("fit", ["layer", "channel", None])
def test_a_float_checkpoint_loaded_later_gives_the_network_of_the_loaded_model(fit):
    """The quanta are fitted to the weights that count, not to those at the time of quantise."""
    torch.manual_seed(3)
    trained = networks.mlp(6, 8, 8, 3).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(3.0)
    expected = ss.quantise(trained, INT4, UINT4, options=ss.QuantiseOptions(init="keep", fit=fit))
    net = network(INT4, UINT4, init="keep", fit=fit)
    net.load_state_dict(trained.state_dict(), strict=True)
    assert stairs(net) == stairs(expected)
    assert torch.equal(net[0].weight_stair.quantum, expected[0].weight_stair.quantum)
    x = torch.randn(50, 6)
    assert torch.equal(net(x), expected(x))
    thresholds = network(INT4, UINT4)
    thresholds.load_state_dict(trained.state_dict(), strict=True)
    assert thresholds[0].weight_stair.stair == INT4


def test_a_state_without_some_of_the_stairs_is_not_complete():
    net, state = network(TERNARY, TERNARY), network(TERNARY, None).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"2\.std", "5\.std"'):
        net.load_state_dict(state)
    assert net.load_state_dict(state, strict=False).missing_keys == ["2.std", "5.std"]
    wrapped = nn.ModuleDict({"net": net})
    with pytest.raises(RuntimeError, match=r'"net\.2\.std"'):
        wrapped.load_state_dict({f"net.{key}": value for key, value in state.items()})


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved[:0],
        lambda saved: saved[0],
        lambda saved: saved[:-1],
        lambda saved: saved.reshape(1, -1),
        lambda saved: saved * torch.nan,
        lambda saved: saved * torch.inf,
        lambda saved: -saved,
        lambda saved: saved.flip(0),
        lambda saved: torch.cat([saved, saved]),
        lambda saved: "ternary",
    ],
)
def test_damaged_stairs_are_refused(damage: Callable[[Tensor], Any]):
    net = network(TERNARY, TERNARY)
    state = net.state_dict()
    for key in ("0.weight_stair._extra_state", "2._extra_state"):
        with pytest.raises(RuntimeError, match=key.replace("_extra_state", "stair must be")):
            net.load_state_dict({**state, key: damage(state[key])})
    assert stairs(net) == [TERNARY] * 5
