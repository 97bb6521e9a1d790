"""Weights for STDiT: what other files call things, and what may differ.

Position tables are recomputed for every size and never read. A "no text" table of another length is cut, or extended
by its last row, as Open-Sora does.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora.utils.ckpt import load_strictly, read_weights

RECOMPUTED = ("pos_embed", "pos_embed_temporal")
NULL_TEXT = "y_embedder.y_embedding"


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load `path` (see `opensora.utils.ckpt.read_weights`) into an STDiT, strictly.

    Raises:
        UserError: the file is missing, unsafe, or of another architecture.
    """
    state = convert(read_weights(path), num_text_tokens=model.state_dict()[NULL_TEXT].shape[0])
    load_strictly(model, state, path)


def convert(state: Mapping[str, Tensor], num_text_tokens: int) -> dict[str, Tensor]:
    """A released STDiT state dict -> ours."""
    state = {name: tensor for name, tensor in state.items() if name not in RECOMPUTED}
    if NULL_TEXT in state:
        state[NULL_TEXT] = _resize_rows(state[NULL_TEXT], num_text_tokens)
    return state


def _resize_rows(table: Tensor, rows: int) -> Tensor:
    if len(table) >= rows:
        return table[:rows]
    return torch.cat([table, table[-1:].expand(rows - len(table), -1)])
