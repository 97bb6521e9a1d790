"""A text encoder that encodes each caption once: a small data set's captions come back every epoch."""

from collections import OrderedDict
from typing import Any

import torch

from opensora.models.text_encoder.condition import TextCondition
from opensora.utils.errors import UserError


class MemoizedTextEncoder:
    """`encoder`, with every caption's features kept on the CPU; the longest unused go first.

    Captions are encoded one by one: rounding differs with what else is in a batch, and so a resumed run, which meets captions in
    other company, would differ from the unbroken one.

    Args:
        encoder: A frozen encoder whose weights processes do not share, for then all must encode at the same time.
        max_bytes: Room for the kept features.
    """

    def __init__(self, encoder: Any, max_bytes: int = 2**30) -> None:
        if getattr(encoder, "sharded", False):
            raise UserError(
                "cache_text=True lets a process skip captions that it knows, but with text_encoder.shardformer=True several "
                "processes must encode together. Switch one of them off, or store the features: tools.cache_features."
            )
        self.encoder, self.max_bytes = encoder, max_bytes
        self.output_dim, self.model_max_length = encoder.output_dim, encoder.model_max_length
        self.num_bytes = 0
        self._kept: OrderedDict[str, TextCondition] = OrderedDict()  # y [1, 1, L, D], mask [1, L]; last used last
        self._device = torch.device("cpu")

    def encode(self, texts: list[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D], mask [B, L], on the encoder's device; only unknown ones are encoded."""
        rows = {}
        for text in dict.fromkeys(texts):
            row = self._kept.get(text)
            if row is None:
                y, mask = self.encoder.encode([text])
                self._device = y.device
                row = self._kept[text] = TextCondition(y.cpu(), mask.cpu())
                self.num_bytes += _size(row)
            self._kept.move_to_end(text)
            rows[text] = row
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= _size(self._kept.popitem(last=False)[1])
        y, mask = (torch.cat(parts) for parts in zip(*(rows[text] for text in texts), strict=True))
        return TextCondition(y.to(self._device), mask.to(self._device))


def _size(row: TextCondition) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row)
