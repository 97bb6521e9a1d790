"""Training from records of latents with their captions: the caches that NOVA's guide builds, or any of the same fields.

A record has `moments` (fp16 bytes of [2C, h, w] or [2C, T, h, w], mean and log variance), their `shape`, a long `caption`, a short
`text`, and, of videos, `flow`, the optical-flow score. Such a folder is a table, a dataset and a cache at once.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.cache.features import StoredFlow
from opensora.datasets.cache.original_records import OriginalRecords, is_original
from opensora.datasets.cache.records import RecordReader
from opensora.datasets.datasets import Item, describe
from opensora.datasets.sampler import SampleKey
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

FIELDS = ("moments", "shape", "caption")  # and often text
FIRST_SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)


@DATASETS.register_module()
class RecordVideoTextDataset:
    """Samples of a folder that `RecordWriter`, or that of `codewithgpu`, wrote with the features of NOVA's guide; all of one size.

    A sample is that of `CachedVideoTextDataset`: `moments` [2C, T, h, w] float32, `text`, sizes, and `flow` where records
    have it.

    Args:
        short_text_prob: How often a sample has its short text; of records without one, the caption's first sentence.
        fps: Of all videos, which records do not have; 12 is NOVA's.
        stride: Frames and pixels (time, height, width) of a latent cell.
        seed: With epoch and index, it decides which of the two texts.
        cache_dir: Where `tools.cache_features --what flow` measured `flow` for records that have none.
        vae_fingerprint: Of the VAE in use; compared where the records' settings have `vae`.
    """

    stored = ("vae",)

    def __init__(
        self,
        data_path: str,
        short_text_prob: float = 0.5,
        fps: float = 12.0,
        stride: tuple[int, int, int] = (4, 8, 8),
        seed: int = 42,
        cache_dir: str | None = None,
        vae_fingerprint: str | None = None,
    ) -> None:
        if not 0 <= short_text_prob <= 1:
            raise UserError(f"dataset.short_text_prob={short_text_prob} is not in [0, 1].")
        self.records = OriginalRecords(data_path) if is_original(data_path) else RecordReader(data_path)
        features = self.records.features
        if missing := [name for name in FIELDS if name not in features]:
            raise UserError(
                f"{data_path}: records without {', '.join(missing)}; a RecordVideoTextDataset needs {', '.join(FIELDS)}. They have "
                f"{', '.join(features)}."
            )
        made_by = self.records.settings.get("vae")
        if None not in (made_by, vae_fingerprint) and made_by != vae_fingerprint:
            raise UserError(f"{data_path} holds latents of another VAE ({made_by}, not {vae_fingerprint}).")
        if not len(self.records):
            raise UserError(f"{data_path} holds no records.")
        self.path, self.seed = Path(data_path), seed
        self.short_text_prob, self.fps, self.stride = short_text_prob, fps, stride
        shapes = {_with_time(self.records.at(i, ("shape",))["shape"]) for i in range(len(self))}
        if len(shapes) > 1:
            shown = " and ".join("x".join(map(str, shape)) for shape in sorted(shapes)[:2])
            raise UserError(f"{data_path}: records of {len(shapes)} sizes, such as {shown}; write one folder for each.")
        self.shape = shapes.pop()  # 2C, T, h, w
        T, h, w = self.shape[1:]
        self.video_size = (
            (T - 1) * stride[0] + 1,
            h * stride[1],
            w * stride[2],
        )  # frames, height and width of the clips
        self.content = hashlib.blake2b(repr(self.records.content_names()).encode(), digest_size=8).hexdigest()
        self.flow: StoredFlow | None = None
        if cache_dir is not None:
            if "flow" in features:
                raise UserError(
                    f"dataset.cache_dir={cache_dir!r} has no effect: the records of {data_path} have their flow. Leave it out."
                )
            self.flow = StoredFlow(cache_dir)
            if lacking := sum(str(i) not in self.flow.records for i in range(len(self))):
                raise UserError(f"{cache_dir} has no flow of {lacking} of {len(self)} records. {self.flow.remedy}")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: SampleKey) -> Item:
        record = self.records[key.index]
        caption = record["caption"]
        if float(torch.rand(1, generator=generator(self.seed, "text", key.epoch, key.index))) < self.short_text_prob:
            caption = record.get("text") or first_sentence(caption)
        scores = {"flow": float(record["flow"])} if "flow" in record else {}
        if self.flow is not None:
            scores = {"flow": self.flow.of(str(key.index), self.content)}
        path = self.path / f"record-{key.index}"
        return {"moments": moments_of(record), **describe(key.index, path, caption, self.video_size, self.fps, scores)}

    def all_captions(self) -> list[str]:
        """The captions that samples can have, each once."""
        chosen: dict[str, None] = {}
        for number in range(len(self)):
            record = self.records.at(number, ("caption", "text"))
            chosen |= {record["caption"]: None, (record.get("text") or first_sentence(record["caption"])): None}
        return list(chosen)

    def fingerprint(self) -> str:
        """A hash of what decides the samples: the records' checksums are in the names of their files."""
        names = self.records.content_names()
        flow = () if self.flow is None else (self.flow.fingerprint(),)
        settings = (self.short_text_prob, self.fps, self.stride, self.seed, len(self), *flow)
        return hashlib.blake2b(repr((type(self).__name__, names, settings)).encode(), digest_size=16).hexdigest()


def first_sentence(caption: str) -> str:
    """Up to the first `.`, `!` or `?` that ends a word; all of it, if there is none."""
    found = FIRST_SENTENCE.match(caption)
    return found.group().strip() if found else caption


def moments_of(record: dict[str, Any]) -> Tensor:
    """`[2C, T, h, w]` float32 of a record's bytes in fp16 (of twice as many, in fp32), or of its tensor."""
    shape = _with_time(record["shape"])
    value = record["moments"]
    if isinstance(value, bytes):
        dtype = np.float32 if len(value) == 4 * np.prod(shape) else np.float16
        value = torch.from_numpy(np.frombuffer(value, dtype).copy())
    if value.numel() != np.prod(shape):
        raise UserError(
            f"a record's moments are {value.numel()} numbers of fp16, but its shape is {'x'.join(map(str, shape))}."
        )
    return value.reshape(shape).float()


def _with_time(shape: Any) -> tuple[int, ...]:
    """[2C, T, h, w] of a record's shape, whose T may be missing."""
    shape = tuple(int(n) for n in shape)
    if len(shape) not in (3, 4):
        raise UserError(
            f"a record's shape is {'x'.join(map(str, shape))}; it is that of one clip's moments, [2 C, T, h, w] or [2 C, h, w]."
        )
    return (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape
