"""The generated C files of a network, and its memory plan."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import softstair
from softstair import _check
from softstair.deploy.c.layout import (
    Features,
    Operation,
    first_places,
    in_lines,
    layout,
    structure,
)
from softstair.deploy.c.lower import lower
from softstair.deploy.c.panels import SLACK
from softstair.deploy.c.winograd import SCRATCH, SCRATCH_OF
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError, Scores
from softstair.deploy.target import HERE, Cpu

ALIGNMENT = 16
CODE = "about 8 to 18 kB on a Cortex-M4"  # measured, with startup code
STACK = 2**18  # bytes of the second thread's stack, SS_THREAD_STACK in softstair.h


@dataclass(frozen=True)
class PlanRow:
    """One operation of the generated program."""

    names: tuple[str, ...]  # the nodes that it computes
    how: str
    weights: int
    flash: tuple[int, int]  # bytes of weights, bytes of other constants
    memory: tuple[int, int]  # offset of its result, bytes of it
    scratch: int  # bytes that it needs while it runs

    @property
    def in_tiles(self) -> bool:
        """Whether it is computed by Winograd's algorithm."""
        return self.how.startswith("tiles")


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a generated program needs; ``str(plan)`` is a table."""

    ram: int  # bytes of memory, without the stack of the caller
    rows: tuple[PlanRow, ...]  # one per operation, and one for a second thread

    @property
    def flash(self) -> int:
        """Bytes of constants; code is not included."""
        return sum(sum(row.flash) for row in self.rows)

    @property
    def warning(self) -> str | None:
        """A sentence if other constants take more bytes than the weights, else None."""
        weights, others = (sum(row.flash[part] for row in self.rows) for part in (0, 1))
        sizes = f"thresholds and the like take {others:,} bytes, and the weights {weights:,}"
        return f"{sizes}: use stairs with fewer levels" if others > weights else None

    def __str__(self) -> str:
        sizes = f"{'memory':>8} {'scratch':>8}"
        lines = [f"{'layer':32} {'weights':>10} {'constants':>10} {sizes}  how"]
        for row in self.rows:
            name = " + ".join(row.names)
            shown = name if len(name) <= 32 else "…" + name[-31:]
            numbers = f"{row.weights:>10,} {sum(row.flash):>10,} {row.memory[1]:>8,}"
            lines.append(f"{shown:32} {numbers} {row.scratch:>8,}  {row.how}")
        total = sum(row.weights for row in self.rows)
        lines.append(f"{'in all':32} {total:>10,} {self.flash:>10,} {self.ram:>17,}  bytes")
        if any(row.in_tiles for row in self.rows):
            lines.append("tiles need vector instructions: set scratch to 16384 for a Cortex-M")
        return "\n".join(lines)


@dataclass(frozen=True)
class Buffer:
    """Bytes that are in use from operation ``first`` to operation ``last``, both included."""

    name: str
    size: int
    first: int
    last: int

    @property
    def room(self) -> int:
        """Size with alignment."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


def arrange(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Return the offset of each buffer, as low as others in use allow, and the total size."""
    placed: list[tuple[int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.size, buffer.first)):
        offset = 0
        for begin, other in sorted(placed, key=lambda entry: entry[0]):
            together = other.first <= buffer.last and buffer.first <= other.last
            if together and begin < offset + buffer.room and offset < begin + other.room:
                offset = begin + other.room
        placed.append((offset, buffer))
    total = max((offset + buffer.room for offset, buffer in placed), default=0)
    return {buffer.name: offset for offset, buffer in placed}, total


def sources(
    network: FrozenNetwork, name: str, scratch: int = SCRATCH, threads: int = 1, cpu: Cpu = "arm"
) -> tuple[dict[str, str], MemoryPlan]:
    """Return the text of the generated files, by their names, and the memory plan."""
    program = _Program(network, name, scratch, threads, cpu)
    if program.size >= 2**31:
        raise ExportError("the features of the network need more than 2 GiB of memory.")
    files = {
        f"{name}.h": program.header(),
        f"{name}.c": program.code(),
        f"{name}_weights.h": program.constants(),
    }
    return files, program.plan()


def is_classifier(network: FrozenNetwork) -> bool:
    """Return whether a network has one class for each example."""
    is_single = len(network.heads) == 1 and math.prod(network.sizes[network.last.name][1:]) == 1
    return network.outputs == "classes" and is_single and network.last.axis == 1


def class_counts(network: FrozenNetwork) -> dict[str, int]:
    """Return how many classes each output has for an example, one for each position; of a network
    with classes."""
    heads = network.heads.items() if network.outputs == "classes" else ()
    return {name: math.prod(network.sizes[head.name]) // len(head.order) for name, head in heads}


def count_of(network: FrozenNetwork, name: str) -> str:
    """Return the name of the number of results in C."""
    return f"{name.upper()}_{'CLASSES' if is_classifier(network) else 'OUTPUTS'}"


def memory_plan(
    network: FrozenNetwork,
    scratch: int = SCRATCH_OF[HERE.cpu],
    threads: int = 1,
    cpu: Cpu = "arm",
) -> MemoryPlan:
    """Return the memory plan of the program that :func:`sources` would generate."""
    return _Program(network, "network", scratch, threads, cpu).plan()


def check_options(to: str, scratch: int | None, threads: int, **fits: int | None) -> None:
    """Raise SoftstairError for options that C cannot have, or that are given for another format."""
    given = {"scratch": scratch, **fits, "threads": None if threads == 1 else threads}
    for name, value in given.items():
        if value is not None and to != "c":
            raise _check.invalid(name, f"is for C, but the format is {to!r}: leave it out")
        if value is not None:
            _check.integer(name, value, 0)
    _check.integer("threads", threads, 1, 2)


def check_fit(
    network: FrozenNetwork, scratch: int, fit_flash: int | None, fit_ram: int | None, threads: int
) -> None:
    """Raise SoftstairError if constants or memory take more bytes than allowed."""
    if fit_flash is None and fit_ram is None:
        return
    plan = memory_plan(network, scratch, threads)
    if fit_flash is not None and plan.flash > fit_flash:
        problem = f"allows {fit_flash:,} bytes, but the constants take {plan.flash:,}"
        raise _check.invalid("fit_flash", f"{problem}; code adds {CODE}. Use fewer bits")
    if fit_ram is not None and plan.ram > fit_ram:
        least = memory_plan(network, 0).ram
        smaller = f"`scratch=0` and `threads=1` take {least:,}. " if least < plan.ram else ""
        problem = f"allows {fit_ram:,} bytes, but the memory plan takes {plan.ram:,}"
        raise _check.invalid("fit_ram", f"{problem}. {smaller}Use fewer channels or fewer bits")


class _Program:
    def __init__(
        self, network: FrozenNetwork, name: str, scratch: int, threads: int, cpu: Cpu = "arm"
    ) -> None:
        self.network, self.name, self.threads, self.cpu = network, name, threads, cpu
        self.layout = layout(network, cpu)
        self.operations = lower(network, self.layout, scratch)
        self.upper = name.upper()
        self.outputs = sum(math.prod(network.sizes[h.name]) for h in network.heads.values())
        self.has_class = is_classifier(network)
        self.places = sum(class_counts(network).values())
        self.count = count_of(network, name)
        self.buffers = self._buffers()
        self.offsets, self.size = arrange(self.buffers)
        self.size += SLACK if cpu == "x86" else 0

    def _buffers(self) -> list[Buffer]:
        buffers = []
        for step, operation in enumerate(self.operations):
            number = operation.number
            users = [at for at, other in enumerate(self.operations) if number in other.reads]
            if not self._is_head(operation):
                size = self._features_of(number).size
                buffers.append(Buffer(f"LAYER_{number}", size, step, max([step, *users])))
            if operation.scratch:
                scratch = f"LAYER_{operation.nodes[0]}_SCRATCH"
                buffers.append(Buffer(scratch, operation.scratch, step, step))
        return buffers

    def _is_head(self, operation: Operation) -> bool:
        """Whether an operation writes scores, which are not in the memory plan."""
        return any(isinstance(self.network.nodes[number], Scores) for number in operation.nodes)

    def _features_of(self, number: int) -> Features:
        if number in self.layout.turned:
            return self.layout.turned[number]
        return self.layout.features[self.network.nodes[number].name]

    def plan(self) -> MemoryPlan:
        """Return the memory plan."""
        rows = []
        for operation in self.operations:
            names = tuple(self.network.nodes[n].name for n in operation.nodes) or ("a copy",)
            offset = self.offsets.get(f"LAYER_{operation.number}")
            size = 0 if offset is None else self._features_of(operation.number).size
            flash = (operation.part("weights"), operation.part("thresholds"))
            how = (operation.how, operation.weights, flash)
            rows.append(PlanRow(names, *how, (offset or 0, size), operation.scratch))
        ram = self.size
        if self.threads > 1:
            scratch, sizes = self._thread_words() * 4, (0, (0, 0), (0, STACK))
            rows.append(PlanRow(("second thread",), "stack and scratch", *sizes, scratch))
            ram += STACK + scratch
        return MemoryPlan(ram, tuple(rows))

    def header(self) -> str:
        """Return the text of <name>.h."""
        plan, upper = self.plan(), self.upper
        shape = [int(size) for size in self.network.sizes[self.network.input.name]]
        table = "\n".join(f" *   {_comment(line)}".rstrip() for line in str(plan).splitlines())
        heads = self.network.heads
        scales = " \\\n".join(
            in_lines(str(scale) for head in heads.values() for scale in head.scale.tolist())
        )
        results = "scores" if self.has_class else "outputs"
        functions = [
            f"/* The {results} of an example, which lies channel after channel, row after row. */",
            f"{self._declared('run', results)};",
        ]
        if self.has_class:
            functions[0] = functions[0].replace(". */", "; its class. */")
            functions.append("\n/* Its class alone: that of the largest score in its unit. */")
            functions.append(f"{self._declared('class')};")
        elif self.places:
            functions.append("\n/* The class of each position of each of these outputs. */")
            functions.append(f"{self._declared_classes()};")
        return f"""/* A frozen network by softstair {softstair.__version__} for {self.cpu}.
 * The SHA-256 of what it computes with is
 * {self.network.digest}
 *
 * It has {plan.flash} bytes of constants, and needs {plan.ram} bytes of memory and about 2 KiB of
 * stack:
 *
{table}
 *
 * It calls no function of a library, and allocates nothing. Its memory is static: one call at a
 * time. All numbers are integers; on 32 bits the compiler may call its own functions (libgcc) for
 * 64. It may replace loops by memset and memcpy; GCC and Clang do not with -fno-builtin, as in the
 * Makefile.
 */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_INPUTS {math.prod(shape)} /* numbers of an example: {" x ".join(map(str, shape))} */
#define {upper}_TYPE {self.network.input.dtype}_t
#define {self.count} {self.outputs}
{self._outputs()}
/* What 1 stands for in each channel of the {results}: numbers for an array of doubles. */
#define {upper}_SCALES {{ \\
{scales} \\
}}

{chr(10).join(functions)}

#ifdef __cplusplus
}}
#endif

#endif
"""

    def _outputs(self) -> str:
        """Return the definitions of the outputs of a network that has no single class."""
        if self.has_class:
            return ""
        lines, shapes, upper = [], [], self.upper
        for name, head in self.network.heads.items():
            size = self.network.sizes[head.name]
            channels, about = len(head.scale), " x ".join(map(str, size))
            shapes.append(f"{{{channels}, {math.prod(size) // channels}}}")
            if name:
                line = (
                    f"#define {upper}_OUTPUT{name.upper()} {first_places(self.network)[head.name]}"
                )
                lines.append(f"{line} /* the first of {about} */")
        if self.places:
            lines.append(f"#define {upper}_PLACES {self.places} /* that have a class */")
        lines.append("/* Of each output: its channels and positions. */")
        lines.append(f"#define {upper}_SHAPES {{{', '.join(shapes)}}}")
        return "\n".join([*lines, ""])

    def _declared_classes(self) -> str:
        ends = f"const int32_t outputs[{self.count}], int32_t classes[{self.upper}_PLACES]"
        return f"void {self.name}_classes({ends})"

    def constants(self) -> str:
        """Return the text of <name>_weights.h."""
        guard = f"{self.upper}_WEIGHTS_H"
        parts = [
            f"/* The constants of {self.name}.c, layer by layer. */",
            f"#ifndef {guard}\n#define {guard}\n\n#include <stdint.h>",
        ]
        for operation in self.operations:
            if operation.constants:
                parts.append(f"/* {self._title(operation)} */")
                parts += [constant.text() for constant in operation.constants]
        return "\n\n".join([*parts, "#endif"]) + "\n"

    def code(self) -> str:
        """Return the text of <name>.c."""
        name = self.name
        panels = "#define SOFTSTAIR_PANELS\n" if self.cpu == "x86" else ""
        parts = [
            f'#include "{name}.h"\n\n{panels}#include "softstair.h"\n\n#include "{name}_weights.h"',
            self._memory(),
            self._traced_sums(),
            *(self._features(o.number) for o in self.operations if not self._is_head(o)),
        ]
        for operation in self.operations:
            if operation.structures:
                parts.append(f"/* {self._title(operation)} */")
                parts += operation.structures
        return "\n\n".join([*parts, self._functions()]) + "\n"

    def _memory(self) -> str:
        lines = [
            "/* The memory plan, in words of 32 bits: what is never used at once shares them. */",
            f"static uint32_t memory[{max(self.size // 4, 1)}];",
        ]
        if words := self._thread_words():
            array = f"static uint32_t thread_memory[{words}]; /* scratch of a second thread */"
            lines.append(f"#ifdef SOFTSTAIR_THREADS\n{array}\n#endif")
        for buffer in self.buffers:
            place = f"#define {buffer.name} (memory + {self.offsets[buffer.name] // 4})"
            lines.append(f"{place} /* {buffer.size} bytes */")
        return "\n".join(lines)

    def _thread_words(self) -> int:
        """Return how many words of scratch memory a second thread needs."""
        return max(operation.scratch for operation in self.operations) // 4

    def _title(self, operation: Operation) -> str:
        computed = (self.network.nodes[number] for number in operation.nodes)
        names = (f"{type(node).__name__} {_comment(node.name)}" for node in computed)
        return ", ".join(names) or "a copy"

    def _features(self, number: int, data: str | None = None) -> str:
        features = self._features_of(number)
        fields = {"kind": features.kind, "channels": features.channels}
        fields |= {"places": features.positions, "bias": features.bias or None}
        return structure("ss_features", f"layer_{number}", **fields, data=data or f"LAYER_{number}")

    def _traced_sums(self) -> str:
        """Return the memory of sums that only a traced build stores."""
        parts = ["#ifdef SOFTSTAIR_TRACE"]
        for operation in self.operations:
            for number in operation.nodes[:-1]:
                words = self._features_of(number).size // 4
                parts.append(f"static uint32_t layer_{number}_traced[{words}];")
                parts.append(self._features(number, f"layer_{number}_traced"))
        return "\n".join([*parts, "#endif"])

    def _functions(self) -> str:
        numbers = {node.name: number for number, node in enumerate(self.network.nodes)}
        lines = []
        for operation in self.operations:
            lines.append(f"    /* {self._title(operation)} */")
            lines += [f"    {call}" for call in operation.calls]
            number = operation.number
            if self._is_head(operation):
                continue
            # A Flatten without a copy has the result of the node in whose memory it lies.
            homes = {self.network.nodes[at].name for at in operation.nodes}
            same = {numbers[name] for name, other in self.layout.home.items() if other in homes}
            for at in sorted({*same, *operation.nodes}):
                features = at if at in operation.nodes else number
                is_turned = int(self._features_of(at).is_turned)
                lines.append(f"    ss_trace({at}, &layer_{features}, {is_turned});")
        body = "\n".join(lines)
        run = f"{self._declared('run', 'results')} {{\n{body}\n"
        if not self.has_class:
            return f"{run}}}" + (self._classes(numbers) if self.places else "")
        order = f"layer_{numbers[self.network.last.name]}_order"
        return f"""{run}    return ss_class(results, {order}, {self.count});
}}

{self._declared("class")} {{
    static int32_t scores[{self.count}];
    return {self.name}_run(input, scores);
}}"""

    def _classes(self, numbers: dict[str, int]) -> str:
        """Return the function that gives the classes of positions."""
        calls, at = [], 0
        for name, places in class_counts(self.network).items():
            head = self.network.heads[name]
            first, order = (
                first_places(self.network)[head.name],
                f"layer_{numbers[head.name]}_order",
            )
            ends = f"{len(head.order)}, {places}, classes + {at}"
            calls.append(f"    ss_classes(outputs + {first}, {order}, {ends});")
            at += places
        return "\n".join(["\n", f"{self._declared_classes()} {{", *calls, "}"])

    def _declared(self, name: str, *results: str) -> str:
        """Return the declaration of a function, without its end."""
        arguments = [f"const {self.network.input.dtype}_t input[{self.upper}_INPUTS]"]
        arguments += [f"int32_t {result}[{self.count}]" for result in results]
        kind = "int32_t" if self.has_class else "void"
        return f"{kind} {self.name}_{name}({', '.join(arguments)})"


def _comment(text: str) -> str:
    """Return text that is safe within a comment of C."""
    # No question marks either: two of them may begin a trigraph, such as that of a backslash.
    return re.sub(r"[^A-Za-z0-9_.,:+ -]", "_", text)[:120]
