"""How large and how long a video is: from "480p", "16:9", "4s" to frames, height and width that VAE and model take.

Lengths: a number; "4s", seconds at the rate of the file; "2x", multiples of two seconds. Where a VAE works in chunks, names
give full chunks: two seconds are as few of them as last that long, and even numbers of seconds are multiples of that. With
the VAE and the 24 frames a second of Open-Sora 1.2 these are its names: "2s" and "1x" are 51 frames, "4s" is 102.

Shapes: "9:16" is HEIGHT:WIDTH for Open-Sora 1.x, hence landscape, and WIDTH:HEIGHT for Open-Sora 2.0 and in everyday language,
hence portrait. `aspect_ratio_order` says which is meant, and the size is logged.

Long videos: `loop` segments of N frames that share P frames with their neighbours have loop (N - P) + P frames. The overlap is
set in latent frames, L; P is what the VAE makes of them.
"""

import inspect
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
from opensora.models.image_encoder import required_frames_of
from opensora.models.vae.base import VideoVAE
from opensora.registry import DENOISERS
from opensora.utils.errors import UserError
from opensora.utils.folders import read_json

logger = logging.getLogger(__name__)

NAMED_SECONDS = 2  # "1x"
MOVED_AT_MOST = 0.02  # of a side, to a multiple that the VAE takes


class VideoSize(NamedTuple):
    """A video to make, in numbers that the VAE takes."""

    num_frames: int
    image_size: Size  # height and width
    fps: float  # of videos; see `model_fps`
    save_fps: float  # of the file

    @property
    def model_fps(self) -> float:
        """The frame rate that conditions the model; 120 for an image, as in training."""
        return IMAGE_FPS if self.num_frames == 1 else self.fps


class Overlap(NamedTuple):
    """What neighbouring segments of a long video share."""

    latent_frames: int  # L
    num_frames: int  # P
    keeps_latents: bool  # the latents are taken over as they are; else the decoded frames are encoded anew


def video_size(cfg: InferenceConfig, vae: VideoVAE, patch_size: Sequence[int] = (1, 2, 2)) -> VideoSize:
    """The size that a config asks for, or the nearest that the VAE takes; moves, and what names stand for, are logged.

    Sizes found by name are multiples of VAE x `patch_size`, the denoiser's (frames, height, width).

    Raises:
        UserError: a name is unknown.
    """
    save_fps, num_frames = saved_rate(cfg), cfg.num_frames
    if not isinstance(num_frames, int):
        if cfg.duration is not None:
            asked = f"duration={cfg.duration:g}"
            num_frames = vae.legal_num_frames(max(round(cfg.duration * save_fps), 1))
        elif num_frames is not None:
            asked = f"num_frames={num_frames!r}"
            num_frames = named_length(num_frames, vae, save_fps)
        else:
            raise UserError("num_frames is missing; set it, or duration.")
        logger.info(
            "%s: %d frames, %.2f seconds at %g frames a second.", asked, num_frames, num_frames / save_fps, save_fps
        )
    size = legal_image_size(vae, cfg.image_size) if cfg.image_size else _named_size(cfg, vae, patch_size)
    return VideoSize(legal_length(vae, num_frames), size, float(cfg.fps), save_fps)


def legal_image_size(vae: VideoVAE, image_size: Size) -> Size:
    """The nearest height and width that the VAE takes; a move is logged."""
    _, *near = vae.legal_size((1, *image_size))
    if near != [*image_size]:
        logger.info(
            "image_size %dx%d (height x width): the VAE takes no such size, moved to %dx%d.", *image_size, *near
        )
    return near[0], near[1]


def take_whole_patches(vae: Any, model: Mapping[str, Any]) -> None:
    """Let the VAE take such sizes only as the denoiser of a config takes without padding, if it asks for that."""
    if (cells := getattr(inspect.unwrap(DENOISERS.get(model["type"])), "whole_cells", None)) is not None:
        vae.cells = cells


def legal_dataset(component: Mapping[str, Any], vae: Any) -> dict[str, Any]:
    """A dataset component whose clips have the nearest size that the VAE takes; one that reads stored latents stays.

    Raises:
        UserError: the VAE does not take its number of frames.
    """
    if "image_size" not in component or not hasattr(vae, "strides"):
        return dict(component)
    size = legal_image_size(vae, component["image_size"])
    vae.latent_size((component.get("num_frames", 1), *size))
    return {**component, "image_size": size}


def legal_length(vae: VideoVAE, num_frames: int) -> int:
    """The nearest number of frames that the VAE takes; a move is logged."""
    legal = vae.legal_num_frames(num_frames)
    if legal != num_frames:
        logger.info("num_frames=%d: the VAE makes no such video (%s), moved to %d.", num_frames, vae.frames_rule, legal)
    return legal


def stated_size(cfg: InferenceConfig) -> VideoSize | None:
    """The size, if the config gives it in numbers; what a name means depends on the VAE."""
    if not isinstance(cfg.num_frames, int) or cfg.image_size is None:
        return None
    return VideoSize(cfg.num_frames, cfg.image_size, float(cfg.fps), saved_rate(cfg))


def saved_rate(cfg: InferenceConfig) -> float:
    """Frames a second of the files."""
    return float(cfg.fps / cfg.frame_interval if cfg.save_fps is None else cfg.save_fps)


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
    sizes, shape = get_resolution(cfg.resolution).sizes, ""
    if cfg.aspect_ratio is not None:
        exact = image_size(cfg.resolution, cfg.aspect_ratio, order=cfg.aspect_ratio_order)
        shape = f" {cfg.aspect_ratio} ({cfg.aspect_ratio_order})" if ":" in cfg.aspect_ratio else f" {cfg.aspect_ratio}"
    elif len(sizes) == 1:
        exact = next(iter(sizes.values()))
    else:
        raise UserError(
            f"resolution={cfg.resolution!r} comes in several shapes: set aspect_ratio, height:width, such as '9:16', or one of "
            f"{', '.join(sizes)}."
        )
    height, width = rounded(exact, multiple)
    kind = "square" if height == width else "landscape" if width > height else "portrait"
    moved = "" if exact == (height, width) else f", moved from {exact[0]}x{exact[1]} to multiples of {multiple}"
    logger.info(
        "resolution %s%s: %dx%d pixels (height x width), %s%s.", cfg.resolution, shape, height, width, kind, moved
    )
    return height, width


def overlap(vae: Any, num_frames: int, latent_frames: int | None = None) -> Overlap:
    """How segments of `num_frames` can overlap.

    What a segment takes over are latents. Where the VAE codes the end of a segment apart from its beginning (every frame by
    itself, or in chunks), they are the latents themselves, so that nothing is lost from segment to segment. Where a video is
    one chunk, the last P decoded frames are encoded anew.

    Args:
        num_frames: N, of a segment.
        latent_frames: L; None: about a quarter of a segment (Open-Sora 1.1 shares 4 of 16, 1.2 5 of 15).

    Raises:
        UserError: the segment is too short, or latents of another video do not fit there.
    """
    total, chunk = vae.latent_frames(num_frames), vae.chunk_latent_frames
    step = chunk or 1
    if latent_frames is None:
        latent_frames = max(total // 4 // step, 1) * step
    if latent_frames % step:
        near = max(round(latent_frames / step), 1) * step
        raise UserError(
            f"condition_frame_length={latent_frames}: this VAE makes {step} latent frames at a time, so it must be a multiple "
            f"of {step}; the nearest is {near}."
        )
    shared = vae.video_frames(latent_frames)
    if chunk is None:  # an overlap begins as a segment does, whose first latent frame may stand for fewer frames
        shared -= vae.video_frames(total) - num_frames
    if latent_frames >= total or shared >= num_frames:
        raise UserError(
            f"loop: segments of {num_frames} frames ({total} latent frames) cannot share {latent_frames} latent frames; raise "
            f"num_frames or lower condition_frame_length{'' if total > step else f' (at least {step})'}."
        )
    legal = vae.legal_num_frames(shared)
    if legal != shared or vae.latent_frames(shared) != latent_frames:
        raise UserError(
            f"condition_frame_length={latent_frames}: no video of this VAE has that many latent frames; the nearest length is "
            f"{legal} frames, {vae.latent_frames(legal)} latent ones."
        )
    before = total - latent_frames
    keeps = chunk is not None and before % step == 0 and vae.video_frames(before) == num_frames - shared
    return Overlap(latent_frames, shared, keeps)


def warn_outside_training(size: VideoSize, checkpoint: str | None) -> None:
    """Warn where a checkpoint of ours was trained on other sizes or lengths; silent where that is not known."""
    if (text := outside_training((size.num_frames, *size.image_size), trained_sizes(checkpoint))) is not None:
        logger.warning("%s: %s", checkpoint, text)


def outside_training(asked: tuple[int, int, int], trained: set[tuple[int, int, int]]) -> str | None:
    """In words, where a size (frames, height, width) is none of the trained ones, the nearest of those; else None."""
    if not trained:
        return None

    def distance(known: tuple[int, int, int]) -> float:
        """Differences of length, height and width on a logarithmic scale, and of shape: a square image wants a square."""
        shape = abs(math.log(known[1] / known[2] * asked[2] / asked[1]))
        return sum(abs(math.log(x / y)) for x, y in zip(known, asked, strict=True)) + 2 * shape

    nearest = min(trained, key=distance)
    sides = zip(nearest[1:], asked[1:], strict=True)
    if nearest[0] == asked[0] and all(abs(x / y - 1) < MOVED_AT_MOST for x, y in sides):  # training moved it, too
        return None
    return (
        f"{frames_of(asked)} is no size that the model was trained on: expect worse videos. The nearest is {frames_of(nearest)}, "
        f"{f'one of {len(trained)} sizes' if len(trained) > 1 else 'the only size'}."
    )


def frames_of(size: tuple[int, int, int]) -> str:
    """`8 frames of 96x160`."""
    num_frames, height, width = size
    return f"{num_frames} frame{'s' if num_frames > 1 else ''} of {height}x{width}"


def warn_of_conditioning_frames(checkpoint: str | None, model: str) -> None:
    """Warn before conditioning frames are used with a checkpoint of ours that was trained without (`mask_ratios`).

    NOVA makes one frame after another, and image-to-video models take them as channels: these are trained with them anyway.
    """
    config = trained_config(checkpoint)
    always = model.startswith("NOVA") or ("model" in config and required_frames_of(config["model"]) is not None)
    if "mask_ratios" in config and not config["mask_ratios"] and not always:
        logger.warning(
            "%s was trained without mask_ratios, so it has never seen conditioning frames: expect that what follows a reference does not fit it.",
            checkpoint,
        )


def trained_sizes(checkpoint: str | None) -> set[tuple[int, int, int]]:
    """(frames, height, width) in the manifest of a checkpoint folder, or of the one that holds the part; none if unknown."""
    config = trained_config(checkpoint)
    if (buckets := config.get("bucket_config")) is not None:
        multiple = config.get("dataset", {}).get("size_multiple")
        settings = {} if multiple is None else {"size_multiple": multiple}
        levels = {  # JSON has string keys only
            name: {int(key) if key.isdecimal() else key: value for key, value in entries.items()}
            for name, entries in buckets.items()
        }
        return {(b.num_frames, b.height, b.width) for b in Buckets(levels, **settings) if b.batch_size}
    if not {"num_frames", "image_size"} <= config.keys():
        return set()
    height, width = config["image_size"]
    of_records = config.get("dataset", {}).get("type") == "RecordVideoTextDataset"
    if of_records and (config["num_frames"], height, width) == (16, 256, 256):
        return set()  # the fields' defaults, which manifests had until the records' own size took their place
    return {(1 if config.get("use_image_transform") else config["num_frames"], height, width)}


def trained_config(checkpoint: str | None) -> dict[str, Any]:
    """The training config in the manifest of a checkpoint folder, or of the folder that holds the part `checkpoint`; {} if unknown."""
    for folder in () if checkpoint is None else (Path(checkpoint), Path(checkpoint).parent):
        if (folder / MANIFEST).is_file():
            config = read_json(folder / MANIFEST, "Name another checkpoint.").get("config")
            return config if isinstance(config, dict) else {}
    return {}
