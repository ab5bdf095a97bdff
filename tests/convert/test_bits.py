"""Stairs by name: ss.quantise(model, "int4"), and mappings of names."""

from typing import get_args

import pytest
import torch
from torch import nn

import networks
import softstair as ss
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum
from softstair.convert.options import (
    StairName,
    feature_stair,
    name_of,
    parse,
    parse_layers,
    stair_named as named,
)


def names(net: nn.Module) -> dict[str, str | None]:
    """The name of each stair, by module."""
    return {
        name.removesuffix(".weight_stair"): name_of(stair.stair)
        for name, stair in ss.nn.stair_modules(net)
    }


def test_a_name_quantises_weights_and_features_and_keeps_the_weights():
    model, x = networks.make("mlp")
    net = ss.quantise(model, "int4")
    assert set(names(net).values()) == {"int4", "uint4"}
    for key, value in model.state_dict().items():
        assert torch.equal(net.state_dict()[key], value)
    for layer in (module for module in net.modules() if isinstance(module, ss.nn.StairLayer)):
        assert layer.weight_stair.stair == fit_quantum(layer.weight, named("int4"), True)
        assert layer.weight_stair.fit == "channel"
    assert torch.isfinite(net(x)).all()


def test_ternary_features_of_deep_networks_by_name_pass_gradients_up_to_two_quanta():
    """Values are those of the stair, and so are the gradients of all other stairs."""
    deep = lambda count: nn.Sequential(*[nn.Linear(4, 4), nn.ReLU()] * count)
    longer = lambda *stairs, model=None, **options: [
        stair.longer_stair(in_quanta=True).levels
        for _, stair in ss.nn.stair_modules(ss.quantise(model or deep(16), *stairs, **options))
        if stair.longer_stair(in_quanta=True)
    ]
    for bits in ("ternary", {"*": "ternary"}, "int4/ternary"):
        assert longer(bits) == [(-2.0, -1.0, 0.0, 1.0, 2.0)] * 16
    for bits in ("ternary/uint2", "int2", "int4", "sign"):
        assert not longer(bits)
    assert not longer(named("ternary"), named("ternary"))
    assert not longer("ternary", noise=ss.ste.hard_sigmoid())
    assert not longer("ternary", options=ss.QuantiseOptions(gradient_margin=0))
    assert not longer("ternary", model=deep(15))
    assert not longer("ternary", model=networks.make("resnet")[0])
    margin = ss.QuantiseOptions(gradient_margin=3)
    assert [len(levels) for levels in longer("int4", model=deep(2), options=margin)] == [22] * 2
    net = ss.quantise(
        deep(1), "ternary", quanta="learned", options=ss.QuantiseOptions(gradient_margin=1)
    )
    x = torch.tensor([-2.1, -1.9, -0.4, 0.6, 1.1, 1.9, 2.1], requires_grad=True)
    y = net[1](x)
    y.sum().backward()
    assert y.tolist() == [-1, -1, 0, 1, 1, 1, 1]
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 1, 0]


def test_init_and_fit_override_what_names_do():
    model = networks.mlp(6, 8, 3)
    quantised = lambda **rare: ss.quantise(model, "ternary", options=ss.QuantiseOptions(**rare))
    quantum = lambda **rare: quantised(**rare)[0].weight_stair.stair
    assert quantum(fit="layer") == fit_quantum(model[0].weight, named("ternary"))
    assert quantum(init="thresholds") == named("ternary")
    started = quantised(init="thresholds")
    assert not torch.equal(started[0].weight, model[0].weight)


def test_a_transposed_convolution_has_one_quantum():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))
    net = ss.quantise(model, "int4")
    assert [type(net[number].weight_stair.stair.quantum) for number in (0, 2)] == [tuple, float]
    with pytest.raises(ValueError, match="must have one quantum"):
        ss.quantise(model, "int4", options=ss.QuantiseOptions(fit="channel"))


@pytest.mark.parametrize(
    ("text", "weights", "features"),
    [
        ("int4", "int4", "uint4"),
        ("ternary", "ternary", "ternary"),
        ("sign", "sign", "sign"),
        ("int4/int8", "int4", "int8"),
        ("float/uint2", "float", "uint2"),
        ("float", "float", "float"),
    ],
)
def test_what_a_name_means(text, weights, features):
    assert parse(text) == (weights, features)


@pytest.mark.parametrize("text", ["int9", "int", "", "int4/", "/uint4", "int4/uint4/uint4", 4])
def test_other_names_are_refused(text):
    with pytest.raises(SoftstairError, match="bits must be float, ternary") as caught:
        parse(text)
    assert caught.value.field == "bits"


def test_a_name_with_a_typing_error_is_suggested():
    with pytest.raises(ValueError, match=r"but 'ternery' was given; did you mean 'ternary'\?"):
        ss.quantise(networks.mlp(6, 8, 3), "ternery")


def test_layers_as_text():
    assert parse_layers("int4/uint2") == {"*": "int4/uint2"}
    assert parse_layers(" stem = int8 , *=int4") == {"stem": "int8", "*": "int4"}
    for text in ("stem=int8,int4", "=int8", "stem=int8,stem=int4", "stem=int8,"):
        with pytest.raises(ValueError, match="one pattern=bits for each pattern"):
            parse_layers(text)


@pytest.mark.parametrize("name", get_args(StairName))
def test_the_name_of_a_stair_does_not_depend_on_its_quanta(name):
    for quantum in (1.0, 0.07, (0.3, 0.1)):
        assert name_of(named(name).with_quantum(quantum)) == name
    assert name_of(ss.Stair((0.0, 1.0, 4.0), (0.5, 2.5))) is None


def test_a_pattern_is_for_weights_and_for_the_activation_that_follows():
    model, _ = networks.make("resnet")
    net = ss.quantise(model, {"conv1": "int8", "fc": "int8", "layer2": "ternary", "*": "int4"})
    assert names(net) == {
        "conv1": "int8",
        "relu": "uint8",
        "layer1.0.conv1": "int4",
        "layer1.0.relu": "uint4",
        "layer1.0.conv2": "int4",
        "layer1.0.relu.2": "uint4",
        "layer2.0.downsample.0": "ternary",
        "layer2.0.downsample.1.stair": "ternary",
        "layer2.0.conv1": "ternary",
        "layer2.0.relu": "ternary",
        "layer2.0.conv2": "ternary",
        "layer2.0.relu.2": "ternary",
        "fc": "int8",
    }


def test_the_stair_of_a_shortcut_follows_its_weights():
    model, _ = networks.make("resnet")
    net = ss.quantise(model, {"layer2.0.downsample.0": "int8/int8", "*": "int4"})
    stairs = names(net)
    assert stairs["layer2.0.downsample.1.stair"] == "int8"
    assert stairs["layer2.0.relu.2"] == "uint4"


def test_a_pattern_may_name_an_activation_alone():
    net = ss.quantise(networks.mlp(6, 8, 8, 3), {"2": "int8", "*": "int4"})
    assert names(net) == {"0": "int4", "2": "uint8", "3": "int4", "5": "uint4", "6": "int4"}


def test_layers_in_float_and_by_number():
    model = networks.mlp(6, 8, 8, 3)
    expected = {"0": "int8", "2": "uint8", "3": "int4", "5": "uint4"}
    assert names(ss.quantise(model, {"0": "int8", "6": "float", "*": "int4"})) == expected
    for bits in ({"0": "int8", "3": "int4"}, {0: "int8", 1: "int4"}):
        with pytest.warns(UserWarning, match=r"18% of the weights stay in float: '6' \(Linear\)"):
            assert names(ss.quantise(model, bits)) == expected
    only_features = ss.quantise(model, {"0": "float/uint8", "*": "int4"})
    assert names(only_features) == {"2": "uint8", "3": "int4", "5": "uint4", "6": "int4"}
    with pytest.raises(ValueError, match="must have something to quantise"):
        ss.quantise(model, "float")


def test_names_of_layers_that_do_not_exist_are_refused():
    model, _ = networks.make("resnet")
    with pytest.raises(SoftstairError, match=r"'konv1' fits none; did you mean 'conv1'") as caught:
        ss.quantise(model, {"konv1": "int8", "*": "int4"})
    assert caught.value.field == "bits"
    with pytest.raises(ValueError, match=r"bits must have '\*' last, but has 'fc' after it"):
        ss.quantise(model, {"*": "int4", "fc": "int8"})


def test_names_exclude_stairs():
    model = networks.mlp(6, 8, 3)
    with pytest.raises(ValueError, match=r"features must be left out .* 'int4/uint4'"):
        ss.quantise(model, "int4", named("uint4"))
    with pytest.raises(ValueError, match=r"bits must be float, .* but Stair"):
        ss.quantise(model, {"0": "int4", "*": named("int4")})


@pytest.mark.parametrize("name", ["uint2", "uint4", "uint8", "int4"])
def test_features_start_with_the_best_quantum_for_normalised_ones(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator, dtype=torch.float64)
    x = x.relu() if name.startswith("u") else x
    chosen = feature_stair(name)
    error = lambda stair: float((stair(x) - x).square().mean())
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert error(chosen) < error(chosen.with_quantum(chosen.quantum * factor))
    assert feature_stair("ternary").quantum == 1.0


def test_the_report_names_stairs():
    model, _ = networks.make("resnet")
    rows = {row.name: row.stair for row in ss.report(ss.quantise(model, "int4")).rows}
    assert rows["conv1"] == "int4, 4 quanta"
    assert rows["relu"] == "uint4, quantum 0.1933"
    assert rows["layer2.0.downsample.1.stair"] == "31 levels -15…15, quantum 0.1933"


def test_a_mixed_network_exports_exactly():
    model = networks.mlp(6, 8, 8, 3)
    torch.manual_seed(0)
    net = ss.quantise(model, {"0": "int8", "6": "int8", "*": "ternary"})
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.3, 1.0)
    x = torch.randint(256, (200, 6), dtype=torch.uint8)
    frozen = ss.freeze(net, (6,), zero=128, scale=64.0, examples=x, outputs="values")
    assert frozen.report.differing == 0
    with torch.no_grad():
        expected = net.eval()((x.float() - 128) / 64)
    assert torch.allclose(frozen.values(x).float(), expected, atol=1e-5)


def test_a_sequence_has_a_name_for_each_layer() -> None:
    model = networks.mlp(6, 8, 8, 3)
    net = ss.quantise(model, ["ternary", "int4/uint8", "float"])
    assert names(net) == names(ss.quantise(model, {0: "ternary", 1: "int4/uint8", 2: "float"}))
    assert list(names(net).values()) == ["ternary", "ternary", "int4", "uint8"]
    with pytest.raises(SoftstairError, match="module 6 in layer 2 gets, but its keys are 0, 1"):
        ss.quantise(model, ("ternary", "int4"))
    with pytest.raises(SoftstairError, match="bits must be float, ternary"):
        ss.quantise(model, ["ternary", "int9", "int4"])
