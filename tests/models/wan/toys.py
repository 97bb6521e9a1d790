"""Wan at tiny sizes, and inputs for it."""

import torch

from opensora.registry import MODELS

TINY = {"hidden_size": 24, "depth": 2, "num_heads": 2, "ffn_dim": 32, "caption_channels": 16}
VARIANTS = {
    "t2v": {"in_channels": 4},
    "ti2v": {"in_channels": 6},
    "i2v": {"in_channels": 4, "condition_channels": 8, "image_dim": 20},
    "flf2v": {"in_channels": 4, "condition_channels": 8, "image_dim": 20, "pos_embed_seq_len": 514},
    "i2v-a14b": {"in_channels": 4, "condition_channels": 8},
}


def build(variant, **changes):
    torch.manual_seed(0)
    return MODELS.build({"type": "Wan", **TINY, **VARIANTS[variant], **changes}).eval()


def inputs(model, size=(3, 4, 6), length=9, batch=2):
    rng = torch.Generator().manual_seed(1)
    cond = {
        "x": torch.randn(batch, model.in_channels, *size, generator=rng),
        "timestep": torch.tensor([3.5, 641.25])[:batch],
        "y": torch.randn(batch, 1, length, 16, generator=rng),
        "mask": torch.arange(length)[None] < torch.tensor([[4], [length]])[:batch],
    }
    if model.condition_channels:
        cond["condition"] = torch.randn(batch, model.condition_channels, *size, generator=rng)
    if model.image_dim:
        images = 2 if model.net.config.pos_embed_seq_len else 1
        cond["image_features"] = torch.randn(images * batch, 257, model.image_dim, generator=rng)
    return cond
