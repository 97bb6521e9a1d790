"""Training from cached buckets: the samples of `VariableVideoTextDataset`, without decoding and encoding."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.buckets.bucket import move_to_legal_sizes
from opensora.datasets.cache.buckets import (
    BUCKETS,
    CONDITIONS,
    FILES,
    IMAGES,
    buckets_of_rows,
    has_one_window,
    left_out_key,
    record_key,
    sample_settings,
    settings_in,
)
from opensora.datasets.cache.dataset import FromCache
from opensora.datasets.cache.moments import REMEDY, occurrences_of_rows
from opensora.datasets.cache.records import METADATA, RecordReader, refuse_other
from opensora.datasets.datasets import Item, draw_choice
from opensora.datasets.sampler import BucketKey
from opensora.datasets.table.table import MAX_CHECKED_FILES, Table, complain_about_rows, read_table
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import VideoInfo
from opensora.registry import DATASETS
from opensora.utils.errors import UserError


@DATASETS.register_module()
class CachedVariableVideoTextDataset(VariableVideoTextDataset, FromCache):
    """`VariableVideoTextDataset` with `moments` [2C, t, h, w] float32 in place of `video`, from what `tools.cache_features` wrote.

    Buckets, captions and, in as many epochs as there are windows, also windows and crops are the same; later epochs repeat the
    windows. A clip that could not be read is a bad file here too. Where a model reads conditioning frames as channels, a sample
    also has `condition_latents` [K, C, t, h, w] of `condition_given` [K, t], and `image_features` [n L, D] if it reads these.

    Args:
        cache_dir: Folder that `tools.cache_features` wrote with the same settings, but for bucket_config, which may be smaller.
        text: "captions": samples have `text`; "features": also the encoded caption, `y` [1, L, D] and `mask` [L].
        vae_fingerprint: Of the VAE in use, which must be that of the cache. None: it is not checked.
        conditions: What of conditioning frames is read, by training: `condition_settings` of the model. None: nothing.
    """

    def __init__(
        self,
        data_path: str,
        bucket_config: Mapping[str, Mapping[Any, Any]],
        cache_dir: str,
        *,
        text: Literal["captions", "features"] = "captions",
        vae_fingerprint: str | None = None,
        conditions: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if text not in ("captions", "features"):
            raise UserError(f"text={text!r} is captions or features.")
        self.cache_dir, self.remedy = Path(cache_dir), REMEDY.format(cache_dir)
        self.files = RecordReader(self.cache_dir / FILES, remedy=self.remedy)
        super().__init__(data_path, bucket_config, **options)
        vae = {} if vae_fingerprint is None else {"vae": vae_fingerprint}
        readers = {BUCKETS: self._find(BUCKETS, vae)}
        if conditions is not None:
            readers[CONDITIONS] = self._find(CONDITIONS, {**vae, "kinds": conditions["kinds"]})
            if conditions["image_encoder"] is not None:
                readers[IMAGES] = self._find(IMAGES, {name: conditions[name] for name in ("image_encoder", "frames")})
        self.readers = readers
        move_to_legal_sizes(self.buckets, _Multiples(*readers[BUCKETS].settings["size_multiples"]))
        self.occurrence = occurrences_of_rows(self.table)  # [N]
        self._refuse_resized(lambda row: self.files.read(self.table.name(row), ("source",))["source"])
        self.windows = self._count_windows()
        self._open_features(text)
        self.stored += ("image_encoder",) * (IMAGES in readers)

    def __getitem__(self, key: BucketKey) -> Item:
        row, name, moments = key.index, self._key(key), self.readers[BUCKETS]
        found: dict[str, Any] = moments.read(name) if name in moments else {"problem": ""}
        if found["problem"]:
            raise BadFile(found["problem"])
        if lacking := [part for part, reader in self.readers.items() if name not in reader]:
            what = f"has no {' and '.join(lacking)} of {'x'.join(map(str, key[2:]))} in the cache {self.cache_dir}"
            raise UserError(f"{self.table.where(row)}: {self.table.path(row)} {what}. {self.remedy}")
        self._refuse_changed(row, found["source"])
        caption = draw_choice(self.table, self.seed, key.epoch, row, 1).caption
        item = {
            "moments": found["moments"].float().clone(),
            **self._describe(row, caption, key[2:], found["fps"], found["source"]),
            "ar": torch.tensor(key.height / key.width, dtype=torch.float32),
        }
        if CONDITIONS in self.readers:
            condition = self.readers[CONDITIONS].read(name)
            item["condition_latents"] = condition["latents"].float().clone()
            item["condition_given"] = condition["given"].clone()
        if IMAGES in self.readers:
            item["image_features"] = self.readers[IMAGES].read(name)["features"].float().clone()
        return item

    def pixels(self, key: BucketKey) -> Tensor:
        """[3, T, H, W] in [-1, 1], what the moments of a sample were made of; a `UserError` where its file cannot be read."""
        return super().__getitem__(key._replace(epoch=self._window(key)))["video"]

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples."""
        settings = [sorted(reader.settings.items()) for reader in self.readers.values()]
        more = (settings, self.windows, self.text and self.text.settings, self.flow and self.flow.fingerprint())
        return hashlib.blake2b(repr((super().fingerprint(), more)).encode(), digest_size=16).hexdigest()

    def _window(self, key: BucketKey) -> int:
        return 0 if has_one_window(self, key.index, key.num_frames) else key.epoch % self.windows

    def _key(self, key: BucketKey) -> str:
        return record_key(self, key._replace(epoch=self._window(key)), self.occurrence[key.index])

    def _find(self, part: str, own: Mapping[str, Any]) -> RecordReader:
        """The folder of a part that was made with the settings of this dataset and `own`."""
        expected = json.loads(json.dumps({**sample_settings(self), **own}))
        found = settings_in(self.cache_dir, part)
        wrong = {path: [k for k, v in expected.items() if other.get(k) != v] for path, other in found.items()}
        if not found:
            raise UserError(f"there is no cache of {part} in {self.cache_dir}. {self.remedy}")
        nearest = min(found, key=lambda path: (len(wrong[path]), -(path / METADATA).stat().st_mtime))
        refuse_other(nearest, {k: found[nearest].get(k) for k in expected}, expected, "settings", self.remedy)
        return RecordReader(nearest, remedy=self.remedy)

    def _count_windows(self) -> int:
        """How many windows of every clip there are.

        Raises:
            UserError: there is not even one; names the rows.
        """
        checked = np.linspace(0, len(self.table) - 1, min(len(self.table), MAX_CHECKED_FILES)).round().astype(int)
        sizes, rows, moments = [bucket[2:5] for bucket in self.buckets], set(checked.tolist()), self.readers[BUCKETS]
        wanted = [(row, sizes[i]) for row, i in buckets_of_rows(self.reachable()) if row in rows]

        def lacking(samples: Sequence[tuple[int, Any]], window: int) -> list[tuple[int, Any]]:
            keys = [record_key(self, BucketKey(window, row, *size), self.occurrence[row]) for row, size in samples]
            complete = np.logical_and.reduce([reader.present(keys) for reader in self.readers.values()])
            incomplete = [(samples[i], keys[i]) for i in np.flatnonzero(~complete).tolist()]
            # of a bad file there is nothing but its problem
            return [s for s, key in incomplete if key not in moments or not moments.read(key, ("problem",))["problem"]]

        if missing := lacking(wanted, 0):
            size = "x".join(map(str, missing[0][1]))
            what = f"have samples that are not in the cache {self.cache_dir}, such as the first as {size}"
            largest = dict(reversed(wanted)).items() if self.bucket_choice == "drawn" else set(wanted)
            hint = " Or, as it has the largest bucket of every clip, set dataset.bucket_choice='largest'."
            first = list(dict.fromkeys(row for row, _ in missing))
            raise complain_about_rows(self.table, first, what, self.remedy + hint * largest.isdisjoint(missing))
        several = [(row, size) for row, size in wanted if not has_one_window(self, row, size[0])]
        return next(window for window in itertools.count(1) if not several or lacking(several, window))

    def _read_table(self, data_path: str, root: str | None, text_columns: Sequence[str]) -> Table:
        """The rows that the table had when it was cached, whether their files are still there or not."""
        allowed = self.bad_files.at_start
        table = read_table(data_path, root, text_columns, check_files=False, max_bad_share=allowed)
        names = table.rows["path"].tolist()
        known = self.files.present(names)
        gone = np.flatnonzero(~known & self.files.present(map(left_out_key, names)))
        known[gone] = True
        if not known.all():
            what = f"are not in the cache {self.cache_dir}"
            raise complain_about_rows(table, np.flatnonzero(~known).tolist(), what, self.remedy)
        what = "their files did not exist when they were cached"
        if len(gone) > allowed * len(table):
            raise complain_about_rows(table, gone, f"are not in the cache {self.cache_dir}: {what}", self.remedy)
        return table.without(gone, what) if len(gone) else table

    def _probe(self, row: int) -> VideoInfo:
        record = self.files.read(self.table.name(row))
        if record["problem"]:
            raise BadFile(record["problem"])
        return VideoInfo(*(record[name] for name in VideoInfo._fields))


class _Multiples(NamedTuple):
    """The sizes that a VAE takes, for `move_to_legal_sizes`, without the VAE; it checked the lengths when it encoded."""

    height: int
    width: int

    def legal_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        height, width = (max(round(n / by), 1) * by for n, by in zip(size[1:], self, strict=True))
        return size[0], height, width
