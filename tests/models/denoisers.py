"""Every denoiser of the registry at toy size, with inputs for it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from opensora.models.denoiser import Denoiser
from opensora.registry import MODELS

L, C_TEXT = 7, 16
TOY = {"depth": 2, "hidden_size": 48, "num_heads": 2, "caption_channels": C_TEXT, "model_max_length": L}

COMPILED_SIZES = [(1, 8, 8), (4, 8, 12), (1, 6, 12), (7, 6, 10)]
"""Of latents: two images and two videos that differ in every dimension."""

DENOISERS = [name for name in MODELS.choices() if "hidden_size" in inspect.signature(MODELS.get(name)).parameters]
"""All registered names of denoisers."""

FAMILIES: dict[str, dict[str, Any]] = {
    "DiT-text": {"type": "DiT-XL/2"},
    "DiT-class": {"type": "DiT-XL/2", "condition": "label_10"},
    "DiT-2x2": {"type": "DiT-XL/2x2"},
    "Latte-text": {"type": "Latte-XL/2"},
    "Latte-class": {"type": "Latte-XL/2", "condition": "label_10"},
    "Latte-unconditional": {"type": "Latte-XL/2", "condition": "unconditional"},
    "LatteT2V": {"type": "LatteT2V-XL/2"},
    "PixArt": {"type": "PixArt-XL/2"},
    "PixArtMS": {"type": "PixArtMS-XL/2"},
    "PixArt-Sigma": {"type": "PixArt-Sigma-XL/2"},
    "PixArt-Sigma-compressed": {"type": "PixArt-Sigma-XL/2", "kv_compress": "conv", "kv_compress_layers": (1,)},
    "STDiT": {"type": "STDiT-XL/2"},
    "STDiT2": {"type": "STDiT2-XL/2"},
    "STDiT2-legacy": {"type": "STDiT2-XL/2", "norm_order": "rope_then_norm"},
    "STDiT3": {"type": "STDiT3-XL/2"},
    "Wan": {"type": "Wan2.1-T2V-14B", "in_channels": 4, "ffn_dim": 96},
    "Wan-I2V": {"type": "Wan2.2-I2V-A14B", "in_channels": 4, "ffn_dim": 96, "condition_channels": 3, "expert": "low"},
}
"""One configuration for each way in which a model computes."""


def build(family: str, **changes: Any) -> Denoiser:
    """A toy model of the family, in eval mode, with nothing left at zero."""
    torch.manual_seed(0)
    return awake(MODELS.build({**TOY, **FAMILIES[family], **changes}))


def toy(name: str) -> dict[str, Any]:
    """Arguments that make the model of a registered name small."""
    return {**TOY, "ffn_dim": 96} if "ffn_dim" in inspect.signature(MODELS.get(name)).parameters else TOY


def awake(model: Denoiser) -> Denoiser:
    """Replace the zero initialisations, behind which every path would look right."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model.eval()


def takes_text(model: nn.Module) -> bool:
    """Whether captions have a length: neither classes nor one pooled vector."""
    return model.null_condition(1).shape[2] > 1


def inputs(model: Denoiser, batch: int = 2, size: tuple[int, int, int] = (3, 6, 8), seed: int = 1) -> dict[str, Tensor]:
    """Keyword arguments for the model: two samples that differ in everything."""
    rng = torch.Generator().manual_seed(seed)
    null = model.null_condition(batch)
    classes = torch.arange(batch).reshape(batch, 1, 1, 1)
    y = torch.randn(null.shape, generator=rng) if null.is_floating_point() else classes
    cond = {
        "x": torch.randn(batch, model.in_channels, *size, generator=rng),
        "timestep": torch.tensor([3.0, 641.0])[:batch],
        "y": y,
        "fps": torch.tensor([8.0, 24.0])[:batch],
        "height": torch.tensor([48.0, 520.0])[:batch],
        "width": torch.tensor([64.0, 853.0])[:batch],
        "num_frames": torch.tensor([3.0, 51.0])[:batch],
    }
    if channels := getattr(model, "condition_channels", 0):
        cond["condition"] = torch.randn(batch, channels, *size, generator=rng)
    if getattr(model, "image_dim", None):
        images = 2 if model.net.config.pos_embed_seq_len else 1
        cond["image_features"] = torch.randn(images * batch, 257, model.image_dim, generator=rng)
    if takes_text(model):
        cond["mask"] = torch.arange(L)[None] < torch.tensor([[4], [L]])[:batch]
    return cond


def sample(cond: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """Sample b alone."""
    return {name: value[b : b + 1] for name, value in cond.items()}
