"""What `tools.cache_features` stores next to moments: encoded captions, and the optical-flow scores of clips.

CACHE/text has each different caption once, found by the caption itself, so that rows may move and captions repeat. Only the tokens
of a caption are kept; padding is read back as zeros, where no denoiser looks. CACHE/flow has the scores of clips that have none in
their table, for models that are conditioned on them (NOVA); they are measured as in docs/how-to/scoring.md.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.datasets.cache.moments import Counts, Job, write_missing
from opensora.datasets.cache.records import RecordReader
from opensora.datasets.table.table import Table
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

TEXT, FLOW = "text", "flow"
TEXT_FEATURES = {"y": "tensor", "mask": "tensor", "caption": "string"}
FLOW_FEATURES = {"flow": "float64", "source": "string"}
NO_TEXT = ""  # the null condition of models without a table for it
DTYPES = ("auto", "fp32", "bf16", "fp16")


class TextFeatures:
    """Reads encoded captions from the folder that `tools.cache_features` wrote; a `UserError` where there are none."""

    def __init__(self, cache_dir: str | Path) -> None:
        self.cache_dir = Path(cache_dir)
        command = f"python -m tools.cache_features TRAIN_CONFIG --what text --cache-dir {cache_dir}"
        self.remedy = f"Write it with `{command}`."
        self.records = RecordReader(self.cache_dir / TEXT, remedy=self.remedy)
        self.settings: dict[str, Any] = self.records.settings
        self.output_dim: int = self.settings["output_dim"]
        self.model_max_length: int = self.settings["model_max_length"]

    def one(self, caption: str) -> tuple[Tensor, Tensor]:
        """y [1, L, D] in the dtype of the cache, mask [L] bool; a `UserError` where the caption is not in the cache."""
        self.check_cached([caption])
        record = self.records.read(caption, ("y", "mask"))
        stored = record["y"]  # [l, D], l <= L
        y = stored.new_zeros(1, self.settings["tokens"], stored.shape[1])
        y[0, : len(stored)] = stored
        return y, record["mask"].clone()

    def many(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """y [B, 1, L, D], mask [B, L]; see `one`."""
        y, mask = zip(*map(self.one, captions), strict=True)
        return torch.stack(y), torch.stack(mask)

    def check_cached(self, captions: Iterable[str]) -> None:
        """Raise a `UserError` where captions are not in the cache."""
        if missing := [caption for caption in dict.fromkeys(captions) if caption not in self.records]:
            shown = ", ".join(repr(caption[:60]) for caption in missing[:3])
            raise UserError(
                f"{len(missing)} captions are not in the text cache {self.cache_dir} ({len(self.records)} are), such as {shown}: "
                f"were they changed after it was written? {self.remedy}"
            )


class StoredFlow:
    """The optical-flow scores of a cache, by the key of a clip; a `UserError` where there are none."""

    def __init__(self, cache_dir: str | Path) -> None:
        self.remedy = (
            f"Measure it with `python -m tools.cache_features TRAIN_CONFIG --cache-dir {cache_dir} --what flow`."
        )
        self.records = RecordReader(Path(cache_dir) / FLOW, remedy=self.remedy)

    def of(self, key: str, source: str) -> float:
        """The score of a clip; a `UserError` where it was measured on other content than `source`."""
        record = self.records.read(key)
        if record["source"] != source:
            raise UserError(f"{self.records.path}: {key} was changed after its flow was measured. {self.remedy}")
        return record["flow"]

    def fingerprint(self) -> list[Any]:
        """What decides the scores."""
        return [sorted(self.records.settings.items()), self.records.content_names()]


def captions_of(table: Table) -> list[str]:
    """All different captions of a table's text columns, in its order."""
    return list(dict.fromkeys(caption for row in range(len(table)) for caption in table.captions(row)))


@torch.inference_mode()
def write_text(captions: Iterable[str], encoder: Any, job: Job, *, batch_size: int = 16) -> Counts:
    """Encode captions and "no text"; see `write_missing`. `job.dtype`: "auto" = that of the encoder, which loses nothing. A
    `UserError` where the folder holds features of another encoder, or features are not finite."""
    captions = list(dict.fromkeys(captions))
    y, _ = encoder.encode(captions[:1])  # for its size and dtype
    dtype = y.dtype
    if y.is_floating_point():
        dtype = getattr(encoder, "dtype", y.dtype) if job.dtype == "auto" else to_torch_dtype(job.dtype)
        captions = list(dict.fromkeys([*captions, NO_TEXT]))  # a class number cannot be empty
    settings = {
        "encoder": encoder.fingerprint(),
        "output_dim": encoder.output_dim,
        "model_max_length": encoder.model_max_length,
        "tokens": y.shape[2],
        "dtype": str(dtype).removeprefix("torch."),
    }
    mine = captions[job.world.rank :: job.world.size]
    index_of = {caption: i for i, caption in enumerate(mine)}
    encoded: dict[str, Any] = {}

    def encode(caption: str) -> dict[str, Any]:
        """A caption is encoded with those that come after it in this process's list."""
        nonlocal encoded
        if caption not in encoded:
            batch = mine[index_of[caption] : index_of[caption] + batch_size]
            y, mask = encoder.encode(batch)
            encoded = {text: row for text, *row in zip(batch, y[:, 0].to(dtype).cpu(), mask.cpu(), strict=True)}
        y, mask = encoded.pop(caption)  # [L, D], [L]
        y = y[: int(mask.nonzero().max()) + 1 if mask.any() else 0]
        if y.is_floating_point() and not y.isfinite().all():
            raise UserError(
                f"the features of {caption[:60]!r} are not finite in {y.dtype}; store them with --text-dtype fp32, or let the "
                "encoder compute in bf16 or fp32 (text_encoder.dtype)."
            )
        return {"y": y, "mask": mask, "caption": caption}

    return write_missing(job, TEXT, TEXT_FEATURES, settings, encode, dict.fromkeys(captions))
