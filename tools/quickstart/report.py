"""What the quickstart's samples are worth: figures, a contact sheet, the loss curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from opensora.config.load import InferenceConfig
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.read_video import frames_needed, probe, read_frames
from opensora.inference.sizes import video_size
from opensora.registry import MODELS, build_module
from tools.quickstart.images import Row, contact_sheet, loss_curve
from tools.quickstart.measure import best_frame_psnr, nearest, psnr


def report(
    run: Path, table: pd.DataFrame, root: Path, cfg: InferenceConfig, frame_interval: int, others: Sequence[Path] = ()
) -> dict[str, Any]:
    """Measure the samples in `run/samples`, and in `run/samples_before` if it is there, which were made before the training.

    Writes `contact_sheet.png` and `loss.png`, and returns the figures.

    Args:
        run: folder of the quickstart run.
        table: the clips that were trained on, with columns path, text and paraphrase.
        root: folder that the paths are relative to.
        cfg: what the samples were made with.
        frame_interval: source frames from one frame of a sample to the next, as trained.
        others: clips that were not trained on, and that a sample can be nearest to.
    """
    size = video_size(cfg, build_module(cfg.vae, MODELS))
    clips = [read_clip(root / path, size.image_size) for path in table["path"]]  # each [3, T, H, W]
    candidates, n = clips + [read_clip(path, size.image_size) for path in others], len(clips)
    samples = [read_clip(path, size.image_size) for path in sorted((run / "samples").glob("*.mp4"))]
    if len(samples) != 2 * n:
        raise RuntimeError(f"{len(samples)} samples in {run / 'samples'} for {n} captions and {n} paraphrases")
    before = [read_clip(path, size.image_size) for path in sorted((run / "samples_before").glob("*.mp4"))]
    figures: dict[str, Any] = {"num_clips": n, "num_candidates": len(candidates), "wrong": []}
    for name, group in (("before", before), ("captions", samples[:n]), ("paraphrases", samples[n:])):
        if group:
            right = [nearest(sample, candidates, frame_interval) == i for i, sample in enumerate(group)]
            near = [best_frame_psnr(sample, clip) for sample, clip in zip(group, clips, strict=True)]
            figures |= {f"{name}_right": sum(right), f"{name}_psnr": sum(near) / n}
            figures["wrong"] += [f"{path}: {name}" for path, ok in zip(table["path"], right, strict=True) if not ok]
    window = frames_needed(size.num_frames, frame_interval)
    contact_sheet(_rows(table, [clip[:, :window] for clip in clips], samples, before), run / "contact_sheet.png")
    loss_curve(sorted((run / "runs").glob("*/metrics.jsonl")), run / "loss.png")
    return figures | {"vae_psnr": vae_psnr(cfg, clips, frame_interval)}


def report_images(run: Path, table: pd.DataFrame, root: Path, cfg: InferenceConfig) -> dict[str, int]:
    """Measure the images in `run/images` and write `images.png`: is an image's nearest frame one of its own clip?

    Args: as of `report`.
    """
    size = video_size(cfg, build_module(cfg.vae, MODELS)).image_size
    clips = [read_clip(root / path, size) for path in table["path"]]
    images = [read_image(path) for path in sorted((run / "images").glob("*.png"))]
    n = len(clips)
    if len(images) != 2 * n:
        raise RuntimeError(f"{len(images)} images in {run / 'images'} for {n} captions and {n} paraphrases")
    right = [nearest(image, clips, 1) == i % n for i, image in enumerate(images)]
    contact_sheet(_rows(table, [clip[:, :1] for clip in clips], images), run / "images.png", frames_per_group=1)
    return {"images_captions_right": sum(right[:n]), "images_paraphrases_right": sum(right[n:])}


def _rows(table: pd.DataFrame, clips: list[Tensor], samples: list[Tensor], before: Sequence[Tensor] = ()) -> list[Row]:
    rows = []
    for i, clip in enumerate(clips):
        caption, paraphrase = (f"CAPTION {table['text'][i]}", f"HELD-OUT PARAPHRASE {table['paraphrase'][i]}")
        groups = [(f"CLIP {table['path'][i]}", clip), (caption, samples[i]), (paraphrase, samples[len(clips) + i])]
        if before:
            groups.insert(1, (f"BEFORE FINE-TUNING {table['text'][i]}", before[i]))
        rows.append(Row(groups))
    return rows


def read_image(path: Path) -> Tensor:
    """An image file as [3, 1, H, W] in [-1, 1]."""
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels.permute(2, 0, 1)[:, None] / 127.5 - 1


def read_clip(path: Path, size: tuple[int, int]) -> Tensor:
    """A whole video at `size`: [3, T, H, W] in [-1, 1]."""
    frames = read_frames(path, 0, probe(path).num_frames, 1)  # [T, H, W, 3]
    return get_transform("center", size)(frames)


@torch.no_grad()
def vae_psnr(cfg: InferenceConfig, clips: list[Tensor], frame_interval: int) -> float:
    """The mean PSNR of a few frames of each clip, encoded and decoded: no sample can look better.

    They are from all over the clip; for a VAE that looks at several frames together, as far apart as those of a sample.
    """
    vae = build_module(cfg.vae, MODELS).eval()
    n = vae.legal_num_frames(4)
    last = [clip.shape[1] - 1 if vae.encodes_frames else (n - 1) * frame_interval for clip in clips]
    x = torch.stack(
        [clip[:, torch.linspace(0, end, n).long()] for clip, end in zip(clips, last, strict=True)]
    )  # [N, 3, n, H, W]
    mean, logvar = vae.moments(x).chunk(2, dim=1)
    z = vae.sample(torch.cat([mean, torch.full_like(logvar, -30.0)], dim=1))  # the mode, whatever the config says
    decoded = vae.decode(z, x.shape[2]).clamp(-1, 1)
    return float(psnr((decoded - x).square().mean(dim=(1, 3, 4))).mean())
