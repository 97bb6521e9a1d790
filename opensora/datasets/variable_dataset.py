"""Clips and images of many lengths and sizes: each sample is cropped to the size of its bucket."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from opensora.datasets.buckets.bucket import NONE, Assignment, Buckets, DropReason
from opensora.datasets.datasets import Item, TableDataset, describe, naming_the_row, read_clip
from opensora.datasets.sampler import BucketKey
from opensora.datasets.table.table import UNKNOWN, Table, read_table
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.files import DEFAULT, BadFiles, Decoding, is_image
from opensora.datasets.video.read_video import FrameRule, VideoInfo, is_slow, probe
from opensora.registry import DATASETS, inherit_signature
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar

logger = logging.getLogger(__name__)

ROUNDING = 1e-4  # of a frame: rates in tables are rounded


@DATASETS.register_module(name=["VariableVideoTextDataset", "VariableVideoText"])  # the second is its older spelling
class VariableVideoTextDataset(TableDataset):
    """Clips and images of the sizes of a `bucket_config`, with a caption; see `bucket.py` for which goes where.

    Images are clips of one frame, for entries of 1 frame. Rows whose file has no readable size are in no bucket; the summary of
    the run (`--dry-run True`) counts them.

    A sample is that of `VideoTextDataset`, and `ar`: height / width of what the model sees. `fps`, `height`, `width`,
    `num_frames` and `ar` are fp32 numbers, never rounded.

    Args:
        data_path: Table with the columns `path` and `text_columns`. With `num_frames`, `height` and `width` it starts at
            once; without them every file is opened first.
        bucket_config: See `buckets/bucket.py`.
        target_fps: As of `VideoTextDataset`; slower videos are in no bucket. A column `fps` saves opening the files.
        transform_name: See `transforms.get_transform`; one that gives the size it is asked for.
        seed: With epoch and row, it decides bucket, caption, window and crop.
        size_multiple: Heights and widths of the aspect tables are moved to the nearest multiple of it: VAE x patch.
        cost_power: p of batch sizes "auto", which make batch_size (frames height width)^p equal. 1: equal tokens.
        bucket_choice: "drawn": by the probabilities of the bucket_config, anew in each epoch; "largest": always the largest
            bucket that they allow, of the longest length.
        frame_interval, root, use_image_transform, text_columns, bad_files, max_bad_share, decode: as of `VideoTextDataset`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherit_signature(cls)

    def __init__(  # noqa: PLR0913
        self,
        data_path: str,
        bucket_config: Mapping[str, Mapping[Any, Any]],
        frame_interval: int = 1,
        root: str | None = None,
        transform_name: str | None = "resize_crop",
        use_image_transform: bool = False,  # noqa: FBT001, FBT002  (a config's key)
        text_columns: Sequence[str] = ("text",),
        seed: int = 42,
        size_multiple: int = 16,
        cost_power: float = 1.0,
        bad_files: Literal["substitute", "error"] = "substitute",
        max_bad_share: float = 0.05,
        decode: Mapping[str, Any] | None = None,
        target_fps: float | None = None,
        bucket_choice: Literal["drawn", "largest"] = "drawn",
    ) -> None:
        if bucket_choice not in ("drawn", "largest"):
            raise UserError(f"bucket_choice={bucket_choice!r} is not one of drawn, largest.")
        FrameRule(1, frame_interval, target_fps)  # refuses what makes no sense now
        if size_multiple < 1:
            raise UserError(f"size_multiple={size_multiple} must be at least 1.")
        if transform_name in ("none", None):  # a command line's `none`
            raise UserError(
                "transform_name='none' keeps the size of a file, but a bucket needs one; use 'resize_crop'."
            )
        self.transform_names = (transform_name, "adm_center" if use_image_transform else transform_name)
        for name in self.transform_names:
            get_transform(name, (16, 16))  # refuses an unknown name now
        self.bad_files = BadFiles(bad_files, max_bad_share, seed)
        self.decoding = Decoding.of(decode)
        self.buckets = Buckets(bucket_config, size_multiple, cost_power)
        # of the epoch that was last asked for, by plan, summary and stand-ins
        self._assigned: tuple[int, Assignment] | None = None
        self.table = self._read_table(data_path, root, text_columns)
        self.rows = range(len(self.table))
        self.frame_interval, self.target_fps, self.seed = frame_interval, target_fps, seed
        self.bucket_choice = bucket_choice
        # [N] int32 each, UNKNOWN of files that cannot be read; and [N] float64
        sizes = _sizes_and_rates(self.table, self._probe, with_fps=target_fps is not None)
        self.num_frames, self.height, self.width, self.fps = sizes
        self._intervals: int | np.ndarray = frame_interval
        self._slow: np.ndarray | None = None  # [N] bool, videos of too low a rate
        if target_fps is not None:
            videos = self.num_frames > 1  # an image is never too slow
            self._slow = videos & is_slow(self.fps, target_fps)
            # frames of the file to one of the clip
            self._intervals = np.nan_to_num(np.where(videos, self.fps / target_fps - ROUNDING, 1.0), nan=1.0)

    def assign(self, epoch: int) -> Assignment:
        """The bucket of every row in an epoch."""
        if self._assigned is not None and self._assigned[0] == epoch:
            return self._assigned[1]
        frames = self.num_frames if self._slow is None else np.where(self._slow, UNKNOWN, self.num_frames)
        assignment = self.buckets.assign(
            frames, self.height, self.width, seed=self.seed, epoch=epoch, frame_interval=self._intervals
        )
        if self._slow is not None:
            assignment.drop_reason[self._slow] = DropReason.SLOW
        if self.bucket_choice == "largest":
            bucket = self.reachable().max(axis=1)  # of one column
            assignment = Assignment(bucket, np.where(bucket != NONE, np.int8(DropReason.KEPT), assignment.drop_reason))
        self._assigned = epoch, assignment
        return assignment

    def reachable(self) -> np.ndarray:
        """[N, n] int32, the buckets that each row may be in in some epoch; NONE fills up."""
        frames = self.num_frames if self._slow is None else np.where(self._slow, UNKNOWN, self.num_frames)
        found = self.buckets.reachable(frames, self.height, self.width, frame_interval=self._intervals)
        if self.bucket_choice == "drawn":
            return found
        first = np.argmax(found != NONE, axis=1)  # 0 where there is none
        return np.take_along_axis(found, first[:, None], axis=1)

    def __getitem__(self, key: BucketKey) -> Item:
        row, path = key.index, self.table.path(key.index)
        # an image has no rate that could be too low
        rule = FrameRule(key.num_frames, self.frame_interval, None if key.num_frames == 1 else self.target_fps)
        try:
            frames, fps, choice = read_clip(self.table, row, rule, self.seed, key.epoch, self.decoding)
        except UserError as error:
            raise naming_the_row(self.table, row, error) from error
        transform = get_transform(self.transform_names[is_image(path)], (key.height, key.width))
        video = transform(frames, generator=choice.rng)  # [3, T, H, W]
        ar = torch.tensor(key.height / key.width, dtype=torch.float32)
        return {"video": video, **describe(row, path, choice.caption, key[2:], fps, self.table.scores(row)), "ar": ar}

    def another(self, key: BucketKey, rng: torch.Generator) -> BucketKey | None:  # type: ignore[override]
        """Another sample of the same bucket in that epoch, to stand in for `key`."""
        bucket = self.assign(key.epoch).bucket
        rows = np.flatnonzero(bucket == bucket[key.index])
        rows = rows[rows != key.index]
        return key._replace(index=int(rows[int(torch.randint(len(rows), (1,), generator=rng))])) if len(rows) else None

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples, except the pixels in the files."""
        sizes = b"".join(array.tobytes() for array in (self.num_frames, self.height, self.width))
        rate = () if self.target_fps is None else (self.target_fps,)
        decoding = () if self.decoding == DEFAULT else (self.decoding,)
        choice = () if self.bucket_choice == "drawn" else (self.bucket_choice,)
        settings = (
            self.frame_interval,
            self.seed,
            self.transform_names,
            self.buckets.fingerprint(),
            *rate,
            *decoding,
            *choice,
        )
        digest = hashlib.blake2b(sizes, digest_size=16)
        if self._slow is not None:  # what of the rates decides the buckets
            digest.update(np.asarray(self._intervals, np.float64).tobytes() + self._slow.tobytes())
        digest.update(repr((type(self).__name__, self.table.fingerprint(), settings)).encode())
        return digest.hexdigest()

    def _read_table(self, data_path: str, root: str | None, text_columns: Sequence[str]) -> Table:
        return read_table(data_path, root, text_columns, max_bad_share=self.bad_files.at_start)

    def _probe(self, row: int) -> VideoInfo:
        """What is known of a row's file; a `UserError` where it cannot be read."""
        return probe(self.table.path(row))


def _sizes_and_rates(
    table: Table, probe_row: Callable[[int], VideoInfo], *, with_fps: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Frames, height, width and, `with_fps`, the rate of every row, [N] each, from the table or from the files."""
    frames, height, width = (np.array(column, np.int32) for column in (table.num_frames, table.height, table.width))
    fps = table.fps.copy()
    is_unknown = (frames <= 0) | (height <= 0) | (width <= 0)
    if with_fps:
        is_unknown |= np.isnan(fps) & (frames != 1)  # an image needs none
    missing, unreadable = np.flatnonzero(is_unknown).tolist(), []
    if missing:
        columns = "num_frames, height, width and fps" if with_fps else "num_frames, height and width"
        logger.info(
            "%s: looking up the size of %d files; columns %s would save this.", table.source, len(missing), columns
        )
    for row in progress_bar(missing, desc="reading sizes", unit="file", disable=len(missing) < 1000):
        try:
            info = probe_row(row)
        except UserError as error:
            unreadable.append(str(error))
            frames[row] = UNKNOWN
            continue
        frames[row] = frames[row] or info.num_frames
        height[row], width[row], fps[row] = info.height, info.width, info.fps
    if unreadable:
        count, first = len(unreadable), unreadable[0]
        logger.warning("%s: %d files cannot be read and are in no bucket, the first: %s", table.source, count, first)
    return frames, height, width, fps
