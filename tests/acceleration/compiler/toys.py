"""Pipelines and modules at toy size, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel


class Toy(nn.Module):
    """A convolution and an MLP, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).permute(0, 2, 3, 1)
        return h + self.fc2(nn.functional.gelu(self.fc1(nn.functional.layer_norm(h, (8,)))))


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


def autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=4)  # fmt: skip


def pixart(**changes: Any) -> PixArtAlphaPipeline:
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=16,
        sample_size=8, caption_channels=12,
    )  # fmt: skip
    parts = {
        "vae": autoencoder(),
        "transformer": transformer.eval(),
        "tokenizer": None,
        "text_encoder": None,
        **changes,
    }
    pipe = PixArtAlphaPipeline(scheduler=DPMSolverMultistepScheduler(), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def saved_pixart(folder: Path) -> Path:
    """A pipeline that takes prompts, as `save_pretrained` leaves it."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "dog": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    config = T5Config(vocab_size=3, d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    pixart(tokenizer=tokenizer, text_encoder=T5EncoderModel(config)).save_pretrained(folder)
    return folder


def sampled(pipe: PixArtAlphaPipeline, height: int = 16, width: int = 24) -> np.ndarray:
    """An image [1, H, W, 3] of two steps; the same noise and text for every pipeline."""
    text = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 5)
    return pipe(
        prompt=None, negative_prompt=None, prompt_embeds=text, negative_prompt_embeds=0 * text,
        prompt_attention_mask=mask, negative_prompt_attention_mask=mask, height=height, width=width,
        num_inference_steps=2, output_type="np", use_resolution_binning=False, generator=torch.Generator().manual_seed(2),
    ).images  # fmt: skip
