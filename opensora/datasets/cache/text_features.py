"""Encoded captions in files: found by the caption itself, so that rows may move and captions repeat.

Only the tokens of a caption are kept; padding is read back as zeros. A denoiser cannot tell, for it never looks at masked
tokens. The folder is CACHE/text, beside the VAE's moments; `tools.cache_features` writes it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.datasets.cache.records import RecordReader
from opensora.utils.errors import UserError

FOLDER = "text"
FEATURES = {"y": "tensor", "mask": "tensor", "caption": "string"}
REMEDY = "Write it with `python -m tools.cache_features TRAIN_CONFIG --what text --cache-dir {}`."


class TextFeatures:
    """Reads encoded captions.

    Args:
        cache_dir: Folder that `tools.cache_features` wrote.

    Raises:
        UserError: there is no such cache.
    """

    def __init__(self, cache_dir: str | Path) -> None:
        self.cache_dir = Path(cache_dir)
        self.remedy = REMEDY.format(self.cache_dir)
        self.records = RecordReader(self.cache_dir / FOLDER, remedy=self.remedy)
        self.settings: dict[str, Any] = self.records.settings
        self.output_dim: int = self.settings["output_dim"]
        self.model_max_length: int = self.settings["model_max_length"]
        self.tokens: int = self.settings["tokens"]

    def one(self, caption: str) -> tuple[Tensor, Tensor]:
        """y [1, L, D] in the number format of the cache, mask [L] bool.

        Raises:
            UserError: the caption is not in the cache.
        """
        try:
            record = self.records.read(caption, ("y", "mask"))
        except KeyError:
            raise self.unknown([caption]) from None
        stored = record["y"]  # [l, D], l <= L
        y = stored.new_zeros(1, self.tokens, stored.shape[1])
        y[0, : len(stored)] = stored
        return y, record["mask"].clone()

    def many(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """y [B, 1, L, D], mask [B, L]; see `one`."""
        y, mask = zip(*map(self.one, captions), strict=True)
        return torch.stack(y), torch.stack(mask)

    def missing(self, captions: Iterable[str]) -> list[str]:
        """Those that are not in the cache, each once."""
        return [caption for caption in dict.fromkeys(captions) if caption not in self.records]

    def unknown(self, captions: Sequence[str]) -> UserError:
        """The error for captions that are not in the cache."""
        shown = ", ".join(repr(caption[:60]) for caption in captions[:3])
        return UserError(
            f"{len(captions)} captions are not in the text cache {self.cache_dir} ({len(self.records)} are), such as {shown}: "
            f"were they changed after it was written? {self.remedy}"
        )
