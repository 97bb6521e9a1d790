"""A table of clips as training samples."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.files import SHOWN_ROWS
from opensora.datasets.table.table import UNKNOWN, Table, complain_about_rows, has_extension, read_table
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.files import (
    DEFAULT,
    IMAGE_EXTENSIONS,
    IMAGE_FPS,
    BadFile,
    BadFiles,
    Decoding,
    TooFewFrames,
    is_image,
)
from opensora.datasets.video.read_video import FrameRule, count_frames, is_slow, open_clip, read_indices
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

Item = dict[str, Any]


class Choice(NamedTuple):
    """What is random about a sample."""

    caption: str
    start: int  # the first frame
    rng: torch.Generator  # for whatever else is drawn for it


def draw_choice(table: Table, seed: int, epoch: int, row: int, num_starts: int) -> Choice:
    """Caption and first frame of a row in an epoch; the frames 0 ... num_starts - 1 are possible starts."""
    rng = generator(seed, "sample", epoch, row)
    captions = table.captions(row)
    caption = captions[int(torch.randint(len(captions), (1,), generator=rng))]
    return Choice(caption, int(torch.randint(num_starts, (1,), generator=rng)), rng)


class TableDataset:
    """Samples of the rows of a table; `rows` [N] has the row of each."""

    table: Table
    rows: Sequence[int] | np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def path_of(self, index: int) -> Path:
        """The file of sample `index`."""
        return self.table.path(int(self.rows[index]))

    def another(self, key: SampleKey, rng: torch.Generator) -> SampleKey | None:
        """Any other sample, all of which have one size and length; None where there is one alone."""
        if len(self) == 1:
            return None
        return SampleKey(key.epoch, (key.index + int(torch.randint(1, len(self), (1,), generator=rng))) % len(self))

    def _hash(self, *settings: Any) -> str:
        text = repr((type(self).__name__, self.table.fingerprint(), *settings))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class ClipRows:
    """The rows of a table that can give a clip, and the random choices for them.

    Datasets of pixels and of cached latents share it: the same (seed, epoch, index) means the same window and caption.
    `count` gives the frames of a row that has no `num_frames` in the table.

    Attributes:
        kept: [N] int64, the rows that can give one.
        dropped: why others cannot -> how many, and which setting would keep them.
    """

    def __init__(
        self,
        table: Table,
        rule: FrameRule,
        seed: int,
        short_clips: Literal["error", "drop"],
        count: Callable[[int], int],
    ) -> None:
        if short_clips not in ("error", "drop"):
            raise UserError(f"short_clips={short_clips!r} is not one of error, drop.")
        self.table, self.rule, self.seed, self.short_clips = table, rule, seed, short_clips
        self.dropped: dict[str, tuple[int, str]] = {}
        num_frames, target_fps = rule.num_frames, rule.target_fps
        maybe = np.flatnonzero(has_extension(table.rows["path"], IMAGE_EXTENSIONS))  # some of these are animated
        images = [row for row in maybe.tolist() if is_image(table.path(row))] if num_frames > 1 or target_fps else []
        out = np.zeros(len(table), bool)
        out[images] = num_frames > 1
        what = f"are images, which cannot give {num_frames} frames"
        self._complain_or_drop(out, what, "images", "Train on images with num_frames=1.")
        if target_fps is not None:
            slow = is_slow(table.fps, target_fps)
            slow[images] = False
            what = f"have fewer than the {target_fps:g} frames a second of target_fps, so that frames would be repeated"
            self._complain_or_drop(slow, what, f"slower than target_fps={target_fps:g}", "Lower dataset.target_fps.")
            out |= slow
        lengths = table.num_frames
        if short_clips == "drop" and rule.needed > 1 and not lengths[~out].all():
            logger.info("%s: counting frames; a column num_frames would save this.", table.source)
            lengths = lengths.copy()
            unknown = np.flatnonzero((lengths == UNKNOWN) & ~out).tolist()
            for row in progress_bar(unknown, desc="counting frames", unit="file", delay=1):
                try:
                    lengths[row] = count(row)
                except UserError as error:
                    raise naming_the_row(table, row, error) from error
        needed = np.full(len(lengths), rule.needed, np.int64)
        if target_fps is not None:  # as far as the table has the rate of the file
            known = np.isfinite(table.fps)
            needed[known] = np.maximum(np.ceil(rule.span * table.fps[known] - 0.01).astype(np.int64) + 1, 1)
        short = (lengths > 0) & (lengths < needed) & ~out
        what = f"are shorter than the {rule.length} that {rule} needs"
        self._complain_or_drop(short, what, "too short", "Lower num_frames or frame_interval.")
        self.kept = np.flatnonzero(~(out | short))

    def too_short(self, row: int, available: int) -> UserError:
        """The error for a clip that has too few frames; a bad file where short clips should have been dropped."""
        return (BadFile if self.short_clips == "drop" else UserError)(
            f"{self.table.where(row)}: {self.table.path(row)} has {available} frames, but {self.rule} needs {self.rule.length}. "
            "Use shorter clips, or leave such rows out with dataset.short_clips='drop'."
        )

    def settings(self) -> tuple[Any, ...]:
        """What, next to the table, decides the choices."""
        at_rate = () if self.rule.target_fps is None else (self.rule.target_fps,)
        return self.rule.num_frames, self.rule.frame_interval, self.seed, len(self.kept), *at_rate

    def _complain_or_drop(self, bad: np.ndarray, what: str, reason: str, remedy: str) -> None:
        """Treat rows that cannot give a clip as `short_clips` says; an error where none would be left."""
        number = int(bad.sum())
        if number == 0:
            return
        left = len(self.table) - sum(count for count, _ in self.dropped.values())
        if self.short_clips == "error" or number == left:
            advice = f"{remedy} Or leave such rows out with dataset.short_clips='drop'."
            raise complain_about_rows(self.table, np.flatnonzero(bad).tolist(), what, advice)
        names = ", ".join(map(self.table.name, np.flatnonzero(bad)[:SHOWN_ROWS].tolist()))
        more = f" and {number - SHOWN_ROWS} more" if number > SHOWN_ROWS else ""
        logger.warning(
            "%s: %d of %d rows are dropped: they %s (%s%s).",
            self.table.source,
            number,
            len(self.table),
            what,
            names,
            more,
        )
        self.dropped[reason] = (number, remedy)


@DATASETS.register_module()
class VideoTextDataset(TableDataset):
    """Clips of one length and size, with a caption.

    A sample is a dict: `video` [3, T, H, W] float32 in [-1, 1], `text`, `fps` (of the clip: the file's rate divided by
    `frame_interval`), `height`, `width`, `num_frames` (float32 numbers), `index` (the table's row) and `path`.

    Args:
        data_path: CSV, JSONL or parquet file with the columns `path` and `text_columns`, or a folder of videos and images
            with a caption next to each.
        num_frames: T.
        frame_interval: Take every n-th frame, exactly.
        image_size: Height and width.
        root: Folder that the paths are relative to; the table's own when None.
        transform_name: See `transforms.get_transform`.
        use_image_transform: Give images ADM's transform instead.
        text_columns: Each sample takes one of these captions; empty ones are skipped. () where there are no captions.
        seed: With epoch and row, it decides caption, window and crop.
        short_clips: What to do with clips that are too short, also images where `num_frames` is more than 1, or of which the
            table says that they are slower than `target_fps`: "error" or "drop".
        bad_files: What the loader does when a file cannot be read: "substitute" another sample, and say so, or "error".
        max_bad_share: The share of substituted samples above which a run ends.
        target_fps: Take what is shown at so many frames a second, of videos of any rate, instead of every n-th frame.
        decode: How files are decoded: a dict with the names of `files.Decoding`.
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
        bad_files: Literal["substitute", "error"] = "substitute",
        max_bad_share: float = 0.05,
        target_fps: float | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        self.decoding = Decoding.of(decode)
        self.bad_files = BadFiles(bad_files, max_bad_share, seed)
        self.table = table = read_table(data_path, root, text_columns, max_bad_share=self.bad_files.at_start)
        count = frames_if_readable if bad_files == "substitute" else count_frames
        rule = FrameRule(num_frames, frame_interval, target_fps)
        self.clips = ClipRows(table, rule, seed, short_clips, lambda row: count(table.path(row)))
        self.rows = self.clips.kept
        self.transform = get_transform(transform_name, image_size)
        self.image_transform = get_transform("adm_center" if use_image_transform else transform_name, image_size)
        decoded = () if self.decoding == DEFAULT else (self.decoding,)
        self._settings = (tuple(image_size), transform_name, use_image_transform, *decoded)

    def __getitem__(self, key: SampleKey) -> Item:
        row = int(self.rows[key.index])
        path = self.table.path(row)
        try:
            clip = read_clip(self.table, row, self.clips.rule, self.clips.seed, key.epoch, self.decoding)
        except TooFewFrames as error:  # the file is too short, or ends before its own index says
            raise self.clips.too_short(row, error.available) from error
        except UserError as error:
            raise naming_the_row(self.table, row, error) from error
        frames, fps, choice = clip
        transform = self.image_transform if is_image(path) else self.transform
        video = transform(frames, generator=choice.rng)  # [3, T, H, W]
        return {"video": video, **describe(row, path, choice.caption, video.shape[1:], fps, self.table.scores(row))}

    @property
    def sample_bytes(self) -> int:
        """Of one sample's video; 0 where files keep their size."""
        (height, width), transform = self._settings[:2]
        return 0 if transform == "none" else self.clips.rule.num_frames * height * width * 3 * 4

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples, except the pixels in the files."""
        return self._hash(self.clips.settings(), self._settings)


def read_clip(
    table: Table, row: int, rule: FrameRule, seed: int, epoch: int, decoding: Decoding = DEFAULT
) -> tuple[Tensor, float, Choice]:
    """Frames [T, H, W, 3] uint8 of a row's file, the clip's fps, and the choices behind them (`draw_choice`); a `TooFewFrames`, or
    another `BadFile`, where the file does not give a clip."""
    path, stated = table.path(row), int(table.num_frames[row])
    with open_clip(path, decoding) as clip:
        if stated > clip.num_frames:
            raise wrong_length(stated, clip.num_frames, path)
        seconds = clip.seconds()[: stated or None]
        try:
            fps = IMAGE_FPS if is_image(path) else rule.fps(clip.fps)
        except BadFile as error:
            raise BadFile(f"{path}: {error}") from error
        starts = rule.num_starts(seconds)
        if not starts:
            needs = f"{rule} needs {rule.length}; correct the table's num_frames and fps, or use longer clips"
            raise TooFewFrames(f"{path} has {len(seconds)} frames, but {needs}.", len(seconds))
        choice = draw_choice(table, seed, epoch, row, starts)
        try:
            frames = read_indices(path, clip, rule.indices(seconds, choice.start))
        except TooFewFrames as error:
            if stated:
                raise wrong_length(stated, error.available, path) from error
            # packets that hold no image: the last frames there are, instead of those that were announced
            seconds = seconds[: error.available]
            starts = rule.num_starts(seconds)
            if starts == 0:
                raise
            choice = choice._replace(start=starts - 1)
            frames = read_indices(path, clip, rule.indices(seconds, choice.start))
    return frames, fps, choice


def frames_if_readable(path: Path) -> int:
    """Frames of a file; of a bad one UNKNOWN, for it is replaced when its turn comes."""
    try:
        return count_frames(path)
    except BadFile:
        return UNKNOWN


def naming_the_row(table: Table, row: int, error: UserError) -> UserError:
    """The error, beginning with the table and the row."""
    where = table.where(row)
    kind = BadFile if isinstance(error, BadFile) else UserError  # the loader may substitute for a bad file
    return error if str(error).startswith(where) else kind(f"{where}: {error}")


def describe(
    row: int, path: Path, caption: str, size: Sequence[int], fps: float, scores: Mapping[str, float] | None = None
) -> Item:
    """What goes with a clip of `size` (T, H, W); `scores`: see `Table.scores`."""
    numbers = {"fps": fps, "num_frames": size[0], "height": size[1], "width": size[2], **(scores or {})}
    return {
        "text": caption,
        **{name: torch.tensor(float(value), dtype=torch.float32) for name, value in numbers.items()},
        "index": torch.tensor(row, dtype=torch.int64),
        "path": str(path),
    }


def wrong_length(stated: int, available: int, path: Path) -> BadFile:
    """The error for a table whose `num_frames` is more than the file has."""
    return BadFile(
        f"the table says num_frames={stated}, but {path} has {available}; correct or empty the cell, or fetch the file again."
    )
