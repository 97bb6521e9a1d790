"""What the text encoders share: a frozen transformer of Hugging Face's `transformers` behind the text contract (D6).

Captions are used verbatim; cleaning them is the data tools' work.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer

from opensora.models.text_encoder.condition import TextCondition
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.pretrained import hub_error, resolve_pretrained

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
VOCABULARY = ("tokenizer.json", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model")


class PretrainedTextEncoder(nn.Module):
    """A frozen tokenizer and transformer. A subclass says which transformer, and what of its output is the text.

    Args:
        model_class: A class of `transformers` with `from_pretrained`.
        from_pretrained: Folder with weights and tokenizer, `package:PACKAGE/folder`, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Number format of the weights and the computation.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
    """

    def __init__(
        self,
        model_class: Any,
        from_pretrained: str,
        *,
        model_max_length: int,
        dtype: str | torch.dtype,
        cache_dir: str | None,
        local_files_only: bool,
    ) -> None:
        super().__init__()
        name = resolve_pretrained(from_pretrained, what="text encoder", any_of=[("config.json",), WEIGHTS, VOCABULARY])
        hub = {"cache_dir": cache_dir, "local_files_only": local_files_only}
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name, **hub)
            model, info = model_class.from_pretrained(
                name, **{_dtype_argument(): to_torch_dtype(dtype)}, output_loading_info=True, **hub
            )
        except (OSError, ValueError) as error:
            raise hub_error(from_pretrained, "text encoder", error) from error
        _check_weights(info["missing_keys"], from_pretrained)
        self.model: Any = (
            model.get_encoder() if model.config.is_encoder_decoder and hasattr(model, "decoder") else model
        )
        self.model.requires_grad_(False).eval()
        self.output_dim: int = self.model.config.hidden_size
        self.model_max_length = model_max_length
        self._check_length(from_pretrained)

    def train(self, mode: bool = True) -> "PretrainedTextEncoder":  # noqa: FBT001, FBT002  (nn.Module's signature)
        """Stays in eval mode: it is frozen, and dropout would change the text."""
        return super().train(False)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D] fp32, mask [B, L] bool, on the encoder's device."""
        tokens = self.tokenizer(
            list(texts), max_length=self.model_max_length, padding="max_length", truncation=True, return_tensors="pt"
        )
        self._warn_if_cut(texts, tokens["attention_mask"])
        return self.condition({name: tensor.to(self.model.device) for name, tensor in tokens.items()})

    def condition(self, tokens: dict[str, Tensor]) -> TextCondition:
        """Tokens (each [B, L] int64) -> the text; this default gives the last hidden state of every token."""
        hidden = self.model(**tokens).last_hidden_state  # [B, L, D]
        return TextCondition(hidden[:, None].float(), tokens["attention_mask"].bool())

    def _warn_if_cut(self, texts: Sequence[str], mask: Tensor) -> None:
        for row in mask.all(dim=1).nonzero().flatten().tolist():
            count = len(self.tokenizer(texts[row], truncation=False, verbose=False)["input_ids"])
            if count > self.model_max_length:
                warnings.warn(
                    f"a caption of {count} tokens is cut to model_max_length={self.model_max_length}: "
                    f"{texts[row][:60]!r}... (said once)",
                    stacklevel=3,
                )
                self._warn_if_cut = lambda texts, mask: None  # type: ignore[method-assign]
                return

    def _check_length(self, name: str) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if self.model_max_length < 1 or (limit is not None and self.model_max_length > limit):
            raise UserError(
                f"text encoder {name}: model_max_length={self.model_max_length} is not in 1..{limit or ''}."
            )
        if self.tokenizer.pad_token is None:
            raise UserError(f"text encoder {name}: its tokenizer has no padding token; pick an encoder that has one.")


def _dtype_argument() -> str:
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _check_weights(missing: Sequence[str], name: str) -> None:
    # a pooler is a head that not every checkpoint has, and that no text of ours uses
    absent = sorted(key for key in missing if "pooler" not in key)
    if absent:
        raise UserError(f"text encoder {name}: its files lack {len(absent)} weights, such as {absent[0]}.")
