"""CLIP's text tower (Radford et al. 2021, arXiv:2103.00020): one vector per caption, for DiT and Latte."""

import torch
import transformers
from torch import Tensor

from opensora.models.text_encoder.cleaning import Clean
from opensora.models.text_encoder.condition import TextCondition
from opensora.models.text_encoder.pretrained import BetweenUses, PretrainedTextEncoder
from opensora.registry import MODELS


@MODELS.register_module("clip")
class ClipEncoder(PretrainedTextEncoder):
    """The pooled output, that is the state at the end-of-text token: y [B, 1, 1, D], mask [B, 1].

    Args:
        from_pretrained: Folder with text tower and tokenizer, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Number format of the weights.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        clean: What is done to captions: "none", "basic" or "legacy", see docs/text.md.
        between_uses: "keep" the weights on the device, hold them on the "cpu", or "unload" them.
    """

    def __init__(
        self,
        from_pretrained: str = "openai/clip-vit-base-patch32",
        model_max_length: int = 77,
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        clean: Clean = "none",
        between_uses: BetweenUses = "keep",
    ) -> None:
        super().__init__(
            transformers.CLIPTextModel,
            from_pretrained,
            model_max_length=model_max_length,
            dtype=dtype,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            clean=clean,
            between_uses=between_uses,
        )

    def condition(self, tokens: dict[str, Tensor]) -> TextCondition:
        """Tokens (each [B, L] int64) -> the pooled text."""
        pooled = self.model(**tokens).pooler_output  # [B, D]
        return TextCondition(
            pooled[:, None, None].float(), torch.ones(len(pooled), 1, dtype=torch.bool, device=pooled.device)
        )
