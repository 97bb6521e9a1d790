"""Samples as the model sees them, read as training reads them, next to each other in one image."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from opensora.utils.errors import UserError

CELL, TEXT, MARGIN, COLUMNS = 150, 30, 6, 3  # pixels; samples in a row, each with three frames


class Reading(NamedTuple):
    """A sample, or what was wrong with it."""

    label: str
    caption: str
    row: int | None
    num_frames: int
    frames: np.ndarray | None  # [<= 3, H, W, 3] uint8: the first, the middle and the last
    seconds: float
    problem: str


def read_samples(dataset: Any, keys: Sequence[Any]) -> list[Reading]:
    """Read samples one after another, timed."""
    readings = []
    for key in keys:
        start = time.perf_counter()
        try:
            item = dataset[key]
        except UserError as error:
            readings.append(Reading("", "", None, 0, None, 0.0, str(error)))
            continue
        seconds = time.perf_counter() - start
        size = tuple(int(item[name]) for name in ("num_frames", "height", "width"))
        label = f"{size[0]} x {size[1]} x {size[2]}, {float(item['fps']):.4g} fps"
        row = int(item["index"])
        readings.append(Reading(label, item["text"], row, size[0], _three(item.get("video")), seconds, ""))
    return readings


def draw_contact_sheet(readings: Sequence[Reading], path: Path) -> int:
    """Write the contact sheet; returns how many samples are on it (none where only latents are read)."""
    shown = [reading for reading in readings if reading.frames is not None]
    if not shown:
        return 0
    width = COLUMNS * (3 * CELL + MARGIN) + MARGIN
    height = -(-len(shown) // COLUMNS) * (CELL + TEXT + MARGIN) + MARGIN
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    for i, reading in enumerate(shown):
        left = MARGIN + i % COLUMNS * (3 * CELL + MARGIN)
        top = MARGIN + i // COLUMNS * (CELL + TEXT + MARGIN)
        assert reading.frames is not None
        for j, frame in enumerate(reading.frames):
            image = Image.fromarray(frame)
            image.thumbnail((CELL - 2, CELL - 2))
            page.paste(image, (left + j * CELL, top + (CELL - image.height) // 2))
        draw.text((left, top + CELL), reading.label, fill="black")
        draw.text((left, top + CELL + TEXT // 2), reading.caption[:70].replace("\n", " "), fill="grey")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
    return len(shown)


def _three(video: Tensor | None) -> np.ndarray | None:
    """First, middle and last frame of a video [3, T, H, W] in [-1, 1]."""
    if video is None:
        return None
    last = video.shape[1] - 1
    chosen = video[:, sorted({0, last // 2, last})]
    return ((chosen + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0).numpy()
