"""`match`: how well a clip's caption fits its middle frame: 100 times the cosine of CLIP's embeddings.

Radford et al. 2021, arXiv:2103.00020; what Open-Sora filters by with `--matchmin`. For ViT-L/14 it is some 15 for any two and
20 to 35 for an image and its caption. A caption longer than CLIP's 77 tokens is cut.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opensora.utils.errors import UserError
from tools.scoring.clip import clip_model, pixels_of
from tools.scoring.frames import Row, each_file, tidy
from tools.scoring.registry import SCORERS


@dataclass(frozen=True)
class Matching:
    """`model`: folder or hub id of a CLIP model with its tokenizer; `points`: see `tools.scoring.frames`; `dtype`: see
    `tools.scoring.clip`.
    """

    model: str = ""
    points: tuple[float, ...] = (0.5,)
    dtype: str = "auto"
    device: str = "cpu"
    columns = ("match",)
    needs = ("text",)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """-100 to 100; None without a caption.

        Raises:
            UserError: there is no model.
        """
        if not self.model:
            raise UserError("the scorer matching needs a CLIP model: --set matching.model=FOLDER or a hub id.")
        clip = clip_model(self.model, self.device, self.dtype)
        pixels: list[torch.Tensor] = []

        def read(path: Path) -> Row:
            pixels.append(pixels_of(clip, path, self.points))
            return {"match": None}

        rows = each_file(paths, self.columns, read)
        there = [(row, text) for row, text in zip(rows, needed["text"], strict=True) if "error" not in row]
        if there:
            images = clip.embed_images(torch.cat(pixels)).unflatten(0, (len(there), -1))  # [B, frames, D]
            texts = clip.embed_texts([str(text or "") for _, text in there])  # [B, D]
            cosines = torch.cosine_similarity(images, texts[:, None], dim=-1).mean(1)  # [B]
            for (row, text), cosine in zip(there, cosines.tolist(), strict=True):
                row["match"] = tidy(100 * cosine) if text else None
        return rows


SCORERS["matching"] = Matching()
