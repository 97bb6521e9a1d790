"""Transforms: sizes, range, what is cropped, agreement with PIL, and randomness that is the generator's alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.transforms import TRANSFORMS, get_transform, resize, to_float
from opensora.utils.errors import UserError


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def gradient(height: int, width: int) -> torch.Tensor:
    """[1, H, W, 3]: channel 0 holds the row, channel 1 the column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, torch.zeros_like(rows)], dim=-1)[None].to(torch.uint8)


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"none"}))
@pytest.mark.parametrize("source", [(33, 47), (180, 320), (320, 180), (16, 24), (10, 300), (1, 1)])
@pytest.mark.parametrize("size", [(16, 24), (32, 32)])
def test_any_source_gives_the_size(name, source, size):
    out = get_transform(name, size)(noise(2, *source, 3), generator=torch.Generator().manual_seed(1))
    assert out.shape == (3, 2, *size)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    assert -1 <= out.min() <= out.max() <= 1


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@pytest.mark.parametrize(("level", "value"), [(255, 1.0), (0, -1.0)])
def test_white_is_one_and_black_is_minus_one(name, level, value):
    frames = torch.full((1, 40, 60, 3), level, dtype=torch.uint8)
    out = get_transform(name, (16, 16))(frames, generator=torch.Generator().manual_seed(1))
    assert (out == value).all()


def test_to_float_keeps_order():
    frames = noise(2, 3, 4, 3)
    out = to_float(frames)
    assert out[1, 0, 2, 3] == pytest.approx(frames[0, 2, 3, 1].item() / 127.5 - 1, abs=1e-6)


@pytest.mark.parametrize("source", [(64, 96), (97, 131), (20, 30)])
def test_resize_agrees_with_pil(source):
    frames = noise(2, *source, 3)
    expected = [np.array(Image.fromarray(f.numpy()).resize((36, 24), Image.Resampling.BILINEAR)) for f in frames]
    difference = resize(frames, (24, 36)).numpy().astype(int) - np.stack(expected)
    assert np.abs(difference).max() <= 1  # rounding


def test_center_covers_and_crops_the_middle():
    wide = gradient(32, 96)
    assert torch.equal(get_transform("center", (32, 32))(wide), to_float(wide[:, :, 32:64]))
    tall = gradient(96, 32)
    assert torch.equal(get_transform("resize_crop", (32, 32))(tall), to_float(tall[:, 32:64]))


def test_none_keeps_the_size():
    assert torch.equal(get_transform("none", (8, 8))(wide := gradient(5, 9)), to_float(wide))


def test_frames_are_transformed_alike_and_images_like_videos():
    frames = noise(3, 50, 70, 3)
    for name in TRANSFORMS:
        transform = get_transform(name, (16, 16))
        together = transform(frames, generator=torch.Generator().manual_seed(3))
        for t in range(3):
            alone = transform(frames[t : t + 1], generator=torch.Generator().manual_seed(3))
            assert torch.equal(alone[:, 0], together[:, t])


def test_random_crop_is_a_function_of_the_generator():
    transform, frames = get_transform("random_crop", (16, 16)), gradient(64, 96)
    before = torch.random.get_rng_state()
    outs = [transform(frames, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    assert torch.equal(outs[7], transform(frames, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(torch.random.get_rng_state(), before)
    sizes = [float(out[0].max() - out[0].min()) * 127.5 for out in outs]  # rows that were cropped
    assert min(sizes) < 40 < 55 < max(sizes) <= 63
    mirrored = [bool(out[1, 0, 0, 0] > out[1, 0, 0, -1]) for out in outs]
    assert 8 < sum(mirrored) < 32
    centres = [float(out[1].mean()) for out in outs]
    assert max(centres) - min(centres) > 0.2
    with pytest.raises(ValueError, match="needs a generator"):
        transform(frames)


def test_random_crop_does_not_enlarge_what_is_large_enough():
    frames = gradient(24, 24)
    for i in range(20):
        out = get_transform("random_crop", (20, 20))(frames, generator=torch.Generator().manual_seed(i))
        assert float(out[0].max() - out[0].min()) * 127.5 >= 18.5  # 20 rows or more


def test_adm_center_is_adms_algorithm():
    image = Image.fromarray(noise(1, 150, 210, 3)[0].numpy())
    size, reference = 32, image
    while min(reference.size) >= 2 * size:
        reference = reference.resize(tuple(side // 2 for side in reference.size), resample=Image.Resampling.BOX)
    scale = size / min(reference.size)
    reference = reference.resize(tuple(round(side * scale) for side in reference.size), Image.Resampling.BICUBIC)
    pixels = np.array(reference)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    expected = torch.from_numpy(pixels[top : top + size, left : left + size].copy())[None]
    out = get_transform("adm_center", (size, size))(torch.from_numpy(np.array(image))[None])
    assert torch.equal(out, to_float(expected))


def test_mistakes():
    with pytest.raises(UserError, match=r"transform_name='centre' is unknown. Did you mean 'center'\? Choices: center"):
        get_transform("centre", (8, 8))
    with pytest.raises(UserError, match=r"image_size=\(0, 8\)"):
        get_transform("center", (0, 8))
