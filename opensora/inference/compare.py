"""Originals beside reconstructions: as one video, and as a sheet of many clips on one page."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from opensora.inference.output import save_sample, to_uint8

ROW_HEIGHT = 128  # pixels of a sheet's row of pictures
GAP = 4


def save_beside(x: Tensor, x_hat: Tensor, path_without_ext: str | Path, fps: float) -> Path:
    """Write originals (left) beside reconstructions (right), both [3, T, H, W] in [-1, 1], as mp4, or PNG when T is 1."""
    return save_sample(torch.cat([x, x_hat.to(x)], dim=3), path_without_ext, fps)


def save_sheet(path: Path, clips: Mapping[str, tuple[Tensor, ...]], columns: int = 5) -> Path:
    """Write a sheet: for each clip, `columns` frames of every version [3, T, H, W] in [-1, 1], one version under the other.

    The first version is the original. A clip with fewer frames than columns shows what it has.
    """
    strips = [_strip(name, versions, columns) for name, versions in clips.items()]
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height + GAP for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height + GAP
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=88)  # heeded by JPEG
    return path


def shown_frames(versions: tuple[Tensor, ...], columns: int = 5) -> tuple[Tensor, ...]:
    """Those frames of versions [3, T, H, W] that a sheet shows, in memory of their own: a table has many clips."""
    frames = versions[0].shape[1]
    chosen = np.linspace(0, frames - 1, min(columns, frames)).round().astype(int).tolist()
    return tuple(version[:, chosen] for version in versions)


def _strip(name: str, versions: tuple[Tensor, ...], columns: int) -> Image.Image:
    shown = shown_frames(versions, columns)
    rows = [np.concatenate(list(to_uint8(version)), axis=1) for version in shown]  # [H, columns W, 3]
    image = Image.fromarray(np.concatenate(rows, axis=0))
    height = ROW_HEIGHT * len(versions)
    image = image.resize((round(image.width * height / image.height), height), Image.Resampling.LANCZOS)
    ImageDraw.Draw(image).text((3, 3), name, fill="white", stroke_width=2, stroke_fill="black")
    return image
