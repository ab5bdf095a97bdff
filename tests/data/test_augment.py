"""Augmentations against loops over examples in numpy, and the distributions of their draws."""

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from softstair.data.augment import (
    Augmentation,
    crop,
    cut,
    cutmix,
    cutout,
    flip,
    mask,
    mixup,
    shift,
)
from softstair.data.batches import Examples


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


@pytest.mark.parametrize(("shape", "padding"), [((3, 16, 16), 4), ((1, 8, 8), 0), ((2, 5, 11), 1)])
def test_cut_equals_a_loop_over_images(shape, padding):
    x = images(4, shape)
    down = torch.tensor([0, padding, 2 * padding, padding // 2])
    right = torch.tensor([2 * padding, padding, 0, padding])
    assert torch.equal(cut(x, down, right, padding), loop_cut(x, down, right, padding))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_dtype_and_shape_are_kept_in_any_layout(dtype):
    x = images(5).to(dtype).contiguous(memory_format=torch.channels_last)
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


def test_cutout_sets_a_square_around_a_random_pixel_to_zero():
    x = torch.rand(300, 3, 8, 10) + 1
    result, draw = cutout(x, 5, Generator().manual_seed(0)), Generator().manual_seed(0)
    rows, columns = (torch.randint(side, (300,), generator=draw) for side in (8, 10))
    expected = x.numpy().copy()
    for n, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        expected[n, :, max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3] = 0
    assert np.array_equal(result, expected)
    assert set(rows.tolist()) == set(range(8))
    zeros = (cutout(x, 4) == 0).sum((1, 2, 3))
    assert int(zeros.max()) == 3 * 4 * 4


@pytest.mark.parametrize(("axis", "longest"), [(2, 8), (3, 2), (3, 50)])
def test_mask_hides_up_to_so_many_frames_or_coefficients(axis, longest):
    x = torch.rand(3000, 1, 49, 10) + 1
    result = mask(x, axis, longest, Generator().manual_seed(0))
    draw, size = Generator().manual_seed(0), x.shape[axis]
    lengths = torch.randint(min(longest, size) + 1, (3000,), generator=draw)
    begins = (torch.rand(3000, generator=draw) * (size - lengths + 1)).int()
    expected = x.numpy().copy()
    for recording, begin, length in zip(expected, begins.tolist(), lengths.tolist(), strict=True):
        hidden = [slice(None), slice(None), slice(None)]
        hidden[axis - 1] = slice(begin, begin + length)
        recording[tuple(hidden)] = 0
    assert np.array_equal(result, expected)
    hidden_places = (result == 0).flatten(1).any(1)
    assert abs(float(hidden_places.float().mean()) - 1 + 1 / (min(longest, size) + 1)) < 0.04
    last = result[:, :, -1] if axis == 2 else result[:, :, :, -1]
    assert bool((last == 0).any())  # no begin is left out


def test_mixup_adds_the_example_from_the_other_end():
    x = torch.rand(5, 3, 4, 4)
    mixed, share = mixup(x, 0.4, Generator().manual_seed(0))
    weight = 0.4 * torch.rand((), generator=Generator().manual_seed(0)).item()
    assert share.item() == pytest.approx(weight)
    for n in range(5):
        expected = (1 - weight) * x[n].numpy() + weight * x[4 - n].numpy()
        np.testing.assert_allclose(mixed[n], expected, rtol=1e-6, atol=1e-7)
    draw = Generator().manual_seed(0)
    shares = np.array([mixup(x[:1], 0.4, draw)[1].item() for _ in range(1000)])
    assert 0 <= shares.min() < 0.01
    assert 0.39 < shares.max() < 0.4
    assert abs(shares.mean() - 0.2) < 0.02


def test_cutmix_replaces_a_rectangle_around_a_uniform_centre():
    x = torch.arange(40.0).reshape(40, 1, 1, 1).expand(40, 2, 16, 12).contiguous()
    shares, boxes_seen, draw = [], set(), Generator().manual_seed(0)
    for seed in range(100):
        mixed, share = cutmix(x, 0.5, draw.manual_seed(seed))
        u, *centre = torch.rand(3, generator=draw.manual_seed(seed)).tolist()
        sides = [  # by hand: the pixels whose centres lie inside
            [k for k in range(size) if abs(k + 0.5 - c * size) < np.sqrt(0.5 * u) * size / 2]
            for c, size in zip(centre, (16, 12), strict=True)
        ]
        expected = x.clone()
        for row in sides[0]:
            for column in sides[1]:
                expected[:, :, row, column] = x.flip(0)[:, :, row, column]
        assert torch.equal(mixed, expected)
        assert share.item() == pytest.approx(len(sides[0]) * len(sides[1]) / (16 * 12))
        shares.append(share.item())
        boxes_seen.add((*sides[0][:1], *sides[1][:1]))
    assert len(boxes_seen) > 30
    assert 0.15 < np.mean(shares) < 0.25  # parts outside are left out
    assert max(shares) <= 0.55


def test_a_batch_is_moved_as_bytes_then_normalised_and_masked():
    x, y = images(12, (1, 8, 8)), torch.arange(12)
    examples, indices = Examples(x, y, mean=100.0, std=32.0), torch.tensor([3, 1, 11, 0])
    augmentation = Augmentation("crop-flip", cutout=3, time_mask=2, coefficient_mask=2)
    inputs, labels, share = examples.batch(indices, augmentation, Generator().manual_seed(4))
    assert share is None
    draw = Generator().manual_seed(4)
    expected = flip(crop(x[indices], generator=draw), draw)
    expected = cutout((expected.float() - 100) / 32, 3, draw)
    expected = mask(mask(expected, 2, 2, draw), 3, 2, draw)
    assert torch.equal(inputs, expected)
    assert labels.tolist() == indices.tolist()
    assert augmentation.mix(inputs) == (inputs, None)
    mixed, share = Augmentation(mixup=1.0).mix(inputs, Generator().manual_seed(5))
    expected, expected_share = mixup(inputs, 1.0, Generator().manual_seed(5))
    assert torch.equal(mixed, expected)
    assert share == expected_share


EVERYTHING = {
    "crop": crop,
    "flip": flip,
    "shift": shift,
    "cutout": lambda x, generator=None: cutout(x, 3, generator),
    "mask": lambda x, generator=None: mask(x, 3, 4, generator),
    "mixup": lambda x, generator=None: mixup(x.float(), 0.5, generator)[0],
    "cutmix": lambda x, generator=None: cutmix(x, 0.5, generator)[0],
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_generator_determines_the_result(name):
    augment, x = EVERYTHING[name], images(50)
    first = augment(x, generator=Generator().manual_seed(5))
    torch.manual_seed(123)
    assert torch.equal(first, augment(x, generator=Generator().manual_seed(5)))
    assert not torch.equal(first, augment(x, generator=Generator().manual_seed(6)))
    torch.manual_seed(5)
    assert torch.equal(first, augment(x))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation("shift", cutout=8, time_mask=5, coefficient_mask=5, mixup=0.5),
        Augmentation("crop-flip", cutmix=0.5),
    ],
)
def test_augmentation_compiles_to_one_graph(augmentation):
    """So no value is read from the device."""
    examples = Examples(images(8), torch.arange(8), mean=128.0, std=64.0)

    def augmented(indices: Tensor) -> Tensor:
        return examples.batch(indices, augmentation)[0]

    compiled = torch.compile(augmented, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    result = compiled(torch.arange(8))
    torch.manual_seed(0)
    assert torch.equal(result, augmented(torch.arange(8)))
