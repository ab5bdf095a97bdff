"""``softstair.deploy.export``: one call writes a network and compares it with the trained one."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import needs_compiler
from torch import nn

import softstair as ss
from softstair import _files
from softstair.deploy import c
from softstair.deploy.c import THREADS
from softstair.deploy.c.program import STACK, memory_plan
from softstair.deploy.comparison import write


def network(stair: ss.Stair, width: int = 8, features: ss.Stair | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 3),
    )
    return ss.quantise(model, stair, features or stair, skip="4")


@pytest.mark.parametrize("to", ["onnx", "qonnx", pytest.param("c", marks=needs_compiler)])
def test_one_call_writes_and_compares(to: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    net, folder = network(ss.Stair.ternary()), tmp_path / "deep" / "folder"
    x = torch.randint(256, (7, 1, 4, 4), dtype=torch.uint8)
    exported = ss.deploy.export(net, (1, 4, 4), 128, 64.0, folder, to=to, x=x)  # type: ignore[arg-type]
    assert exported.mismatches == 0
    assert {"integer network", to} - {"qonnx"} == set(exported.comparisons)
    assert all(sum(each.compared.values()) == 7 * 129 for each in exported.comparisons.values())
    assert all(file.is_file() for file in exported.files)
    assert (exported.plan is None) == (to != "c")
    assert net.training  # left as it is
    assert str(exported.path) in str(exported)
    names = {file.name for file in exported.files}
    assert names >= ({"network.c", "network.h"} if to == "c" else {f"network.{to}"})
    integer = ss.deploy.integerise(net, (1, 4, 4), 128, 64.0)
    assert write(integer, exported.path, to) == exported.plan  # type: ignore[arg-type]
    assert all(file in exported.files for file in folder.rglob("*") if file.is_file())


@needs_compiler
def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.touch()
    with pytest.raises(ValueError, match="an earlier export to C"):
        ss.deploy.export(network(ss.Stair.ternary()), (1, 4, 4), 128, 64.0, tmp_path)
    assert list(tmp_path.iterdir()) == [thesis]
    with pytest.raises(ValueError, match="to must be one of onnx, qonnx, c"):
        ss.deploy.export(network(ss.Stair.ternary()), (1, 4, 4), 128, 64.0, tmp_path, to="C")  # type: ignore[arg-type]


def test_failed_export_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, missing = tmp_path / "c", tmp_path / "missing"
    integers = [
        ss.deploy.integerise(network(stair), (1, 4, 4), 128, 64.0)
        for stair in (ss.Stair.ternary(), ss.Stair.linear(4, signed=True, quantum=0.25))
    ]
    c.write(integers[0], folder)
    (folder / "mine.c").write_text("mine")
    contents = lambda: {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    earlier, full = contents(), OSError(errno.ENOSPC, "No space left on device")

    def write_some(path: Path, text: str) -> None:
        if path.name == "Makefile":  # one of the last
            raise full
        path.write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", write_some)
        for out in (folder, missing):
            with pytest.raises(OSError, match="No space left on device") as error:
                c.write(integers[1], out)
            assert error.value.filename == str(out)
    assert contents() == earlier
    assert not missing.exists()
    c.write(integers[1], missing)
    c.write(integers[1], folder)
    assert (folder / "mine.c").read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [folder, missing]
    for path in missing.rglob("*"):
        assert path.is_dir() or (folder / path.relative_to(missing)).read_bytes() == (
            path.read_bytes()
        )


def test_export_that_is_killed_between_two_files_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integer = ss.deploy.integerise(network(ss.Stair.ternary()), (1, 4, 4), 128, 64.0)
    c.write(integer, tmp_path)
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "network.c":
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            c.write(integer, tmp_path)
    assert not (tmp_path / "network.h").exists()
    write(integer, tmp_path, "c")  # it is still taken for an earlier export
    assert (tmp_path / "network.h").exists()


def test_network_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    given = (network(ss.Stair.ternary()), (1, 4, 4), 128, 64.0)
    integer = ss.deploy.integerise(*given)
    plan, least = memory_plan(integer), memory_plan(integer, scratch=0)
    assert least.ram < plan.ram
    refused = tmp_path / "refused"
    flash, ram = plan.flash - 1, plan.ram - 1
    with pytest.raises(ValueError, match=r"'4' \([\d,]+\).* 18 kB .*last_layer=int8") as error:
        ss.deploy.export(*given, refused, fit_flash=flash)
    assert f"fit_flash allows {flash:,} bytes, but the constants take {plan.flash:,}" in str(error)
    with pytest.raises(ValueError, match=f"takes less, `scratch=0` {least.ram:,} bytes.$"):
        ss.deploy.export(*given, refused, fit_ram=ram)
    with pytest.raises(ValueError, match=r"fit_flash allows 0 .* `fit_ram` allows 0 .* channels"):
        ss.deploy.export(*given, refused, fit_flash=0, fit_ram=0, scratch=0)
    with pytest.raises(ValueError, match=r"fit_ram is for C, but the format is 'qonnx'"):
        ss.deploy.export(*given, refused, to="qonnx", fit_ram=ram)
    with pytest.raises(ValueError, match="fit_flash must be an integer of at least 0"):
        ss.deploy.export(*given, refused, fit_flash=-1)
    assert not refused.exists()
    fits = {"fit_flash": plan.flash, "fit_ram": plan.ram}
    assert write(integer, tmp_path / "fits", "c", **fits) == plan


@needs_compiler
def test_memory_of_a_second_thread_is_counted(tmp_path: Path) -> None:
    given = (network(ss.Stair.ternary()), (1, 4, 4), 128, 64.0)
    integer = ss.deploy.integerise(*given)
    alone = memory_plan(integer, scratch=0)
    exported = ss.deploy.export(*given, tmp_path / "fits", threads=2, scratch=0)
    plan = exported.plan
    assert exported.mismatches == 0
    assert plan == memory_plan(integer, scratch=0, threads=2)
    assert plan.ram < memory_plan(integer, threads=2).ram
    *rows, second = plan.rows
    assert (tuple(rows), second.names) == (alone.rows, ("second thread",))
    assert second.memory[1] == STACK
    assert second.scratch == max(row.scratch for row in rows) > 0
    assert plan.ram == alone.ram + STACK + second.scratch
    for text in (str(plan), (tmp_path / "fits/network.h").read_text().replace("262144", "262,144")):
        assert re.search(rf"second thread .* 262,144 +{second.scratch}  stack and scratch", text)
    command = ["make", "-s", "CFLAGS=-DSS_MIN_PRODUCTS=0", "-C", tmp_path / "fits"]
    assert subprocess.run(command, check=False).returncode == 0
    size = '#include <stdio.h>\n#include "network.c"\nint main(void) {printf("%zu", '
    size += "sizeof memory + sizeof thread_memory + sizeof totals + SS_THREAD_STACK);}"
    (tmp_path / "fits/size.c").write_text(size)
    command = ["cc", *THREADS[2], "-o", "size", "size.c"]
    subprocess.run(command, cwd=tmp_path / "fits", check=True)
    assert int(subprocess.check_output([tmp_path / "fits/size"])) == plan.ram
    with pytest.raises(ValueError, match=rf"'second thread' .* `threads=1` it takes {alone.ram:,}"):
        ss.deploy.export(*given, tmp_path / "refused", fit_ram=plan.ram - 1, threads=2, scratch=0)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ValueError, match="threads must be an integer from 1 to 2, but 3"):
        ss.deploy.export(*given, tmp_path / "three", threads=3)
    with pytest.raises(ValueError, match="threads is for C, but the format is 'onnx'"):
        write(integer, tmp_path / "network.onnx", "onnx", threads=2)
    with pytest.raises(ValueError, match="scratch is for C, but the format is 'onnx'"):
        write(integer, tmp_path / "network.onnx", "onnx", scratch=0)


@pytest.mark.nightly
@needs_compiler
def test_thresholds_larger_than_the_weights_are_a_warning_with_figures(tmp_path: Path) -> None:
    int8 = ss.Stair.linear(bits=8, signed=True)
    levels = tuple(float(level) for level in range(-100, 100) if level != 40)
    thresholds = tuple((a + b) / 2 for a, b in pairwise(levels))
    net = network(int8, features=ss.Stair(levels, thresholds))  # uneven: no affine steps
    with pytest.warns(UserWarning, match=r"thresholds .* take [\d,]+ bytes, and the weights"):
        exported = ss.deploy.export(net, (1, 4, 4), 128, 64.0, tmp_path / "int8")
    assert exported.plan is not None
    for part in (0, 1):
        figure = sum(row.flash[part] for row in exported.plan.rows)
        assert f"{figure:,}" in str(exported.plan).splitlines()[-1]
    for name, stair in {"ternary": ss.Stair.ternary(), "even": int8}.items():
        exported = ss.deploy.export(network(stair), (1, 4, 4), 128, 64.0, tmp_path / name)
        assert exported.plan is not None
        assert exported.plan.warning is None


def test_float_networks_and_inputs_after_normalisation_are_named(tmp_path: Path) -> None:
    net = network(ss.Stair.ternary())
    x = torch.randint(256, (2, 1, 4, 4), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"x must be a tensor of uint8, .* before the norm"):
        ss.deploy.export(net, (1, 4, 4), 128, 64.0, tmp_path, x=(x - 128.0) / 64)
    with pytest.raises(ValueError, match=r"x must be a tensor of uint8"):
        ss.deploy.export(net, (1, 4, 4), 128, 64.0, tmp_path, x=x.numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale .* 255\.0 was given.* \(x - zero\) / scale"):
        ss.deploy.export(net, (1, 4, 4), 128, 255.0, tmp_path)
    with pytest.raises(ValueError, match=r"net must be a network of softstair\.quantise"):
        ss.deploy.export(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()), (1, 4, 4), 0, 1.0, tmp_path)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_wrapped_networks_are_to_be_unwrapped(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"pass the network inside DDP or torch\.compile"):
        ss.deploy.export(wrap(network(ss.Stair.ternary())), (1, 4, 4), 128, 64.0, tmp_path)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network(ss.Stair.ternary())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers((x - 128) / 64)  # type: ignore[no-any-return]


def test_normalisation_in_the_forward_pass_is_to_be_done_before(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sub of the input .* give `zero` and `scale`"):
        ss.deploy.export(Normalised(), (1, 4, 4), 0, 1.0, tmp_path)


def test_mismatches_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    net, other = (network(ss.Stair.ternary()).eval() for _ in range(2))
    with torch.no_grad():
        other[0].weight.neg_()
    integer = ss.deploy.integerise(other, (1, 4, 4), 128, 64.0)
    monkeypatch.setattr("softstair.deploy.comparison.integerise", lambda *given: integer)
    with pytest.warns(UserWarning, match="integer network: [0-9,]+ mismatches"):
        exported = ss.deploy.export(net, (1, 4, 4), 128, 64.0, tmp_path, to="qonnx")
    assert exported.mismatches > 0


def test_what_is_no_network_or_no_example_is_refused(tmp_path: Path) -> None:
    net = network(ss.Stair.ternary())
    empty = torch.zeros(0, 1, 4, 4, dtype=torch.uint8)
    integer = ss.deploy.integerise(net, (1, 4, 4), 128, 64.0)
    with pytest.raises(ValueError, match="x must hold at least one example"):
        ss.deploy.verify(net, integer, empty)
    with pytest.raises(ValueError, match="net must be a network"):
        ss.deploy.export("net", (1, 4, 4), 128, 64.0, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module"):
        ss.report("net")  # type: ignore[arg-type]


class Heads(nn.Module):
    """Two classifiers of the same features."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.ReLU())
        self.label, self.place, self.kind = nn.Linear(8, 3), nn.Linear(8, 2), kind

    def forward(self, x: torch.Tensor) -> Any:
        x = self.body(x)
        return self.kind((name, getattr(self, name)(x)) for name in ("label", "place"))


class One(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["place"]  # type: ignore[no-any-return]


def test_two_outputs_are_named_and_one_of_them_exports(tmp_path: Path) -> None:
    ternary = ss.Stair.ternary()
    for kind, given in (
        (tuple, r"a tuple of 2.*net\(x\)\[0\]"),
        (dict, r"a dict of 2.*\['label'\]"),
    ):
        net = ss.quantise(Heads(kind), ternary, ternary, skip=("label", "place"))
        with pytest.raises(ss.deploy.ExportError, match=given):
            ss.deploy.integerise(net, (1, 4, 4), 128, 64.0)
        assert "returns a" in ss.report(net, (1, 4, 4)).conclusion
    assert ss.deploy.export(One(net), (1, 4, 4), 128, 64.0, tmp_path, to="qonnx").mismatches == 0


def test_verify_leaves_the_mode_of_each_module() -> None:
    net = network(ss.Stair.ternary()).train()
    net[1].eval()
    before = [module.training for module in net.modules()]
    x = torch.randint(256, (3, 1, 4, 4), dtype=torch.uint8)
    integer = ss.deploy.integerise(net, (1, 4, 4), 128, 64.0)
    for comparison in ss.deploy.verify(net, integer, x).values():
        assert comparison.mismatches == 0
    assert [module.training for module in net.modules()] == before
