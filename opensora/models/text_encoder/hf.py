"""Any encoder that `transformers.AutoModel` loads, for example a small sentence encoder on a laptop."""

import torch
import transformers

from opensora.models.text_encoder.cleaning import Clean
from opensora.models.text_encoder.pretrained import BetweenUses, Padding, PretrainedTextEncoder
from opensora.registry import MODELS


@MODELS.register_module("hf")
class HFTextEncoder(PretrainedTextEncoder):
    """The last hidden state of every token: y [B, 1, L, D], mask [B, L].

    Args:
        from_pretrained: Folder with encoder and tokenizer, `package:PACKAGE/folder` = a folder inside an installed
            package, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Number format of the weights.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        clean: What is done to captions: "none", "basic" or "legacy", see docs/text.md.
        padding: "max_length", or "longest": compute only up to the longest caption of a batch; y is zero behind it.
        between_uses: "keep" the weights on the device, hold them on the "cpu", or "unload" them.
        tokenizer: Folder or hub id of the tokenizer, where it is not with the weights, as in NOVA's pipelines.
    """

    def __init__(
        self,
        from_pretrained: str,
        model_max_length: int = 120,
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        clean: Clean = "none",
        padding: Padding = "max_length",
        between_uses: BetweenUses = "keep",
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(
            transformers.AutoModel,
            from_pretrained,
            model_max_length=model_max_length,
            dtype=dtype,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            clean=clean,
            padding=padding,
            between_uses=between_uses,
            tokenizer=tokenizer,
        )
