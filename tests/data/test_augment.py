"""Crops and flips against loops over images, and their draws against what chance would give."""

import pytest
import torch
from torch import Generator, Tensor

from softstair.data.augment import crop, cut, flip, shift


def photographs(count: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    """No black pixel inside, so that every 0 of a result is border."""
    generator = Generator().manual_seed(7)
    return torch.randint(1, 256, (count, *shape), dtype=torch.uint8, generator=generator)


def naive_cut(x: Tensor, down: Tensor, right: Tensor, padding: int) -> Tensor:
    """Pixel (i, j) of a cut is pixel (i + down − padding, j + right − padding), or black."""
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for n in range(len(x)):
        for i in range(height):
            for j in range(width):
                row, column = i + int(down[n]) - padding, j + int(right[n]) - padding
                if 0 <= row < height and 0 <= column < width:
                    out[n, :, i, j] = x[n, :, row, column]
    return out


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 5, 11)])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_cut_is_a_loop_over_images(shape, padding):
    x = photographs(4, shape)
    down = torch.tensor([0, padding, 2 * padding, padding // 2])
    right = torch.tensor([2 * padding, padding, 0, padding])
    assert torch.equal(cut(x, down, right, padding), naive_cut(x, down, right, padding))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_dtype_shape_and_device_stay_whatever_the_layout(layout, dtype):
    x = photographs(5).to(dtype).contiguous(memory_format=layout)
    before = x.clone()
    for augment in (crop, flip):
        result = augment(x, generator=Generator().manual_seed(0))
        assert (result.dtype, result.shape, result.device) == (x.dtype, x.shape, x.device)
        plain = augment(x.contiguous(), generator=Generator().manual_seed(0))
        assert torch.equal(result, plain)
        assert torch.equal(x, before), "the batch itself is left alone"


def offsets(x: Tensor, cuts: Tensor, padding: int) -> Tensor:
    """Where each cut lies, by comparing it with every possible one; −1 where it is none."""
    found = torch.full((len(x),), -1)
    for place in range((2 * padding + 1) ** 2):
        down, right = divmod(place, 2 * padding + 1)
        corner = torch.ones(len(x), dtype=torch.int64)
        same = (cut(x, down * corner, right * corner, padding) == cuts).flatten(1).all(1)
        found[same] = place
    return found


def test_every_offset_occurs_as_often_as_any_other():
    count = 8100
    x = photographs(1, (1, 6, 6)).expand(count, 1, 6, 6)
    places = offsets(x, crop(x, 4, Generator().manual_seed(0)), 4)
    assert int(places.min()) == 0, "every crop is one of the 81"
    counts = torch.bincount(places, minlength=81)
    assert len(counts) == 81
    assert int(counts.min()) > 0
    # χ² with 80 degrees of freedom: 99.99 % of all draws lie below 137.
    assert float(((counts - 100) ** 2 / 100).sum()) < 137


def test_images_of_a_batch_are_cut_and_mirrored_one_by_one():
    x = photographs(1, (3, 9, 9)).expand(64, 3, 9, 9)
    assert len(crop(x, 4, Generator().manual_seed(0)).flatten(1).unique(dim=0)) > 30
    assert len(flip(x, Generator().manual_seed(0)).flatten(1).unique(dim=0)) == 2


def test_the_border_is_black_and_nothing_else_is():
    x = photographs(300)
    cuts = crop(x, 4, Generator().manual_seed(3))
    black = (cuts == 0).all(1)
    assert torch.equal((cuts == 0).any(1), black)
    rows, columns = black.all(2), black.all(1)
    assert torch.equal(black, rows[:, :, None] | columns[:, None, :])
    assert int(rows.sum(1).max()) == 4
    assert int(columns.sum(1).max()) == 4
    assert not black[:, 4:28, 4:28].any()


def test_flip_mirrors_half_of_them():
    x = photographs(4000, (2, 3, 4))
    flipped = flip(x, Generator().manual_seed(0))
    mirrored = (flipped == x[:, :, :, [3, 2, 1, 0]]).flatten(1).all(1)
    same = (flipped == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert abs(int(mirrored.sum()) - 2000) < 4 * 32  # four standard deviations of a fair coin


def test_the_generator_alone_decides():
    x = photographs(50)
    for augment in (crop, flip):
        first = augment(x, generator=Generator().manual_seed(5))
        torch.manual_seed(123)
        assert torch.equal(first, augment(x, generator=Generator().manual_seed(5)))
        assert not torch.equal(first, augment(x, generator=Generator().manual_seed(6)))
        torch.manual_seed(5)
        assert torch.equal(first, augment(x)), "without one, torch's own"


def test_an_empty_batch_stays_empty():
    x = photographs(0)
    assert crop(x).shape == flip(x).shape == (0, 3, 32, 32)


def test_no_padding_leaves_images_as_they_are():
    x = photographs(3)
    assert torch.equal(crop(x, padding=0), x)


def test_nothing_waits_for_the_device():
    """On the meta device no value exists: whoever reads one, to branch or to loop, fails."""
    x = torch.empty(6, 3, 32, 32, dtype=torch.uint8, device="meta")
    assert crop(x).shape == flip(x).shape == x.shape


@pytest.mark.parametrize("padding", [-1, 1.5, True, "4"])
def test_padding_that_is_none(padding):
    with pytest.raises(ValueError, match="padding"):
        crop(photographs(1), padding)


def test_images_without_a_batch():
    for augment in (crop, flip):
        with pytest.raises(ValueError, match=r"x must be \(N, C, H, W\), but \(3, 32, 32\)"):
            augment(photographs(1)[0])


def test_a_generator_elsewhere():
    x = torch.empty(6, 3, 32, 32, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="generator must be on the device of x, meta"):
        crop(x, generator=Generator())


def test_compiled_in_one_graph():
    """Traced whole by torch.compile's front end; the values are those of the plain functions."""
    whole = torch.compile(lambda x, d, r: cut(x, d, r, 4), backend="eager", fullgraph=True)
    x = photographs(8)
    down, right = torch.randint(9, (2, 8), generator=Generator().manual_seed(0))
    assert torch.equal(whole(x, down, right), cut(x, down, right, 4))
    both = torch.compile(lambda x: flip(crop(x)), backend="eager", fullgraph=True)
    torch.manual_seed(0)
    given = both(x)
    torch.manual_seed(0)
    assert torch.equal(given, flip(crop(x)))


def test_shift_moves_each_recording_by_whole_frames_and_repeats_its_ends():
    x = photographs(500, (1, 49, 10))
    moved = shift(x, frames=5, generator=Generator().manual_seed(0))
    found = []
    for before, after in zip(x[:, 0], moved[:, 0], strict=True):
        for places in range(-5, 6):
            rows = [before[min(max(time + places, 0), 48)] for time in range(49)]
            if torch.equal(torch.stack(rows), after):
                found.append(places)
    assert len(found) == 500
    assert set(found) == set(range(-5, 6))
    assert torch.equal(shift(x, frames=0), x)
    with pytest.raises(ValueError, match="frames"):
        shift(x, frames=-1)
