"""Measure a VAE on held-out pictures, beside the best linear codec with as many channels.

    python -m tools.eval_vae --vae FOLDER --data-path data/pictures/held_out.csv \
        --train-path data/pictures/train.csv --sheet outputs/vae.png

For every source (the table's `source` column): PSNR, and how much of the colour's saturation is kept. The linear codec is
a PCA of 8x8 pixel patches fitted on `--train-path`: a trained VAE that does not beat it clearly is not worth its time, and
PSNR alone hides grey pictures. Pictures are cut to whole latent cells and encoded at their own size.

Exit code: 0, or 1 when the gate is missed (at least 2.5 dB better than the linear codec, saturation ratio above 0.9).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from opensora.models.vae import VideoAutoencoderKL
from opensora.utils.errors import UserError, exit_on_user_error

GATE_DB = 2.5
GATE_SATURATION = 0.9
SHEET_HEIGHT = 160  # pixels of a row


class LinearCodec(NamedTuple):
    """Patches of pixels as `channels` numbers: x ~ mean + basis^T basis (x - mean)."""

    mean: Tensor  # [D], D = 3 * patch * patch
    basis: Tensor  # [channels, D], orthonormal
    patch: int

    def __call__(self, picture: Tensor) -> Tensor:
        """Encode and decode a picture [3, H, W], whose sides are multiples of `patch`."""
        x = _patches(picture, self.patch) - self.mean  # [N, D]
        x = x @ self.basis.T @ self.basis + self.mean
        return rearrange(
            x,
            "(h w) (C p q) -> C (h p) (w q)",
            h=picture.shape[1] // self.patch,
            C=3,
            p=self.patch,
            q=self.patch,
        )


class Row(NamedTuple):
    """What is measured on one picture, or the mean over pictures."""

    psnr: float
    saturation: float  # ratio, out / in
    linear_psnr: float


def fit_pca(pictures: Iterable[Tensor], channels: int, patch: int = 8) -> LinearCodec:
    """The linear codec with the least squared error on the patches of pictures [3, H, W]."""
    count, size = 0, 3 * patch * patch
    total, outer = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for picture in pictures:
        x = _patches(picture, patch).double()
        count, total, outer = count + len(x), total + x.sum(0), outer + x.T @ x
    if count == 0:
        raise UserError("the linear codec has no pictures to be fitted on: --train-path names an empty table.")
    mean = total / count
    _, vectors = torch.linalg.eigh(outer / count - torch.outer(mean, mean))  # eigenvalues ascend
    return LinearCodec(mean.float(), vectors[:, -channels:].T.float().contiguous(), patch)


def pca_codec_psnr(train: Iterable[Tensor], held_out: Iterable[Tensor], channels: int, patch: int = 8) -> float:
    """Mean PSNR in dB, on held-out pictures [3, H, W] in [-1, 1], of the linear codec fitted on `train`."""
    codec = fit_pca(train, channels, patch)
    return float(np.mean([psnr(codec(picture), picture) for picture in held_out]))


def psnr(x_hat: Tensor, x: Tensor) -> float:
    """In dB, of pictures in [-1, 1]; x_hat is clamped to it."""
    error = (x_hat.clamp(-1, 1) - x).double().square().mean()
    return float(10 * torch.log10(4 / error.clamp_min(1e-10)))


def saturation(picture: Tensor) -> float:
    """Mean of max - min over RGB, of a picture [3, H, W]."""
    picture = picture.clamp(-1, 1)
    return float((picture.amax(0) - picture.amin(0)).mean())


def read_pictures(table: Path, root: Path | None, multiple: int) -> Iterator[tuple[str, Tensor]]:
    """(source, picture [3, H, W] in [-1, 1]) of a table, cut to multiples; paths are relative to root or the table."""
    if not table.is_file():
        raise UserError(f"there is no table {table}; tools/datasets/collect_pictures.py writes data/pictures/*.csv.")
    rows = pd.read_csv(table)
    if "path" not in rows:
        raise UserError(f"{table} has no column 'path'; its columns: {', '.join(map(str, rows.columns))}.")
    sources = rows["source"] if "source" in rows else rows["path"]
    for path, source in zip(rows["path"], sources, strict=True):
        picture = ImageOps.exif_transpose(Image.open((root or table.parent) / path)).convert("RGB")
        x = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1  # [3, H, W]
        height, width = (side // multiple * multiple for side in x.shape[1:])
        if height and width:
            yield str(source), x[:, :height, :width]


@torch.no_grad()
def reconstruct(vae: VideoAutoencoderKL, picture: Tensor) -> Tensor:
    """[3, H, W] through the VAE, on the CPU."""
    x = picture[None, :, None].to(next(vae.parameters()).device)  # [1, 3, 1, H, W]
    return vae.decode(vae.encode(x), num_frames=1)[0, :, 0].clamp(-1, 1).cpu()


def table_lines(rows: dict[str, Row]) -> list[str]:
    """The table, sources first, then the mean over sources."""
    width = max(len(name) for name in rows)
    head = f"{'source':{width}}  {'PSNR dB':>8} {'linear':>8} {'gain':>6} {'saturation':>10}"
    return [head] + [
        f"{name:{width}}  {row.psnr:8.2f} {row.linear_psnr:8.2f} {row.psnr - row.linear_psnr:6.2f} {row.saturation:10.3f}"
        for name, row in rows.items()
    ]


def save_sheet(path: Path, pictures: dict[str, list[Tensor]]) -> None:
    """One row a source: its pictures [3, H, W] side by side, original first."""
    strips = []
    for name, versions in pictures.items():
        x = torch.cat(versions, dim=2)  # [3, H, sum of W]
        image = Image.fromarray(((x + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
        image = image.resize((round(image.width * SHEET_HEIGHT / image.height), SHEET_HEIGHT))
        ImageDraw.Draw(image).text((3, 3), name, fill="white", stroke_width=2, stroke_fill="black")
        strips.append(image)
    sheet = Image.new("RGB", (max(s.width for s in strips), len(strips) * (SHEET_HEIGHT + 4)), "white")
    for i, strip in enumerate(strips):
        sheet.paste(strip, (0, i * (SHEET_HEIGHT + 4)))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def mean_row(rows: Iterable[Row]) -> Row:
    """Each number's mean."""
    return Row(*np.mean(list(rows), axis=0).tolist())


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", required=True, help="folder in diffusers' format, or hub id")
    parser.add_argument("--data-path", type=Path, required=True, help="table of held-out pictures")
    parser.add_argument("--train-path", type=Path, help="table of pictures to fit the linear codec on")
    parser.add_argument("--root", type=Path, help="folder that paths are relative to; default: each table's own")
    parser.add_argument("--per-source", type=int, help="pictures of a source, evenly picked; default: all")
    parser.add_argument("--sheet", type=Path, help="write originals beside reconstructions to this picture file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """Measure, print, judge."""
    args = read_arguments()
    vae = VideoAutoencoderKL(args.vae, posterior="mode").requires_grad_(False).eval().to(args.device)
    codec = None
    if args.train_path is not None:
        codec = fit_pca((x for _, x in read_pictures(args.train_path, args.root, 8)), vae.out_channels)
    held_out: dict[str, list[Tensor]] = defaultdict(list)
    for source, picture in read_pictures(args.data_path, args.root, max(vae.spatial_factor, 8)):
        held_out[source].append(picture)
    if not held_out:
        raise UserError(f"{args.data_path} names no picture that is large enough.")

    rows, sheet = {}, {}
    for source, pictures in held_out.items():
        wanted = args.per_source or len(pictures)
        chosen = pictures[:: max(len(pictures) // wanted, 1)][:wanted]
        measured, versions = [], []
        for x in chosen:
            versions = [x, reconstruct(vae, x)] + ([codec(x).clamp(-1, 1)] if codec else [])
            linear = psnr(versions[2], x) if codec else float("nan")
            ratio = saturation(versions[1]) / max(saturation(x), 1e-6)
            measured.append(Row(psnr(versions[1], x), ratio, linear))
        rows[f"{source} ({len(chosen)})"], sheet[source] = mean_row(measured), versions
    overall = mean_row(rows.values())
    print("\n".join(table_lines({**rows, "mean over sources": overall})))
    if args.sheet is not None:
        save_sheet(args.sheet, sheet)
        print(f"originals | reconstructions{' | linear codec' if codec else ''}: {args.sheet}")
    lowest = min(rows, key=lambda name: rows[name].saturation)
    print(f"lowest saturation ratio: {rows[lowest].saturation:.3f} ({lowest})")
    if codec is not None:
        sys.exit(judge(overall))


def judge(overall: Row) -> int:
    """Print whether the gate is met; the exit code."""
    gain = overall.psnr - overall.linear_psnr
    met = gain >= GATE_DB and overall.saturation > GATE_SATURATION
    print(
        f"gate {'met' if met else 'MISSED'}: {gain:+.2f} dB over the linear codec (>= {GATE_DB}), "
        f"saturation ratio {overall.saturation:.3f} (> {GATE_SATURATION})"
    )
    return 0 if met else 1


def _patches(picture: Tensor, patch: int) -> Tensor:
    height, width = (side // patch * patch for side in picture.shape[1:])
    return rearrange(picture[:, :height, :width], "C (h p) (w q) -> (h w) (C p q)", p=patch, q=patch)


if __name__ == "__main__":
    main()
