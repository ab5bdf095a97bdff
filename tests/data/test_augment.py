"""Crops, flips and shifts against loops over examples, and their random numbers."""

import pytest
import torch
from torch import Generator, Tensor

from softstair.data.batches import crop, cut, flip, shift


def images(count: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    generator = Generator().manual_seed(7)
    return torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)


def loop_cut(x: Tensor, down: Tensor, right: Tensor, padding: int) -> Tensor:
    """Pixel (i, j) of a crop is pixel (i + down − padding, j + right − padding), or 0."""
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for n in range(len(x)):
        for i in range(height):
            for j in range(width):
                row, column = i + int(down[n]) - padding, j + int(right[n]) - padding
                if 0 <= row < height and 0 <= column < width:
                    out[n, :, i, j] = x[n, :, row, column]
    return out


@pytest.mark.parametrize(("shape", "padding"), [((3, 32, 32), 4), ((1, 8, 8), 0), ((2, 5, 11), 1)])
def test_cut_equals_a_loop_over_images(shape, padding):
    x = images(4, shape)
    down = torch.tensor([0, padding, 2 * padding, padding // 2])
    right = torch.tensor([2 * padding, padding, 0, padding])
    assert torch.equal(cut(x, down, right, padding), loop_cut(x, down, right, padding))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_dtype_and_shape_are_kept_in_any_layout(layout, dtype):
    x = images(5).to(dtype).contiguous(memory_format=layout)
    before = x.clone()
    for augment in (crop, flip):
        result = augment(x, generator=Generator().manual_seed(0))
        assert (result.dtype, result.shape) == (x.dtype, x.shape)
        assert torch.equal(result, augment(x.contiguous(), generator=Generator().manual_seed(0)))
    assert torch.equal(x, before)


def test_corners_of_crops_are_uniform():
    x = images(1, (1, 6, 6)).expand(8100, 1, 6, 6)
    crops = crop(x, 4, Generator().manual_seed(0))
    places = torch.full((len(x),), -1)
    ones = torch.ones(len(x), dtype=torch.int64)
    for place in range(81):
        down, right = divmod(place, 9)
        places[(cut(x, down * ones, right * ones, 4) == crops).flatten(1).all(1)] = place
    assert int(places.min()) == 0
    counts = torch.bincount(places, minlength=81)
    # χ² with 80 degrees of freedom: 99.99 % of all draws are below 137.
    assert float(((counts - 100) ** 2 / 100).sum()) < 137


def test_flip_mirrors_half_of_the_images():
    x = images(4000, (2, 3, 4))
    flipped = flip(x, Generator().manual_seed(0))
    mirrored = (flipped == x[:, :, :, [3, 2, 1, 0]]).flatten(1).all(1)
    same = (flipped == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert abs(int(mirrored.sum()) - 2000) < 4 * 32  # four standard deviations


def test_shift_moves_each_recording_and_repeats_its_first_or_last_frame():
    x = images(200, (1, 49, 10))
    shifted = shift(x, frames=5, generator=Generator().manual_seed(0))
    frames = torch.arange(49)
    shifts = [
        [s for s in range(-5, 6) if torch.equal(before[(frames + s).clamp(0, 48)], after)]
        for before, after in zip(x[:, 0], shifted[:, 0], strict=True)
    ]
    assert {len(found) for found in shifts} == {1}
    assert {found[0] for found in shifts} == set(range(-5, 6))
    assert torch.equal(shift(x, frames=0), x)


def test_the_generator_determines_the_result():
    x = images(50)
    for augment in (crop, flip):
        first = augment(x, generator=Generator().manual_seed(5))
        torch.manual_seed(123)
        assert torch.equal(first, augment(x, generator=Generator().manual_seed(5)))
        assert not torch.equal(first, augment(x, generator=Generator().manual_seed(6)))
        torch.manual_seed(5)
        assert torch.equal(first, augment(x))


def test_no_value_is_read_from_the_device():
    x = torch.empty(6, 3, 32, 32, dtype=torch.uint8, device="meta")
    assert crop(x).shape == flip(x).shape == x.shape


def test_augmentation_compiles_to_one_graph():
    compiled = torch.compile(lambda x: flip(crop(x)), backend="eager", fullgraph=True)
    x = images(8)
    torch.manual_seed(0)
    result = compiled(x)
    torch.manual_seed(0)
    assert torch.equal(result, flip(crop(x)))
