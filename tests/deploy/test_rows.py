"""The operator table is true: every row trains, and exports if it says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patterns import PATTERNS, SOUND, TERNARY, Concatenated, Pattern, image, layer, sound
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.convert.graph import trace
from softstair.convert.ops import OPERATORS, Effect, Operator, operator_named, operator_of
from softstair.deploy import ExportError, integerise, onnx, qonnx, verify
from softstair.deploy.c.program import sources


class Called(nn.Module):
    """Features, a function of a module and of them, and a linear layer."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.function, self.module = layer(4, padding=1), function, module
        self.last = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.function(x) if self.module is None else self.function(self.module, x)
        return self.last(y.flatten(1))


def called(function: Callable[..., Tensor], module: Any = None) -> Pattern:
    build = lambda: Called(function, None if module is None else module())
    return Pattern(build, settings={"skip": ("last", *(() if module is None else ("module",)))})


def among(*modules: Callable[[], nn.Module]) -> Pattern:
    return Pattern(lambda: image(*(module() for module in modules)))


def in_one_dimension(*modules: Callable[[], nn.Module]) -> Pattern:
    return Pattern(lambda: sound(*(module() for module in modules)), SOUND)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "clone": lambda x: x.clone(),
    "expand": lambda x: x.expand(-1, 4, 6, 6),
    "flip": lambda x: x.flip(2),
    "getitem": lambda x: x[:, :2],
    "narrow": lambda x: x.narrow(1, 0, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "reshape": lambda x: x.reshape(x.size(0), -1),
    "roll": lambda x: x.roll(1, 2),
    "split": lambda x: x.split(2, 1)[0],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "transpose": lambda x: x.transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "view": lambda x: x.view(x.size(0), -1),
    "stack": lambda x: torch.stack([x, x], 1),
    "add": lambda x: x + x,
    "sub": lambda x: x - F.max_pool2d(x, 3, 1, 1),
    "neg": lambda x: -x,
    "mean": lambda x: x.mean([2, 3]),
    "mul": lambda x: x * torch.sin(x),
}
EXAMPLES: dict[str, Pattern] = {
    "linear": among(nn.Flatten, lambda: nn.LazyLinear(5), nn.ReLU),
    "conv1d": in_one_dimension(lambda: nn.Conv1d(4, 4, 3), nn.ReLU),
    "conv2d": among(layer),
    "conv3d": Pattern(
        lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
        (2, 4, 5, 5),
    ),
    "conv_transpose2d": among(lambda: nn.ConvTranspose2d(4, 4, 2), nn.ReLU),
    "bilinear": called(lambda module, x: module(x, x), lambda: nn.Bilinear(6, 6, 5)),
    **{
        row.name: among(lambda: nn.Conv2d(4, 4, 1), row.modules[0])
        for row in OPERATORS
        if row.effect is Effect.ACTIVATION
    },
    **{row.name: among(row.modules[0]) for row in OPERATORS if row.passes},
    "dropout1d": in_one_dimension(nn.Dropout1d),
    "flatten": among(nn.Flatten),
    "unflatten": among(lambda: nn.Unflatten(1, (2, 2)), nn.Flatten),
    **{name: called(function) for name, function in FUNCTIONS.items()},
    "pixel_shuffle": among(lambda: nn.PixelShuffle(2)),
    "channel_shuffle": among(lambda: nn.ChannelShuffle(2)),
    "ZeroPad": among(lambda: nn.ZeroPad2d(1)),
    "CopyingPad": among(lambda: nn.ReflectionPad2d(1)),
    "max_pool1d": in_one_dimension(lambda: nn.MaxPool1d(2)),
    "max_pool2d": among(lambda: nn.MaxPool2d(2)),
    "adaptive_max_pool1d": in_one_dimension(lambda: nn.AdaptiveMaxPool1d(3)),
    "adaptive_max_pool2d": among(lambda: nn.AdaptiveMaxPool2d(3)),
    "cat": Pattern(lambda: Concatenated("ab")),
    "avg_pool1d": in_one_dimension(lambda: nn.AvgPool1d(3)),
    "avg_pool2d": among(lambda: nn.AvgPool2d(3, 1, 1)),
    "adaptive_avg_pool1d": in_one_dimension(lambda: nn.AdaptiveAvgPool1d(6)),
    "adaptive_avg_pool2d": among(lambda: nn.AdaptiveAvgPool2d(3)),
    "batch_norm": among(layer),
    "OtherNorm": among(lambda: nn.Conv2d(4, 4, 1), lambda: nn.GroupNorm(2, 4), nn.ReLU),
    "multi_head_attention_forward": called(
        lambda module, x: module(x[:, 0], x[:, 1], x[:, 2])[0],
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    ),
    **{
        row.name: Pattern(
            lambda kind=row.modules[0]: nn.Sequential(  # type: ignore[misc]
                image(), kind(1) if "softmax" in kind.__name__.lower() else kind()
            )
        )
        for row in OPERATORS
        if row.keeps_order
    },
    "hardsigmoid": among(nn.Hardsigmoid),
}


def rows_of(net: nn.Module) -> set[str]:
    """Return the rows of all operations of a network."""
    graph, _ = trace(net)
    modules = [net.get_submodule(step.module) for step in graph.steps if step.module]
    functions = [operator_named(step.function) for step in graph.steps if step.function]
    return {operator.name for operator in [*map(operator_of, modules), *functions]}


@pytest.mark.nightly(keep=16)
@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_row_says_what_is_exported(row: Operator) -> None:
    pattern = EXAMPLES[row.name]
    model = pattern.build()
    model(pattern.floats(pattern.inputs()))  # lazy layers
    assert row.name in rows_of(model)
    assert formats(pattern) == [row.exports] * 4


def squeeze_excite() -> nn.Module:
    """A gate for each channel, in functions."""
    gate = lambda m, x: m.b(m.r(m.a(x.mean([2, 3], keepdim=True))))
    modules = {"a": nn.Conv2d(4, 2, 1), "b": nn.Conv2d(2, 4, 1)}
    return Code(lambda m, x: x * torch.sigmoid(gate(m, x)), **modules)


@pytest.mark.parametrize(
    ("module", "advice"), [(squeeze_excite, "remove it"), (lambda: nn.GroupNorm(2, 4), "BatchNorm")]
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
    assert not summary.exports_exactly


def attention() -> nn.Module:
    """Attention whose projections are Linear modules."""
    weights = lambda m, x: (m.query(x) @ m.key(x).transpose(1, 2)).softmax(-1)
    names = ("query", "key", "value", "a")
    modules = {name: nn.Linear(12, 12) for name in names} | {"b": nn.Linear(12, 3)}
    return Code(lambda m, x: m.b(m.r(m.a(weights(m, x) @ m.value(x))).mean(1)), **modules)


def broadcasting() -> nn.Module:
    def code(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.b(m.r(m.small(x) + x).flatten(1))

    return Code(code, a=layer(4, padding=1), small=nn.Conv2d(4, 4, 6), b=nn.LazyLinear(3))


def two_sums() -> nn.Module:
    modules = {name: nn.Conv2d(2, 4, 1) for name in "ac"} | {"d": nn.Conv2d(4, 4, 1)}
    code = lambda m, x: m.b(m.r(m.d(m.a(x) + m.c(x))).flatten(1))
    return Code(code, **modules, b=nn.LazyLinear(3))


def residual(x: Tensor) -> Tensor:
    x += x
    return x


def over_rows(*norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 5), *norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


QUARTER = ss.Stair.ternary(quantum=0.25)
GLOBAL_AVERAGE = (lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten)
PAGE: dict[str, list[Pattern]] = {
    "`Conv1d` on (N, C, L)": [EXAMPLES["conv1d"]],
    "an input of int8 or int16": [PATTERNS["int8 input"], PATTERNS["int16 input"]],
    "a bottleneck with `ReLU6`": [PATTERNS["ReLU6 and Hardtanh"]],
    "a shortcut that is added": [called(residual), EXAMPLES["add"]],
    "two sums that are added": [Pattern(two_sums)],
    "the same, quantised with": [
        Pattern(two_sums, settings={"options": ss.QuantiseOptions(sums=None)})
    ],
    "a shortcut that broadcasts": [Pattern(broadcasting)],
    "features of one quantum, concatenated along the channels": [EXAMPLES["cat"]],
    "features of one quantum, concatenated along another axis": [
        Pattern(lambda: Concatenated("ab", 2))
    ],
    "features of several quanta": [
        Pattern(lambda: Concatenated("ab"), settings={"features": {"a.*": QUARTER, "*": TERNARY}})
    ],
    "a squeeze-excite block": [among(squeeze_excite)],
    "`GroupNorm` or `LayerNorm`": [EXAMPLES["OtherNorm"]],
    "a quantised layer after `AvgPool2d`": [EXAMPLES["avg_pool2d"]],
    "a quantised layer after a global average": [among(*GLOBAL_AVERAGE)],
    "the same with a float layer": [
        Pattern(lambda: image(*(m() for m in GLOBAL_AVERAGE)), settings={"skip": "5.1"})
    ],
    "a convolution as the last layer, one score": [PATTERNS["convolutional head"]],
    "a convolution as the last layer, scores for each": [
        Pattern(lambda: image(head=nn.Conv2d(4, 3, 1)))
    ],
    "averages of features as the scores": [PATTERNS["averages as scores"]],
    "a softmax at the end": [PATTERNS["softmax"], PATTERNS["softmax of floats"]],
    "`Linear` applied to more than a vector": [Pattern(over_rows, SOUND)],
    "the same, followed by a batch normalisation": [
        Pattern(lambda: over_rows(nn.BatchNorm1d(2)), SOUND)
    ],
    "the `Linear` layers of attention": [Pattern(attention, SOUND)],
}


def formats(pattern: Pattern) -> list[bool]:
    """Return whether a trained network exports to integers, ONNX, QONNX and C."""
    net, x = pattern.trained(), pattern.inputs()
    try:
        network = integerise(net, pattern.shape, pattern.zero, pattern.scale, pattern.dtype)
    except ExportError:
        return [False] * 4
    assert verify(net, network, x)["integer network"].mismatches == 0
    results = [True]
    for write in (onnx.model, qonnx.model, lambda network: sources(network, "network")):
        try:
            write(network)
        except ExportError:
            results.append(False)
        else:
            results.append(True)
    return results


def test_patterns_of_the_page_export_as_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+?) ((?:\| (?:yes|no) ){4})\|$", text.partition("## Patterns")[2], re.M
    )
    assert len(rows) == len(PAGE)
    for (name, cells), (start, patterns) in zip(rows, PAGE.items(), strict=True):
        assert name.startswith(start)
        expected = [cell == "yes" for cell in re.findall("yes|no", cells)]
        for pattern in patterns:
            assert formats(pattern) == expected, name


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
