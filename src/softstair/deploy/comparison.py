"""Export of a trained network, and its comparison with every way to run it, number by number."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import _check
from softstair._errors import SoftstairError, import_extra
from softstair._files import output_file
from softstair.convert.conversion import constant_layers, copy_of
from softstair.convert.graph import training_mode
from softstair.deploy import c, onnx, qonnx
from softstair.deploy.integer import INPUT_TYPES, integerise
from softstair.deploy.nodes import IntegerNetwork, Rescaled, Steps
from softstair.deploy.target import HERE, Cpu, Runtime, Target, target_of
from softstair.nn import StairActivation, StairModule, hooked

FORMATS = ("onnx", "qonnx", "c")
EXAMPLES = 32  # random ones that an export is compared on if none are given
CLASS = "class"  # the row of the classes
Runner = Callable[[Tensor], Mapping[str, Tensor]]
"""Bytes -> the result of each layer by name, in integers, and the class under :data:`CLASS`.

Scores are included if the last layer has integer weights: their bits do not depend on the order of
summation."""


@dataclass
class Comparison:
    """Counts of the numbers that differ between the trained network and one way to run it.

    Attributes:
        compared: How many numbers were compared, by layer.
        wrong: How many of them differ, by layer.
        first: The first that differs, as (layer, example, index, expected, actual).
    """

    compared: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    first: tuple[str, int, tuple[int, ...], float, float] | None = None

    @property
    def mismatches(self) -> int:
        """How many numbers differ in all."""
        return sum(self.wrong.values())

    def add(self, layer: str, expected: Tensor, actual: Tensor, examples: Tensor) -> None:
        """Compare the results of a layer for the examples with these numbers."""
        if expected.shape != actual.shape:
            raise SoftstairError(
                f"{layer} must give shape {tuple(expected.shape)}, but it gave "
                f"{tuple(actual.shape)}."
            )
        differ = expected != actual
        count = int(differ.sum())
        self.compared[layer] = self.compared.get(layer, 0) + expected.numel()
        self.wrong[layer] = self.wrong.get(layer, 0) + count
        if count and self.first is None:
            place = tuple(differ.nonzero()[0].tolist())
            values = (expected[place].item(), actual[place].item())
            self.first = (layer, int(examples[place[0]]), place[1:], *values)

    def __str__(self) -> str:
        total = sum(self.compared.values())
        if self.first is None:
            return f"0 mismatches of {total:,} numbers"
        layer, example, place, expected, actual = self.first
        at = f" at {place}" if place else ""
        return (
            f"{self.mismatches:,} mismatches of {total:,} numbers; the first in {layer}, example "
            f"{example}{at}: {actual} and not {expected}"
        )


def verify(
    net: nn.Module,
    integer: IntegerNetwork,
    x: Tensor,
    others: Mapping[str, Runner] | None = None,
    chunk: int = 100,
    on_progress: Callable[[int], None] = lambda _: None,
    examples: Tensor | None = None,
    earlier: Mapping[str, Comparison] | None = None,
) -> dict[str, Comparison]:
    """Run the trained network, its integer network and others on the same bytes, and compare them.

    Args:
        net: The trained stair network, on the CPU; as in ``eval()``, it is the reference.
        integer: Its integer network.
        x: Integers of the network's type, such as (N, C, H, W) uint8.
        others: More ways to run it, such as :func:`onnx_runner` and :func:`c_runner`, by name.
        chunk: How many examples to run at a time.
        on_progress: Called with the number of examples that have been compared.
        examples: Numbers of the examples to compare, (n,) int64; by default all.
        earlier: What an earlier call returned for other examples of ``x``; it is included.

    Returns:
        A comparison for ``"integer network"`` and for each of ``others``.

    Raises:
        SoftstairError: If ``x`` is empty, or not of the network's type and shape, or if ``integer``
            is not that of ``net``.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8),
    ...                       nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> integer = ss.deploy.integerise(net, (1, 2, 2), zero=128, scale=64.0)
    >>> print(verify(net, integer, x)["integer network"])
    0 mismatches of 45 numbers
    """
    if not isinstance(integer, IntegerNetwork):
        allowed = "the integer network of softstair.deploy.integerise"
        raise _check.wrong("integer", type(integer), allowed)
    integer.check_input(x)
    if not len(x):
        raise _check.invalid("x", "must hold at least one example, but it is empty")

    def run_integers(x: Tensor) -> dict[str, Tensor]:
        features = integer.features(x)
        compared = {name: features[name] for name in _compared_layers(integer)}
        return {**compared, CLASS: features[integer.last.name].argmax(1)}

    runners: dict[str, Runner] = {"integer network": run_integers, **(others or {})}
    comparisons = {name: copy.deepcopy((earlier or {}).get(name, Comparison())) for name in runners}
    reference = trained_runner(net, integer)
    done = 0
    for numbers in (torch.arange(len(x)) if examples is None else examples).split(chunk):
        expected = reference(part := x[numbers])
        for name, run in runners.items():
            actual = run(part)
            for layer, values in expected.items():
                if layer not in actual:
                    raise SoftstairError(f"{name} must give the result of {layer!r}.")
                comparisons[name].add(layer, values, actual[layer], numbers)
        done += len(part)
        on_progress(done)
    return comparisons


def _compared_layers(integer: IntegerNetwork) -> Sequence[str]:
    """Return the stairs, and the scores if the last layer has integer weights."""
    stairs = integer.stairs or [node.name for node in integer.nodes if isinstance(node, Steps)]
    return [*stairs, integer.last.name] if isinstance(integer.last, Rescaled) else stairs


def trained_runner(net: nn.Module, integer: IntegerNetwork) -> Runner:
    """Return a runner of the trained network, with its features in quanta."""
    _check_quantised(net)
    layers, last = _compared_layers(integer), integer.last.name
    by_name: dict[str, Any] = dict(net.named_modules(remove_duplicate=False))
    modules: dict[str, Any] = {name: by_name.get(name) for name in layers if name != last}
    others = [name for name, each in modules.items() if not isinstance(each, StairActivation)]
    if integer.head:
        modules[last] = by_name.get(integer.head)
        others += [integer.head] * (modules[last] is None)
    if others:
        problem = "must be the network that the integer network was made of, but its layer"
        raise _check.invalid("net", f"{problem} {others[0]!r} is not an activation of it")
    zero, scale = integer.input.zero, integer.input.scale

    def run(x: Tensor) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}

        def record(name: str, _: object, y: Tensor) -> None:
            results[name] = y if name == last else _in_quanta(modules[name], y)

        with training_mode(net, training=False), torch.no_grad(), hooked(modules, record):
            scores = net((x.float() - zero) / scale)
        scores = results.get(last, scores).reshape(len(x), *integer.sizes[last])
        results[last] = scores
        return {**{name: results[name] for name in layers}, CLASS: scores.argmax(1)}

    return run


def _in_quanta(activation: StairActivation, y: Tensor) -> Tensor:
    """Return the integers that features stand for, found among the levels and not by division."""
    stair = activation.stair
    assert stair.integers is not None
    levels = torch.tensor(stair.rounded(torch.float32).levels)
    index = torch.searchsorted(levels, y.contiguous())
    if not torch.equal(levels[index.clamp(max=len(levels) - 1)], y):
        raise SoftstairError("a feature of the trained network is not a level of its stair.")
    return torch.tensor(stair.integers)[index]


def onnx_runner(network: IntegerNetwork, folder: Path, target: Target = HERE) -> Runner:
    """Write a network as ONNX, features included, and return a runner on ONNX Runtime.

    Raises:
        MissingExtraError: If onnx or onnxruntime is not installed.
    """
    runtime = import_extra("onnxruntime", "onnx")
    file = onnx.write(network, folder / "network.onnx", True, None, *target)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    outputs = onnx.feature_outputs(network, target)
    names = {layer: outputs[layer] for layer in _compared_layers(network)} | {CLASS: "class"}

    def run(x: Tensor) -> dict[str, Tensor]:
        arrays = session.run([*names.values()], {session.get_inputs()[0].name: x.numpy()})
        tensors = map(torch.from_numpy, arrays)
        return {
            layer: tensor if tensor.is_floating_point() else tensor.long()
            for layer, tensor in zip(names, tensors, strict=True)
        }

    return run


def c_runner(
    network: IntegerNetwork, folder: Path, scratch: int | None = None, threads: int = 1
) -> Runner:
    """Write a network as C, compile it, and return a runner of the program.

    ``scratch`` and ``threads`` are those of :func:`export`.

    Raises:
        SoftstairError: If there is no compiler.
    """
    c.write(network, folder, scratch=scratch, threads=threads)
    flags = ("-O2", *c.THREADS[threads])
    program, traced = (c.build(folder, trace=trace, flags=flags) for trace in (False, True))

    def run(x: Tensor) -> dict[str, Tensor]:
        features = c.features(traced, network, x)
        classes, _ = c.classes(program, x)
        classes = classes.reshape(len(x), *network.sizes[network.last.name][1:])
        return {**{layer: features[layer] for layer in _compared_layers(network)}, CLASS: classes}

    return run


@dataclass(frozen=True)
class Exported:
    """What :func:`export` wrote, and how it compares with the trained network.

    Attributes:
        path: The file, or the folder of C.
        files: All files that were written.
        comparisons: Of the integer network and, for ONNX and C, of what was written, by name.
        plan: The memory that the C program needs; None for other formats.
    """

    path: Path
    files: tuple[Path, ...]
    comparisons: Mapping[str, Comparison]
    plan: c.MemoryPlan | None = None

    @property
    def mismatches(self) -> int:
        """How many numbers differ from the trained network's."""
        return sum(comparison.mismatches for comparison in self.comparisons.values())

    def __str__(self) -> str:
        rows = [f"{name}: {comparison}" for name, comparison in self.comparisons.items()]
        return "\n".join([*([] if self.plan is None else [str(self.plan)]), *rows, str(self.path)])


def export(
    net: nn.Module,
    shape: Sequence[int],
    zero: int,
    scale: float,
    folder: Path | str,
    to: Literal["onnx", "qonnx", "c"] = "c",
    x: Tensor | None = None,
    scratch: int | None = None,
    fit_flash: int | None = None,
    fit_ram: int | None = None,
    threads: int = 1,
    cpu: Cpu | None = None,
    runtime: Runtime = "onnxruntime",
) -> Exported:
    """Write a trained network as ONNX, QONNX or C, and compare it with the network.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8),
    ...                       nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = ss.deploy.export(net, (1, 2, 2), 128, 64.0, folder, to="qonnx")
    >>> exported.path.name, exported.mismatches
    ('network.qonnx', 0)

    The network is evaluated as in ``eval()``, in float32 on the CPU, and is left as it is. The
    exported network takes bytes; the trained one sees ``(byte.float() - zero) / scale``. ONNX is
    run by ONNX Runtime, and C is compiled and run. QONNX is not run: the integer network that it is
    written from is compared. Mismatches are a warning: of a float last layer, the class may differ
    where two scores are as good as equal. Neither accuracy nor ``zero`` and ``scale`` are checked.

    Args:
        net: A network of :func:`softstair.quantise`, trained.
        shape: Shape of one input, (C, H, W).
        zero: The byte that stands for 0.
        scale: A power of two.
        folder: Folder for ``network.onnx``, ``network.qonnx`` or the files of C. It is created. C
            needs a folder that is new, empty or an earlier export to C.
        to: ``"onnx"``, ``"qonnx"`` or ``"c"``.
        x: Bytes to compare on, (N, C, H, W) uint8, such as a test set; by default 32 random ones.
            With int8 or int16 the exported network takes integers of that type.
        scratch: Bytes of memory that a layer of C may use to be faster, by default 1 MiB, or 16384
            for x86; 16384 for microcontrollers.
        fit_flash: Bytes that the constants of C may take; the code comes on top.
        fit_ram: Bytes that the memory plan of C may take; the stack comes on top.
        threads: Threads of C. 2 computes layers of 16 million products or more on two POSIX
            threads; the memory plan has the stack and the scratch memory of the second.
        cpu: ``"x86"`` or ``"arm"``, on which C or ONNX is to be fast; by default this machine's.
            The numbers are the same on both.
        runtime: What runs ONNX: ``"openvino"`` reads files of ``"onnxruntime"`` wrongly.

    Returns:
        The files, the comparisons and, for C, the memory plan.

    Raises:
        ExportError: If the network has no exact integer form; the message names the layer.
        SoftstairError: If the network is float or does not fit, the folder holds something else,
            or there is no C compiler. Nothing is written then.
        MissingExtraError: If onnx or onnxruntime is not installed.
    """
    _check.choice("to", to, FORMATS)
    _check_quantised(net)
    if x is not None and (not isinstance(x, Tensor) or x.dtype not in INPUT_TYPES):
        allowed = "a tensor of uint8, int8 or int16, from before the normalisation"
        raise _check.wrong("x", x.dtype if isinstance(x, Tensor) else type(x), allowed)
    fits = {"fit_flash": fit_flash, "fit_ram": fit_ram}
    c.check_options(to, scratch, threads, **fits)
    target, folder = target_of(to, cpu, runtime), Path(folder)
    scratch = c.SCRATCH_OF[target.cpu] if scratch is None else scratch
    if to == "c":
        _check_folder(folder)
    net = copy_of(net).cpu().float().eval()
    integer = integerise(net, shape, zero, scale, torch.uint8 if x is None else x.dtype)
    if names := constant_layers(net):
        warnings.warn(f"all weights of {names} have the same level", stacklevel=2)
    if x is None:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(256, (EXAMPLES, *shape), generator=draw, dtype=torch.uint8)
    others: dict[str, Runner] = {}
    c.check_fit(integer, scratch, **fits, threads=threads)
    with tempfile.TemporaryDirectory() as work:
        if to == "onnx":
            others[to] = onnx_runner(integer, Path(work), target)
        elif to == "c":
            others[to] = c_runner(integer, Path(work), scratch, threads)
        comparisons = verify(net, integer, x, others)
    if to != "c":
        folder.mkdir(parents=True, exist_ok=True)
    path = folder if to == "c" else folder / f"network.{to}"
    memory = scratch if to == "c" else None
    plan = write(integer, path, to, scratch=memory, threads=threads, target=target)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if plan else [path]
    notes = [f"{name}: {part}" for name, part in comparisons.items() if part.mismatches]
    for note in (*notes, plan.warning if plan else None):
        if note:
            warnings.warn(note, stacklevel=2)
    return Exported(path, tuple(files), comparisons, plan)


def _check_quantised(net: nn.Module) -> None:
    """Raise SoftstairError if nothing in a network is quantised."""
    if not isinstance(net, nn.Module):
        raise _check.wrong("net", net, "a network of softstair.quantise")
    if not any(isinstance(module, StairModule) for module in net.modules()):
        raise _check.invalid(
            "net",
            "must be a network of softstair.quantise, but nothing in it is quantised: pass the "
            "network that softstair.quantise returned",
        )


def write(
    network: IntegerNetwork,
    path: Path,
    to: Literal["onnx", "qonnx", "c"],
    classes: Sequence[str] | None = None,
    scratch: int | None = None,
    fit_flash: int | None = None,
    fit_ram: int | None = None,
    threads: int = 1,
    target: Target = HERE,
) -> c.MemoryPlan | None:
    """Write an ONNX or QONNX file, or a folder of C; return the memory plan of C.

    Options of C: see :func:`export`.
    """
    fits = {"fit_flash": fit_flash, "fit_ram": fit_ram}
    c.check_options(to, scratch, threads, **fits)
    scratch = c.SCRATCH_OF[target.cpu] if scratch is None else scratch
    options = target._asdict() if to == "onnx" else {}
    c.check_fit(network, scratch, **fits, threads=threads)
    if to != "c":
        with output_file(path, "out") as partial:
            (onnx if to == "onnx" else qonnx).write(network, partial, classes=classes, **options)
        return None
    _check_folder(path)
    return c.write(network, path, scratch=scratch, threads=threads, cpu=target.cpu)


def _check_folder(path: Path) -> None:
    is_export = (path / "softstair.h").exists()
    names = [file.name for file in path.iterdir()] if path.is_dir() and not is_export else []
    # A process that was killed while it wrote leaves a temporary folder.
    is_used = any(not name.endswith(".part") for name in names)
    if path.is_file() or is_used:
        allowed = "must be a new or empty folder, or an earlier export to C"
        raise _check.invalid("out", f"{allowed}, but {str(path)!r} holds something else")
