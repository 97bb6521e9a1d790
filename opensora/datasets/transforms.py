"""From decoded frames to what a model sees: one size, numbers in [-1, 1]. The same code for videos and images.

Resizing is bilinear and antialiased on uint8, as in PIL; `adm_center` is the images' transform of ADM (Dhariwal & Nichol
2021, arXiv:2105.05233): halve with a box filter while twice too large, then bicubic, then crop.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Size = tuple[int, int]  # height, width
Transform = Callable[..., Tensor]  # (frames [T, H, W, 3] uint8, generator=None) -> [3, T, H, W] float32 in [-1, 1]

MIN_CROP = 0.5  # the smallest random crop, as a fraction of the largest


def get_transform(name: str, image_size: Size) -> Transform:
    """The transform of that name: `transform(frames, generator=None)`.

    Names: "center" and "resize_crop" (cover, then crop the centre), "random_crop" (random size, position and mirroring),
    "adm_center", "none" (keep the size).
    """
    if name not in TRANSFORMS:
        raise UserError(
            f"transform_name={name!r} is unknown.{did_you_mean(name, list(TRANSFORMS))} Choices: {', '.join(TRANSFORMS)}."
        )
    height, width = (int(n) for n in image_size)
    if min(height, width) < 1:
        raise UserError(f"image_size={tuple(image_size)}: height and width must be at least 1.")
    return partial(TRANSFORMS[name], (height, width))


def to_float(frames: Tensor) -> Tensor:
    """[T, H, W, 3] uint8 -> [3, T, H, W] float32 in [-1, 1]; 255 is exactly 1."""
    return rearrange(frames, "T H W C -> C T H W").to(torch.float32, memory_format=torch.contiguous_format) / 127.5 - 1


def resize(frames: Tensor, size: Size) -> Tensor:
    """[T, H, W, 3] uint8 -> [T, h, w, 3] uint8."""
    if tuple(frames.shape[1:3]) == size:
        return frames
    # channels-last strides, on which torch has a fast uint8 kernel
    x = F.interpolate(rearrange(frames, "T H W C -> T C H W"), size, mode="bilinear", antialias=True)
    return rearrange(x, "T C H W -> T H W C")


def _center(size: Size, frames: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return to_float(_crop_center(resize(frames, _covering(frames, size)), size))


def _random_crop(size: Size, frames: Tensor, generator: torch.Generator | None = None) -> Tensor:
    if generator is None:
        raise ValueError("random_crop needs a generator")
    height, width = frames.shape[1:3]
    scale_u, top_u, left_u, mirror_u = torch.rand(4, generator=generator).tolist()
    largest = min(height / size[0], width / size[1])  # of the crop, as a multiple of `size`
    smallest = min(largest, max(1.0, MIN_CROP * largest))  # enlarge only what is too small anyway
    scale = smallest + (largest - smallest) * scale_u
    h, w = (min(side, max(1, round(n * scale))) for side, n in zip((height, width), size, strict=True))
    top, left = math.floor(top_u * (height - h + 1)), math.floor(left_u * (width - w + 1))
    crop = resize(frames[:, top : top + h, left : left + w], size)
    return to_float(crop.flip(2) if mirror_u < 0.5 else crop)


def _adm_center(size: Size, frames: Tensor, generator: torch.Generator | None = None) -> Tensor:
    images = [Image.fromarray(frame.numpy()) for frame in frames]
    while all(side >= 2 * n for side, n in zip((images[0].height, images[0].width), size, strict=True)):
        images = [image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX) for image in images]
    halved = torch.from_numpy(np.stack([np.array(image) for image in images]))
    h, w = _covering(halved, size)
    resized = [np.array(image.resize((w, h), Image.Resampling.BICUBIC)) for image in images]
    return to_float(_crop_center(torch.from_numpy(np.stack(resized)), size))


def _none(size: Size, frames: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return to_float(frames)


def _covering(frames: Tensor, size: Size) -> Size:
    """The smallest size of the frames' shape that covers `size`."""
    height, width = frames.shape[1:3]
    scale = max(size[0] / height, size[1] / width)
    return max(size[0], round(height * scale)), max(size[1], round(width * scale))


def _crop_center(frames: Tensor, size: Size) -> Tensor:
    top, left = ((side - n) // 2 for side, n in zip(frames.shape[1:3], size, strict=True))
    return frames[:, top : top + size[0], left : left + size[1]]


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "center": _center,
    "resize_crop": _center,
    "random_crop": _random_crop,
    "adm_center": _adm_center,
    "none": _none,
}
