"""The videos that an evaluation looks at: from a folder, a table or an `.npz` of the ADM evaluator, cut in time and size in a way that is written down.

How frames are picked and resized changes a Frechet distance more than many a model does (Parmar et al. 2022,
arXiv:2104.11222), so both are settings, and both are part of the record of a score.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from opensora.datasets.table.table import read_table
from opensora.datasets.transforms import to_float
from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.datasets.video.read_video import probe, read_frames
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar

Resize = Literal["antialias", "bilinear", "area", "none"]
Shape = Literal["squeeze", "crop"]


class Clip(NamedTuple):
    """A video [3, T, H, W] in [-1, 1] and where it comes from."""

    path: Path
    video: Tensor


class Sampling(NamedTuple):
    """Which frames of a file, and how they are brought to one size."""

    num_frames: int = 16  # from the first frame on
    frame_interval: int = 1  # take every n-th frame
    size: tuple[int, int] = (224, 224)  # height, width
    resize: Resize = "antialias"  # bilinear with and without a low-pass filter, box filter, or keep the size
    shape: Shape = "squeeze"  # of another aspect ratio: squeeze it, or crop the middle


def read_clips(source: Path, sampling: Sampling, root: Path | None = None, limit: int | None = None) -> Iterator[Clip]:
    """The clips of a table or of a folder's videos and images, in order of the table or the names.

    Args:
        source: a folder, a table with a column `path`, or an `.npz` whose `arr_0` are images, uint8 [N, H, W, 3].
        sampling: how each is cut.
        root: folder that the table's paths are relative to; None: the table's own.
        limit: at most so many.

    Raises:
        UserError: there is none, or one is too short or cannot be read: a distance over fewer clips is another number, so
            nothing is left out.
    """
    if sampling.resize not in get_args(Resize) or sampling.shape not in get_args(Shape):
        raise UserError(f"resize={sampling.resize!r}, shape={sampling.shape!r}: choose from {Resize} and {Shape}.")
    if source.suffix == ".npz":
        images = npz_arrays(source, "arr_0").get("arr_0")
        if images is None or images.dtype != np.uint8 or images.shape[3:] != (3,) or sampling.num_frames != 1:
            raise UserError(
                f"{source}: expected images, arr_0 of uint8[N, H, W, 3], of which a clip is --num-frames 1."
            )
        yield from (
            Clip(source, resized(to_float(torch.from_numpy(x[None])), sampling))
            for x in progress_bar(images[:limit], desc=f"reading {source}", unit="image")
        )
        return
    paths = files_of(source, root)
    if not paths:
        raise UserError(f"{source}: there are no videos or images in it.")
    for path in progress_bar(paths[:limit], desc=f"reading {source}", unit="clip"):
        yield Clip(path, _read_clip(path, sampling))


def npz_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Those of the arrays that an `.npz` file has."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in names if name in file.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:  # a plain array is no context
        raise UserError(f"{path} is no .npz file: {error}") from error


def files_of(source: Path, root: Path | None = None) -> list[Path]:
    """The files that `source`, a folder or a table, names."""
    if source.is_dir():
        return sorted(p for p in source.iterdir() if p.suffix.lower() in (*VIDEO_EXTENSIONS, *IMAGE_EXTENSIONS))
    table = read_table(source, root, ())
    return [table.path(row) for row in range(len(table))]


def _read_clip(path: Path, sampling: Sampling) -> Tensor:
    needed = (sampling.num_frames - 1) * sampling.frame_interval + 1
    available = probe(path).num_frames
    if available < needed:
        raise UserError(
            f"{path} has {available} frames; num_frames={sampling.num_frames} at interval {sampling.frame_interval} needs "
            f"{needed}. Lower --num-frames for all, since clips of several lengths have no common distance."
        )
    video = to_float(read_frames(path, 0, sampling.num_frames, sampling.frame_interval))  # [3, T, H, W]
    return resized(video, sampling)


def resized(video: Tensor, sampling: Sampling) -> Tensor:
    """[3, T, H, W] -> [3, T, h, w] of the sampling's size; in floating point, not rounded to 8 bits in between."""
    if sampling.resize == "none":
        return video
    x = rearrange(video, "C T H W -> T C H W")
    if sampling.shape == "crop":
        x = _cropped(x, sampling.size)
    if sampling.resize == "area":
        x = F.interpolate(x, sampling.size, mode="area")
    else:
        x = F.interpolate(x, sampling.size, mode="bilinear", antialias=sampling.resize == "antialias")
    return rearrange(x, "T C H W -> C T H W")


def _cropped(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest part of the middle that has the shape of `size`."""
    height, width = x.shape[-2:]
    scale = min(height / size[0], width / size[1])
    h, w = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    top, left = (height - h) // 2, (width - w) // 2
    return x[..., top : top + h, left : left + w]
