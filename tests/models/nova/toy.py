"""A small NOVA and inputs for it."""

import torch

from opensora.models.nova.nova import NOVA
from opensora.registry import MODELS

TOY = {"caption_channels": 16, "model_max_length": 7, "width": 32, "num_heads": 2, "video_depth": 2, "image_depth": 4,
       "head_depth": 2}  # fmt: skip


def build(**changes) -> NOVA:
    torch.manual_seed(0)
    model = MODELS.build({"type": "NOVA", **TOY, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def inputs(batch=2, size=(3, 8, 12), draws=2, visible=5, seed=1):
    rng = torch.Generator().manual_seed(seed)
    T, H, W = size
    N = H * W // 4
    x = torch.randn(batch, 4, *size, generator=rng)
    return {
        "x": x,
        "timestep": torch.rand(batch, draws, T, N, generator=rng) * 1000,
        "y": torch.randn(batch, 1, 7, 16, generator=rng),
        "noisy": torch.randn(batch, draws, 4, *size, generator=rng),
        "visible": torch.stack([torch.randperm(N, generator=rng)[:visible] for _ in range(batch * T)]).view(
            batch, T, -1
        ),
        "mask": torch.arange(7)[None] < torch.tensor([[4], [7]])[:batch],
        "fps": torch.tensor([8.0, 24.0])[:batch],
        "flow": torch.tensor([5.0, 1.5])[:batch],
    }
