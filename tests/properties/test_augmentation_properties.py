"""A sample looks the same in any batch: augmentation depends on seed, epoch and id."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad

from utils.images.augment import augment, cut_out, normalize
from utils.run.draws import random_uint32

SEEDS, EPOCHS = st.integers(0, 2**32 - 1), st.integers(0, 500)
IDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True)


def pictures(count, height, width):
    """Images of which no two pixels are alike, nor two images."""
    values = torch.arange(count * 3 * height * width) * 37 % 251
    return values.to(torch.uint8).view(count, 3, height, width)


@given(IDS, SEEDS, EPOCHS, st.integers(0, 3), st.randoms())
def test_augmentation_depends_on_the_sample_not_on_its_batch(ids, seed, epoch, padding, random):
    images, ids = pictures(len(ids), 8, 6), torch.tensor(ids)
    options = dict(epoch=epoch, seed=seed, padding=padding)
    part = random.sample(range(len(ids)), random.randint(1, len(ids)))
    some = augment(images[part], ids[part], **options)
    assert torch.equal(augment(images, ids, **options)[part], some)


@given(IDS, SEEDS, EPOCHS, st.integers(0, 2))
@settings(max_examples=20)
def test_an_image_is_shifted_into_its_reflection_and_mirrored_in_every_other_epoch(
    ids, seed, epoch, padding
):
    images = pictures(len(ids), 8, 6)
    crops = pad(images.float(), (padding,) * 4, mode="reflect").unfold(2, 8, 1).unfold(3, 6, 1)
    crops = crops.permute(2, 3, 0, 1, 4, 5).flatten(0, 1)  # [shifts, images, ...]
    mirrored = []
    for number in (epoch, epoch + 1):
        changed = augment(images, torch.tensor(ids), number, seed, padding=padding)
        matches = (crops == changed).flatten(2).all(2).any(0)
        flipped = (crops == changed.flip(-1)).flatten(2).all(2).any(0)
        assert torch.equal(matches, ~flipped)
        mirrored.append(flipped)
    assert torch.equal(mirrored[0], ~mirrored[1])


@given(IDS, SEEDS, EPOCHS, st.integers(1, 9))
def test_cutout_paints_one_square_whose_center_is_in_the_image(ids, seed, epoch, side):
    images = pictures(len(ids), 8, 6)
    changed = cut_out(images, torch.tensor(ids), epoch, seed, side, torch.full((3,), 254.6))
    painted = (changed == 255).all(1)
    assert torch.equal(changed, images.masked_fill(painted[:, None], 255))
    for square in painted:
        rows, columns = square.any(1), square.any(0)
        assert torch.equal(square, rows[:, None] & columns[None])
        for line, size in ((rows, 8), (columns, 6)):
            places = line.nonzero().flatten().tolist()
            assert places == list(range(places[0], places[-1] + 1))  # without a gap
            cut_off = places[0] == 0 or places[-1] == size - 1
            assert len(places) == side or (cut_off and side // 2 <= len(places) < side)


@given(SEEDS, EPOCHS)
@settings(max_examples=5)
def test_random_numbers_are_uniform_and_independent(seed, epoch):
    ids = torch.arange(20_000)
    draws = [random_uint32(seed, epoch, ids, stream) for stream in range(3)]
    draws += [random_uint32(seed + 1, epoch, ids, 0), random_uint32(seed, epoch + 1, ids, 0)]
    draws = torch.stack([*draws, draws[0].roll(1)]).double() / 2**32
    assert draws.min() >= 0 and draws.max() < 1
    assert (
        draws.mean(1).sub(0.5).abs().max() < 0.01 and draws.var(1).sub(1 / 12).abs().max() < 0.003
    )
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.035


@given(st.booleans(), st.sampled_from([None, 4, 6]))
def test_images_are_normalized_and_then_scaled(channels_last, size):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = pictures(4, 6, 6).contiguous(memory_format=layout)
    mean, std = torch.tensor([10.0, 20, 30]), torch.tensor([0.01, 4, 8])
    out = normalize(images, mean, std, size)
    expected = (images.float() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    if size == 4:
        expected = interpolate(expected, size=(4, 4), mode="bilinear", antialias=True)
    assert torch.allclose(out, expected, atol=1e-4)
    assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype == torch.float32
