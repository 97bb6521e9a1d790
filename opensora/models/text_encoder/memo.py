"""A text encoder that encodes each caption once: a small data set's captions come back every epoch."""

from collections import OrderedDict

import torch

from opensora.models.text_encoder.condition import TextCondition, TextEncoder
from opensora.utils.errors import UserError


class MemoizedTextEncoder:
    """`encoder`, with every caption's features kept on the CPU; the longest unused go first.

    Args:
        encoder: A frozen encoder.
        max_bytes: Room for the kept features.

    Raises:
        UserError: processes share the encoder's weights, and so must all encode at the same time.
    """

    def __init__(self, encoder: TextEncoder, max_bytes: int = 2**30) -> None:
        if getattr(encoder, "sharded", False):
            raise UserError(
                "cache_text=True lets a process skip captions that it knows, but with text_encoder.shardformer=True several "
                "processes must encode together. Switch one of them off, or store the features: tools.cache_features."
            )
        self.encoder = encoder
        self.max_bytes = max_bytes
        self.output_dim = encoder.output_dim
        self.model_max_length = encoder.model_max_length
        self.num_bytes = 0
        self._kept: OrderedDict[str, TextCondition] = OrderedDict()  # y [1, L, D], mask [L]; last used last
        self._device = torch.device("cpu")

    def encode(self, texts: list[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D], mask [B, L], on the encoder's device; only unknown ones are encoded."""
        rows = {text: self._kept[text] for text in texts if text in self._kept}
        unknown = [text for text in dict.fromkeys(texts) if text not in rows]
        if unknown:
            y, mask = self.encoder.encode(unknown)
            self._device = y.device
            for new, own_y, own_mask in zip(unknown, y.cpu(), mask.cpu(), strict=True):
                rows[new] = TextCondition(own_y.clone(), own_mask.clone())  # views would keep their whole batch alive
        for text, row in rows.items():
            self.num_bytes += 0 if text in self._kept else _size(row)
            self._kept[text] = row
            self._kept.move_to_end(text)
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= _size(self._kept.popitem(last=False)[1])
        y, mask = (torch.stack(parts) for parts in zip(*(rows[text] for text in texts), strict=True))
        return TextCondition(y.to(self._device), mask.to(self._device))


def _size(row: TextCondition) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row)
