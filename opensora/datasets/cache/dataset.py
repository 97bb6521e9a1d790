"""Training from what `tools.cache_features` wrote: the samples of `VideoTextDataset`, without decoding and encoding."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from opensora.datasets.cache.flow import FOLDER as FLOW
from opensora.datasets.cache.flow import StoredFlow
from opensora.datasets.cache.moments import (
    CLIPS,
    REMEDY,
    SAMPLES,
    Choices,
    clip_settings,
    occurrences_of_rows,
    refuse_rate_of_clips,
    sample_key,
    sample_settings,
    source_hash,
)
from opensora.datasets.cache.records import METADATA, RecordReader, refuse_other
from opensora.datasets.cache.text import TextFeatures
from opensora.datasets.datasets import ClipRows, Item, describe, draw_choice, wrong_length
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import MAX_CHECKED_FILES, UNKNOWN, complain_about_rows, read_table
from opensora.datasets.video.files import IMAGE_FPS, BadFile, Decoding, is_image
from opensora.datasets.video.read_video import count_frames
from opensora.registry import DATASETS
from opensora.utils.errors import UserError


@DATASETS.register_module()
class CachedVideoTextDataset:
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
        shared = (self.image_size, transform_name, found["dtype"])
        vae, choices = vae_fingerprint or found["vae"], Choices(use_image_transform, Decoding.of(decode), target_fps)
        expected = clip_settings(vae, *shared, choices)
        if content == SAMPLES:
            expected = sample_settings(vae, (num_frames, frame_interval), *shared, seed, choices)
        refuse_other(self.cache_dir / content, found, expected, "settings", REMEDY.format("ANOTHER_FOLDER"))
        self.occurrence = occurrences_of_rows(self.table)  # [N]
        if content == CLIPS:
            self._refuse_missing_and_resized()
        self.clips = ClipRows(
            self.table, num_frames, frame_interval, seed, short_clips, count=self._count, target_fps=target_fps
        )
        self.epochs = self._count_epochs() if content == SAMPLES else 0
        self.text = TextFeatures(cache_dir) if text == "features" else None
        self.flow = self._stored_flow()
        if self.text is not None and len(self.table) <= MAX_CHECKED_FILES:
            wanted = (caption for row in range(len(self.table)) for caption in self.table.captions(row))
            if missing := self.text.missing(wanted):
                raise self.text.unknown(missing)
        self._verified = np.zeros(len(self.table), bool)

    def __len__(self) -> int:
        return len(self.clips)

    def path_of(self, index: int) -> Path:
        """The file of sample `index`."""
        return self.table.path(self.clips.row(index))

    def __getitem__(self, key: SampleKey) -> Item:
        row = self.clips.row(key.index)
        item = self._window(key.epoch, row) if self.content == CLIPS else self._sample(key.epoch, row)
        if self.text is not None:
            item["y"], item["mask"] = self.text.one(item["text"])
        return item

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples."""
        settings = [*sorted(self.records.settings.items()), self.content, self.epochs, self.text and self.text.settings]
        flow = () if self.flow is None else (self.flow.fingerprint(),)
        parts = (type(self).__name__, self.table.fingerprint(), self.clips.settings(), settings, *flow)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def _window(self, epoch: int, row: int) -> Item:
        """Of whole clips."""
        clips, path, stated = self.clips, self.table.path(row), int(self.table.num_frames[row])
        record = self.records.read(self.table.name(row), ("source", "num_frames", "fps", "moments"))
        moments: Tensor = record["moments"]  # [2C, stored frames, h, w]
        stored = moments.shape[1]
        if stated > stored:
            raise UserError(f"{self.table.where(row)}: {wrong_length(stated, stored, path)}")
        self._refuse_changed(row, record["source"], path)
        available = stated or record["num_frames"]
        choice = clips.choose(epoch, row, available - clips.needed + 1, available)
        if stored < clips.needed:
            raise clips.too_short(row, stored)
        start = min(choice.start, stored - clips.needed)  # of fewer frames than the file announces, the last ones
        moments = moments[:, start : start + clips.needed : clips.frame_interval].float().clone()
        fps = IMAGE_FPS if is_image(path) else record["fps"] / clips.frame_interval
        size, scores = (moments.shape[1], *self.image_size), self._scores(row, record["source"])
        return {"moments": moments, **describe(row, path, choice.caption, size, fps, scores)}

    def _sample(self, epoch: int, row: int) -> Item:
        """Of the samples of the first epochs."""
        path = self.table.path(row)
        record = self.records.read(self._key(row, epoch % self.epochs))
        self._refuse_changed(row, record["source"], path)
        choice = draw_choice(self.table, self.clips.seed, epoch, row, 1)  # of the caption: the window is in the record
        scores = self._scores(row, record["source"])
        described = describe(row, path, choice.caption, record["size"], record["fps"], scores)
        return {"moments": record["moments"].float().clone(), **described}

    def _key(self, row: int, epoch: int = 0) -> str:
        name = self.table.name(row)
        return name if self.content == CLIPS else sample_key(name, int(self.occurrence[row]), epoch)

    def _count(self, row: int) -> int:
        """Frames of a row's file; of one that is in no record, as one that was too short for a sample is, by the file."""
        if self._key(row) in self.records:
            return self.records.read(self._key(row), ("num_frames",))["num_frames"]
        try:
            return count_frames(self.table.path(row))
        except BadFile:
            return UNKNOWN

    def _count_epochs(self) -> int:
        rows = self.clips.kept.tolist()
        if missing := [row for row in rows if self._key(row) not in self.records]:
            raise complain_about_rows(self.table, missing, f"are not in the cache {self.cache_dir}", self.remedy)
        epochs = 1
        while all(self._key(row, epochs) in self.records for row in rows):
            epochs += 1
        return epochs

    def _stored_flow(self) -> StoredFlow | None:
        """The cache's scores, where the table lacks some."""
        lacking = self.table.without_flow()
        if not lacking or not (self.cache_dir / FLOW / METADATA).is_file():
            return None
        found = StoredFlow(self.cache_dir)
        names = {self.table.name(row): row for row in reversed(lacking)}
        if missing := sorted(names[name] for name in found.missing(names)):
            raise complain_about_rows(self.table, missing, "have no flow, here or in the cache", found.remedy)
        return found

    def _scores(self, row: int, source: str) -> dict[str, float]:
        scores = self.table.scores(row)
        if self.flow is None or not math.isnan(scores.get("flow", math.nan)):
            return scores
        return {**scores, "flow": self.flow.of(self.table.name(row), source)}

    def _refuse_missing_and_resized(self) -> None:
        names = self.table.rows["path"].tolist()
        if missing := [row for row, name in enumerate(names) if name not in self.records]:
            raise complain_about_rows(self.table, missing, f"are not in the cache {self.cache_dir}", self.remedy)
        changed = []
        for row, name in enumerate(names if len(names) <= MAX_CHECKED_FILES else ()):
            size = self.records.read(name, ("source",))["source"].partition("-")[0]
            with suppress(OSError):  # deleted or moved, which it may be
                if self.table.path(row).stat().st_size != int(size):
                    changed.append(row)
        if changed:
            what = f"were changed after the cache {self.cache_dir} was written"
            raise complain_about_rows(self.table, changed, what, self.remedy)

    def _refuse_changed(self, row: int, source: str, path: Path) -> None:
        """Compare contents, once in each process; sizes were compared at the start."""
        if not self._verified[row] and path.is_file() and source_hash(path) != source:
            raise UserError(
                f"{self.table.where(row)}: {path} was changed after the cache {self.cache_dir} was written. {self.remedy}"
            )
        self._verified[row] = True
