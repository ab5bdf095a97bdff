"""The kernel that makes a batch, interpreted on the CPU, against the torch version.

test_triton.py starts the tests that need the interpreter.
"""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from softstair import _accelerate
from softstair.data.augment import ROWS, Augmentation, draw
from softstair.data.batches import Examples
from softstair.train.execution import use_batch_kernel

triton = pytest.importorskip("triton", reason="needs triton, which is not installed")
augment_triton = importlib.import_module("softstair._accelerate.augment_triton")

NEEDS_INTERPRETER = True
MEAN, STD = 101.3, 37.7

OPTIONS: list[dict[str, Any]] = [
    {"augment": "crop"}, {"augment": "crop-flip"}, {"augment": "shift"}, {"cutout": 3},
    {"cutout": 4}, {"mixup": 0.9}, {"cutmix": 0.8}, {"time_mask": 4},
    {"coefficient_mask": 50},
]  # fmt: skip
PAIRS = [
    {**first, **second}
    for first, second in itertools.combinations(OPTIONS, 2)
    if first.keys().isdisjoint(second) and {"mixup", "cutmix"} != {*first, *second}
]
ALL = {"augment": "crop-flip", "cutout": 3, "time_mask": 4, "coefficient_mask": 2}
CASES = [{}, *OPTIONS, *PAIRS, {**ALL, "mixup": 0.9}, {**ALL, "cutmix": 0.8}]


def reference(x: Tensor, augmentation: Augmentation, draws: Tensor) -> tuple[Tensor, Tensor | None]:
    moved = augmentation.move(x, draws)
    return augmentation.mix(augmentation.mask((moved.float() - MEAN) / STD, draws), draws)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("options", CASES[::-1], ids=str)
def test_the_kernel_gives_what_torch_gives_with_the_same_draws(options: dict[str, Any]) -> None:
    for shape, count in (((3, 12, 9), 6), ((1, 20, 10), 1)):
        generator = Generator().manual_seed(3)
        x = torch.randint(256, (11, *shape), dtype=torch.uint8, generator=generator)
        y = torch.randint(10, (11,), generator=generator)
        indices = torch.randperm(11, generator=generator)[:count]
        augmentation = Augmentation(**options)
        for _ in range(2):
            draws = draw(count, generator, x.device)
            given = (x, y, indices, draws, MEAN, STD, vars(augmentation))
            inputs, labels, share = augment_triton.batch(*given)
            expected, expected_share = reference(x[indices], augmentation, draws)
            tolerance = 1e-6 if augmentation.mixup else 0.0
            torch.testing.assert_close(inputs, expected, rtol=tolerance, atol=tolerance)
            assert inputs.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(labels, y[indices])
            assert (share is None) is (expected_share is None)
            if share is not None:
                torch.testing.assert_close(share, expected_share)


def test_extreme_draws_stay_inside() -> None:
    """The largest number below 1 gives the last corner, and 0 the first."""
    x = torch.arange(2 * 36, dtype=torch.uint8).reshape(2, 1, 6, 6)
    augmentation = Augmentation("crop-flip", cutout=3, time_mask=6, coefficient_mask=6, cutmix=1.0)
    for number in (0.0, 1 - 2**-24):
        draws = torch.full((len(ROWS), 2), number)
        indices = torch.arange(2)
        given = (x, indices, indices, draws, 0.0, 1.0, vars(augmentation))
        inputs, _, share = augment_triton.batch(*given)
        moved = augmentation.mask(augmentation.move(x, draws).float(), draws)
        expected, expected_share = augmentation.mix(moved, draws)
        assert torch.equal(inputs, expected)
        assert share == expected_share


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("options", CASES[::-1], ids=str)
def test_the_kernel_compiles_for_a_gpu_without_the_interpreter(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter accepts the compiler may not; it needs no GPU to say so."""
    compiler = pytest.importorskip("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {name.upper(): value for name, value in vars(Augmentation(**options)).items()}
    constants |= dict(CHANNELS=3, HEIGHT=32, WIDTH=32, BLOCK=augment_triton.BLOCK)
    types = {"x_ptr": "*u8", "y_ptr": "*i64", "labels_ptr": "*i64"}
    types |= {"indices_ptr": "*i64", "random_ptr": "*fp32", "inputs_ptr": "*fp32"}
    types |= {"share_ptr": "*fp32", "n": "i32"}
    kernel = augment_triton.batch_kernel
    signature = {
        name: "constexpr" if name in constants else types.get(name, "fp32")
        for name in kernel.arg_names
    }
    source = triton.compiler.ASTSource(kernel, signature, constants)
    target = compiler.GPUTarget("cuda", 90, 32)
    built = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert "st.global" in built.asm["ptx"]


def test_examples_use_the_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(256, (4, 1, 6, 6), dtype=torch.uint8, generator=Generator().manual_seed(0))
    augmentation, indices = Augmentation("crop-flip", cutout=3), torch.tensor([2, 0])
    plain = Examples(x, torch.arange(4), MEAN, STD)
    assert use_batch_kernel(plain).kernel is None
    monkeypatch.setattr(_accelerate, "can_fuse", lambda device: True)
    examples = use_batch_kernel(Examples(x, torch.arange(4), MEAN, STD))
    inputs, labels, _ = examples.batch(indices, augmentation, Generator().manual_seed(1))
    draws = draw(2, Generator().manual_seed(1), x.device)
    assert torch.equal(inputs, reference(x[indices], augmentation, draws)[0])
    assert torch.equal(labels, indices)
