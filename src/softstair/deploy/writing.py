"""Export of a frozen network, compared with it before anything is put in place; GGUF of a trained
one."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from softstair import _check
from softstair._files import output_file
from softstair.deploy import c, gguf, onnx, pte, qonnx, qonnx_quant, tflite
from softstair.deploy.comparison import Comparison, verify
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.processes import absent
from softstair.deploy.target import Cpu, Runtime, Target, target_of

Format = Literal["onnx", "qonnx", "c", "tflite", "pte", "gguf"]
Flavour = Literal["multithreshold", "quant"]
EXAMPLES = 32
"""Random ones that an export is compared on if none are given."""


@dataclass(frozen=True)
class Exported:
    """What :func:`export` wrote, and how it compares with the frozen network.

    Attributes:
        path: The file, or the folder of C.
        files: All files that were written.
        comparison: Of what was written; None for GGUF and QONNX of MultiThreshold, which are not
            run, and for QONNX of Quant where the package qonnx is not installed.
        plan: The memory that the C program needs; None for other formats.
    """

    path: Path
    files: tuple[Path, ...]
    comparison: Comparison | None = None
    plan: c.MemoryPlan | None = None

    @property
    def mismatches(self) -> int:
        """How many numbers differ from the frozen network's."""
        return self.comparison.mismatches if self.comparison else 0

    def __str__(self) -> str:
        compared = "not run" if self.comparison is None else str(self.comparison)
        return "\n".join(
            [*([] if self.plan is None else [str(self.plan)]), compared, str(self.path)]
        )


def export(
    frozen: FrozenNetwork | nn.Module,
    out: Path | str,
    to: Format = "c",
    x: Tensor | None = None,
    *,
    scratch: int | None = None,
    fit_flash: int | None = None,
    fit_ram: int | None = None,
    threads: int = 1,
    cpu: Cpu | None = None,
    runtime: Runtime = "onnxruntime",
    flavour: Flavour = "multithreshold",
    check: bool = True,
    **settings: Any,
) -> Exported:
    """Write a frozen network as ONNX, QONNX, C or .tflite, and compare every number of it.

    Of a trained Llama-shaped network, write GGUF for llama.cpp.

    >>> import softstair as ss
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, "ternary", skip="3")
    >>> frozen = ss.freeze(net, (1, 8, 8), zero=128, scale=64.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = ss.deploy.export(frozen, f"{folder}/firmware", to="c")
    >>> exported.path.name, exported.mismatches
    ('firmware', 0)

    Args:
        frozen: A network of :func:`softstair.freeze`; for GGUF, a trained one.
        out: The file to write, or for C a folder that is new, empty or an earlier export.
        to: ``"onnx"``, ``"qonnx"``, ``"c"``, ``"tflite"``, ``"pte"`` or ``"gguf"``.
        x: Integers to compare on, such as a test set; by default 32 random inputs.
        scratch: Bytes of memory that a layer of C for ARM may use to be faster, by default 1 MiB;
            16384 for microcontrollers.
        fit_flash: Bytes that the constants of C for ARM may take; the code comes on top.
        fit_ram: Bytes that the memory plan of C for ARM may take; the stack comes on top.
        threads: Threads of C. 2 computes layers of 16 million products or more on two POSIX
            threads; the memory plan has the stack and the scratch memory of the second.
        cpu: ``"x86"`` or ``"arm"``, on which C or ONNX is to be fast; by default this machine's.
            The numbers are the same on both. ``"arm"`` is for microcontrollers, too.
        runtime: What runs ONNX: ``"openvino"`` reads files of ``"onnxruntime"`` wrongly.
        flavour: Of QONNX: ``"multithreshold"`` for FINN, ``"quant"`` for hls4ml.
        check: Whether to run what was written; False needs no compiler and no runtime. The
            weights of GGUF are read back and compared.
        **settings: Of GGUF: the options of :func:`softstair.deploy.gguf.write`.

    Raises:
        SoftstairError: If the network cannot be written so or does not fit, if a number differs,
            if the folder holds something else, or if there is no C compiler. Nothing is written
            then.
        MissingExtraError: If the packages of the format are not installed.
    """
    _check.choice("to", to, get_args(Format))
    if to == "gguf":
        return _export_gguf(frozen, Path(out), check, settings)
    if settings:
        raise _check.invalid(next(iter(settings)), f"is an option of GGUF, but to is {to!r}")
    if not isinstance(frozen, FrozenNetwork):
        raise _check.wrong("frozen", type(frozen), "a network of softstair.freeze")
    fits: Mapping[str, int | None] = {"fit_flash": fit_flash, "fit_ram": fit_ram}
    c.check_options(to, scratch, threads, **fits)
    _check.choice("flavour", flavour, get_args(Flavour))
    if to != "qonnx" and flavour != "multithreshold":
        raise _check.invalid("flavour", f"must be left out for the format {to!r}")
    target, path = target_of(to, cpu, runtime), Path(out)
    memory = c.SCRATCH_OF[target.cpu] if scratch is None else scratch
    if to == "c":
        _check_folder(path)
        for name, value in {"scratch": scratch, **fits}.items():
            if value is not None and target.cpu == "x86":
                problem = "is for ARM, but the C is for x86: leave it out, or give cpu='arm'"
                raise _check.invalid(name, f"{problem}, also for microcontrollers")
        c.check_fit(frozen, memory, fit_flash, fit_ram, threads)
    examples = frozen.input.random(EXAMPLES) if x is None else x
    frozen.input.check(examples)
    comparison = None
    how: Any = {"scratch": memory, "threads": threads, "target": target, "flavour": flavour}
    write: Callable[[Path], c.MemoryPlan | None] = partial(_write, frozen, to=to, **how)
    is_run = to != "qonnx" or (flavour == "quant" and not absent("qonnx"))
    if check and is_run:
        with tempfile.TemporaryDirectory() as work:
            trial = Path(work) / ("c" if to == "c" else f"network.{to}")
            write(trial)
            comparison = verify(frozen, trial, examples, threads=threads, timed=False)
        if comparison.mismatches:
            raise _check.invalid("frozen", f"was not written, since its {to} has {comparison}")
    plan = write(path)
    if plan is not None and plan.warning:
        warnings.warn(plan.warning, stacklevel=2)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if plan else [path]
    return Exported(path, tuple(files), comparison, plan)


def _export_gguf(net: Any, path: Path, check: bool, settings: Mapping[str, Any]) -> Exported:
    """Write GGUF, and compare its weights and fields with those of the network."""
    if not isinstance(net, nn.Module) or isinstance(net, FrozenNetwork):
        raise _check.wrong("net", type(net), "a trained network, which is not frozen")
    with output_file(path, "out", (".gguf",)) as partial:
        gguf.write(net, partial, **settings)
        described = {k: v for k, v in settings.items() if k in ("config", "names", "rotary")}
        found = gguf.verify(net, partial, run=False, **described) if check else None
        if found is not None and not found.passes[0]:
            raise _check.invalid("net", f"was not written, since its GGUF has {found}")
    return Exported(path, (path,))


def _write(
    frozen: FrozenNetwork,
    path: Path,
    to: Format,
    scratch: int,
    threads: int,
    target: Target,
    flavour: Flavour,
) -> c.MemoryPlan | None:
    if to == "c":
        return c.write(frozen, path, scratch=scratch, threads=threads, cpu=target.cpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_file(path, "out") as file:
        if to == "onnx":
            onnx.write(frozen, file, *target)
        elif to == "tflite":
            tflite.write(frozen, file)
        elif to == "pte":
            pte.write(frozen, file)
        elif flavour == "quant":
            qonnx_quant.write(frozen, file)
        else:
            qonnx.write(frozen, file)
    return None


def _check_folder(path: Path) -> None:
    is_export = (path / "softstair.h").exists()
    names = [file.name for file in path.iterdir()] if path.is_dir() and not is_export else []
    # A process that was killed while it wrote leaves a temporary folder.
    is_used = any(not name.endswith(".part") for name in names)
    if path.is_file() or is_used:
        allowed = "must be a new or empty folder, or an earlier export to C"
        raise _check.invalid("out", f"{allowed}, but {str(path)!r} holds something else")
