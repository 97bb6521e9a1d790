"""Clips and images in memory, for training that takes batches faster than files can be decoded, as a small VAE's does.

Every file is decoded once, at start, to uint8; a sample is then a crop. Images become clips by a camera that moves over
them, so that one table may hold both, and a still photograph teaches what motion of its detail looks like.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from opensora.datasets.datasets import TableDataset, describe, naming_the_row
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import complain_about_rows, read_table
from opensora.datasets.transforms import get_transform, to_float
from opensora.datasets.video.files import IMAGE_FPS, TooFewFrames, is_image
from opensora.datasets.video.read_video import FrameRule, open_clip, read_indices
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

MAX_ZOOM = 1.3  # of a moving camera: beyond, sampling without a filter would alias


@DATASETS.register_module()
class InMemoryVideoDataset(TableDataset):
    """Random crops of clips and images, without captions; samples as of `VideoTextDataset`.

    A clip of n windows (of `num_frames`, without overlap) counts as n samples of an epoch, and each of them draws its window
    anew from the whole clip: a long video is seen more often than an image, in proportion.

    Args:
        data_path: Table with the column `path`.
        image_size: Of the crop. Of a clip it covers between half of what fits and all of it, never enlarged unless the file is
            smaller.
        num_frames, frame_interval, root, seed: as of `VideoTextDataset`.
        pictures: What an image is when `num_frames` > 1: "pan" moves and zooms over it, "error" refuses it.
        repeat_clips: Count each window of a clip so many times, where images would outnumber them.
        num_threads: That decode files at start.
    """

    def __init__(  # noqa: PLR0913  (a config)
        self,
        data_path: str,
        num_frames: int = 17,
        frame_interval: int = 1,
        image_size: tuple[int, int] = (128, 128),
        root: str | None = None,
        seed: int = 42,
        pictures: Literal["pan", "error"] = "pan",
        repeat_clips: int = 1,
        num_threads: int = 8,
    ) -> None:
        if pictures not in ("pan", "error"):
            raise UserError(f"pictures={pictures!r} is not one of pan, error.")
        if repeat_clips < 1:
            raise UserError(f"repeat_clips={repeat_clips}; use a number from 1.")
        self.table = read_table(data_path, root, ())
        self.num_frames, self.frame_interval, self.seed = num_frames, frame_interval, seed
        self.size = (int(image_size[0]), int(image_size[1]))
        self.rule = FrameRule(num_frames, frame_interval)
        self.crop = get_transform("random_crop", self.size)
        stills = [row for row in range(len(self.table)) if is_image(self.table.path(row))]
        if stills and num_frames > 1 and pictures == "error":
            what = f"are images, but num_frames={num_frames}"
            raise complain_about_rows(self.table, stills, what, "Set dataset.pictures='pan', or remove them.")
        with ThreadPoolExecutor(max(num_threads, 1)) as pool:
            decoding = pool.map(self._decode, range(len(self.table)))
            decoded = list(progress_bar(decoding, total=len(self.table), desc="decoding", unit="file", delay=1))
        self.videos, self.fps = zip(*decoded, strict=True)  # [T, H, W, 3] uint8 each
        rows: list[int] = []
        for row, frames in enumerate(self.videos):
            rows += [row] * (1 if is_image(self.table.path(row)) else len(frames) // self.rule.needed * repeat_clips)
        self.rows = rows
        self._settings = (num_frames, frame_interval, self.size, seed, pictures, len(rows))
        size = sum(video.numel() for video in self.videos)
        logger.info("%s: %d files, %.2f GB in memory", self.table.source, len(self.videos), size / 1e9)

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        row = self.rows[key.index]
        path, frames = self.table.path(row), self.videos[row]
        rng = generator(self.seed, "sample", key.epoch, key.index)
        if is_image(path) and self.num_frames > 1:
            video, fps = pan(frames[0], self.num_frames, self.size, rng), IMAGE_FPS
        else:
            start = int(torch.randint(len(frames) - self.rule.needed + 1, (1,), generator=rng))
            window = frames[start : start + self.rule.needed : self.frame_interval]
            video, fps = self.crop(window, generator=rng), self.fps[row] / self.frame_interval
        return {"video": video, **describe(row, path, "", video.shape[1:], fps)}

    @property
    def sample_bytes(self) -> int:
        """Of one sample's video."""
        return self.num_frames * self.size[0] * self.size[1] * 3 * 4

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples, except the pixels in the files."""
        return self._hash(self._settings, [len(video) for video in self.videos])

    def _decode(self, row: int) -> tuple[Tensor, float]:
        """All frames of a file, and their rate; opened once, for an animated image is decoded each time that it is opened."""
        path = self.table.path(row)
        try:
            with open_clip(path) as clip:
                fps = clip.fps
                try:
                    frames = read_indices(path, clip, range(max(clip.num_frames, 1)))
                except TooFewFrames as error:  # packets that hold no image
                    frames = read_indices(path, clip, range(max(error.available, 1)))
        except UserError as error:
            raise naming_the_row(self.table, row, error) from error
        if not is_image(path) and len(frames) < self.rule.needed:
            has = f"{path} has {len(frames)} frames, but {self.rule} needs {self.rule.length}"
            raise UserError(f"{self.table.where(row)}: {has}. Remove the row, or use shorter clips.")
        return frames, fps


def pan(image: Tensor, num_frames: int, size: tuple[int, int], rng: torch.Generator) -> Tensor:
    """A camera's straight path over an image [H, W, 3] uint8: [3, num_frames, h, w] in [-1, 1].

    It starts and ends at random positions with random zooms, and mirrors the image half of the time.
    """
    height, width = image.shape[:2]
    zoom_u, top_u, left_u = torch.rand(3, 2, generator=rng)  # at the start and at the end
    mirrored = bool(torch.rand(1, generator=rng) < 0.5)
    largest = min(height / size[0], width / size[1])
    smallest = min(1.0, largest)
    zoom = smallest + (min(largest, MAX_ZOOM) - smallest) * zoom_u  # source pixels per pixel
    way = torch.linspace(0, 1, num_frames)
    h, w = (torch.lerp(zoom[0], zoom[1], way) * side for side in size)  # [T] each, of the crop
    top = torch.lerp(top_u[0], top_u[1], way) * (height - h)
    left = torch.lerp(left_u[0], left_u[1], way) * (width - w)
    # centre and half size of the crop in grid_sample's coordinates, where the image spans [-1, 1]
    zeros = torch.zeros(num_frames)
    theta = torch.stack(
        [w / width, zeros, (2 * left + w) / width - 1, zeros, h / height, (2 * top + h) / height - 1], dim=1
    ).view(num_frames, 2, 3)
    grid = F.affine_grid(theta, [num_frames, 3, *size], align_corners=False)
    source = rearrange(to_float(image[None]), "C 1 H W -> 1 C H W").expand(num_frames, -1, -1, -1)
    frames = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    video = rearrange(frames, "T C H W -> C T H W")
    return (video.flip(3) if mirrored else video).contiguous()
