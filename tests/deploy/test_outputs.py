"""Frozen networks of several outputs, and of outputs that are no classes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from freezes import assert_equals_numpy
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.deploy.frozen import leaves

TERNARY = ss.Stair.ternary()
INPUT: dict[str, Any] = {"shape": (1, 4, 4), "zero": 128, "scale": 64.0}


def examples(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(256, (count, 1, 4, 4), dtype=torch.uint8, generator=generator)


def heads(kind: type) -> Any:
    """A classifier, a mask and a probability at different depths."""
    body, deep = layer(1, 6), layer(6, 8, stride=2)
    ends = {"label": nn.Linear(8, 3), "mask": nn.Conv2d(6, 2, 1), "likely": nn.Linear(8, 1)}

    def code(m: nn.Module, x: Tensor) -> Any:
        y = m.body(x)
        z = m.deep(y).mean([2, 3])
        found = {"mask": m.mask(y), "label": m.label(z), "likely": m.likely(z).sigmoid()}
        return found if kind is dict else (found["mask"], [found["label"], found["likely"]])

    return Code(code, body=body, deep=deep, **ends)


def layer(inputs: int, outputs: int, **options: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("kind", "outputs", "to"),
    [(dict, "classes", "c"), (tuple, "values", "onnx"),
     (tuple, "values", "c"), (dict, "classes", "onnx")],
)  # fmt: skip
def test_several_outputs_are_returned_saved_and_exported(
    kind: type, outputs: Any, to: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    skip = ("label", "likely") if kind is tuple else ()
    net, x = ss.quantise(heads(kind), "int8", skip=skip).eval(), examples(40)
    ss.calibrate(net, [(x - 128.0) / 64], outputs=None, norms=False)
    assert ss.report(net, (1, 4, 4)).freezes
    frozen = ss.freeze(net, **INPUT, examples=x, outputs=outputs)
    with torch.no_grad():
        expected = net((x - 128.0) / 64)
    actual = frozen.values(x)
    assert list(actual) == ["mask", "label", "likely"] if kind is dict else type(actual) is tuple
    pairs = list(zip(leaves(expected), leaves(actual), leaves(frozen.predict(x)), strict=True))
    assert len(pairs) == 3
    for number, (y, value, found) in enumerate(pairs):
        if number < 2 or outputs == "values":  # classes are the same without the sigmoid
            assert float((value - y).abs().max()) <= 0.03 * float(y.abs().max())
        assert float((found == y.argmax(1)).double().mean()) >= 0.97
    assert_equals_numpy(frozen, x)
    again = ss.load_frozen(frozen.save(tmp_path / "frozen.safetensors"))
    assert again.returns == frozen.returns
    assert again.digest == frozen.digest
    names = ("_mask", "_label", "_likely") if kind is dict else ("_0", "_1_0", "_1_1")
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such small layers have more thresholds than weights
        exported = ss.deploy.export(frozen, tmp_path / f"a.{to}", to, x)
    assert exported.comparison is not None
    counts = [exported.comparison.compared[f"scores{name}"] for name in names]
    assert (counts, exported.mismatches) == ([40 * 2 * 16, 40 * 3, 40], 0)
    with pytest.raises(ss.deploy.ExportError, match="QONNX has one output"):
        ss.deploy.export(frozen, tmp_path / "a.onnx", "qonnx")
    with pytest.raises(ss.SoftstairError, match="several outputs"):
        ss.freeze(net, **INPUT, classes=["a", "b"])


def test_a_softmax_is_left_out_of_classes_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(1))
    net = ss.quantise(model, TERNARY, TERNARY)
    assert ss.freeze(net, **INPUT).returns == "3.scores"
    with pytest.raises(ss.deploy.ExportError, match="'4': softmax changes the values"):
        ss.freeze(net, **INPUT, outputs="values")


def test_one_of_two_outputs_exports() -> None:
    model = Code(lambda m, x: m.net(x)["label"], net=heads(dict))
    net = ss.quantise(model, TERNARY, TERNARY, skip=("net.label", "net.mask"))
    frozen, x = ss.freeze(net, **INPUT, examples=examples(50)), examples(50)
    assert ([*frozen.stairs], frozen(x).shape) == (["net.body.2", "net.deep.2"], (50, 3))
    with torch.no_grad():
        expected = net.eval()((x - 128.0) / 64)
    assert torch.allclose(frozen.values(x).float(), expected, atol=0.02)
    rows = {row.name: row.exports for row in ss.report(net, (1, 4, 4)).rows}
    assert rows["net.label"] == "yes"
    assert rows["net.mask"] == "the output does not need it"
