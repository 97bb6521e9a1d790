"""Encoded captions from a cache in place of an encoder: nothing is loaded, and nothing is computed."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from opensora.datasets.cache.features import TextFeatures
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS
from opensora.utils.errors import UserError


@MODELS.register_module("cached")
class CachedTextEncoder(nn.Module):
    """What `tools.cache_features --what text` wrote: y [B, 1, L, D], mask [B, L], on the CPU; y is zero where mask is False.

    Args:
        cache_dir: The cache's folder.
        encoder: The text encoder that it stands for, as in `text_encoder=dict(type=..., ...)`. `tools.cache_features` makes
            the cache with it; in training it only documents.
        fingerprint: Of the encoder that the features must come from; None: it is not checked.
    """

    def __init__(
        self, cache_dir: str, encoder: Mapping[str, Any] | None = None, fingerprint: str | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.features = TextFeatures(cache_dir)
        found = self.features.settings["encoder"]
        if fingerprint not in (None, found):
            raise UserError(
                f"the text cache {cache_dir} was made with another encoder: its fingerprint is {found}, not {fingerprint}. "
                f"{self.features.remedy}"
            )
        self.output_dim: int = self.features.output_dim
        self.model_max_length: int = self.features.model_max_length

    def encode(self, texts: list[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D] (fp32, or int64 for classes), mask [B, L].

        Raises:
            UserError: a caption is not in the cache.
        """
        y, mask = self.features.many(texts)
        return TextCondition(y.float() if y.is_floating_point() else y, mask)

    def fingerprint(self) -> str:
        """That of the encoder which wrote the cache."""
        return str(self.features.settings["encoder"])
