"""How large and how long a video is: from "480p", "16:9", "4s" to frames, height and width that VAE and model take.

Lengths: a number; "4s", seconds at the rate of the file; "2x", multiples of two seconds. Where a VAE works in chunks, names
give full chunks: two seconds are as few of them as last that long, and even numbers of seconds are multiples of that. With
the VAE and the 24 frames a second of Open-Sora 1.2 these are its names: "2s" and "1x" are 51 frames, "4s" is 102.

Shapes: "9:16" is HEIGHT:WIDTH for Open-Sora 1.x, hence landscape, and WIDTH:HEIGHT for Open-Sora 2.0 and in everyday language,
hence portrait. `aspect_ratio_order` says which is meant, and the size is logged.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from opensora.checkpoint.load import MANIFEST
from opensora.config.load import InferenceConfig
from opensora.config.schema import NUM_FRAMES
from opensora.datasets.buckets.aspect import Size, get_resolution, image_size, rounded
from opensora.datasets.buckets.bucket import Buckets
from opensora.datasets.video.files import IMAGE_FPS
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

NAMED_SECONDS = 2  # "1x"


class VideoSize(NamedTuple):
    """A video to make, in numbers that the VAE takes."""

    num_frames: int
    height: int
    width: int
    fps: float  # conditions the model; 120 for an image, as in training
    save_fps: float  # of the file

    @property
    def image_size(self) -> Size:
        """Height and width."""
        return self.height, self.width


class TrainedSize(NamedTuple):
    """A size that a checkpoint knows."""

    num_frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_frames} frames of {self.height}x{self.width}"


def video_size(cfg: InferenceConfig, vae: VideoVAE, patch_size: Sequence[int] = (1, 2, 2)) -> VideoSize:
    """The size that a config asks for; what names stand for is logged.

    Read of the config: `num_frames` or `duration`; `image_size`, or `resolution` with `aspect_ratio` and
    `aspect_ratio_order`; `fps`, `frame_interval`, `save_fps`.

    Args:
        cfg: the config.
        vae: knows the sizes and lengths it takes.
        patch_size: of the denoiser (frames, height, width): sizes found by name are multiples of VAE x patch.

    Raises:
        UserError: a name is unknown, or the VAE takes no such size or length.
    """
    save_fps = saved_rate(cfg)
    num_frames = _num_frames(cfg, vae, save_fps)
    height, width = cfg.image_size or _named_size(cfg, vae, patch_size)
    vae.latent_size((num_frames, height, width))  # refuses what the VAE does not take
    fps = IMAGE_FPS if num_frames == 1 else float(cfg.fps)
    return VideoSize(num_frames, height, width, fps, save_fps)


def check_size(vae: VideoVAE, num_frames: int, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """The latent size (t, h, w) of a video.

    Raises:
        UserError: the VAE makes no such video; the message names the nearest that it makes.
    """
    legal = vae.legal_num_frames(num_frames)
    if legal != num_frames:
        raise UserError(
            f"num_frames={num_frames}: this VAE does not make videos of that length; the nearest is {legal}."
        )
    return vae.latent_size((num_frames, *image_size))


def saved_rate(cfg: InferenceConfig) -> float:
    """Frames a second of the files."""
    return float(cfg.fps / cfg.frame_interval if cfg.save_fps is None else cfg.save_fps)


def _num_frames(cfg: InferenceConfig, vae: VideoVAE, save_fps: float) -> int:
    """The number of frames that `num_frames` or `duration` ask for, at `save_fps` frames a second."""
    if cfg.duration is not None:
        asked = f"duration={cfg.duration:g}"
        frames = vae.legal_num_frames(max(round(cfg.duration * save_fps), 1))
    elif isinstance(cfg.num_frames, str):
        asked = f"num_frames={cfg.num_frames!r}"
        frames = named_length(cfg.num_frames, vae, save_fps)
    elif cfg.num_frames is not None:
        return cfg.num_frames
    else:
        raise UserError("num_frames is missing; set it, or duration.")
    logger.info("%s: %d frames, %.2f seconds at %g frames a second.", asked, frames, frames / save_fps, save_fps)
    return frames


def named_length(name: str, vae: VideoVAE, fps: float) -> int:
    """Frames of "51", "4s" or "2x", in full chunks where the VAE has chunks.

    Raises:
        UserError: it is none of these, or far too long.
    """
    if not re.fullmatch(NUM_FRAMES, name):
        raise UserError(f"num_frames={name!r}: expected a number, or seconds such as '4s', or '2x'.")
    seconds = Fraction(name.rstrip("sx")) * (NAMED_SECONDS if name.endswith("x") else 1)
    if not seconds:
        raise UserError(f"num_frames={name!r} is no length; use '1s', or 1 for an image.")
    if name.isdecimal():
        return int(name)
    repeats, chunk = 1, vae.chunk_latent_frames
    if chunk is not None and (seconds / NAMED_SECONDS).denominator == 1:
        repeats, seconds = int(seconds / NAMED_SECONDS), Fraction(NAMED_SECONDS)
    least = math.ceil(float(seconds) * fps - 1e-6)  # 2 * 23.976 is no more than itself
    if chunk is not None:
        size = vae.video_frames(chunk)
        least = math.ceil(least / size) * size
    return repeats * vae.legal_num_frames_over(max(least, 1))


def _named_size(cfg: InferenceConfig, vae: VideoVAE, patch_size: Sequence[int]) -> Size:
    """Height and width of `resolution` in the shape of `aspect_ratio`, as multiples of what VAE and patches take."""
    if cfg.resolution is None:
        raise UserError("image_size is missing; set it, or resolution.")
    multiple = math.lcm(*(stride * patch for stride, patch in zip(vae.strides[1:], patch_size[1:], strict=True)))
    table = get_resolution(cfg.resolution)
    if cfg.aspect_ratio is None:
        if len(table.sizes) > 1:
            raise UserError(
                f"resolution={cfg.resolution!r} comes in several shapes: set aspect_ratio, height:width, such as '9:16', or "
                f"one of {', '.join(table.sizes)}."
            )
        exact, shape = next(iter(table.sizes.values())), ""
    else:
        exact = image_size(cfg.resolution, cfg.aspect_ratio, order=cfg.aspect_ratio_order)
        shape = f" {cfg.aspect_ratio} ({cfg.aspect_ratio_order})" if ":" in cfg.aspect_ratio else f" {cfg.aspect_ratio}"
    size = rounded(exact, multiple)
    height, width = size
    kind = "square" if height == width else "landscape" if width > height else "portrait"
    moved = "" if exact == size else f", moved from {exact[0]}x{exact[1]} to multiples of {multiple}"
    name = f"{cfg.resolution}{shape}"
    logger.info("resolution %s: %dx%d pixels (height x width), %s%s.", name, height, width, kind, moved)
    return size


def warn_outside_training(size: VideoSize, checkpoint: str | None) -> None:
    """Warn where a checkpoint of ours was trained on other sizes or lengths; silent where that is not known."""
    trained = trained_sizes(checkpoint)
    asked = TrainedSize(size.num_frames, size.height, size.width)
    if not trained or asked in trained:
        return

    def distance(known: TrainedSize) -> float:
        """Differences of length, height and width on a logarithmic scale, and of shape: a square image wants a square."""
        shape = abs(math.log(known.height / known.width * asked.width / asked.height))
        return sum(abs(math.log(x / y)) for x, y in zip(known, asked, strict=True)) + 2 * shape

    nearest = min(trained, key=distance)
    among = f"one of {len(trained)} sizes" if len(trained) > 1 else "the only size"
    message = "%s is no size that %s was trained on: expect worse videos. The nearest is %s, %s."
    logger.warning(message, asked, checkpoint, nearest, among)


def warn_of_conditioning_frames(checkpoint: str | None, model: str) -> None:
    """Warn before conditioning frames are used with a checkpoint of ours that was trained without (`mask_ratios`).

    NOVA makes one frame after another, and so is trained with them anyway.
    """
    config = _config_of(checkpoint)
    if config and "mask_ratios" in config and not config["mask_ratios"] and not model.startswith("NOVA"):
        logger.warning(
            "%s was trained without mask_ratios, so it has never seen conditioning frames: expect that what follows a reference does not fit it.",
            checkpoint,
        )


def trained_sizes(checkpoint: str | None) -> set[TrainedSize]:
    """The sizes in the manifest of a checkpoint folder, or of the folder that holds the part `checkpoint`; none if unknown."""
    config = _config_of(checkpoint)
    if config is None:
        return set()
    if (buckets := config.get("bucket_config")) is not None:
        multiple = config.get("dataset", {}).get("size_multiple")
        settings = {} if multiple is None else {"size_multiple": multiple}
        levels = {  # JSON has string keys only
            name: {int(key) if key.isdecimal() else key: value for key, value in entries.items()}
            for name, entries in buckets.items()
        }
        return {TrainedSize(b.num_frames, b.height, b.width) for b in Buckets(levels, **settings) if b.batch_size}
    if not {"num_frames", "image_size"} <= config.keys():
        return set()
    frames = 1 if config.get("use_image_transform") else config["num_frames"]
    return {TrainedSize(frames, *config["image_size"])}


def _config_of(checkpoint: str | None) -> Mapping[str, Any] | None:
    """That in the manifest of a checkpoint folder, or of the folder that holds the part `checkpoint`; None if unknown."""
    folders = [] if checkpoint is None else [Path(checkpoint), Path(checkpoint).parent]
    for manifest in (folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()):
        config = json.loads(manifest.read_text(encoding="utf-8")).get("config")
        return config if isinstance(config, Mapping) else None
    return None
