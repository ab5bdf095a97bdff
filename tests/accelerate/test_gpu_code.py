"""The fused kernels, compiled for a GPU: what the interpreter accepts the compiler may not."""

import importlib

import pytest
import torch

from helpers.gpu_code import compile_kernel, remarks, stack_bytes

pytest.importorskip("triton", reason="needs triton, which is not installed")


@pytest.mark.nightly
@pytest.mark.parametrize("taps", [0, 3])
@pytest.mark.parametrize(
    ("count", "family", "forward"), [(2, "uniform", "mode"), (15, "logistic", "expectation")]
)
def test_fused_kernels_compile_without_the_interpreter(
    count, family, forward, taps, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ("batchnorm", "batchnorm_backward", "first", "integer_sums", "moments")
    norm, backward, first, integers, moments = (
        importlib.import_module("softstair._accelerate." + n) for n in names
    )
    convolution = importlib.import_module("softstair.kernels.triton.convolution")
    constants = dict(COUNT=count, FAMILY=family, FORWARD=forward, HEIGHT=8, WIDTH=8, CHANNELS=100)
    constants |= dict(ROWS=16, BLOCK=128, PARTS=4, NORMALISE=True, POOL=True, INTEGERS=True)
    constants |= dict(SHORTCUT=taps == 0, STORE=True, TRANSPOSE=count == 2, SUMS=2 + taps // 3)
    settings = (16, 17, 3, taps, 2, 1, 0, 2, 32, "ieee")
    constants |= dict(LOADED=4, FIRST=settings if taps else None)
    types = {"rows": "i32", "count": "i32", "images": "i32", "per_quantum": "fp32"}
    types |= {"seed_ptr": "*i64", "integers_ptr": "*i8", "argmax_ptr": "*i8"}
    types |= {"transposed_ptr": "*fp8e5"} | ({"dc_ptr": "*fp8e5"} if count == 2 else {})
    types |= {"tiles": "i32", "square_tiles": "i32", "zeros_ptr": "*i64", "tracked_ptr": "*i64"}
    types |= dict.fromkeys(("unit", "per_unit", "eps", "momentum"), "fp32")
    constants |= {} if taps else {"quanta_ptr": None}
    of_first = (first._first_moments, first._reduce_first, first._first_gradient)
    for kernel in (norm._forward, moments._statistics, *(of_first if taps else ())):
        compile_kernel(kernel, constants, types, "*fp32")
    code = compile_kernel(backward._backward, constants, types, "*fp32")["ttgir"]
    # Of four pixels each, one rounding for each store: ptxas 12.8 loses bytes of a shared one.
    assert code.count("tt.fp_to_fp") == (8 if count == 2 else 0)
    for kernel in (moments._moments, backward._reduce_dz):
        ptx = compile_kernel(kernel, constants, types, "*fp32")["ptx"]
        assert "atom.global.gpu.acq_rel" in ptx
    types |= {"partial_ptr": "*i64", "sums_ptr": "*i16", "features": "tensordesc<i8[1,8,16,64]>"}
    types |= {"weights": "tensordesc<i8[64,64]>"}
    constants |= dict(OUTPUTS=64, INPUTS=64, TAPS_DOWN=3, TAPS_ACROSS=3, PADDING=1, BOX_IMAGES=1)
    constants |= dict(BOX_HEIGHT=8, BOX_WIDTH=16, BLOCK=64, DEPTH=64, EXACT=True, FINISH=True)
    constants |= dict(GATHER=False, SOURCE_HEIGHT=16, SOURCE_WIDTH=16, STRIDE=1)
    gathered = constants | dict(GATHER=True, STRIDE=2, INPUTS=16, DEPTH=32)
    pointers = types | {"features": "*i8", "weights": "*i8"}
    pointwise = constants | dict(HEIGHT=1, WIDTH=1, TAPS_DOWN=1, TAPS_ACROSS=1, PADDING=0)
    pointwise |= dict(BOX_IMAGES=128, BOX_HEIGHT=1, BOX_WIDTH=1, SOURCE_HEIGHT=1, SOURCE_WIDTH=1)
    pixels = types | {"features": "tensordesc<i8[128,1,1,64]>"}
    for values, own in ((constants, types), (gathered, pointers), (pointwise, pixels)):
        code = compile_kernel(integers._convolve_moments, values, own, "*fp32")
        assert code["ptx"].count("atom.global.gpu.acq_rel") == 1
        assert "wgmma.mma_async" in code["ptx"]
        assert "ttg.local_load" not in code["ttgir"]  # no factor in registers
        assert ("async_copy_global" in code["ttgir"]) == values["GATHER"]
        compile_kernel(convolution._convolve_int8, values, own, "*fp32")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sums", "dy", "pooled"),
    [("int32", "bfloat16", True), ("float32", "float32", True), ("float32", "float32", False)],
)
def test_tiles_fit_into_small_gpus_without_the_interpreter(sums, dy, pooled, tmp_path, monkeypatch):
    """Four tiles of pooled int32 or float32 sums, or of three float32 tensors, take over 99 KB."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    backward, moments = (
        importlib.import_module(f"softstair._accelerate.{n}")
        for n in ("batchnorm_backward", "moments")
    )
    loaded = [torch.empty(4, dtype=getattr(torch, name)) for name in (dy, "int8" if pooled else dy)]
    features = torch.empty(512, 64, 2, 2, dtype=getattr(torch, sums))
    _, constants = moments.reduction(features, 2048, pooled, loaded)
    constants |= dict(COUNT=2, FAMILY="uniform", POOL=pooled, SHORTCUT=not pooled, SUMS=2)
    names = {"int32": "*i32", "bfloat16": "*bf16", "float32": "*fp32"}
    types = {"rows": "i32", "count": "i32", "per_unit": "fp32", "zeros_ptr": "*i64"}
    types |= {"sums_ptr": names[sums], "dy_ptr": names[dy], "argmax_ptr": "*i8"}
    code = compile_kernel(backward._reduce_dz, constants, types, "*fp32", capability=86)
    assert "async_copy_global" in code["ttgir"]


@pytest.mark.nightly
@pytest.mark.parametrize("features", ["fp8e5", "fp8e4nv"])
def test_products_and_adam_compile_without_the_interpreter(features, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    products, adam = (
        importlib.import_module(f"softstair._accelerate.{name}") for name in ("gradients", "adam")
    )
    constants = dict(HEIGHT=16, WIDTH=16, OUTPUTS=256, INPUTS=256, DOWN=3, ACROSS=3, PADDING=1)
    constants |= dict(BOX_IMAGES=1, BOX_HEIGHT=8, BOX_WIDTH=16, BLOCK=128, DEPTH=128)
    constants |= dict(PARTS=11, BLOCK_OUT=128, BLOCK_IN=128, TAPS=3, COUNT=2, FAMILY="uniform")
    constants |= dict(BETA_1=0.9, BETA_2=0.999, LOG_1=-0.15, LOG_2=-0.0014)
    constants |= dict(LAYERS=21)
    types = {"unit": "fp32", "eps": "fp32", "images": "i32"}
    types |= {"weights": "tensordesc<fp8e5[128,128]>"}
    dx = types | {"gradients": "tensordesc<fp8e5[1,8,16,128]>"}
    dw = types | {"gradients": "tensordesc<fp8e5[128,128]>"}
    dw |= {"features": f"tensordesc<{features}[128,1,1,128]>", "counters_ptr": "*i64"}
    gathered = constants | dict(GATHER=True, OUTPUTS=16, INPUTS=16, BLOCK=16, DEPTH=32)
    finish = dict(FINISH=True, PARTS=products.FEW_PARTS, OUTPUTS=512, INPUTS=512)
    gathered_types = types | {"weights": "*fp8e5", "gradients": "*fp8e5"}
    for kernel, values, own in (
        (products._feature_gradient, constants | dict(GATHER=False), dx),
        (products._feature_gradient, gathered, gathered_types),
        (products._weight_gradient, constants | dict(FINISH=False), dw),
        (products._weight_gradient, constants | finish, dw),
    ):
        warps = 8 if kernel is products._weight_gradient else 4
        code = compile_kernel(kernel, values, own, "*fp32", warps=warps)
        # Factors in registers are wrong on Hopper with Triton 3.6.
        assert "ttg.local_load" not in code["ttgir"]
        assert stack_bytes(code["cubin"], tmp_path) == 0
        # As ptxas 12.8 of Triton 3.6 did if the loop might not run; ptxas 13 does not.
        assert "serialized" not in remarks(code["ptx"], tmp_path)
    types |= dict.fromkeys(("first", "sizes"), ("i32",) * 21)
    types |= dict.fromkeys(("decays", "lows", "highs"), ("fp32",) * 21)
    types |= {"gradient_ptrs": ("*bf16",) * 21}
    compile_kernel(adam._adam, constants, types, ("*fp32",) * 21)


def test_no_part_of_a_weight_gradient_is_empty():
    """The kernel relies on it. There is a counter for each tile that has several parts."""
    gradients, moments = (
        importlib.import_module(f"softstair._accelerate.{n}") for n in ("gradients", "moments")
    )
    for tiles in (*range(1, 70), 96, 131, 132, 133, 400):
        for steps in (*range(1, 140), 699):
            parts = gradients.part_count(tiles, steps)
            count = -(-steps // parts)
            assert (parts - 1) * count < steps <= parts * count
            assert parts == 1 or tiles * parts <= moments.PROGRAMS
            assert parts == 1 or tiles <= moments.SHARED_TILES
