"""The operator table and the patterns of docs/layers.md are true: what they say is exported is
frozen and equal everywhere, and all else is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from freezes import formats, frozen_of
from patterns import (
    OTHERS,
    PAGE,
    ROWS,
    TERNARY,
    Concatenated,
    Pattern,
    image,
    layer,
    squeeze_excite,
)
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.convert.graph import trace
from softstair.convert.ops import OPERATORS, Effect, Operator, operator_named, operator_of
from softstair.deploy import ExportError


def calls_of(net: nn.Module) -> list[tuple[str, str]]:
    """Return the row of each operation of a network, and its module or function."""
    graph, _ = trace(net)
    modules = [(step.module, operator_of(net.get_submodule(step.module)))
               for step in graph.steps if step.module]  # fmt: skip
    functions = [(f, operator_named(f)) for step in graph.steps if (f := step.function)]
    return [(operator.name, name) for name, operator in [*modules, *functions]]


def exports(pattern: Pattern, folder: Path) -> tuple[list[bool], str]:
    """Return whether a trained network has integers, ONNX, QONNX and C, and what is refused.

    All numbers are compared. The report says the same before training.
    """
    net, x = pattern.quantised(), pattern.inputs()
    said = ss.report(net, pattern.shape, pattern.zero, pattern.scale, dtype=pattern.dtype)
    net = pattern.trained(net)
    entry = (pattern.shape, x, pattern.zero, pattern.scale)
    if said.freezes:
        return [True, *formats(frozen_of(net, *entry, pattern.is_exact), x, folder)], ""
    with pytest.raises(ExportError) as caught:
        frozen_of(net, *entry)
    assert str(caught.value) in said.conclusion
    (name,) = re.findall(r"^cannot export '(.+?)': ", str(caught.value))
    return [False] * 4, name


# A Conv1D of Hugging Face is found by the name of its class.
HAVE_PATTERNS = [row for row in OPERATORS if row.name != "Conv1D"]


@pytest.mark.nightly(keep=10)
@pytest.mark.parametrize("row", HAVE_PATTERNS, ids=lambda row: row.name)
def test_row_says_what_is_exported(row: Operator, tmp_path: Path) -> None:
    pattern = ROWS[row.name]
    model = pattern.build()
    model(pattern.floats(pattern.inputs()))  # lazy layers
    calls = [name for kind, name in calls_of(model) if kind == row.name]
    assert calls
    found, refused = exports(pattern, tmp_path)
    formats = [row.exports and name not in row.not_in for name in ("ONNX", "QONNX", "C")]
    assert found == [row.exports, *formats]
    assert row.exports or refused in calls


def pages() -> dict[str, list[bool]]:
    """The patterns of the page: whether each has integers, ONNX, QONNX and C."""
    text = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")
    table = text.partition("## Patterns")[2]
    rows = re.findall(r"^\| (.+?) ((?:\| (?:yes|no) ){4})\|$", table, re.M)
    return {name: [cell == "yes" for cell in re.findall("yes|no", cells)] for name, cells in rows}


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("start", PAGE)
def test_pattern_of_the_page_exports_as_it_says(start: str, tmp_path: Path) -> None:
    (expected,) = (cells for name, cells in pages().items() if name.startswith(start))
    for number, pattern in enumerate(PAGE[start]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert exports(pattern, folder)[0] == expected, number


def test_every_pattern_of_the_page_is_tested() -> None:
    assert len(PAGE) == len(pages())


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", OTHERS)
def test_pattern_exports(name: str, tmp_path: Path) -> None:
    assert exports(OTHERS[name], tmp_path)[0] == [True] * 4


@pytest.mark.parametrize(
    ("module", "advice"),
    [(squeeze_excite, "by name quantise it"), (lambda: nn.GroupNorm(2, 4), "BatchNorm")],
)
def test_report_says_before_training_what_is_not_exported(
    module: Callable[[], nn.Module], advice: str
) -> None:
    convs = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(convs[0], nn.ReLU(), module(), convs[1], nn.ReLU())
    net = ss.quantise(model, TERNARY, TERNARY)
    summary = ss.report(net, shape=(2, 8, 8))
    for rows in (ss.report(net).rows, summary.rows):
        reasons = [row.became for row in rows if advice in row.became]
        assert len(reasons) == 1
        assert "not exported" in reasons[0]
    assert not summary.freezes


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


REFUSED = {
    "two stairs": (Pattern(two_stairs, settings={"skip": "b"}), "'other': another stair reads 'a'"),
    "after a layer in float": (
        Pattern(lambda: nn.Sequential(image(), nn.ReLU()), settings={"skip": "0.3.1"}),
        "'0.3.1': it is in float",
    ),
    "unquantised": (
        Pattern(lambda: Concatenated("ab"), settings={"skip": "a.2"}),
        "'cat': its input, 'a.0', is not quantised",
    ),
    "a constant for each place": (
        Pattern(lambda: image(Code(lambda m, x: x + m.c, c=torch.randn(4, 6, 6)))),
        "'add': its constant differs from place to place",
    ),
    "a division that rounds": (
        Pattern(lambda: image(Code(lambda m, x: torch.div(x, 2.0, rounding_mode="floor")))),
        "'div': its arguments are more than two terms: rounding_mode",
    ),
    "a weighted sum": (
        Pattern(lambda: image(Code(lambda m, x: torch.add(x, x, alpha=2)))),
        "'add': its arguments are more than two terms: alpha",
    ),
    "division of features": (
        Pattern(lambda: image(Code(lambda m, x: x / (x + 2)))),
        "'truediv': it divides features",
    ),
    "uneven windows": (
        Pattern(lambda: image(nn.AdaptiveAvgPool2d(4), layer())),
        r"'3': .*over \(6, 6\) differ in size. Choose an output size that divides it",
    ),
    "crop": (Pattern(lambda: image(nn.ZeroPad2d(-1), layer())), "'3': it crops"),
    "softmax of the batch": (
        Pattern(lambda: nn.Sequential(image(), nn.Softmax(0))),
        "'1': it is not a softmax of a module's scores",
    ),
    "softmax of one position": (
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Softmax(-1)))),
        "'3.1': .*Set dim=1",
    ),
    "softmax at each step of a sequence": (
        Pattern(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1)),
            (4, 6),
        ),
        "'3': .*Set dim=1",
    ),
    "flattened batch": (
        Pattern(lambda: nn.Sequential(image(head=nn.Conv2d(4, 3, 6)), Code(batched))),
        "'flatten': a change of the batch",
    ),
    "scores of positions": (
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 5), nn.Flatten()))),
        "'3.1': its input, '3.0', is not quantised",
    ),
    "asymmetric padding": (
        Pattern(lambda: image(nn.Conv2d(4, 4, 2, padding="same"), nn.ReLU())),
        "'3': .*as many zeros on both sides",
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_integer_form_is_refused_by_name(name: str) -> None:
    pattern, sentence = REFUSED[name]
    with pytest.raises(ExportError, match=f"^cannot export {sentence}"):
        ss.freeze(pattern.trained(), pattern.shape, zero=pattern.zero, scale=pattern.scale)


def test_the_report_gives_the_reason_of_each_call_behind_one_that_is_not_exported() -> None:
    norm = nn.Sequential(nn.Sigmoid(), nn.GroupNorm(2, 4), nn.Flatten(2), nn.GRU(36, 3))
    net = ss.quantise(image(head=norm), TERNARY, TERNARY, skip="3.3")
    rows = [row.exports for row in ss.report(net, (2, 6, 6)).rows[-4:]]
    assert "Sigmoid is a gate" in rows[0]
    assert "GroupNorm is a normalisation of each example" in rows[1]
    assert rows[2] == "its input is not exported"
    assert "GRU is not supported" in rows[3]
    net = ss.quantise(image(head=nn.Sequential(*norm[2:])), TERNARY, TERNARY, skip="3.1")
    with pytest.raises(ExportError, match="GRU is not supported"):
        ss.freeze(net, (2, 6, 6))


def test_row_says_what_is_fused() -> None:
    fuse = pytest.importorskip("softstair._accelerate.fuse", reason="needs triton")
    conv = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    linear = nn.Linear(16, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()
    pattern = Pattern(lambda: nn.Sequential(*conv, nn.Flatten(), *linear, nn.Linear(4, 3)))
    expected = {row.name for row in OPERATORS if row.fuses}
    net = pattern.trained().train()
    graph = fuse.fused(net).code.graph
    kept = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    replaced = [module for name, module in pattern.build().named_modules() if name not in kept]
    names = {operator_of(module).name for module in replaced} - {""}
    assert names == {"conv2d", "batch_norm", "relu", "max_pool2d", "linear"}
    assert names <= expected
    others = {row.name for row in OPERATORS if row.fuses and row.effect is not Effect.ACTIVATION}
    assert others == names - {"relu"}
