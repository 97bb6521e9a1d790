"""Each byte of a caption is a token, with a fixed random vector."""

import torch
from torch import nn

from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS


@MODELS.register_module()
class ByteEncoder(nn.Module):
    def __init__(self, output_dim=32, model_max_length=48):
        super().__init__()
        self.output_dim, self.model_max_length = output_dim, model_max_length
        self.register_buffer("table", torch.randn(256, output_dim, generator=torch.Generator().manual_seed(0)))

    def encode(self, texts):
        rows = [list(text.encode()[: self.model_max_length]) for text in texts]
        ids = torch.tensor([row + [0] * (self.model_max_length - len(row)) for row in rows])
        mask = torch.arange(self.model_max_length) < torch.tensor([[len(row)] for row in rows])
        return TextCondition(self.table[ids][:, None], mask.to(self.table.device))  # [B, 1, L, D], [B, L]

    def fingerprint(self):
        return f"bytes-{self.output_dim}-{self.model_max_length}"
