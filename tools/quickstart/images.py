"""Images to look at: source clips next to samples, and the loss curve."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LINE = 14
MARGIN = 6


@dataclass(frozen=True)
class Row:
    """One row of the contact sheet: titled groups of frames, each [3, T, H, W] in [-1, 1], with a line of text."""

    groups: Sequence[tuple[str, Tensor]]


def contact_sheet(rows: Sequence[Row], path: Path, frames_per_group: int = 3) -> None:
    """Write one image: for each row its groups next to each other, the text of each above it."""
    height, width = rows[0].groups[0][1].shape[2:]
    group_width = frames_per_group * width + 2 * MARGIN
    row_height = height + 3 * LINE + MARGIN
    page = Image.new("RGB", (group_width * len(rows[0].groups), row_height * len(rows)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(LINE - 3)
    for r, row in enumerate(rows):
        for g, (text, video) in enumerate(row.groups):
            left, top = g * group_width + MARGIN, r * row_height
            for i, line in enumerate(_wrapped(text, draw, font, group_width - 2 * MARGIN)[:3]):
                draw.text((left, top + i * LINE), line, fill="black", font=font)
            for i, t in enumerate(np.linspace(0, video.shape[1] - 1, frames_per_group).round().astype(int)):
                page.paste(_image(video[:, t]), (left + i * width, top + 3 * LINE))
    page.save(path)


def loss_curve(metrics: Sequence[Path], path: Path) -> None:
    """Plot the losses over steps from the `metrics.jsonl` files of a run and of its continuations: every point of the training
    loss and their moving average, and the held-out loss, whose noise and timesteps are the same each time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found: dict[str, dict[int, float]] = {"loss": {}, "val/loss": {}}
    for file in metrics:
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            for name in found.keys() & entry.keys():
                found[name][entry["step"]] = entry[name]  # of a step that was taken again, the later
    loss, held_out = (pd.Series(values, dtype=float).sort_index() for values in found.values())
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(loss, ".", color="tab:blue", alpha=0.5, markersize=5, label="training")
    axes.plot(
        loss.ewm(span=max(len(loss) / 8, 2)).mean(), color="tab:blue", linewidth=2, label="training, moving average"
    )
    if len(held_out):
        axes.plot(held_out, "o-", color="tab:orange", label="held-out captions, EMA weights")
    axes.set(xlabel="optimizer step", ylabel="loss (mean squared error of the prediction)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _image(frame: Tensor) -> Image.Image:
    pixels = ((frame.clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())  # [3, H, W] -> [H, W, 3]


def _wrapped(
    text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and draw.textlength(longer, font=font) > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]
