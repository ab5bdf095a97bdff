"""``softstair.deploy.export``: one call writes a frozen network and compares what it wrote."""

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
from networks import Code
from softstair import _files
from softstair.deploy import FrozenNetwork, comparison
from softstair.deploy.c import THREADS
from softstair.deploy.c.program import STACK, memory_plan
from softstair.deploy.loaders import Running

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.25)
INPUT: dict[str, Any] = {"shape": (1, 4, 4), "zero": 128, "scale": 64.0}


def network(stair: ss.Stair = TERNARY, width: int = 8, features: ss.Stair | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 3),
    )
    return ss.quantise(model, stair, features or stair, skip="4")


def frozen_of(*arguments: Any, **options: Any) -> FrozenNetwork:
    return ss.freeze(network(*arguments, **options), **INPUT)


def examples(count: int = 7) -> torch.Tensor:
    return torch.randint(256, (count, 1, 4, 4), dtype=torch.uint8)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", ["onnx", "qonnx", pytest.param("c", marks=needs_compiler)])
def test_one_call_writes_and_compares(to: Any, tmp_path: Path) -> None:
    if to != "c":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    frozen, x = frozen_of(), examples()
    path = tmp_path / "deep" / ("firmware" if to == "c" else "network.onnx")
    exported = ss.deploy.export(frozen, path, to, x)
    assert (exported.mismatches, exported.path) == (0, path)
    assert {*exported.files} == {*contents(tmp_path)}
    assert (exported.plan is None, exported.comparison is None) == (to != "c", to == "qonnx")
    assert str(path) in str(exported)
    if exported.comparison:  # what the stair gives, the scores and the class
        found = exported.comparison.compared
        assert (found["2"], found["scores"], found["class"]) == (7 * 128, 7 * 3, 7)
        assert str(ss.deploy.verify(frozen, path, x)) == str(exported.comparison)
        random = ss.deploy.export(frozen, path, to).comparison
        assert random is not None
        assert random.compared["class"] == 32


@needs_compiler
def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.touch()
    for out in (tmp_path, thesis):
        with pytest.raises(ValueError, match="an earlier export to C"):
            ss.deploy.export(frozen_of(), out)
    assert [*tmp_path.iterdir()] == [thesis]


def test_failed_export_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, missing = tmp_path / "c", tmp_path / "missing"
    first, second = frozen_of(), frozen_of(INT4)
    export = partial(ss.deploy.export, check=False)
    export(first, folder)
    (folder / "mine.c").write_text("mine")
    earlier, full = contents(tmp_path), OSError(errno.ENOSPC, "No space left on device")

    def write_some(path: Path, text: str) -> None:
        if path.name == "Makefile":  # one of the last
            raise full
        path.write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", write_some)
        for out in (folder, missing):
            with pytest.raises(OSError, match="No space left on device") as error:
                export(second, out)
            assert error.value.filename == str(out)
    assert contents(tmp_path) == earlier
    assert not missing.exists()
    export(second, missing)
    export(second, folder)
    assert (folder / "mine.c").read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [folder, missing]
    for path, text in contents(missing).items():
        assert (folder / path.relative_to(missing)).read_bytes() == text


def test_export_that_is_killed_between_two_files_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, real = frozen_of(), os.replace
    export = partial(ss.deploy.export, frozen, tmp_path, check=False)
    export()

    def replace(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "network.c":
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            export()
    assert not (tmp_path / "network.h").exists()
    export()  # it is still taken for an earlier export
    assert (tmp_path / "network.h").exists()


def test_network_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    frozen, refused = frozen_of(), tmp_path / "refused"
    plan, least = memory_plan(frozen), memory_plan(frozen, scratch=0)
    assert least.ram < plan.ram
    flash, ram = plan.flash - 1, plan.ram - 1
    with pytest.raises(ValueError, match=r"code adds .* 18 kB") as error:
        ss.deploy.export(frozen, refused, cpu="arm", fit_flash=flash)
    assert f"fit_flash allows {flash:,} bytes, but the constants take {plan.flash:,}" in str(error)
    with pytest.raises(ValueError, match=rf"`scratch=0` and `threads=1` take {least.ram:,}\."):
        ss.deploy.export(frozen, refused, cpu="arm", fit_ram=ram)
    with pytest.raises(ValueError, match=r"fit_flash allows 0 bytes"):
        ss.deploy.export(frozen, refused, cpu="arm", fit_flash=0, fit_ram=0, scratch=0)
    assert not refused.exists()
    fits: Any = {"fit_flash": plan.flash, "fit_ram": plan.ram, "cpu": "arm"}
    assert ss.deploy.export(frozen, tmp_path / "fits", check=False, **fits).plan == plan


@needs_compiler
def test_memory_of_a_second_thread_is_counted(tmp_path: Path) -> None:
    frozen = frozen_of()
    alone = memory_plan(frozen, scratch=0)
    exported = ss.deploy.export(frozen, tmp_path / "fits", threads=2, scratch=0, cpu="arm")
    plan = exported.plan
    assert exported.mismatches == 0
    assert plan == memory_plan(frozen, scratch=0, threads=2)
    assert plan is not None
    assert plan.ram < memory_plan(frozen, threads=2).ram
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
    size += "sizeof memory + sizeof thread_memory + SS_THREAD_STACK);}"
    (tmp_path / "fits/size.c").write_text(size)
    command = ["cc", *THREADS[2], "-o", "size", "size.c"]
    subprocess.run(command, cwd=tmp_path / "fits", check=True)
    assert int(subprocess.check_output([tmp_path / "fits/size"])) == plan.ram
    refused = {"fit_ram": plan.ram - 1, "threads": 2, "scratch": 0, "cpu": "arm"}
    with pytest.raises(ValueError, match=rf"`threads=1` take {alone.ram:,}\."):
        ss.deploy.export(frozen, tmp_path / "refused", **refused)
    assert not (tmp_path / "refused").exists()


def test_constants_larger_than_the_weights_are_a_warning_with_figures(tmp_path: Path) -> None:
    int8 = ss.Stair.linear(bits=8, signed=True)
    levels = tuple(float(level) for level in range(-100, 100) if level != 40)
    thresholds = tuple((a + b) / 2 for a, b in pairwise(levels))
    uneven = frozen_of(int8, features=ss.Stair(levels, thresholds))  # no multiplier has them
    export = partial(ss.deploy.export, check=False)
    with pytest.warns(UserWarning, match=r"thresholds .* take [\d,]+ bytes, and the weights") as w:
        plan = export(uneven, tmp_path / "uneven").plan
    assert plan is not None
    for part in (0, 1):
        assert f"{sum(row.flash[part] for row in plan.rows):,}" in str(w[0].message)
    for name, stair in {"ternary": TERNARY, "even": int8}.items():
        plan = export(frozen_of(stair), tmp_path / name).plan
        assert plan is not None
        assert plan.warning is None


@needs_compiler
def test_other_networks_and_inputs_are_refused(tmp_path: Path) -> None:
    frozen, x = frozen_of(), examples()
    for given in (network(), "net"):
        with pytest.raises(ValueError, match=r"frozen must be a network of softstair\.freeze"):
            ss.deploy.export(given, tmp_path / "c")
    for given in ((x - 128.0) / 64, x.numpy(), x[:, 0]):
        with pytest.raises(ValueError, match="x must be uint8 of shape"):
            ss.deploy.export(frozen, tmp_path / "c", x=given)
    with pytest.raises(ValueError, match="x must hold at least one example"):
        ss.deploy.export(frozen, tmp_path / "c", x=x[:0])
    assert not [*tmp_path.iterdir()]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "change", [nn.DataParallel, partial(torch.compile, backend="eager"), lambda net: nn.ReLU()]
)
def test_float_and_wrapped_networks_are_refused(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    with pytest.raises(ValueError, match=r"pass the network inside DDP or torch\.compile"):
        ss.freeze(change(network()), **INPUT)


def test_normalisation_in_the_forward_pass_is_to_be_done_before() -> None:
    model = Code(lambda m, x: m.layers((x - 128) / 64), layers=nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
    ))  # fmt: skip
    net = ss.quantise(model, TERNARY, TERNARY, skip="layers.3")
    with pytest.raises(ValueError, match=r"sub of the input .* give `zero` and `scale`"):
        ss.freeze(net, (1, 4, 4))


def test_a_network_with_mismatches_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = frozen_of()

    def wrong(x: torch.Tensor) -> dict[str, torch.Tensor]:
        results = comparison.results_of(frozen, x)
        return {**results, "scores": results["scores"] + (x[:, 0, 0, :1] > 127)}

    running = Running(wrong, lambda _: 0.0)
    monkeypatch.setattr(comparison, "runner", lambda *_: running)
    with pytest.raises(ss.SoftstairError, match=r"mismatches of .* the first in scores, example"):
        ss.deploy.export(frozen, tmp_path / "c")
    assert not [*tmp_path.iterdir()]


@needs_compiler
def test_a_folder_that_was_changed_has_mismatches(tmp_path: Path) -> None:
    frozen, x = frozen_of(), examples()
    folder = ss.deploy.export(frozen, tmp_path / "c", check=False).path
    text = (folder / "network_weights.h").read_text()
    at = text.index("{", text.index("4.scores"))
    number = re.search(r"-?\d+", text[at:])
    assert number is not None
    changed = f"{text[:at]}{text[at:].replace(number[0], str(int(number[0]) + 1), 1)}"
    (folder / "network_weights.h").write_text(changed)
    found, score = ss.deploy.verify(frozen, folder, x), int(frozen(x)[0, 0])
    assert found.wrong["scores"] == 7
    assert found.first == ("4.scores", 0, (0,), score, score + 1)


@pytest.mark.parametrize("to", ["c", "onnx"])
def test_what_was_written_of_another_network_is_refused(to: Any, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    path = ss.deploy.export(frozen_of(), tmp_path / "a.onnx", to, check=False).path
    with pytest.raises(ss.SoftstairError, match="of another"):
        ss.deploy.verify(frozen_of(INT4), path, examples())
