"""Reconstruct videos and images with a VAE: `python scripts/inference_vae.py CONFIG --files a.mp4 b.png`.

For every file, `<save_dir>/<name>.mp4` (or .png) has the original on the left and the reconstruction on the right; all
together are in `<save_dir>/sheet.png`, and their PSNR and SSIM on the terminal. tools/eval_vae.py measures more.
"""

import opensora  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.acceleration.distributed import init_world
from opensora.config.load import VAEInferenceConfig, parse_config
from opensora.datasets.table.table import read_table
from opensora.datasets.transforms import get_transform, to_float
from opensora.datasets.video.files import is_image
from opensora.datasets.video.read_video import frames_needed, probe, read_frames
from opensora.inference.output import save_image_grid, save_sample, shown_frames
from opensora.models.vae.metrics import quality, reconstruct
from opensora.registry import VAES, build_module
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.folders import make_writable
from opensora.utils.logging import progress_bar, show_messages

logger = logging.getLogger("opensora.inference_vae")
IMAGE_SAVE_FPS = 1.0
SHEET = "sheet"
SUFFIXES = (".mp4", ".png")


@exit_on_user_error
def main() -> None:
    """Reconstruct what the config names."""
    cfg = parse_config(VAEInferenceConfig, {"vae": VAES})
    show_messages()
    world = init_world(cfg.device)
    if world.size > 1:
        raise UserError(
            "inference_vae.py works in one process, and each of several would write the same files: run it without torchrun."
        )
    device = world.device
    make_writable(cfg.save_dir, "save_dir")
    files = sources(cfg)
    refuse_replacing(files, Path(cfg.save_dir))
    vae = build_module({"posterior": "mode", **cfg.vae}, VAES).requires_grad_(False).eval().to(device)
    folder, sheet = Path(cfg.save_dir), {}
    for path, name in progress_bar(list(named(files)), desc="reconstructing", unit="file"):
        x, fps = read(path, cfg, vae)
        with torch.autocast(device.type, to_torch_dtype(cfg.dtype), enabled=cfg.dtype != "fp32"):
            x_hat = reconstruct(vae, x[None].to(device)).cpu()[0]
        file = save_sample(
            torch.cat([x, x_hat.to(x)], dim=3), folder / name, fps
        )  # original left, reconstruction right
        measured = quality(x_hat[None], x[None])
        sheet[f"{name}  {measured.psnr:.1f} dB"] = shown_frames((x, x_hat))
        size = " x ".join(map(str, x.shape[1:]))
        tqdm.write(f"{file}: {size}, PSNR {measured.psnr:.2f} dB, SSIM {measured.ssim:.4f}")
    sys.stdout.write(f"originals above reconstructions: {save_image_grid(folder / f'{SHEET}.png', sheet)}\n")


def sources(cfg: VAEInferenceConfig) -> list[Path]:
    """The files to reconstruct."""
    if cfg.files:
        files = [Path(name) for name in cfg.files]
        if missing := [str(path) for path in files if not path.is_file()]:
            raise UserError(f"files: there is no {', '.join(missing)}.")
        return files
    table = read_table(str(cfg.data_path), cfg.root, ())
    return [table.path(row) for row in range(len(table))[: cfg.num_samples]]


def named(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Each file with a name for its result; files of one name are numbered."""
    stems = [path.stem for path in files]
    taken = [*stems, SHEET]
    for number, (path, stem) in enumerate(zip(files, stems, strict=True)):
        yield path, stem if taken.count(stem) == 1 else f"{number:04d}_{stem}"


def refuse_replacing(files: list[Path], folder: Path) -> None:
    """See that no result is written where a source is.

    Raises:
        UserError: one would be.
    """
    originals = {path.resolve() for path in files}
    results = [folder / f"{name}{suffix}" for _, name in named(files) for suffix in SUFFIXES]
    for result in (*results, folder / f"{SHEET}.png"):
        if result.resolve() in originals:
            raise UserError(
                f"save_dir={folder}: {result} is one of the files to reconstruct, and would be replaced. Choose another --save-dir."
            )


def read(path: Path, cfg: VAEInferenceConfig, vae: Any) -> tuple[Tensor, float]:
    """The video [3, T, H, W] in [-1, 1], of a length and a size that the VAE takes, and the rate of its result."""
    info = probe(path)
    available = -(-info.num_frames // cfg.frame_interval)
    num_frames = 1 if is_image(path) else cfg.num_frames or vae.legal_num_frames_within(available)
    if vae.legal_num_frames(num_frames) != num_frames:
        raise UserError(
            f"num_frames={num_frames}: the VAE does not take that many; the nearest is {vae.legal_num_frames(num_frames)}."
        )
    if frames_needed(num_frames, cfg.frame_interval) > info.num_frames:
        raise UserError(f"{path} has {info.num_frames} frames: too few for num_frames={num_frames}.")
    frames = read_frames(path, 0, num_frames, cfg.frame_interval)
    if num_frames < available:
        logger.info("%s: the first %d of %d frames", path, num_frames, available)
    fps = cfg.save_fps or (IMAGE_SAVE_FPS if is_image(path) else info.fps / cfg.frame_interval)
    if cfg.image_size is not None:
        return get_transform("center", cfg.image_size)(frames), fps
    return cut_to_cells(to_float(frames), vae), fps


def cut_to_cells(x: Tensor, vae: Any) -> Tensor:
    """[3, T, H, W] without the rows and columns that do not fill a latent cell, as many on both sides."""
    height, width = (int(side) // cell * cell for side, cell in zip(x.shape[2:], vae.strides[1:], strict=True))
    if not height or not width:
        raise UserError(f"an image of {tuple(x.shape[2:])} pixels is smaller than one latent cell, {vae.strides[1:]}.")
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]


if __name__ == "__main__":
    main()
