"""T5's encoder (Raffel et al. 2020, arXiv:1910.10683): the text of PixArt and Open-Sora."""

import warnings

import torch
from transformers import T5EncoderModel

from opensora.models.text_encoder.pretrained import PretrainedTextEncoder
from opensora.registry import MODELS


@MODELS.register_module("t5")
class T5Encoder(PretrainedTextEncoder):
    """The last hidden state of every token: y [B, 1, L, D], mask [B, L].

    fp32 by default: the larger T5s overflow in fp16. Captions are used verbatim.

    Args:
        from_pretrained: Folder with encoder and tokenizer, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Number format of the weights.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        shardformer: Accepted, because Open-Sora's configs set it; has no effect in this version and says so.
    """

    def __init__(
        self,
        from_pretrained: str = "DeepFloyd/t5-v1_1-xxl",
        model_max_length: int = 120,
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        shardformer: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        if shardformer:
            warnings.warn("text_encoder.shardformer=True has no effect in this version.", stacklevel=2)
        super().__init__(
            T5EncoderModel,
            from_pretrained,
            model_max_length=model_max_length,
            dtype=dtype,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
