"""Images and videos that a sample starts from, and which of its frames they become.

    reference_path + mask_strategy     as the strategy says (see `mask_strategy.py`), every frame of each file
    --image FIRST [--last-image LAST]  image to video, and interpolation between two images
    --extend VIDEO                     the result begins with the end of a video
    --edit VIDEO --edit-ratio R        a variant of a video: noised up to R of the way, and denoised again

References are resized to cover the target size and cropped in the middle, as in training, and have lengths that the VAE takes.

Lengths also decide what latents mean. A VAE may take any number of frames and yet make one latent frame of several: Open-Sora
1.2's pads the beginning of a chunk up to a multiple of 4, so that the first latent frame of 10 frames stands for two of them,
that of a full chunk of 17 for one. In a full chunk, latents of 10 frames would be seen a frame late, and one be lost. So a
reference that ends with a part of a chunk is shortened to where that part has the causal padding (`vae.causal_padding`) of the chunk of
the video that it becomes.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.config.load import InferenceConfig
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.read_video import CLOSE, MAX_REPEATED, open_clip, read_indices
from opensora.inference.fetch import fetch
from opensora.inference.mask_strategy import (
    FrameCondition,
    check_conditions,
    check_references,
    describe,
    parse_mask_strategy,
    resolve,
)
from opensora.inference.prompts import PromptItem
from opensora.inference.sizes import overlap, saved_rate
from opensora.models.image_encoder import required_frames_of
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError, first_few
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

MAX_FRAMES = 2048  # of one reference; more would fill memory for frames that no model takes
AT_A_TIME = 32  # frames that are decoded at full size at the same time


class Conditioning(NamedTuple):
    """What one sample starts from."""

    references: list[Tensor]  # [3, T_i, H, W] each, in [-1, 1], fp32, of lengths that the VAE takes
    conditions: list[FrameCondition]


NO_CONDITIONING = Conditioning([], [])


def conditioning(
    cfg: InferenceConfig, item: PromptItem, vae: VideoVAE, num_frames: int, image_size: tuple[int, int]
) -> Conditioning:
    """The references of a prompt, and which frames they become.

    From `item.references` with `item.mask_strategy`, or from the config's `image`, `last_image`, `extend`, `edit`. Frames of the
    last two are taken at the rate of the result, which has `num_frames` frames of `image_size` (height, width).

    Raises:
        UserError: a file cannot be had or read, or references and conditions do not fit together.
    """
    check_shortcuts(cfg, [item])
    used = _shortcuts(cfg)
    where = f"prompt {item.index}: " + (f"--{used[0]}" if used else "mask_strategy")

    def read(source: str, num_frames: int | None = None, *, rate: float | None = None, end: bool = False) -> Tensor:
        path = fetch(source, Path(cfg.reference_cache))
        return read_reference(path, vae, image_size, num_frames, rate=rate, end=end)

    # an image, or the first frame of a video, as often as the VAE's shortest video needs it
    last = None if cfg.last_image is None else read(cfg.last_image, 1)
    if cfg.edit is not None:
        start = edit(read(cfg.edit, num_frames, rate=saved_rate(cfg)), vae, num_frames, cfg.edit_ratio)
    elif cfg.extend is not None:
        shared = overlap(vae, num_frames, cfg.condition_frame_length).num_frames
        end = read(cfg.extend, shared, rate=saved_rate(cfg), end=True)
        start = extension(end, vae, last, num_frames=num_frames, loop=cfg.loop)
        kept = start.references[0].shape[1]
        logger.info("extend: the video begins with the last %d frames of %s.", kept, cfg.extend)
    elif used:
        start = first_and_last(None if cfg.image is None else read(cfg.image, 1), last, cfg.loop)
    else:
        conditions = parse_mask_strategy(item.mask_strategy, cfg.mask_strategy_format, where)
        check_references(conditions, len(item.references), where)
        start = Conditioning([read(source) for source in item.references], conditions)
    align = alignment(vae, cfg.align)
    start = _fitted(start, vae, num_frames, align, where)
    lengths = [vae.latent_frames(reference.shape[1]) for reference in start.references]
    taken_over = overlap(vae, num_frames, cfg.condition_frame_length).latent_frames if cfg.loop > 1 else 0
    check_conditions(start.conditions, lengths, vae.latent_frames(num_frames), align, where, shared=taken_over)
    return start


def check_shortcuts(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """Raise a `UserError` where a run's shortcuts do not fit its prompts or its length, before anything is loaded."""
    used = _shortcuts(cfg)
    if clash := [item.index for item in items if used and item.references]:
        raise UserError(
            f"prompt {clash[0]}: its reference_path and --{used[0].replace('_', '-')} both say what the video starts from; "
            "keep one."
        )
    if cfg.edit is not None and cfg.loop > 1:
        raise UserError(
            f"edit has no effect on loops 1 to {cfg.loop - 1}, which would not follow the video: set --loop 1, with as many "
            "--num-frames as are to be edited, or edit the parts of the video one by one."
        )


def check_files_exist(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """Raise a `UserError` that names local references which do not exist, before minutes of loading and hours of sampling."""
    sources = [(f"--{name.replace('_', '-')}", getattr(cfg, name)) for name in _shortcuts(cfg)]
    sources += [(f"prompt {item.index}: reference_path", source) for item in items for source in item.references]
    missing = [
        f"{where}: there is no file {source}."
        for where, source in sources
        if "://" not in source and not Path(source).is_file()
    ]
    if missing:
        raise UserError("\n".join(first_few(missing)))


def check_has_images(
    cfg: InferenceConfig,
    items: Sequence[PromptItem],
    remedy: str = "set --image (and --last-image), or reference_path and mask_strategy",
) -> None:
    """Raise a `UserError` with the `remedy` where a model that makes videos from images is given a prompt without any."""
    if required_frames_of(cfg.model) is None:
        return
    if lacking := [item.index for item in items if not sources_of(cfg, item)]:
        raise UserError(f"prompt {lacking[0]}: {cfg.model['type']} makes videos from images: {remedy}.")


def sources_of(cfg: InferenceConfig, item: PromptItem) -> list[str]:
    """The files and addresses that the sample of a prompt starts from."""
    return [*(getattr(cfg, name) for name in _shortcuts(cfg)), *item.references]


def _shortcuts(cfg: InferenceConfig) -> list[str]:
    return [name for name in ("image", "last_image", "extend", "edit") if getattr(cfg, name) is not None]


def first_and_last(first: Tensor | None, last: Tensor | None = None, loop: int = 1) -> Conditioning:
    """A video of `loop` segments that begins with one image, ends with another, or both; [3, T, H, W] each."""
    references, conditions = [], []
    if first is not None:
        references.append(first)
        conditions.append(FrameCondition())
    if last is not None:
        conditions.append(FrameCondition(loop=loop - 1, reference=len(references), target_start=-1))
        references.append(last)
    return Conditioning(references, conditions)


def extension(
    video: Tensor, vae: VideoVAE, last: Tensor | None = None, *, num_frames: int | None = None, loop: int = 1
) -> Conditioning:
    """A video that begins with the end of another, and ends with an image, if one is given.

    Args:
        video: [3, T, H, W], the end of what is continued; frames in front that do not fit the VAE are left out, which is logged.
        last: [3, T, H, W], the image.
        num_frames: of the video to make, or of each of its `loop` segments; None: `video` becomes full chunks of the VAE.
    """
    count = video.shape[1]
    fits = _fitting_length(vae, count, FrameCondition(length=vae.latent_frames(count)), num_frames)
    if fits < count:
        logger.info("extend: %d frames in front are left out, for the VAE's chunks begin otherwise.", count - fits)
    start = first_and_last(_to_length(video, fits, end=True), last, loop)
    return Conditioning(start.references, [FrameCondition(length=vae.latent_frames(fits)), *start.conditions[1:]])


def edit(video: Tensor, vae: VideoVAE, num_frames: int, ratio: float) -> Conditioning:
    """A variant of `video [3, T, H, W]`: SDEdit (Meng et al. 2022), from `ratio` of the way into the noise."""
    count = video.shape[1]
    fits = _fitting_length(vae, count, FrameCondition(length=vae.latent_frames(count)), num_frames)
    if min(count, fits) < num_frames:
        of_these = "" if fits == count else f", of which {fits} fit its chunks"
        logger.warning("edit: the video has %d frames%s; the rest of %d is made anew.", count, of_these, num_frames)
    return Conditioning([_to_length(video, fits)], [FrameCondition(length=vae.latent_frames(fits), edit_ratio=ratio)])


def encode_references(
    vae: VideoVAE,
    references: Sequence[Tensor],
    seed: int,
    prompt_index: int,
    *,
    mode: bool = False,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Scaled latents [C, t_i, h, w], fp32, of references [3, T_i, H, W], on `device`; None: where the VAE's weights are.

    The posterior's noise depends on seed, prompt and index of the reference, and on nothing else; with `mode` there is none.
    """
    device = next(vae.parameters()).device if device is None else device
    with torch.no_grad():
        return [
            vae.mode(vae.moments(x[None].to(device)))[0]
            if mode
            else vae.encode(x[None].to(device), [generator(seed, "reference", prompt_index, i)])[0].float()
            for i, x in enumerate(references)
        ]


def placed_frames(
    start: Conditioning, vae: VideoVAE, num_frames: int, *, loop: int = 0, align: int = 1
) -> list[tuple[Tensor, int]]:
    """What a segment of `num_frames` takes from its references as pixels: each [3, n, H, W], and at which frame it begins.

    L latent frames are 1 + s (L - 1) frames, with s the VAE's stride, that end where they end: one of them is an image.

    Raises:
        UserError: frames are to be edited, and not kept.
    """
    stride, placed = vae.strides[0], []
    for condition in (condition for condition in start.conditions if condition.loop == loop):
        if condition.edit_ratio:
            raise UserError(
                f"{describe(condition)}: this model reads conditioning frames as they are and cannot edit them; use edit_ratio 0, or a "
                "text-to-video model."
            )
        reference = start.references[condition.reference]
        fixed = resolve(condition, vae.latent_frames(reference.shape[1]), vae.latent_frames(num_frames), align)
        # a latent frame that is not the first, in both, has all its frames
        more = stride - 1 if fixed.ref_start and fixed.target_start else 0
        begin, count = stride * fixed.ref_start - more, 1 + stride * (fixed.length - 1) + more
        placed.append((reference[:, begin : begin + count], stride * fixed.target_start - more))
    return placed


def read_reference(
    path: Path,
    vae: VideoVAE,
    image_size: tuple[int, int],
    num_frames: int | None = None,
    *,
    rate: float | None = None,
    end: bool = False,
) -> Tensor:
    """An image or a video as [3, T, H, W] in [-1, 1], cropped to `image_size` (height, width), of a length that the VAE takes.

    Where even the VAE's shortest length is longer than the file, the last frame is repeated.

    Args:
        num_frames: at most so many frames; None = all.
        rate: frames a second to take, as a player would show them; None = every frame.
        end: take the video's last frames instead of its first.

    Raises:
        BadFile: it cannot be read.
        UserError: it has more frames than fit into memory.
    """
    with open_clip(path) as clip:
        indices = np.arange(clip.num_frames)
        if rate is not None and clip.num_frames > 1:  # counted from its first frame, or from its last
            if rate > MAX_REPEATED * clip.fps:
                logger.warning(
                    "reference %s has %g frames a second; some are repeated to make %g.", path, clip.fps, rate
                )
            seconds = clip.seconds()
            wanted = np.arange(math.floor((seconds[-1] + CLOSE) * rate) + 1) / rate
            if end:
                wanted += seconds[-1] - wanted[-1]
            indices = np.searchsorted(seconds, wanted + CLOSE, side="right") - 1
        count = len(indices) if num_frames is None else min(num_frames, len(indices))
        if count > MAX_FRAMES:
            raise UserError(
                f"reference {path} has {count} frames, more than {MAX_FRAMES}: cut out the part that is meant."
            )
        legal = vae.legal_num_frames_within(count)
        chosen = indices[-legal:] if end else indices[:legal]
        chosen = np.pad(chosen, (0, legal - len(chosen)), mode="edge")
        transform = get_transform("resize_crop", image_size)
        parts = np.split(chosen, range(AT_A_TIME, legal, AT_A_TIME))
        video = torch.cat([transform(read_indices(path, clip, part)) for part in parts], dim=1)
    if legal != count:
        logger.info("reference %s: %d of %d frames are used; %s.", path, legal, count, vae.frames_rule)
    return video


def alignment(vae: VideoVAE, align: int | None = None) -> int:
    """Latent frames to whose multiples references are moved: the config's, or the VAE's chunk, or 1."""
    return align or vae.chunk_latent_frames or 1


def _fitted(start: Conditioning, vae: VideoVAE, num_frames: int, align: int, where: str) -> Conditioning:
    """References [3, T_i, H, W] of lengths that fit, and their conditions; what is left out or repeated is logged.

    Raises:
        UserError: a condition is outside its reference or the video, or two of one reference need it at different lengths.
    """
    videos, conditions = list(start.references), list(start.conditions)
    for i, video in enumerate(start.references):
        uses = [k for k, condition in enumerate(conditions) if condition.reference == i]
        count = video.shape[1]
        before = vae.latent_frames(count)
        # a start from the end is meant of the whole file
        fixed = {k: conditions[k]._replace(ref_start=conditions[k].ref_start % before) for k in uses}
        lengths = sorted({_fitting_length(vae, count, conditions[k], num_frames, align) for k in uses}) or [count]
        for length in lengths:
            if len(lengths) == 1 or all(
                condition.ref_start < vae.latent_frames(length)
                and _fitting_length(vae, length, condition, num_frames, align) == length
                for condition in fixed.values()
            ):
                break
        else:
            raise UserError(
                f"{where}: groups take {count} frames of one reference to chunks of the VAE that begin differently "
                f"({'; '.join(describe(conditions[k]) for k in uses)}): name its file twice in reference_path, once for each group."
            )
        if length == count:
            continue
        done = f"{count - length} are left out" if length < count else "the last is repeated"
        message = "%s: reference %d has %d frames, and %s: with %d its last chunk begins as the video's does."
        logger.info(message, where, i, count, done, length)
        videos[i] = _to_length(video, length)
        if vae.latent_frames(length) != before:
            for k in uses:
                conditions[k] = fixed[k]
    return Conditioning(videos, conditions)


def _fitting_length(
    vae: VideoVAE, count: int, condition: FrameCondition, num_frames: int | None = None, align: int | None = None
) -> int:
    """The number of frames to which a reference of `count` frames must be shortened, or repeated, for one condition.

    Args:
        num_frames: of the video, or of a segment of it; None: as many full chunks as the reference needs.
        align: latent frames to whose multiples references are moved; None: the VAE's chunks.
    """
    chunk = vae.chunk_latent_frames
    size = max(count, num_frames or 0) if chunk is None else vae.video_frames(chunk)
    if num_frames is None:
        num_frames = count if chunk is None else math.ceil(count / size) * size
    latents, target = vae.latent_frames(count), vae.latent_frames(num_frames)
    fixed = resolve(condition, latents, target, align or chunk or 1)
    chunk = chunk or max(latents, target)
    if fixed.ref_start % chunk or fixed.target_start % chunk:
        return count  # inside a chunk, which only `align` asks for: no length makes it fit
    for k in range(math.ceil(fixed.length / chunk)):
        begin, target_begin = (start // chunk * size + k * size for start in (fixed.ref_start, fixed.target_start))
        has, takes = min(size, count - begin), min(size, num_frames - target_begin)
        padding = vae.causal_padding(takes)
        if vae.causal_padding(has) == padding:
            continue
        first = vae.strides[0] - padding  # frames that the first latent frame stands for
        spare = min(has, takes) - first
        if spare < 0:  # not even the first latent frame can be filled
            return begin + (0 if k else first)
        return begin + first + spare // vae.strides[0] * vae.strides[0]
    return count


def _to_length(video: Tensor, length: int, *, end: bool = False) -> Tensor:
    """[3, T, H, W] -> [3, length, H, W]: the first frames, or the last; where there are too few, the outermost is repeated."""
    count = video.shape[1]
    if length <= count:
        return video[:, count - length :] if end else video[:, :length]
    edge = (video[:, :1] if end else video[:, -1:]).expand(-1, length - count, -1, -1)
    return torch.cat([edge, video] if end else [video, edge], dim=1)
