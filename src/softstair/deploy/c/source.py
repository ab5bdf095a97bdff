"""The text of the generated files."""

from dataclasses import dataclass

from softstair.deploy import nodes
from softstair.deploy.c.features import Layout, layout
from softstair.deploy.c.lower import lower
from softstair.deploy.c.memory import Buffer, arrange
from softstair.deploy.c.names import comment
from softstair.deploy.c.operation import Operation
from softstair.deploy.c.plan import Plan, Row
from softstair.deploy.c.text import structure
from softstair.deploy.integer import ExportError
from softstair.deploy.network import IntegerNetwork

__all__ = ["sources"]


def sources(network: IntegerNetwork, name: str) -> tuple[dict[str, str], Plan]:
    """The files of a network, by their names, and its plan."""
    how = layout(network)
    operations = lower(network, how)
    buffers = _buffers(network, how, operations)
    placed, total = arrange(buffers)
    if total >= 2**31:
        raise ExportError("the features of the network need more than 2 GiB of memory.")
    made = _Made(network, name, how, operations, buffers, placed, total)
    files = {
        f"{name}.h": made.header(),
        f"{name}.c": made.program(),
        f"{name}_weights.h": made.constants(),
    }
    return files, made.plan()


def _buffers(network: IntegerNetwork, how: Layout, operations: list[Operation]) -> list[Buffer]:
    found = []
    for step, one in enumerate(operations):
        users = [at for at, other in enumerate(operations) if one.number in other.reads]
        if one is not operations[-1]:
            size = how.features[network.nodes[one.number].name].size
            found.append(Buffer(f"LAYER_{one.number}", size, step, max([step, *users])))
        if one.scratch:
            found.append(Buffer(f"LAYER_{one.nodes[0]}_SCRATCH", one.scratch, step, step))
    return found


@dataclass(frozen=True)
class _Made:
    network: IntegerNetwork
    name: str
    layout: Layout
    operations: list[Operation]
    buffers: list[Buffer]
    placed: dict[str, int]
    total: int

    @property
    def classes(self) -> int:
        return int(self.network.sizes[self.network.nodes[-1].name][0])

    @property
    def totals(self) -> bool:
        """Whether the scores are added up in doubles, a place for each class."""
        return isinstance(self.network.nodes[-1], nodes.Scores)

    def plan(self) -> Plan:
        rows = []
        for one in self.operations:
            names = tuple(self.network.nodes[number].name for number in one.nodes)
            begins = self.placed.get(f"LAYER_{one.number}")
            size = 0 if begins is None else self.layout.features[names[-1]].size
            flash = (one.part("weights"), one.part("thresholds"))
            rows.append(Row(names, one.how, one.weights, flash, (begins or 0, size), one.scratch))
        ram = self.total + 8 * self.classes * self.totals
        every = tuple(node.name for node in self.network.nodes)
        return Plan(self.name, ram, tuple(rows), every)

    def header(self) -> str:
        plan, name, upper = self.plan(), self.name, self.name.upper()
        shape = [int(size) for size in self.network.sizes[self.network.input.name]]
        inputs = 1
        for size in shape:
            inputs *= size
        rows = [("layer", "constants", "memory", "")]
        for row in plan.rows:
            bytes_of = (str(sum(row.flash)), str(row.memory[1]))
            rows.append((comment(" ".join(row.names)), *bytes_of, row.how))
        table = "\n".join(f" *   {a:40} {b:>10} {c:>8}  {d}".rstrip() for a, b, c, d in rows)
        return f"""/* An integer network, written by softstair.
 *
 * It has {plan.flash} bytes of constants, and needs {plan.ram} bytes of static memory and about
 * 2 KiB of stack:
 *
{table}
 *
 * It asks nothing of any library, and allocates nothing. Its memory is static: one call at a time.
 */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_INPUTS {inputs} /* bytes of an example: {" x ".join(map(str, shape))} */
#define {upper}_CLASSES {self.classes}

/* The scores of an example, whose bytes lie channel after channel, row after row; its class. */
int32_t {name}_run(const uint8_t input[{upper}_INPUTS], float scores[{upper}_CLASSES]);

/* Its class alone: the first of those with the greatest score. */
int32_t {name}_class(const uint8_t input[{upper}_INPUTS]);

#ifdef __cplusplus
}}
#endif

#endif
"""

    def constants(self) -> str:
        guard = f"{self.name.upper()}_WEIGHTS_H"
        parts = [
            f"/* The constants of {self.name}.c, layer by layer. */",
            f"#ifndef {guard}\n#define {guard}\n\n#include <stdint.h>",
        ]
        for one in self.operations:
            if one.constants:
                parts.append(f"/* {self._title(one)} */")
                parts += [constant.text() for constant in one.constants]
        return "\n\n".join([*parts, "#endif"]) + "\n"

    def program(self) -> str:
        name = self.name
        parts = [
            f'#include "{name}.h"\n\n#include "softstair.h"\n\n#include "{name}_weights.h"',
            self._memory(),
            self._traced(),
            *(self._features(one.number) for one in self.operations[:-1]),
        ]
        for one in self.operations:
            if one.structures:
                parts.append(f"/* {self._title(one)} */")
                parts += one.structures
        return "\n\n".join([*parts, self._run()]) + "\n"

    def _memory(self) -> str:
        lines = [
            "/* The memory plan, in words of 32 bits: what is never used at once shares them. */",
            f"static uint32_t memory[{max(self.total // 4, 1)}];",
        ]
        for one in self.buffers:
            place = f"#define {one.name} (memory + {self.placed[one.name] // 4})"
            lines.append(f"{place} /* {one.size} bytes */")
        if self.totals:
            lines.append(f"static volatile double totals[{self.name.upper()}_CLASSES];")
        return "\n".join(lines)

    def _title(self, operation: Operation) -> str:
        made = (self.network.nodes[number] for number in operation.nodes)
        return ", ".join(f"{type(node).__name__} {comment(node.name)}" for node in made)

    def _features(self, number: int, data: str | None = None) -> str:
        one = self.layout.features[self.network.nodes[number].name]
        return structure(
            "ss_features",
            f"layer_{number}",
            kind=one.kind,
            channels=one.channels,
            places=one.places,
            bias=one.bias or None,
            data=data or f"LAYER_{number}",
        )

    def _traced(self) -> str:
        """Sums that only a traced build keeps."""
        parts = ["#ifdef SOFTSTAIR_TRACE"]
        for one in self.operations:
            for number in one.nodes[:-1]:
                size = self.layout.features[self.network.nodes[number].name].size
                parts.append(f"static uint32_t layer_{number}_traced[{size // 4}];")
                parts.append(self._features(number, f"layer_{number}_traced"))
        return "\n".join([*parts, "#endif"])

    def _run(self) -> str:
        upper = self.name.upper()
        number = {node.name: at for at, node in enumerate(self.network.nodes)}
        lines = []
        for one in self.operations:
            lines.append(f"    /* {self._title(one)} */")
            lines += [f"    {call}" for call in one.calls]
            if one is self.operations[-1]:
                lines.append(f"    ss_trace_scores({one.number}, scores, {upper}_CLASSES);")
                continue
            # A flattening that only looks gives what its home does.
            home = self.network.nodes[one.number].name
            same = {number[name] for name, other in self.layout.home.items() if other == home}
            for at in sorted({*same, *one.nodes}):
                lines.append(f"    ss_trace({at}, &layer_{at if at in one.nodes else one.number});")
        body = "\n".join(lines)
        given = f"const uint8_t input[{upper}_INPUTS]"
        return f"""int32_t {self.name}_run({given}, float scores[{upper}_CLASSES]) {{
{body}
    return ss_class(scores, {upper}_CLASSES);
}}

int32_t {self.name}_class({given}) {{
    static float scores[{upper}_CLASSES];
    return {self.name}_run(input, scores);
}}"""
