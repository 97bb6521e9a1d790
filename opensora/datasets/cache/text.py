"""Writing encoded captions: each different caption once, found again by the caption itself."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from opensora.datasets.cache.moments import Counts, Job, write_missing
from opensora.datasets.cache.text_features import FEATURES, FOLDER
from opensora.datasets.table.table import Table
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

NO_TEXT = ""  # the null condition of models without a table for it
DTYPES = ("auto", "fp32", "bf16", "fp16")


class TextEncoder(Protocol):
    """What the cache asks of a text encoder."""

    output_dim: int
    model_max_length: int

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """B captions -> y [B, 1, L, D], mask [B, L]."""

    def fingerprint(self) -> str: ...


def captions_of(table: Table) -> list[str]:
    """All different captions of a table's text columns, in its order."""
    return list(dict.fromkeys(caption for row in range(len(table)) for caption in table.captions(row)))


@torch.inference_mode()
def write_text(captions: Iterable[str], encoder: TextEncoder, job: Job, *, batch_size: int = 16) -> Counts:
    """Encode captions and "no text". An interrupted call goes on where it stopped; every process of `job.world` calls it.

    `job.dtype`: "auto" = what loses nothing, which is the encoder's own number format.

    Raises:
        UserError: the folder holds features of another encoder, or features are not finite.
    """
    captions = list(dict.fromkeys(captions))
    y, _ = encoder.encode(captions[:1])  # for its size
    if y.is_floating_point() and NO_TEXT not in captions:  # a class number cannot be empty
        captions.append(NO_TEXT)
    dtype = storage_dtype(encoder, y, job.dtype)
    settings = {
        "encoder": encoder.fingerprint(),
        "output_dim": encoder.output_dim,
        "model_max_length": encoder.model_max_length,
        "tokens": y.shape[2],
        "dtype": str(dtype).removeprefix("torch."),
    }
    batches = _Batches(captions[job.world.rank :: job.world.size], encoder, dtype, batch_size)
    return write_missing(job, FOLDER, FEATURES, settings, captions, batches.one)


def storage_dtype(encoder: Any, y: Tensor, name: str) -> torch.dtype:
    """The number format in which features y are kept."""
    if not y.is_floating_point():
        return y.dtype
    return getattr(encoder, "dtype", y.dtype) if name == "auto" else to_torch_dtype(name)


class _Batches:
    """Encodes ahead: a caption is encoded with those that come after it in this process's list."""

    def __init__(self, captions: Sequence[str], encoder: TextEncoder, dtype: torch.dtype, batch_size: int) -> None:
        self.captions, self.encoder, self.dtype, self.batch_size = captions, encoder, dtype, batch_size
        self.places = {caption: i for i, caption in enumerate(captions)}
        self.ready: dict[str, dict[str, Any]] = {}

    def one(self, caption: str) -> dict[str, Any]:
        if caption not in self.ready:
            first = self.places[caption]
            self.ready = self._encode(self.captions[first : first + self.batch_size])
        return self.ready.pop(caption)

    def _encode(self, captions: Sequence[str]) -> dict[str, dict[str, Any]]:
        y, mask = self.encoder.encode(list(captions))
        y, mask = y[:, 0].to(self.dtype).cpu(), mask.cpu()  # [B, L, D], [B, L]
        records = {}
        for caption, rows, real in zip(captions, y, mask, strict=True):
            length = int(real.nonzero().max()) + 1 if real.any() else 0
            if rows.is_floating_point() and not rows[:length].isfinite().all():
                raise UserError(
                    f"the features of {caption[:60]!r} are not finite in {self.dtype}; store them with --text-dtype fp32, or "
                    "let the encoder compute in bf16 or fp32 (text_encoder.dtype)."
                )
            records[caption] = {"y": rows[:length], "mask": real, "caption": caption}
        return records
