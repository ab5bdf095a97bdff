"""Kernels in Triton compiled for a GPU, which takes none."""

import re
import subprocess

import pytest

triton = pytest.importorskip("triton", reason="needs triton, which is not installed")

SHARED_MEMORY = {86: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may use, by compute capability."""


def compile_kernel(kernel, constants, types, default, capability=90, warps=4):
    compiler = pytest.importorskip("triton.backends.compiler")
    own = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {n: "constexpr" if n in own else types.get(n, default) for n in kernel.arg_names}
    # As at run time, where tensors begin at multiples of 16 bytes: other code is made without it.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if isinstance(kind, str) and kind.startswith("*")
    }
    source = triton.compiler.ASTSource(kernel, signature, own, attributes)
    target = compiler.GPUTarget("cuda", capability, 32)
    options = {"enable_fp_fusion": True, "num_warps": warps}
    built = triton.compile(source, target=target, options=options)
    assert "st.global" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY[capability]
    return built.asm


def remarks(ptx, folder):
    """What ptxas says about the code of a kernel."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    tool = triton.knobs.nvidia.ptxas.path
    call = [tool, "-v", "--gpu-name", "sm_90a", file, "-o", f"{file}.o"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stderr


def stack_bytes(cubin, folder):
    """The memory of a thread for what its registers do not hold."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])
