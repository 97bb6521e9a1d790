"""`aes`: how much people like the image, 1 to 10, by a head of linear layers on CLIP's embedding of three frames.

LAION's predictors (Schuhmann 2022): `sac+logos+ava1-l14-linearMSE.pth`, five linear layers without anything between them, which
Open-Sora used, or `sa_0_4_vit_l_14_linear.pth`, one layer. Both are for CLIP ViT-L/14. Images that people like are around 6,
ordinary ones 4 to 5. Neither file ships here; both are given by path.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from opensora.utils.errors import UserError
from tools.scoring.clip import clip_model, pixels_of
from tools.scoring.frames import KEY_POINTS, Row, each_file, tidy
from tools.scoring.registry import SCORERS

Layers = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Aesthetic:
    """`model`: folder or hub id of CLIP; `head`: file of the linear layers; `points`: shares of the clip's length.

    `dtype`: of the network, see `tools.scoring.clip`; the head is float32.
    """

    model: str = ""
    head: str = ""
    points: tuple[float, ...] = KEY_POINTS
    dtype: str = "auto"
    device: str = "cpu"
    columns = ("aes",)
    needs = ()

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """The mean over the frames.

        Raises:
            UserError: the model or the head is missing, or they do not fit.
        """
        if not self.model or not self.head:
            raise UserError(
                "the scorer aesthetic needs weights: --set aesthetic.model=CLIP_FOLDER aesthetic.head=FILE "
                "(CLIP ViT-L/14 and LAION's sac+logos+ava1-l14-linearMSE.pth)."
            )
        clip = clip_model(self.model, self.device, self.dtype)
        layers = head_layers(self.head, clip.model.config.projection_dim, self.device)
        pixels: list[Tensor] = []

        def read(path: Path) -> Row:
            pixels.append(pixels_of(clip, path, self.points))
            return {"aes": None}

        rows = each_file(paths, self.columns, read)
        there = [row for row in rows if "error" not in row]
        if there:
            scores = apply_head(layers, clip.embed_images(torch.cat(pixels))).unflatten(
                0, (len(there), -1)
            )  # [B, frames]
            for row, value in zip(there, scores.mean(1).tolist(), strict=True):
                row["aes"] = tidy(value)
        return rows


def apply_head(layers: Layers, embeddings: Tensor) -> Tensor:
    """[N, D] -> [N] scores; embeddings are brought to length 1 first, as the heads were trained."""
    x = F.normalize(embeddings.float(), dim=-1)
    for weight, bias in layers:
        x = F.linear(x, weight, bias)
    return x[:, 0]


@functools.cache
def head_layers(file: str, width: int, device: str) -> Layers:
    """The linear layers of a head, in order of their numbers.

    Raises:
        UserError: the file is missing or no such head, or it is for embeddings of another width.
    """
    state = _state(Path(file))
    names = sorted((name.removesuffix("weight") for name in state if name.endswith("weight")), key=_number)
    layers = [(state[f"{name}weight"].float().to(device), state.get(f"{name}bias")) for name in names]
    complete = tuple((weight, bias.float().to(device)) for weight, bias in layers if bias is not None)
    widths = [width, *(len(weight) for weight, _ in complete)]
    fits = [
        weight.ndim == 2 and weight.shape[1] == before for (weight, _), before in zip(complete, widths, strict=False)
    ]
    if not complete or len(complete) < len(names) or not all(fits) or widths[-1] != 1:
        shapes = ", ".join(str(tuple(state[f"{name}weight"].shape)) for name in names) or "none"
        raise UserError(
            f"{file} is no head for CLIP embeddings of width {width}: expected linear layers from {width} to 1, each with a "
            f"bias; its weights are {shapes}. ViT-L/14 has width 768."
        )
    return complete


def _state(file: Path) -> Mapping[str, Tensor]:
    if not file.is_file():
        raise UserError(f"the head of the scorer aesthetic: there is no file {file}.")
    try:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{file} is no file of weights: {str(error).splitlines()[0]}") from error


def _number(name: str) -> int:
    found = re.search(r"([0-9]+)", name)
    return int(found[1]) if found else 0


SCORERS["aesthetic"] = Aesthetic()
