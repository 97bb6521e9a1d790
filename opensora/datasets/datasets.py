"""A table of clips as training samples."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.read_video import (
    IMAGE_FPS,
    TooFewFrames,
    count_frames,
    frames_needed,
    is_image,
    probe,
    read_frames,
)
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table import Table, complain_about_rows, read_table
from opensora.datasets.transforms import get_transform
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

Item = dict[str, Any]


class Choice(NamedTuple):
    """What is random about a sample; `rng` goes on to whatever else is drawn for it."""

    caption: str
    start: int
    rng: torch.Generator


class ClipRows:
    """The rows of a table that can give a clip, and the random choices for them.

    Datasets of pixels and of cached latents share it: the same (seed, epoch, index) means the same window and caption.
    `count` gives the frames of a row whose number the table does not state.
    """

    def __init__(
        self,
        table: Table,
        num_frames: int,
        frame_interval: int,
        seed: int,
        short_clips: Literal["error", "drop"],
        *,
        count: Callable[[int], int] | None = None,
    ) -> None:
        if num_frames < 1 or frame_interval < 1:
            raise UserError(f"num_frames={num_frames} and frame_interval={frame_interval} must be at least 1.")
        if short_clips not in ("error", "drop"):
            raise UserError(f"short_clips={short_clips!r} is not one of error, drop.")
        self.table, self.num_frames, self.frame_interval, self.seed = table, num_frames, frame_interval, seed
        self.needed = frames_needed(num_frames, frame_interval)
        self._refuse_pictures()
        self.kept = self._long_enough(short_clips, count or self._count)  # [N] row numbers

    def __len__(self) -> int:
        return len(self.kept)

    def row(self, index: int) -> int:
        """The table's row of sample `index`; they differ where short clips were dropped."""
        return int(self.kept[index])

    def choose(self, epoch: int, row: int, available: int) -> Choice:
        """Caption and first frame of a sample whose file has `available` frames."""
        rng = generator(self.seed, "sample", epoch, row)
        captions = self.table.captions(row)
        caption = captions[int(torch.randint(len(captions), (1,), generator=rng))]
        if available < self.needed:
            raise self.too_short(row, available)
        return Choice(caption, int(torch.randint(available - self.needed + 1, (1,), generator=rng)), rng)

    def too_short(self, row: int, available: int) -> UserError:
        """The error for a clip that has too few frames."""
        return UserError(
            f"{self.table.where(row)}: {self.table.path(row)} has {available} frames, but num_frames={self.num_frames} at "
            f"frame_interval={self.frame_interval} needs {self.needed}. Use shorter clips, or leave such rows out with "
            "dataset.short_clips='drop'."
        )

    def settings(self) -> tuple[Any, ...]:
        """What, beside the table, decides the choices."""
        return self.num_frames, self.frame_interval, self.seed, len(self)

    def _refuse_pictures(self) -> None:
        if self.num_frames == 1:
            return
        pictures = [row for row, name in enumerate(self.table.rows["path"]) if is_image(name)]
        if pictures:
            raise complain_about_rows(
                self.table,
                pictures,
                f"are pictures, which cannot give {self.num_frames} frames",
                "Train on pictures with num_frames=1, or remove these rows.",
            )

    def _long_enough(self, short_clips: str, count: Callable[[int], int]) -> np.ndarray:
        lengths = self.table.num_frames
        if short_clips == "drop" and self.needed > 1 and not lengths.all():
            logger.info("%s: counting frames; a column num_frames would save this.", self.table.source)
            counted = [n or count(row) for row, n in enumerate(lengths.tolist())]
            lengths = np.array(counted, np.int64)
        short = np.flatnonzero((lengths > 0) & (lengths < self.needed))
        if len(short) == 0:
            return np.arange(len(self.table))
        what = (
            f"have fewer than the {self.needed} frames that num_frames={self.num_frames} at "
            f"frame_interval={self.frame_interval} needs"
        )
        if short_clips == "error" or len(short) == len(self.table):
            raise complain_about_rows(
                self.table,
                short.tolist(),
                what,
                "Use shorter clips, or leave such rows out with dataset.short_clips='drop'.",
            )
        logger.warning("%s: %d of %d rows are dropped: they %s.", self.table.source, len(short), len(lengths), what)
        return np.setdiff1d(np.arange(len(lengths)), short)

    def _count(self, row: int) -> int:
        try:
            return count_frames(self.table.path(row))
        except UserError as error:
            raise UserError(f"{self.table.where(row)}: {error}") from error


@DATASETS.register_module()
class VideoTextDataset:
    """Clips of one length and size, with a caption.

    A sample is a dict: `video` [3, T, H, W] float32 in [-1, 1], `text`, `fps` (of the clip: the file's rate divided by
    `frame_interval`), `height`, `width`, `num_frames` (float32 numbers), `index` (the table's row) and `path`.

    Args:
        data_path: CSV or parquet file with the columns `path` and `text_columns`.
        num_frames: T. Pictures are allowed only when it is 1.
        frame_interval: Take every n-th frame, exactly.
        image_size: Height and width.
        root: Folder that the paths are relative to; the table's own when None.
        transform_name: See `transforms.get_transform`.
        use_image_transform: Give pictures ADM's transform instead.
        text_columns: Each sample takes one of these captions; empty ones are skipped. () where there are no captions.
        seed: With epoch and row, it decides caption, window and crop.
        short_clips: What to do with clips that are too short: "error" or "drop".
    """

    def __init__(  # noqa: PLR0913
        self,
        data_path: str,
        num_frames: int = 16,
        frame_interval: int = 1,
        image_size: tuple[int, int] = (256, 256),
        root: str | None = None,
        transform_name: str = "center",
        use_image_transform: bool = False,  # noqa: FBT001, FBT002  (a config's key)
        text_columns: Sequence[str] = ("text",),
        seed: int = 42,
        short_clips: Literal["error", "drop"] = "error",
    ) -> None:
        self.table = read_table(data_path, root, text_columns)
        self.clips = ClipRows(self.table, num_frames, frame_interval, seed, short_clips)
        self.transform = get_transform(transform_name, image_size)
        self.image_transform = get_transform("adm_center" if use_image_transform else transform_name, image_size)
        self._settings = (tuple(image_size), transform_name, use_image_transform)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, key: SampleKey) -> Item:
        row = self.clips.row(key.index)
        path = self.table.path(row)
        try:
            frames, fps, choice = self._read(key.epoch, row, path)
        except TooFewFrames as error:  # the file ends before its own index says, by more than can be made up
            raise self.clips.too_short(row, error.available) from error
        except UserError as error:
            where = self.table.where(row)
            raise error if str(error).startswith(where) else UserError(f"{where}: {error}") from error
        transform = self.image_transform if is_image(path) else self.transform
        video = transform(frames, generator=choice.rng)  # [3, T, H, W]
        return {"video": video, **describe(row, path, choice.caption, video.shape[1:], fps)}

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples, except the pixels in the files."""
        text = repr((type(self).__name__, self.table.fingerprint(), self.clips.settings(), self._settings))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _read(self, epoch: int, row: int, path: Path) -> tuple[Tensor, float, Choice]:
        """Frames [T, H, W, 3], the clip's fps, and the choices behind them."""
        clips, stated = self.clips, int(self.table.num_frames[row])
        info = probe(path)
        if stated > info.num_frames:
            raise wrong_length(stated, info.num_frames, path)
        choice = clips.choose(epoch, row, stated or info.num_frames)
        try:
            frames = read_frames(path, choice.start, clips.num_frames, clips.frame_interval)
        except TooFewFrames as error:
            if stated:
                raise wrong_length(stated, error.available, path) from error
            # packets that hold no picture: the last frames there are, instead of those that were announced
            choice = choice._replace(start=last_start(error.available, clips.needed, error))
            frames = read_frames(path, choice.start, clips.num_frames, clips.frame_interval)
        return frames, IMAGE_FPS if is_image(path) else info.fps / clips.frame_interval, choice


def last_start(available: int, needed: int, error: UserError) -> int:
    """The start of the last window that fits, or `error` when none does."""
    if available < needed:
        raise error
    return available - needed


def describe(row: int, path: Path, caption: str, size: Sequence[int], fps: float) -> Item:
    """What goes with a clip of `size` (T, H, W)."""
    numbers = {"fps": fps, "num_frames": size[0], "height": size[1], "width": size[2]}
    return {
        "text": caption,
        **{name: torch.tensor(float(value), dtype=torch.float32) for name, value in numbers.items()},
        "index": torch.tensor(row, dtype=torch.int64),
        "path": str(path),
    }


def wrong_length(stated: int, available: int, path: Path) -> UserError:
    """The error for a table whose `num_frames` is more than the file has."""
    return UserError(
        f"the table says num_frames={stated}, but {path} has {available}; correct or empty the cell, or fetch the file again."
    )
