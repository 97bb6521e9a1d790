"""Training from what `tools.cache_features` wrote: the samples of `VideoTextDataset`, without decoding and encoding."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from opensora.datasets.cache.features import FLOW, StoredFlow, TextFeatures
from opensora.datasets.cache.moments import (
    CLIPS,
    REMEDY,
    SAMPLES,
    Choices,
    cache_settings,
    occurrences_of_rows,
    refuse_rate_of_clips,
    sample_key,
    source_hash,
)
from opensora.datasets.cache.records import METADATA, RecordReader, refuse_other
from opensora.datasets.datasets import (
    ClipRows,
    Item,
    TableDataset,
    describe,
    draw_choice,
    frames_if_readable,
    read_clip,
    wrong_length,
)
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import MAX_CHECKED_FILES, Table, complain_about_rows, read_table
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.files import IMAGE_FPS, Decoding, is_image
from opensora.datasets.video.read_video import FrameRule
from opensora.registry import DATASETS
from opensora.utils.errors import UserError


class FromCache:
    """What datasets of stored moments share: a caption's features, flow, and that clips are those that were encoded."""

    table: Table
    cache_dir: Path
    remedy: str

    def _open_features(self, text: str) -> None:
        self.text = TextFeatures(self.cache_dir) if text == "features" else None
        self.stored: tuple[str, ...] = ("vae",) if self.text is None else ("vae", "text_encoder")
        if self.text is not None and len(self.table) <= MAX_CHECKED_FILES:
            self.text.check_cached(caption for row in range(len(self.table)) for caption in self.table.captions(row))
        self.flow: StoredFlow | None = None
        lacking = self.table.without_flow()
        if lacking and (self.cache_dir / FLOW / METADATA).is_file():
            self.flow = StoredFlow(self.cache_dir)
            names = {self.table.name(row): row for row in reversed(lacking)}
            if unknown := sorted(row for name, row in names.items() if name not in self.flow.records):
                what = "have no flow, here or in the cache"
                raise complain_about_rows(self.table, unknown, what, self.flow.remedy)
        self._verified = np.zeros(len(self.table), bool)

    def _refuse_resized(self, source_of: Callable[[int], str]) -> None:
        """At the start, sizes are compared; contents are when a process first reads a clip. The clips may be elsewhere by now."""
        changed = []
        rows = range(len(self.table))
        for row in rows if len(rows) <= MAX_CHECKED_FILES else ():
            size = source_of(row).partition("-")[0]
            with suppress(OSError):
                if size and self.table.path(row).stat().st_size != int(size):
                    changed.append(row)
        if changed:
            what = f"were changed after the cache {self.cache_dir} was written"
            raise complain_about_rows(self.table, changed, what, self.remedy)

    def _refuse_changed(self, row: int, source: str) -> None:
        path = self.table.path(row)
        if not self._verified[row] and path.is_file() and source_hash(path) != source:
            raise UserError(
                f"{self.table.where(row)}: {path} was changed after the cache {self.cache_dir} was written. {self.remedy}"
            )
        self._verified[row] = True

    def _describe(self, row: int, caption: str, size: Sequence[int], fps: float, source: str) -> Item:
        """What goes with the stored moments of a row."""
        scores = self.table.scores(row)
        if self.flow is not None and math.isnan(scores.get("flow", math.nan)):
            scores["flow"] = self.flow.of(self.table.name(row), source)
        item = describe(row, self.table.path(row), caption, size, fps, scores)
        if self.text is not None:
            item["y"], item["mask"] = self.text.one(caption)
        return item


@DATASETS.register_module()
class CachedVideoTextDataset(FromCache, TableDataset):
    """`VideoTextDataset` with `moments` [2C, T, h, w] float32 in place of `video`; the choices are the same.

    Where the table has no optical-flow score (column `flow`), it is that of the cache, if it was measured.

    Args:
        data_path: As for `VideoTextDataset`, like everything not named here.
        cache_dir: Folder that `tools.cache_features` wrote.
        image_size: Must be the cache's, like `transform_name`, `use_image_transform` and `decode`, and for samples like all
            that decides them.
        content: "clips": windows of whole clips; "samples": the samples of the first epochs, again and again. Which of
            them the cache holds depends on the VAE, see the tool.
        text: "captions": samples have `text`; "features": also the encoded caption, `y` [1, L, D] and `mask` [L].
        vae_fingerprint: Of the VAE in use, which must be that of the cache. None: it is not checked.
        target_fps: With content "samples" only.
    """

    def __init__(  # noqa: PLR0913
        self,
        data_path: str,
        cache_dir: str,
        num_frames: int = 16,
        frame_interval: int = 1,
        image_size: tuple[int, int] = (256, 256),
        root: str | None = None,
        transform_name: str = "center",
        text_columns: Sequence[str] = ("text",),
        seed: int = 42,
        short_clips: Literal["error", "drop"] = "error",
        content: Literal["clips", "samples"] = "clips",
        text: Literal["captions", "features"] = "captions",
        vae_fingerprint: str | None = None,
        target_fps: float | None = None,
        use_image_transform: bool = False,  # noqa: FBT001, FBT002  (a config's key)
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        if content not in (CLIPS, SAMPLES) or text not in ("captions", "features"):
            raise UserError(
                f"content={content!r}, text={text!r}: content is clips or samples, text is captions or features."
            )
        if content == CLIPS:
            refuse_rate_of_clips(target_fps)
        # the clips themselves may be elsewhere by now
        self.table = read_table(data_path, root, text_columns, check_files=False)
        self.cache_dir, self.content = Path(cache_dir), content
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.remedy = REMEDY.format(cache_dir) + (" --epochs N" if content == SAMPLES else "")
        self.records = RecordReader(self.cache_dir / content, remedy=self.remedy)
        found = self.records.settings
        self.choices = choices = Choices(use_image_transform, Decoding.of(decode), target_fps)
        window = {"num_frames": num_frames, "frame_interval": frame_interval, "seed": seed}
        expected = cache_settings(
            vae_fingerprint or found["vae"],
            self.image_size,
            transform_name,
            found["dtype"],
            choices,
            **(window if content == SAMPLES else {}),
        )
        refuse_other(self.cache_dir / content, found, expected, "settings", REMEDY.format("ANOTHER_FOLDER"))
        self.occurrence = occurrences_of_rows(self.table)  # [N]
        if content == CLIPS:
            self._check_cached(range(len(self.table)))
            self._refuse_resized(lambda row: self.records.read(self._key(row), ("source",))["source"])
        rule = FrameRule(num_frames, frame_interval, target_fps)
        self.clips = ClipRows(self.table, rule, seed, short_clips, self._count)
        self.rows = self.clips.kept
        self.epochs = 0
        if content == SAMPLES:
            self._check_cached(self.rows.tolist())
            self.epochs = 1
            while all(self._key(row, self.epochs) in self.records for row in self.rows.tolist()):
                self.epochs += 1
        self._open_features(text)

    def __getitem__(self, key: SampleKey) -> Item:
        row = int(self.rows[key.index])
        record = self.records.read(self._key(row, key.epoch % max(self.epochs, 1)))
        self._refuse_changed(row, record["source"])
        if self.content == CLIPS:
            moments, caption, fps = self._window(key.epoch, row, record)
            size = (moments.shape[1], *self.image_size)
        else:
            moments, size, fps = record["moments"], record["size"], record["fps"]
            caption = draw_choice(self.table, self.clips.seed, key.epoch, row, 1).caption
        return {"moments": moments.float().clone(), **self._describe(row, caption, size, fps, record["source"])}

    def pixels(self, key: SampleKey) -> Tensor:
        """[3, T, H, W] in [-1, 1], what the moments of a sample were made of; a `UserError` where its file cannot be read."""
        row, path = int(self.rows[key.index]), self.path_of(key.index)
        choices, name = self.choices, self.records.settings["transform_name"]
        epoch = key.epoch if self.content == CLIPS else key.epoch % self.epochs
        frames, _, choice = read_clip(self.table, row, self.clips.rule, self.clips.seed, epoch, choices.decode)
        transform = get_transform(
            "adm_center" if choices.use_image_transform and is_image(path) else name, self.image_size
        )
        return transform(frames, generator=choice.rng)

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples."""
        settings = [*sorted(self.records.settings.items()), self.content, self.epochs, self.text and self.text.settings]
        flow = () if self.flow is None else (self.flow.fingerprint(),)
        return self._hash(self.clips.settings(), settings, *flow)

    def _window(self, epoch: int, row: int, record: dict[str, Any]) -> tuple[Tensor, str, float]:
        """A window of the moments of a whole clip, its caption and its rate."""
        clips, path, stated = self.clips, self.table.path(row), int(self.table.num_frames[row])
        needed, interval, stored = clips.rule.needed, clips.rule.frame_interval, record["moments"].shape[1]
        if stated > stored:
            raise UserError(f"{self.table.where(row)}: {wrong_length(stated, stored, path)}")
        available = stated or record["num_frames"]
        if min(available, stored) < needed:
            raise clips.too_short(row, min(available, stored))
        choice = draw_choice(self.table, clips.seed, epoch, row, available - needed + 1)
        start = min(choice.start, stored - needed)  # of fewer frames than the file announces, the last ones
        moments = record["moments"][:, start : start + needed : interval]
        return moments, choice.caption, IMAGE_FPS if is_image(path) else record["fps"] / interval

    def _key(self, row: int, epoch: int = 0) -> str:
        name = self.table.name(row)
        return name if self.content == CLIPS else sample_key(name, self.occurrence[row], epoch)

    def _count(self, row: int) -> int:
        """Frames of a row's file; of one that is in no record, as one that was too short for a sample is, by the file."""
        if self._key(row) in self.records:
            return self.records.read(self._key(row), ("num_frames",))["num_frames"]
        return frames_if_readable(self.table.path(row))

    def _check_cached(self, rows: Sequence[int]) -> None:
        if missing := [row for row in rows if self._key(row) not in self.records]:
            raise complain_about_rows(self.table, missing, f"are not in the cache {self.cache_dir}", self.remedy)
