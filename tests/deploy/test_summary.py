"""``softstair.report``: what freezes is said before training, by the code that freezes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import networks
import softstair as ss
from softstair._errors import SoftstairError
from softstair.deploy.c.program import memory_plan
from softstair.deploy.nodes import ExportError
from softstair.deploy.summary import report as report_of

TERNARY = ss.Stair.ternary()


class Hindered(nn.Module):
    """A pooling before its normalisation, a GroupNorm, and a layer behind a stair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.pool, self.norm, self.relu = nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.ReLU()
        self.point, self.group = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)
        self.flatten, self.head = nn.Flatten(), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.pool(self.conv(x))))
        return self.head(self.flatten(torch.relu(self.group(self.point(x)))))


def plain(*first: nn.Module) -> nn.Sequential:
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def test_rows_have_costs_and_the_memory_is_that_of_the_program() -> None:
    model = plain(nn.Conv2d(2, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8))
    model(torch.zeros(2, 2, 9, 9))
    int4 = ss.Stair.linear(4, signed=True, quantum=0.25)
    net = ss.quantise(model, int4, TERNARY, skip="4")
    report = report_of(net, (2, 9, 9), 121, 64.0)
    rows = {row.name: row for row in report.rows}
    assert [row.exports for row in report.rows] == ["yes"] * 5
    assert [*rows] == list("01234")
    conv, head = rows["0"], rows["4"]
    assert (conv.weights, conv.macs, conv.bytes) == (144, 144 * 16, 72)
    assert (head.weights, head.macs, head.bytes) == (384, 384, 4 * 387)
    assert conv.stair.startswith("int4, quantum 0.25")
    assert report.freezes
    assert report.plan is not None
    integer = ss.freeze(net, (2, 9, 9), zero=121, scale=64.0)
    assert report.plan.ram == memory_plan(integer).ram
    assert report.plan.flash >= memory_plan(integer).flash
    shown = str(report).splitlines()
    assert shown[-1] == report.conclusion
    assert f"freezes; C needs about {report.plan.flash:,} bytes" in shown[-1]
    assert shown[-2].split() == ["in", "all", "547", "2,688", "1,684"]


def test_float_network_is_reported_in_ternary_and_left_as_it_is() -> None:
    model = plain(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4))
    model(torch.zeros(2, 1, 5, 5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = report_of(model, (1, 5, 5))
    assert report.conclusion.startswith("in ternary, with '4' in float: freezes")
    assert [row.became for row in report.rows if row.layer is not None] == [
        "stair weights",
        "ternary stair instead of ReLU",
    ]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    without = report_of(model)
    assert without.freezes is None
    assert "give `shape`" in without.conclusion


def test_what_does_not_export_is_named_and_what_follows_a_stair_is_examined() -> None:
    net = ss.quantise(Hindered(), TERNARY, TERNARY, skip="head")
    report = report_of(net, (1, 8, 8))
    exports = {row.name: row.exports for row in report.rows}
    assert exports["norm"].startswith("after training perhaps: cannot export 'norm': negative")
    assert exports["group"].startswith("cannot export 'group': GroupNorm")
    assert {exports[name] for name in ("conv", "point", "relu", "flatten", "head")} == {"yes"}
    assert not report.freezes
    with pytest.raises(ExportError) as caught:
        ss.freeze(net, (1, 8, 8), zero=128, scale=64.0)
    assert report.conclusion == f"does not freeze: {caught.value}"
    assert str(report).count("no (") == 3


def test_what_training_may_change_is_said() -> None:
    model = plain(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.BatchNorm2d(4))
    model(torch.zeros(2, 1, 6, 6))
    net = ss.quantise(model, TERNARY, TERNARY, skip="5").eval()
    report = report_of(net, (1, 6, 6))
    assert report.freezes
    assert "as it is, but training may change that: cannot export '2'" in report.conclusion
    ss.freeze(net, (1, 6, 6), zero=128, scale=64.0)
    norm = net.get_submodule("2")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.weight.data[1] = -0.5
    assert not report_of(net, (1, 6, 6)).freezes


def test_wrong_inputs_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    model = plain(nn.Conv2d(1, 4, 3))
    model(torch.zeros(2, 1, 6, 6))
    functional = networks.make("functional resnet")[0]
    for net, shape in ((model, (3, 6, 6)), (functional, (5, 8, 8)), (functional, (2, 3, 8, 8))):
        net = ss.quantise(net, TERNARY, TERNARY)
        sentence = r"^cannot export '\w+': .* Correct the shape"
        with pytest.raises(SoftstairError, match=sentence) as caught:
            report_of(net, shape)
        if len(shape) == 3:
            with pytest.raises(ValueError, match="Correct the shape") as exported:
                ss.freeze(net, shape)
            assert str(caught.value) == str(exported.value)
        assert caught.value.field == "shape"
    assert capfd.readouterr().err == ""
    report = report_of(model, (1, 6, 6), zero=3.5)  # type: ignore[arg-type]
    assert report.freezes is False
    assert "zero must be an integer" in report.conclusion


class Words(nn.Module):
    """Most parameters belong to no layer that is quantised: one of them to none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.place, self.fc, self.head = (
            nn.Parameter(torch.zeros(8)),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.words(x) + self.place)
        x = self.attention(x, x, x)[0]
        return self.head(torch.relu(self.norm(self.fc(x))))  # type: ignore[no-any-return]


def test_all_parameters_are_counted_and_what_never_exports_is_named_without_a_shape() -> None:
    model = Words()
    net = ss.quantise(model, TERNARY, TERNARY, skip=("attention", "head"))
    report = report_of(net)
    total = sum(parameter.numel() for parameter in model.parameters())
    rows = {row.kind: row for row in report.rows}
    floats = {kind: row.floats for kind, row in rows.items() if row.floats}
    assert floats.pop("Linear") == 8 * 3 + 3
    assert floats == {"Embedding": 400, "LayerNorm": 16, "MultiheadAttention": 288, "Words": 8}
    assert sum(row.parameters for row in report.rows) == total
    assert sum(row.bytes for row in report.rows) == 64 // 4 + 4 * (total - 64)
    assert report.freezes is False
    assert {row.kind for row in report.rows if row.exports} == {*floats} - {"Words"}
    headline, *_ = str(report).splitlines()
    assert headline == report.headline
    assert f"quantised {64 / total:.1%} of the {total:,} parameters" in headline
    assert headline.endswith("exports: no (1 Embedding, 1 LayerNorm, 1 MultiheadAttention)")


def test_the_first_line_says_whether_the_network_exports() -> None:
    model = plain(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4))
    model(torch.zeros(2, 1, 5, 5))
    net = ss.quantise(model, TERNARY, TERNARY, skip="4")
    assert report_of(net).headline.endswith("trains: yes; exports: depends on `shape`")
    assert report_of(net, (1, 5, 5)).headline.endswith(
        "(in float: Linear 111, BatchNorm2d 8); trains: yes; exports: yes"
    )
    hindered = report_of(ss.quantise(Hindered(), TERNARY, TERNARY, skip="head"), (1, 8, 8))
    assert hindered.headline.endswith("exports: no (1 GroupNorm)")
    untraced = ss.quantise(networks.Branching(), TERNARY, TERNARY, example_inputs=torch.zeros(2, 6))
    for shape in (None, (6,)):
        assert report_of(untraced, shape).headline.endswith("exports: no")


def test_a_tied_parameter_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    report = report_of(ss.quantise(model, TERNARY, TERNARY))
    assert sum(row.parameters for row in report.rows) == 16
    assert report.headline.startswith("quantised 100.0% of the 16 parameters")


def test_each_kept_activation_that_is_not_exported_is_named() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.PReLU(4), nn.Conv2d(4, 4, 3), nn.PReLU(4)
    for activation in layers[1::2]:
        activation.weight.data[0] = -0.1
    net = ss.quantise(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)), "int8", skip="5")
    rows = {row.name: row.exports for row in report_of(net, (1, 8, 8)).rows}
    assert "PReLU" in rows["1"]
    assert "PReLU" in rows["3"]
