"""Networks as people write them: trained a little, then exported and compared bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled import needs_compiler, program_of, run_in_program
from patterns import PATTERNS, TERNARY, Concatenated, Pattern, image, layer
from test_random_modules import by_onnx
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.deploy import ExportError, IntegerNetwork, integerise, nodes, qonnx, verify


def differing(network: IntegerNetwork, x: Tensor, results: dict[str, Tensor]) -> list[str]:
    """Return the nodes whose results differ from the integer network's."""
    expected, results = network.features(x), dict(results)
    last = network.last.name
    if isinstance(network.last, nodes.Scores):  # sums of floats, in another order
        expected[last], results[last] = expected[last].argmax(1), results[last].argmax(1)
    return [name for name in expected if not torch.equal(expected[name], results[name])]


@pytest.fixture(scope="module")
def networks() -> dict[str, IntegerNetwork]:
    """The integer networks of all patterns, which were compared with the trained ones; the report
    said before training that they export."""
    integers = {}
    for name, pattern in PATTERNS.items():
        inputs = pattern.shape, pattern.zero, pattern.scale, pattern.dtype
        net = pattern.quantised()
        assert ss.report(net, *inputs).exports_exactly, name
        net, x = pattern.trained(net), pattern.inputs()
        integers[name] = integerise(net, *inputs)
        comparison = verify(net, integers[name], x)["integer network"]
        assert comparison.mismatches == 0, f"{name}: {comparison}"
    return integers


def test_patterns_are_exact_in_onnx(networks: dict[str, IntegerNetwork]) -> None:
    for name, network in networks.items():
        x = PATTERNS[name].inputs()
        assert differing(network, x, by_onnx(network, x)) == [], name


@needs_compiler
def test_patterns_are_exact_in_c(networks: dict[str, IntegerNetwork], tmp_path: Path) -> None:
    program = program_of(dict(enumerate(networks.values())), tmp_path)
    for number, (name, network) in enumerate(networks.items()):
        x = PATTERNS[name].inputs()
        results = run_in_program(program, number, network, x)
        assert differing(network, x, results) == [], name


def test_patterns_are_exact_in_qonnx(
    networks: dict[str, IntegerNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("qonnx", reason="qonnx is not installed")
    from test_qonnx import assert_equal, execute

    monkeypatch.setattr(pytest.importorskip("onnx"), "IR_VERSION", 8)
    from qonnx.core.modelwrapper import ModelWrapper

    for name, network in networks.items():
        x = PATTERNS[name].inputs()[:1]
        assert_equal(network, x, execute(ModelWrapper(qonnx.model(network)), x))


def batched(m: nn.Module, x: Tensor) -> Tensor:
    """Scores that are given a batch again outside of the export."""
    y = x.flatten(0)
    return y.view(-1, 3) if m.training else y


def two_stairs() -> nn.Module:
    """A sum that two stairs read."""

    def code(m: nn.Module, x: Tensor) -> Tensor:
        y = m.norm(m.a(x))
        return m.b((m.r(y) + m.other(y)).flatten(1))

    modules = {"a": nn.Conv2d(2, 3, 1, bias=False), "norm": nn.BatchNorm2d(3)}
    return Code(code, **modules, other=nn.ReLU(), b=nn.LazyLinear(2))


QUARTER = ss.Stair.ternary(quantum=0.25)
REFUSED = {
    "two stairs": (
        Pattern(two_stairs, settings={"skip": "b"}),
        "cannot export 'other': another stair reads 'a' too",
    ),
    "after the scores": (
        Pattern(lambda: nn.Sequential(image(), nn.ReLU()), settings={"skip": "0.3.1"}),
        "cannot export '1': it follows the scores",
    ),
    "other quanta": (
        Pattern(lambda: Concatenated("ab"), settings={"features": {"a.*": QUARTER, "*": TERNARY}}),
        r"quanta 0\.25, 1\.0. Give the stairs before it the same quantum",
    ),
    "unquantised": (
        Pattern(lambda: Concatenated("ab"), settings={"skip": "a.2"}),
        "is not quantised. Add an activation",
    ),
    "border": (
        Pattern(lambda: image(nn.AvgPool2d(2, padding=1, count_include_pad=False), layer())),
        "Set count_include_pad=True",
    ),
    "uneven windows": (
        Pattern(lambda: image(nn.AdaptiveAvgPool2d(4), layer())),
        r"over \(6, 6\) differ in size. Choose an output size that divides it",
    ),
    "crop": (Pattern(lambda: image(nn.ZeroPad2d(-1), layer())), "crops"),
    "global average": (
        Pattern(lambda: image(nn.AdaptiveAvgPool2d(2), layer(kernel=1))),
        "Leave it in float with `skip`, or use AvgPool2d",
    ),
    "softmax of the batch": (
        Pattern(lambda: nn.Sequential(image(), nn.Softmax(0))),
        "not a softmax of a module's scores",
    ),
    "softmax of one position": (
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Softmax(-1)))),
        "Set dim=1",
    ),
    "softmax at each step of a sequence": (
        Pattern(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1)),
            (4, 6),
        ),
        "Set dim=1",
    ),
    "flattened batch": (
        Pattern(lambda: nn.Sequential(image(head=nn.Conv2d(4, 3, 6)), Code(batched))),
        "a change of the batch",
    ),
    "scores of positions": (
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 5), nn.Flatten()))),
        "scores for each position",
    ),
    "rounded averages": (
        Pattern(lambda: image(head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))),
        "quantum 0.027.* are rounded. End in a linear layer",
    ),
    "asymmetric padding": (
        Pattern(lambda: image(nn.Conv2d(4, 4, 2, padding="same"), nn.ReLU())),
        "as many zeros on both sides",
    ),
}


def test_the_report_gives_the_reason_of_each_call_behind_one_that_is_not_exported() -> None:
    norm = nn.Sequential(nn.Sigmoid(), nn.GroupNorm(2, 4), nn.Flatten(2), nn.GRU(36, 3))
    net = ss.quantise(image(head=norm), TERNARY, TERNARY, skip="3.3")
    exports = [row.exports for row in ss.report(net, (2, 6, 6)).rows[-4:]]
    assert "Sigmoid is a gate" in exports[0]
    assert "GroupNorm is a normalisation of each example" in exports[1]
    assert exports[2] == "its input is not exported"
    assert "GRU is not supported" in exports[3]
    net = ss.quantise(image(head=nn.Sequential(*norm[2:])), TERNARY, TERNARY, skip="3.1")
    with pytest.raises(ExportError, match="GRU is not supported"):
        integerise(net, (2, 6, 6))
    model = image(nn.Sigmoid())
    model(torch.zeros(1, 2, 6, 6))  # a lazy layer
    with pytest.raises(ExportError, match=r"'0': it is in float, .* Quantise it"):
        integerise(model, (2, 6, 6))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_with_a_sentence(name: str) -> None:
    pattern, sentence = REFUSED[name]
    with pytest.raises(ExportError, match=sentence):
        integerise(pattern.trained(), pattern.shape, pattern.zero, pattern.scale)


def test_type_of_the_input_is_checked() -> None:
    pattern = PATTERNS["int8 input"]
    net, x = pattern.trained(), pattern.inputs()
    with pytest.raises(ValueError, match=r"zero must be an integer from -128 to 127"):
        integerise(net, pattern.shape, 128, 64.0, torch.int8)
    with pytest.raises(ValueError, match=r"dtype must be torch.uint8, torch.int8 or torch.int16"):
        integerise(net, pattern.shape, 0, 64.0, torch.int32)
    network = integerise(net, pattern.shape, 0, 64.0, torch.int8)
    with pytest.raises(ValueError, match=r"x must be int8 of shape \(N, 2, 6, 6\)"):
        network(x.to(torch.uint8))
