"""Training from what `tools.cache_features` wrote: the samples of `VideoTextDataset`, without decoding and encoding."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from opensora.datasets.cache.flow import StoredFlow
from opensora.datasets.cache.moments import (
    CLIPS,
    REMEDY,
    SAMPLES,
    clip_settings,
    occurrences,
    sample_key,
    sample_settings,
    source_hash,
)
from opensora.datasets.datasets import ClipRows, Item, describe, last_start, wrong_length
from opensora.datasets.files import IMAGE_FPS, is_image
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table import MAX_CHECKED_FILES, complain_about_rows, read_table
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.records import RecordReader, refuse_other
from opensora.utils.text_features import TextFeatures

SMALL = ("source", "num_frames", "fps")


@DATASETS.register_module()
class CachedVideoTextDataset:
    """`VideoTextDataset` with `moments` [2C, T, h, w] float32 in place of `video`; the choices are the same.

    Clips of which the table does not say how much moves (column `flow`) have it from the cache, if that was measured.

    Args:
        data_path: As for `VideoTextDataset`, like everything not named here.
        cache_dir: Folder that `tools.cache_features` wrote.
        image_size: Must be the cache's, like `transform_name`.
        content: "clips": windows of whole clips; "samples": the samples of the first epochs, again and again. Which of
            them the cache holds depends on the VAE, see the tool.
        text: "captions": samples have `text`; "features": also `y` [1, L, D] and `mask` [L], the captions as the text
            encoder gave them, so that it is not called.
        vae_fingerprint: Of the VAE in use: the cache must be its own. None: it is not checked.
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
    ) -> None:
        if content not in (CLIPS, SAMPLES) or text not in ("captions", "features"):
            raise UserError(
                f"content={content!r}, text={text!r}: content is clips or samples, text is captions or features."
            )
        # the clips themselves may be elsewhere by now
        self.table = read_table(data_path, root, text_columns, check_files=False)
        self.cache_dir, self.content = Path(cache_dir), content
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.remedy = REMEDY.format(cache_dir) + (" --epochs N" if content == SAMPLES else "")
        self.records = RecordReader(self.cache_dir / content, remedy=self.remedy)
        found = self.records.settings
        shared = (self.image_size, transform_name, found["dtype"])
        expected = clip_settings(vae_fingerprint or found["vae"], *shared)
        if content == SAMPLES:
            expected = sample_settings(vae_fingerprint or found["vae"], (num_frames, frame_interval), *shared, seed)
        refuse_other(self.cache_dir / content, found, expected, "settings", REMEDY.format("ANOTHER_FOLDER"))
        if content == CLIPS:
            self._refuse_missing()
        self.clips = ClipRows(self.table, num_frames, frame_interval, seed, short_clips, count=self._count)
        self.occurrence = dict(occurrences(self))
        self.epochs = self._count_epochs() if content == SAMPLES else 0
        self.text = TextFeatures(cache_dir) if text == "features" else None
        self.flow = self._stored_flow()
        self._refuse_unknown_captions()
        self._verified: set[int] = set()

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

    # ------------------------------------------------------------------------------------------------ whole clips

    def _window(self, epoch: int, row: int) -> Item:
        clips, path, stated = self.clips, self.table.path(row), int(self.table.num_frames[row])
        record = self.records.read(self.table.name(row), (*SMALL, "moments"))
        moments: Tensor = record["moments"]  # [2C, stored frames, h, w]
        stored = moments.shape[1]
        if stated > stored:
            raise UserError(f"{self.table.where(row)}: {wrong_length(stated, stored, path)}")
        self._refuse_changed(row, record["source"], path)
        choice = clips.choose(epoch, row, stated or record["num_frames"])
        start = choice.start
        if start + clips.needed > stored:
            start = last_start(stored, clips.needed, clips.too_short(row, stored))
        moments = moments[:, start : start + clips.needed : clips.frame_interval].float().clone()
        fps = IMAGE_FPS if is_image(path) else record["fps"] / clips.frame_interval
        size, scores = (moments.shape[1], *self.image_size), self._scores(row, record["source"])
        return {"moments": moments, **describe(row, path, choice.caption, size, fps, scores)}

    def _count(self, row: int) -> int:
        return self._small(row)["num_frames"]

    def _small(self, row: int) -> dict[str, Any]:
        return self.records.read(self._key(row), SMALL)

    def _key(self, row: int) -> str:
        name = self.table.name(row)
        return name if self.content == CLIPS else sample_key(name, self.occurrence[row], 0)

    # ------------------------------------------------------------------------------------------------ fixed samples

    def _sample(self, epoch: int, row: int) -> Item:
        path = self.table.path(row)
        record = self.records.read(sample_key(self.table.name(row), self.occurrence[row], epoch % self.epochs))
        self._refuse_changed(row, record["source"], path)
        choice = self.clips.choose(epoch, row, int(self.table.num_frames[row]) or record["num_frames"])
        scores = self._scores(row, record["source"])
        described = describe(row, path, choice.caption, record["size"], record["fps"], scores)
        return {"moments": record["moments"].float().clone(), **described}

    def _count_epochs(self) -> int:
        rows = {row: self.table.name(row) for row in self.occurrence}
        missing = [row for row, name in rows.items() if sample_key(name, self.occurrence[row], 0) not in self.records]
        if missing:
            raise complain_about_rows(self.table, missing, f"are not in the cache {self.cache_dir}", self.remedy)
        epochs = 1
        while all(sample_key(name, self.occurrence[row], epochs) in self.records for row, name in rows.items()):
            epochs += 1
        return epochs

    # ------------------------------------------------------------------------------------------------ flow

    def _stored_flow(self) -> StoredFlow | None:
        """The cache's scores, where the table lacks some."""
        lacking = self.table.without_flow()
        found = StoredFlow.beside(self.cache_dir) if lacking else None
        if found is not None:
            names = {self.table.name(row): row for row in reversed(lacking)}
            if missing := [names[name] for name in found.missing(names)]:
                raise complain_about_rows(
                    self.table, sorted(missing), "have no flow, here or in the cache", found.remedy
                )
        return found

    def _scores(self, row: int, source: str) -> dict[str, float]:
        scores = self.table.scores(row)
        if self.flow is None or not math.isnan(scores.get("flow", math.nan)):
            return scores
        return {**scores, "flow": self.flow.of(self.table.name(row), source)}

    # ------------------------------------------------------------------------------------------------ what is refused

    def _refuse_missing(self) -> None:
        names = self.table.rows["path"].tolist()
        if missing := [row for row, name in enumerate(names) if name not in self.records]:
            raise complain_about_rows(self.table, missing, f"are not in the cache {self.cache_dir}", self.remedy)
        if len(names) > MAX_CHECKED_FILES:
            return
        sizes = [(_size(self.table.path(row)), self._small(row)["source"]) for row in range(len(names))]
        known = [int(source.partition("-")[0]) for _, source in sizes]
        if changed := [i for i, (size, _) in enumerate(sizes) if size not in (None, known[i])]:
            what = f"were changed after the cache {self.cache_dir} was written"
            raise complain_about_rows(self.table, changed, what, self.remedy)

    def _refuse_changed(self, row: int, source: str, path: Path) -> None:
        """Compare contents, once in each process; sizes were compared at the start."""
        if row in self._verified:
            return
        if path.is_file() and source_hash(path) != source:
            raise UserError(
                f"{self.table.where(row)}: {path} was changed after the cache {self.cache_dir} was written. {self.remedy}"
            )
        self._verified.add(row)

    def _refuse_unknown_captions(self) -> None:
        if self.text is None or len(self.table) > MAX_CHECKED_FILES:
            return
        wanted = (caption for row in range(len(self.table)) for caption in self.table.captions(row))
        if missing := self.text.missing(wanted):
            raise self.text.unknown(missing)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
