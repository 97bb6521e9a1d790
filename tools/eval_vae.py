"""Measure a VAE on held-out clips and images: PSNR, SSIM, LPIPS, and how much colour is left.

    python -m tools.eval_vae --vae FOLDER --data-path assets/clips/held_out.csv --csv outputs/vae.csv --sheet outputs/vae.png
    python -m tools.eval_vae --vae FOLDER --data-path data/images/held_out.csv --train-path data/images/train.csv

Each row of the table gives one clip: an image, or the first `--num-frames` frames of a video, at its own size, cut to whole
latent cells; the latents are the posterior's mean. The mean is over sources (the table's `source` column), each of which
is the mean over its clips, so that a source with many does not decide. LPIPS is AlexNet's by default; it needs
the package stlpips-pytorch or one of its files (`--lpips none` leaves it out).

`--train-path` fits the best linear codec with as many channels a cell, a PCA of pixel patches, on images, and adds a gate:
a VAE that does not beat it clearly is not worth its time, and PSNR alone hides grey images. The exit code is then 0, or 1
when the VAE is not at least 2.5 dB better, or keeps 0.9 of the saturation or less.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from tqdm import tqdm

from opensora.datasets.table.files import read_frame
from opensora.datasets.table.table import read_table
from opensora.datasets.transforms import to_float
from opensora.datasets.video.read_video import probe, read_frames
from opensora.inference.output import save_image_grid, shown_frames
from opensora.models.vae import DiffusersVideoVAE, VideoAutoencoderKL
from opensora.models.vae.metrics import LPIPS, Quality, mean_quality, psnr, quality, reconstruct
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar, show_messages
from tools.command import Parser

GATE_DB = 2.5
GATE_SATURATION = 0.9
MOST_SHOWN = 12  # sources


class LinearCodec(NamedTuple):
    """Patches of pixels as `channels` numbers: x ~ mean + basis^T basis (x - mean)."""

    mean: Tensor  # [D], D = 3 * patch * patch
    basis: Tensor  # [channels, D], orthonormal
    patch: int

    def __call__(self, video: Tensor) -> Tensor:
        """Encode and decode a video [3, T, H, W], whose height and width are multiples of `patch`."""
        x = _patches(video, self.patch) - self.mean  # [N, D]
        x = x @ self.basis.T @ self.basis + self.mean
        _, frames, height, _ = video.shape
        sizes = {"T": frames, "h": height // self.patch, "C": 3, "p": self.patch, "q": self.patch}
        return rearrange(x, "(T h w) (C p q) -> C T (h p) (w q)", **sizes).clamp(-1, 1)


class Clip(NamedTuple):
    """A row of the table: where it comes from, and its video [3, T, H, W] in [-1, 1]."""

    name: str
    source: str
    video: Tensor


class Measured(NamedTuple):
    """A clip's result, and what to show of it."""

    name: str
    source: str
    quality: Quality
    linear_psnr: float  # nan without the linear codec
    versions: tuple[
        Tensor, ...
    ]  # [3, 5, H, W], the frames of the image grid: original, reconstruction and, with it, the linear codec's


def fit_pca(videos: Iterable[Tensor], channels: int, patch: int = 8) -> LinearCodec:
    """The linear codec with the least squared error on the patches of videos [3, T, H, W]."""
    count, size = 0, 3 * patch * patch
    total, outer = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for video in videos:
        x = _patches(video, patch).double()
        count, total, outer = count + len(x), total + x.sum(0), outer + x.T @ x
    if count == 0:
        raise UserError("the linear codec has no images to be fitted on: --train-path names an empty table.")
    mean = total / count
    _, vectors = torch.linalg.eigh(outer / count - torch.outer(mean, mean))  # eigenvalues ascend
    return LinearCodec(mean.float(), vectors[:, -channels:].T.float().contiguous(), patch)


def load_vae(folder: str) -> Any:
    """A folder in diffusers' format, or a hub id, whose config names the class; latents are posterior means."""
    config = Path(folder) / "config.json"
    name = json.loads(config.read_text()).get("_class_name") if config.is_file() else "AutoencoderKL"
    constructor: Any = VideoAutoencoderKL if name in (None, "AutoencoderKL") else DiffusersVideoVAE
    return constructor(folder, posterior="mode").requires_grad_(False).eval()


def read_clips(table_path: Path, root: Path | None, vae: Any, num_frames: int) -> Iterator[Clip]:
    """The clips of a table; one that is smaller than a latent cell is named and left out.

    Raises:
        UserError: the table or a file cannot be read, or no clip is left.
    """
    table = read_table(table_path, root, ())
    rows = read_frame(table_path)
    sources = rows["source"] if "source" in rows else rows["path"]
    some = False
    for row in progress_bar(range(len(table)), desc=f"reading {table_path}", unit="clip"):
        path = table.path(row)
        available = min(probe(path).num_frames, num_frames)
        count = next((n for n in range(available, 0, -1) if vae.legal_num_frames(n) == n), 0)
        height, width = (side // cell * cell for side, cell in zip(probe(path)[1:3], vae.strides[1:], strict=True))
        if not count or not height or not width:
            tqdm.write(f"{path}: too small for this VAE, left out", file=sys.stderr)
            continue
        some = True
        yield Clip(table.name(row), str(sources.iat[row]), to_float(read_frames(path, 0, count)[:, :height, :width]))
    if not some:
        raise UserError(f"{table_path} names no clip that is large enough.")


def measure(clips: Iterable[Clip], vae: Any, lpips: LPIPS | None, codec: LinearCodec | None) -> Iterator[Measured]:
    """Reconstruct and compare."""
    device = next(vae.parameters()).device
    for clip in progress_bar(clips, desc="measuring", unit="clip"):
        x = clip.video[None].to(device)
        x_hat = reconstruct(vae, x)
        versions, linear = [clip.video, x_hat[0].cpu()], float("nan")
        if codec is not None:
            versions.append(codec(clip.video))
            linear = float(psnr(versions[2][None], clip.video[None]))
        yield Measured(clip.name, clip.source, quality(x_hat, x, lpips), linear, shown_frames(tuple(versions)))


def by_source(rows: Iterable[Measured]) -> dict[str, tuple[Quality, float]]:
    """The mean of each source, named with its number of clips, and last the mean of these means."""
    groups: dict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        groups[row.source].append(row)
    means = {
        f"{source} ({len(group)})": (
            mean_quality(row.quality for row in group),
            float(np.mean([row.linear_psnr for row in group])),
        )
        for source, group in groups.items()
    }
    overall = mean_quality(q for q, _ in means.values()), float(np.mean([linear for _, linear in means.values()]))
    return {**means, "mean over sources": overall}


def table_lines(rows: dict[str, tuple[Quality, float]]) -> list[str]:
    """The table for the terminal; a column of which nothing was measured is left out."""
    width = max(len(name) for name in rows)
    columns: list[tuple[str, str, Any]] = [
        ("PSNR dB", ".2f", lambda q, _: q.psnr),
        ("SSIM", ".4f", lambda q, _: q.ssim),
        ("LPIPS", ".4f", lambda q, _: q.lpips),
        ("saturation", ".3f", lambda q, _: q.saturation),
        ("linear dB", ".2f", lambda _, linear: linear),
    ]
    columns = [c for c in columns if not all(np.isnan(c[2](*row)) for row in rows.values())]
    lines = [" ".join([f"{'source':{width}}", *(f"{title:>10}" for title, _, _ in columns)])]
    for name, row in rows.items():
        lines.append(" ".join([f"{name:{width}}", *(f"{value(*row):>10{form}}" for _, form, value in columns)]))
    return lines


def write_csv(path: Path, rows: list[Measured]) -> None:
    """One row a clip, and the mean over sources."""
    overall, linear = by_source(rows)["mean over sources"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", "source", *Quality._fields, "linear_psnr"])
        for row in rows:
            writer.writerow([row.name, row.source, *(f"{value:.6g}" for value in (*row.quality, row.linear_psnr))])
        writer.writerow(["mean over sources", "", *(f"{value:.6g}" for value in (*overall, linear))])


def judge(overall: Quality, linear_psnr: float) -> int:
    """Print whether the gate is met; the exit code."""
    gain = overall.psnr - linear_psnr
    met = gain >= GATE_DB and overall.saturation > GATE_SATURATION
    print(
        f"gate {'met' if met else 'MISSED'}: {gain:+.2f} dB over the linear codec (>= {GATE_DB}), "
        f"saturation ratio {overall.saturation:.3f} (> {GATE_SATURATION})"
    )
    return 0 if met else 1


def read_arguments() -> argparse.Namespace:
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--vae", required=True, help="folder in diffusers' format, or hub id")
    parser.add_argument("--data-path", type=Path, required=True, help="table of held-out clips and images")
    parser.add_argument("--train-path", type=Path, help="table of images to fit the linear codec on")
    parser.add_argument("--root", type=Path, help="folder that paths are relative to; default: each table's own")
    parser.add_argument(
        "--num-frames", type=int, default=33, help="frames of a video, from its first; fewer if it has fewer"
    )
    parser.add_argument("--per-source", type=int, help="clips of a source, evenly picked; default: all")
    parser.add_argument("--lpips", default="alex", help="alex, vgg, a weight file, or none")
    parser.add_argument("--csv", type=Path, help="write the result of every clip to this file")
    parser.add_argument("--sheet", type=Path, help="write originals above reconstructions to this image file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """Measure, print, judge."""
    args = read_arguments()
    show_messages()
    if args.per_source is not None and args.per_source < 1:
        raise UserError(f"--per-source {args.per_source}: it must be at least 1; leave it out for all.")
    lpips = None if args.lpips == "none" else LPIPS(args.lpips).to(args.device)
    vae = load_vae(args.vae).to(args.device)
    codec = None
    if args.train_path is not None:
        images = (clip.video for clip in read_clips(args.train_path, args.root, vae, 1))
        codec = fit_pca(images, vae.out_channels, vae.strides[1])
    clips = picked(read_clips(args.data_path, args.root, vae, args.num_frames), args.per_source)
    rows = list(measure(clips, vae, lpips, codec))
    means = by_source(rows)
    print("\n".join(table_lines(means)))
    if args.csv is not None:
        write_csv(args.csv, rows)
        print(f"every clip: {args.csv}")
    if args.sheet is not None:
        last = {row.source: row for row in rows}  # one clip of each source
        shown = [(f"{source}  {row.quality.psnr:.1f} dB", row.versions) for source, row in last.items()]
        save_image_grid(args.sheet, dict(shown[:MOST_SHOWN]))
        print(f"originals above reconstructions{' above the linear codec' if codec else ''}: {args.sheet}")
    lowest = min((name for name in means if name != "mean over sources"), key=lambda name: means[name][0].saturation)
    print(f"lowest saturation ratio: {means[lowest][0].saturation:.3f} ({lowest})")
    if codec is not None:
        sys.exit(judge(*means["mean over sources"]))


def picked(clips: Iterable[Clip], per_source: int | None) -> list[Clip]:
    """All clips, or so many of each source, evenly spread."""
    groups: dict[str, list[Clip]] = defaultdict(list)
    for clip in clips:
        groups[clip.source].append(clip)
    chosen = []
    for group in groups.values():
        wanted = len(group) if per_source is None else min(per_source, len(group))
        chosen += [group[i * len(group) // wanted] for i in range(wanted)]
    return chosen


def _patches(video: Tensor, patch: int) -> Tensor:
    height, width = (side // patch * patch for side in video.shape[2:])
    return rearrange(video[:, :, :height, :width], "C T (h p) (w q) -> (T h w) (C p q)", p=patch, q=patch)


if __name__ == "__main__":
    main()
