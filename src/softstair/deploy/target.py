"""What C and ONNX are written for; the numbers are the same on each."""

import platform
from typing import Literal, NamedTuple, get_args

from softstair import _check

Cpu = Literal["x86", "arm"]
Runtime = Literal["onnxruntime", "openvino"]


class Target(NamedTuple):
    """The processor on which a file is to be fast, by default this machine's, and what runs it."""

    cpu: Cpu = "x86" if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686") else "arm"
    runtime: Runtime = "onnxruntime"


HERE = Target()


def target_of(to: str, cpu: Cpu | None, runtime: Runtime) -> Target:
    """Return the target of a format; raise SoftstairError for what it cannot have."""
    given = {"cpu": cpu, "runtime": None if runtime == HERE.runtime else runtime}
    for name, kinds, formats in (("cpu", Cpu, ("onnx", "c")), ("runtime", Runtime, ("onnx",))):
        if given[name] is not None:
            _check.choice(name, given[name], get_args(kinds))
            if to not in formats:
                raise _check.invalid(name, f"must be left out for the format {to!r}")
    return Target(cpu or HERE.cpu, runtime)
