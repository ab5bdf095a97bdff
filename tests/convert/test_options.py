"""The options of quantise(): by layer, by name, and what they leave in float."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import networks
import softstair as ss

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")


def kinds(net: nn.Module) -> list[str]:
    return [type(module).__name__ for module in net.children()]


@pytest.mark.parametrize("fit", ["layer", "channel", None])
def test_keep_keeps_the_weights(fit):
    model, x = networks.make("resnet")
    net = ss.quantise(model, INT4, UINT4, options=ss.QuantiseOptions(init="keep", fit=fit))
    for key, value in model.state_dict().items():
        assert torch.equal(net.state_dict()[key], value)
    layers = [module for module in net.modules() if isinstance(module, ss.nn.StairLayer)]
    quanta = [layer.weight_stair.stair.quantum for layer in layers]
    assert all(isinstance(quantum, tuple) == (fit == "channel") for quantum in quanta)
    assert fit is not None or set(quanta) == {0.07}
    assert torch.isfinite(net(x)).all()


def test_weights_only_and_features_only():
    model = networks.mlp(6, 8, 8, 3)
    weights = ss.quantise(model, TERNARY)
    assert kinds(weights) == ["StairLinear", "BatchNorm1d", "ReLU"] * 2 + ["StairLinear"]
    assert [r.layer for r in ss.report(weights).rows if r.layer is not None] == [0, 1, 2]
    features = ss.quantise(model, None, TERNARY)
    assert kinds(features) == ["Linear", "BatchNorm1d", "StairActivation"] * 2 + ["Linear"]
    assert torch.equal(features[0].weight, model[0].weight)


@pytest.mark.filterwarnings("ignore:the weights of .* cannot be negative")
def test_options_by_layer():
    stairs = [TERNARY, INT4, UINT4]
    net = ss.quantise(
        networks.mlp(6, 8, 8, 3),
        weights=stairs,
        features=tuple(stairs),
        noise=["normal", ss.noise.Logistic(), ss.ste.clipped_relu()],
        forward=("random", "expectation", "mode"),
    )
    families = {0: ss.noise.Normal, 1: ss.noise.Logistic, 2: ss.noise.Uniform}
    forwards = {0: "random", 1: "expectation", 2: "hard"}
    for _, stair in ss.nn.stair_modules(net):
        assert stair.stair == stairs[stair.layer]
        assert type(stair.noise) is families[stair.layer]
        assert stair.strategy == forwards[stair.layer]
    assert float(net[6].weight_stair.mean) == 0.5


def test_options_by_name_and_number():
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


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        ([TERNARY, None, TERNARY], (0, 6)),
        ({0: TERNARY, 1: None, 2: TERNARY}, (0, 6)),
        ({0: TERNARY, "*": None}, (0,)),
        ({"0": None, "*": TERNARY}, (3, 6)),
    ],
)
def test_none_for_a_layer_leaves_its_weights_in_float(weights, kept):
    net = ss.quantise(networks.mlp(6, 8, 8, 3), weights, TERNARY)
    for index in (0, 3, 6):
        assert type(net[index]) is (ss.nn.StairLinear if index in kept else nn.Linear)


def test_a_layer_left_in_float_keeps_the_count_of_the_caller():
    """Sequences count the layers of the model; the network numbers those that are left."""
    stairs = [TERNARY, None, TERNARY]
    families = ["uniform", "normal", "logistic"]
    net = ss.quantise(networks.mlp(6, 8, 8, 3), stairs, [*stairs[:2], None], noise=families)
    layers = {module.layer: type(module.noise).__name__ for _, module in ss.nn.stair_modules(net)}
    assert layers == {0: "Uniform", 1: "Logistic"}


@pytest.mark.parametrize("estimator", ["clipped_relu", "piecewise_polynomial", "sigmoid", "relu"])
def test_estimators_as_noise(estimator):
    """The hard stair forward; the estimator's own slope, in quanta, backward."""
    noise = getattr(ss.ste, estimator)()
    torch.manual_seed(0)
    net = ss.quantise(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), INT4, UINT4, noise=noise)
    x = torch.randn(8, 6)
    hidden = F.linear(x, INT4(net[0].weight), net[0].bias).detach().requires_grad_()
    noise(hidden, UINT4).sum().backward()
    y = net(x)
    assert torch.equal(y, UINT4(hidden))
    y.sum().backward()
    torch.testing.assert_close(net[0].bias.grad, hidden.grad.sum(0), rtol=1e-4, atol=1e-5)


def test_skip():
    skip = ("layer1", "fc", "layer2.*.downsample.*")
    net = ss.quantise(networks.ResNet(), TERNARY, TERNARY, skip=skip)
    names = {name: type(module).__name__ for name, module in net.named_modules()}
    assert names["layer1.0.conv1"] == names["layer2.0.downsample.0"] == "Conv2d"
    assert (names["layer1.0.relu"], names["fc"]) == ("ReLU", "Linear")
    assert names["layer2.0.conv1"] == "StairConv2d"
    assert [r.layer for r in ss.report(net).rows if r.layer is not None] == [0, 0, 1, 1, 2, 2]


def test_a_reparametrised_layer_is_left_in_float():
    for wrap in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = nn.Sequential(wrap(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))
        with pytest.warns(UserWarning, match="'0'"):
            net = ss.quantise(model, TERNARY, TERNARY)
        assert "0" in {row.name for row in ss.report(net).rows if row.layer is None}
        assert net(torch.randn(4, 6)).shape == (4, 3)


def mlp() -> nn.Module:
    return networks.mlp(6, 8, 8, 3)


@pytest.mark.parametrize(
    ("build", "settings", "field"),
    [
        (mlp, {"model": "resnet"}, "model"),
        (lambda: ss.quantise(mlp(), TERNARY), {}, "model"),
        (lambda: nn.Sequential(nn.BatchNorm1d(3)), {}, "model"),
        (mlp, {"skip": ("*",)}, "model"),
        (networks.Branching, {}, "example_inputs"),
        (networks.Branching, {"example_inputs": 3}, "example_inputs"),
        (networks.Branching, {"example_inputs": (torch.ones(3),)}, "example_inputs"),
        (mlp, {"weights": None, "features": None}, "weights"),
        (mlp, {"weights": [None] * 3, "features": [None] * 3}, "weights"),
        (mlp, {"weights": "ternary"}, "features"),
        (mlp, {"weights": [TERNARY, "ternary", TERNARY], "features": None}, "bits"),
        (mlp, {"weights": [TERNARY] * 4}, "weights"),
        (mlp, {"weights": [TERNARY, TERNARY]}, "weights"),
        (mlp, {"weights": {0: TERNARY}}, "weights"),
        (mlp, {"weights": TERNARY.with_quantum([1.0, 2.0], axis=0)}, "weights"),
        (mlp, {"features": 3}, "features"),
        (mlp, {"noise": {}}, "noise"),
        (mlp, {"noise": "unifrom"}, "noise"),
        (mlp, {"noise": ss.noise.Uniform}, "noise"),
        (mlp, {"noise": ss.ste.identity().noise}, "noise"),
        (mlp, {"forward": ["mode", 3, "mode"]}, "forward"),
        (mlp, {"skip": ("7",)}, "skip"),
        (mlp, {"skip": 3}, "skip"),
        (mlp, {"quanta": "fitted"}, "quanta"),
        (mlp, {"activation": "relu"}, "activation"),
        (mlp, {"options": {"fit": "layer"}}, "options"),
        (mlp, {"options": ss.QuantiseOptions(fit="channel")}, "fit"),
        (mlp, {"weights": {"2": INT4, "*": TERNARY}}, "weights"),
        (mlp, {"features": {"0": INT4, "*": TERNARY}}, "features"),
        (mlp, {"noise": {-1: "normal", "*": "uniform"}}, "noise"),
        (mlp, {"forward": {nn.ReLU: "mode", "*": "random"}}, "forward"),
    ],
)
def test_a_wrong_option_is_named_and_the_model_stays_as_it_was(build, settings, field):
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = {"model": model, "weights": TERNARY, "features": TERNARY, **settings}
    with pytest.raises(ss._errors.SoftstairError) as caught:
        ss.quantise(**options)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_a_key_that_fits_no_layer_is_named_with_close_names():
    weights = {"layer1.0.konv1": INT4, "*": TERNARY}
    with pytest.raises(ValueError, match=r"'layer1\.0\.konv1' fits none.* 'layer1\.0\.conv1'.*\?$"):
        ss.quantise(networks.ResNet(), weights, TERNARY)
    skipped = ss.quantise(mlp(), {"6": INT4, "*": TERNARY}, TERNARY, skip="6")
    assert type(skipped[6]) is nn.Linear


def test_report_raises_for_a_network_that_quantise_did_not_return():
    with pytest.raises(ValueError, match="something to quantise"):
        ss.report(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="inside DDP"):
        ss.report(nn.Sequential(ss.quantise(mlp(), TERNARY, TERNARY)))


def test_weights_that_cannot_be_negative_warn():
    model = networks.mlp(6, 8, 3)
    with pytest.warns(UserWarning, match=r"'0' and others cannot .* signed=True") as warned:
        ss.quantise(model, ss.Stair.linear(4), ss.Stair.linear(4))
    assert [warning.filename for warning in warned] == [__file__]
    ss.quantise(model, ss.Stair.heaviside(), ss.Stair.linear(4))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("init", "zeros", "one of auto, thresholds, keep"),
        ("fit", "tensor", "auto, layer, channel or None"),
        ("sums", "no", "sum, branches or None"),
        ("shortcuts", 8, "a Stair, a name such as uint8, or None"),
        ("gradient_margin", -1, "an integer of at least 0"),
    ],
)
def test_a_wrong_rare_option_is_named(option, value, allowed):
    with pytest.raises(ss.SoftstairError, match=f"^{option} must be {allowed}, but ") as caught:
        ss.QuantiseOptions(**{option: value})
    assert caught.value.field == option


def test_a_name_to_skip_that_fits_nothing_is_answered_with_close_names():
    model, _ = networks.make("resnet")
    with pytest.raises(ValueError, match=r"called 'layer1\.0\.konv1'; did you mean .*conv1.*\?$"):
        ss.quantise(model, TERNARY, TERNARY, skip="layer1.0.konv1")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("prepare", "undo"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), prune.remove),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (
            lambda layer: nn.utils.spectral_norm(layer)(torch.ones(1, 8)),
            nn.utils.remove_spectral_norm,
        ),
    ],
)
def test_weights_that_hooks_compute_are_named_with_what_removes_them(prepare, undo):
    model = mlp()
    prepare(model[3])
    with pytest.raises(ValueError, match=rf"^model .*'3'.*{undo.__name__}\(layer, 'weight'\)\.$"):
        ss.quantise(model, "int4")
    if undo is not nn.utils.remove_spectral_norm:  # which stays, in float
        with torch.no_grad():
            model(torch.ones(2, 6))
        with pytest.raises(ValueError, match=rf"^model .*'3'.*{undo.__name__}"):
            ss.quantise(model, "int4")
    undo(model[3], *(["weight"] if undo is prune.remove else []))
    net = ss.quantise(model, "int4").eval()
    prepare(net[3])
    with pytest.raises(ValueError, match=rf"^net .*'3'.*{undo.__name__}"):
        ss.freeze(net, (6,))


class Sequences(nn.Module):
    """An embedding, a GRU, a Linear that is called and one that is not."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(500, 8), nn.GRU(8, 8, batch_first=True)
        self.hidden, self.head, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(99, 99)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.rnn(self.words(x))[0])))


class Lookup(Sequences):
    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.words(x))))


@pytest.mark.parametrize(
    ("build", "weights", "settings", "named"),
    [
        (Sequences, "int4", {}, "'rnn' (GRU)"),
        (Sequences, TERNARY, {"skip": "head"}, "'rnn' (GRU)"),
        (Sequences, {"head": "int8", "*": "int4"}, {}, "'rnn' (GRU)"),
        (Sequences, {"rnn": "int4", "*": "int8"}, {"skip": "head"}, "'rnn' (GRU)"),
        (Sequences, {"h*": "int4"}, {}, "'rnn' (GRU)"),
        (Sequences, "int4", {"skip": "rnn"}, ""),
        (Sequences, {"rnn": "float", "*": "int4"}, {}, ""),
        (Lookup, {"head": None, "*": TERNARY}, {}, ""),
        (Sequences, {"*": "float/uint4"}, {}, ""),
        (Sequences, None, {"features": TERNARY}, ""),
        (Lookup, "int4", {}, ""),
        (Lookup, {0: "int4", "*": "float"}, {}, ""),
        (Lookup, [TERNARY, None], {}, ""),
        (Lookup, {"head": "int8"}, {}, "'hidden' (Linear)"),
    ],
)
def test_weights_that_stay_in_float_without_a_word_are_a_warning(build, weights, settings, named):
    model = build()
    if not named:
        ss.quantise(model, weights, strict=True, **settings)
        return
    with pytest.warns(UserWarning, match=re.escape(named)) as caught:
        ss.quantise(model, weights, **settings)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match=rf"^model .*{re.escape(named)}"):
        ss.quantise(model, weights, strict=True, **settings)


def test_weights_that_code_reads_count_as_weights_in_float():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.place = (
                nn.Parameter(torch.randn(6, 6)),
                nn.Parameter(torch.randn(1, 99, 6)),
            )

        def forward(self, x):
            return x @ self.weight

    model = nn.Sequential(Own(), nn.Linear(6, 6), nn.ReLU())
    with pytest.warns(UserWarning, match=r"^50% of the weights stay in float: '0' \(Own\)"):
        ss.quantise(model, "int4")
    ss.quantise(model, "int4", skip="0")


def test_a_lazy_layer_that_is_skipped_stays_lazy() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LazyLinear(2))
    net = ss.quantise(model, "int4", skip="2")
    assert net(torch.randn(3, 4)).shape == (3, 2)
