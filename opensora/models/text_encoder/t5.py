"""The encoder of T5 (Raffel et al. 2020, arXiv:1910.10683), mT5 and UMT5: the text of PixArt, Open-Sora and most others."""

from typing import Any

import torch
import transformers

from opensora.models.text_encoder.cleaning import Clean
from opensora.models.text_encoder.fast import compile_blocks_of, shard_inside_node
from opensora.models.text_encoder.pretrained import BetweenUses, Padding, PretrainedTextEncoder
from opensora.registry import MODELS
from opensora.utils.errors import UserError

FAMILY = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes of transformers, by name: it imports what is asked for, and that takes seconds which a run without T5 does not need."""


@MODELS.register_module("t5")
class T5Encoder(PretrainedTextEncoder):
    """The last hidden state of every token of a T5, mT5 or UMT5: y [B, 1, L, D], mask [B, L].

    The larger T5s overflow in fp16. There, as in `transformers`, what overflows between layers is clamped and the feed-forward
    outputs stay fp32; a result that is not finite is an error. bf16 needs none of that.

    Args:
        from_pretrained: Folder with encoder and tokenizer, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Number format of the weights.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        shardformer: The faster path, by the name that Open-Sora's configs know: compiled blocks and, in training with several
            processes, weights that those of a node share (FSDP).
        clean: What is done to captions: "none", "basic" (mends encodings and white space, any language), or "legacy" (what
            Open-Sora 1.x and PixArt did: lower case, no Chinese, no links), see docs/text.md.
        padding: "max_length", or "longest": compute only up to the longest caption of a batch; y is zero behind it.
        between_uses: "keep" the weights on the device, hold them on the "cpu", or "unload" them.
    """

    fast = False

    def __init__(
        self,
        from_pretrained: str = "DeepFloyd/t5-v1_1-xxl",
        model_max_length: int = 120,
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        shardformer: bool = False,  # noqa: FBT001, FBT002
        clean: Clean = "basic",
        padding: Padding = "max_length",
        between_uses: BetweenUses = "keep",
    ) -> None:
        super().__init__(
            _Family,
            from_pretrained,
            model_max_length=model_max_length,
            dtype=dtype,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            clean=clean,
            padding=padding,
            between_uses=between_uses,
        )
        self.fast = shardformer
        if shardformer:
            self._compile(self.model)

    def shard(self) -> "T5Encoder":
        """With `shardformer`, let the processes of a node share the weights. From then on all must encode equally often.

        Raises:
            UserError: the weights are not kept on the device.
        """
        if not self.fast:
            return self
        if self.between_uses != "keep" and torch.distributed.is_initialized():
            raise UserError(
                f"text encoder {self.from_pretrained}: shardformer=True shares the weights among processes, so they cannot "
                f"move; drop between_uses={self.between_uses!r}."
            )
        self.sharded = shard_inside_node(self.model, self.device)
        return self

    def _load_tokenizer(self) -> Any:
        try:
            return super()._load_tokenizer()
        except ValueError:  # a UMT5 folder with a spiece.model alone, which `AutoTokenizer` cannot read
            tokenizer: Any = transformers.T5Tokenizer
            return tokenizer.from_pretrained(self._name, **self._hub)

    def _load(self) -> Any:
        model = super()._load()
        if self.fast:
            self._compile(model)
        return model

    def _compile(self, model: Any) -> None:
        compile_blocks_of(model, varying_sizes=self.padding == "longest")


class _Family:
    """Picks the class of `transformers` by the config's model_type."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        hub = {key: options[key] for key in ("cache_dir", "local_files_only")}
        kind = transformers.AutoConfig.from_pretrained(name, **hub).model_type
        if kind not in FAMILY:
            raise UserError(f"text encoder {name} is a {kind}, not one of {', '.join(FAMILY)}; use type='hf'.")
        return getattr(transformers, FAMILY[kind]).from_pretrained(name, **options)
