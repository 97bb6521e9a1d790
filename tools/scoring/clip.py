"""The CLIP model that `aesthetic` and `matching` look at frames with, and that `tools.eval.text_similarity` compares by."""

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.datasets.transforms import to_float
from opensora.utils.errors import UserError
from tools.scoring.frames import key_frames

logger = logging.getLogger("opensora.tools.clip")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's training images
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Clip:
    """A CLIP model with its tokenizer and what it wants images to be."""

    def __init__(self, folder: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.folder = Path(
            resolve_pretrained(folder, what="CLIP", any_of=[("config.json",), ("*.safetensors", "*.bin")])
        )
        logger.info("loading %s", folder)
        try:
            model: Any = CLIPModel.from_pretrained(self.folder, dtype=dtype)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise hub_error(folder, "CLIP", error) from error
        self.model = model.requires_grad_(False).eval().to(device)
        self.device, self.dtype = device, dtype
        self.size: int = self.model.config.vision_config.image_size
        config = self.folder / "preprocessor_config.json"
        wanted = json.loads(config.read_text()) if config.is_file() else {}
        self.mean = torch.tensor(wanted.get("image_mean", MEAN), device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(wanted.get("image_std", STD), device=device).view(1, 3, 1, 1)

    @torch.no_grad()
    def similarity(self, video: Tensor, prompt: str) -> float:
        """100 cos, the mean over the frames of `video [3, T, H, W]` in [-1, 1]; a prompt that is too long is cut."""
        images, text = self.embed_images(self.preprocess(video.to(self.device))), self.embed_texts([prompt])
        return 100 * float(F.cosine_similarity(images, text).mean())

    @torch.no_grad()
    def embed_images(self, pixels: Tensor) -> Tensor:
        """[N, 3, size, size] in [0, 1] -> [N, D] float32.

        Raises:
            UserError: they are not finite.
        """
        normed = ((pixels.to(self.device) - self.mean) / self.std).to(self.dtype)
        pooled = self.model.vision_model(pixel_values=normed).pooler_output
        return self._finite(self.model.visual_projection(pooled).float())

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """[N, D] float32; what is longer than the model takes is cut.

        Raises:
            UserError: they are not finite.
        """
        limit = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(list(texts), truncation=True, padding=True, max_length=limit, return_tensors="pt")
        pooled = self.model.text_model(**tokens.to(self.device)).pooler_output
        return self._finite(self.model.text_projection(pooled).float())

    def _finite(self, embedded: Tensor) -> Tensor:
        if not embedded.isfinite().all():
            fix = (
                "the weights are damaged"
                if self.dtype == torch.float32
                else "--set aesthetic.dtype=float32 or matching's"
            )
            raise UserError(
                f"{self.folder}: embeddings in {str(self.dtype).removeprefix('torch.')} are not finite; {fix}."
            )
        return embedded

    def preprocess(self, video: Tensor) -> Tensor:
        """[3, T, H, W] in [-1, 1] -> [T, 3, size, size] in [0, 1]: bicubic to the shorter side, the middle cut out."""
        x = rearrange((video + 1) / 2, "C T H W -> T C H W")
        height, width = x.shape[-2:]
        scale = self.size / min(height, width)
        size = max(self.size, round(height * scale)), max(self.size, round(width * scale))
        x = F.interpolate(x, size, mode="bicubic", antialias=True).clamp(0, 1)
        top, left = (size[0] - self.size) // 2, (size[1] - self.size) // 2
        return x[..., top : top + self.size, left : left + self.size]


@functools.cache
def clip_model(folder: str, device: str, dtype: str = "auto") -> Clip:
    """The model of a folder or hub id, loaded once.

    Args:
        folder: see `Clip`.
        device: cpu or cuda.
        dtype: of the network's weights; auto: float16 on a GPU, as CLIP's authors run it, and float32 on a CPU.

    Raises:
        UserError: it cannot be loaded, or the dtype is unknown.
    """
    if dtype == "auto":
        dtype = "float16" if device.startswith("cuda") else "float32"
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} of a scorer with CLIP: one of auto, {', '.join(DTYPES)}.")
    return Clip(folder, device, DTYPES[dtype])


def pixels_of(clip: Clip, path: Path, points: Sequence[float]) -> Tensor:
    """[N, 3, size, size] in [0, 1], frames at these shares of a clip's length, as the model wants them, on its device.

    Raises:
        BadFile: the file cannot be read.
    """
    return prepared(clip, key_frames(path, points))


def prepared(clip: Clip, frames: Sequence[np.ndarray]) -> Tensor:
    """Frames [H, W, 3] uint8 as the model wants them: [N, 3, size, size] in [0, 1].

    They go to the model's device as bytes and are resized there, which takes a GPU less time than a processor core takes to
    make them numbers.
    """
    moved = (torch.from_numpy(frame)[None].to(clip.device) for frame in frames)  # [1, H, W, 3]
    return torch.cat([clip.preprocess(to_float(frame)) for frame in moved])
