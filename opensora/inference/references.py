"""Pictures and videos that a sample starts from, and what the video takes from them.

    reference_path + mask_strategy     whatever the strategy says (see `mask_strategy.py`), every frame of each file
    --image FIRST [--last-image LAST]  picture to video, and interpolation between two pictures
    --extend VIDEO                     the result begins with the end of a video
    --edit VIDEO --edit-ratio R        a variant of a video: noised up to R of the way, and denoised again

Every number of frames is asked from the VAE, also how long a reference may be for its place (`references_fit.py`). References
are covered by the target size and cut in the middle, as in training.
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
from opensora.datasets.video.frame_times import CLOSE, MAX_REPEATED
from opensora.datasets.video.read_video import Clip, open_clip, read_indices
from opensora.inference.fetch import fetch
from opensora.inference.long_video import overlap
from opensora.inference.mask_strategy import Condition, check_places, check_references, parse_mask_strategy
from opensora.inference.prompts import PromptItem
from opensora.inference.references_fit import fitted, fitting_length, to_length
from opensora.inference.sizes import saved_rate
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError, first_few
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

MAX_FRAMES = 2048  # of one reference; more would fill memory for frames that no model takes
AT_A_TIME = 32  # frames that are decoded at full size at the same time
SHORTCUTS = ("image", "last_image", "extend", "edit")


class Conditioning(NamedTuple):
    """What one sample starts from."""

    references: list[Tensor]  # [3, T_i, H, W] each, in [-1, 1], fp32, of lengths that the VAE takes
    conditions: list[Condition]


NO_CONDITIONING = Conditioning([], [])


def conditioning(
    cfg: InferenceConfig, item: PromptItem, vae: VideoVAE, num_frames: int, image_size: tuple[int, int]
) -> Conditioning:
    """The references of a prompt, and what the video takes from them.

    From `item.references` with `item.mask_strategy`, or from the config's `image`, `last_image`, `extend`, `edit`. Read of the
    config also: `edit_ratio`, `condition_frame_length`, `mask_strategy_format`, `align`, `reference_cache`,
    and `fps`, `frame_interval`, `save_fps`: frames of `extend` and `edit` are taken at the rate of the result.

    Args:
        cfg: the config.
        item: the prompt.
        vae: knows the lengths it takes and the latent frames of a piece.
        num_frames, image_size: of the video to make (height, width), which the VAE takes.

    Raises:
        UserError: a file cannot be had or read, or references and conditions do not fit together.
    """
    refuse_contradictions(cfg, [item])
    used = _shortcuts(cfg)
    load = _Loader(Path(cfg.reference_cache), vae, image_size)
    given = _by_shortcut(cfg, load, vae, num_frames) if used else _by_strategy(cfg, item, load)
    where, align = f"prompt {item.index}: " + (f"--{used[0]}" if used else "mask_strategy"), piece_of(vae, cfg.align)
    given = Conditioning(*fitted(given.references, given.conditions, vae, num_frames, align, where))
    lengths = [vae.latent_frames(reference.shape[1]) for reference in given.references]
    shared = overlap(vae, num_frames, cfg.condition_frame_length).latent_frames if cfg.loop > 1 else 0
    check_places(given.conditions, lengths, vae.latent_frames(num_frames), align, where, shared=shared)
    return given


def refuse_contradictions(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """See that a run's shortcuts fit its prompts and its length, before anything is loaded.

    Raises:
        UserError: they do not.
    """
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
    if cfg.align is not None and not used and not any(item.references for item in items):
        raise UserError(f"align={cfg.align} has no effect: no prompt has references that could be moved.")
    given = any(item.mask_strategy is not None for item in items)
    if cfg.mask_strategy_format != "six-fields" and not given:
        raise UserError(f"mask_strategy_format={cfg.mask_strategy_format!r} has no effect without mask_strategy.")


def sources_of(cfg: InferenceConfig, item: PromptItem) -> list[str]:
    """The files and addresses that the sample of a prompt starts from."""
    return [*(getattr(cfg, name) for name in _shortcuts(cfg)), *item.references]


def refuse_missing(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """See that every file that a run starts from is there, before minutes of loading and hours of sampling.

    Raises:
        UserError: names those that are not.
    """
    sources = [(f"--{name.replace('_', '-')}", getattr(cfg, name)) for name in SHORTCUTS]
    sources += [(f"prompt {item.index}: reference_path", source) for item in items for source in item.references]
    missing = [
        f"{where}: there is no file {source}."
        for where, source in sources
        if source is not None and "://" not in source and not Path(source).is_file()
    ]
    if missing:
        raise UserError("\n".join(first_few(missing)))


def first_and_last(first: Tensor | None, last: Tensor | None = None, loop: int = 1) -> Conditioning:
    """A video of `loop` segments that begins with one picture, ends with another, or both; [3, T, H, W] each."""
    given = [(first, Condition()), (last, _end(loop))]
    chosen = [(picture, place) for picture, place in given if picture is not None]
    return Conditioning(
        [picture for picture, _ in chosen], [place._replace(reference=i) for i, (_, place) in enumerate(chosen)]
    )


def extension(
    video: Tensor, vae: VideoVAE, last: Tensor | None = None, *, num_frames: int | None = None, loop: int = 1
) -> Conditioning:
    """A video that begins with the end of another, and ends with a picture, if one is given.

    Args:
        video: [3, T, H, W], the end of what is continued; frames in front that do not fit are left out, and that is told.
        vae: knows how many fit.
        last: [3, T, H, W], the picture.
        num_frames: of the video to make, or of a segment of it; None: the pieces of the VAE that `video` is put to are whole.
        loop: segments of the video to make.
    """
    count = video.shape[1]
    fits = fitting_length(vae, count, Condition(length=vae.latent_frames(count)), num_frames)
    if fits < count:
        logger.info("extend: %d frames in front are left out, for the VAE's pieces begin otherwise.", count - fits)
    video = to_length(video, fits, end=True)
    conditions = [Condition(length=vae.latent_frames(fits))]
    if last is None:
        return Conditioning([video], conditions)
    return Conditioning([video, last], [*conditions, _end(loop)._replace(reference=1)])


def edit(video: Tensor, vae: VideoVAE, num_frames: int, ratio: float) -> Conditioning:
    """A variant of `video [3, T, H, W]`: SDEdit (Meng et al. 2022), from `ratio` of the way into the noise."""
    count = video.shape[1]
    fits = fitting_length(vae, count, Condition(length=vae.latent_frames(count)), num_frames)
    video = to_length(video, fits)
    if min(count, fits) < num_frames:
        of_these = "" if fits == count else f", of which {fits} fit its pieces"
        logger.warning("edit: the video has %d frames%s; the rest of %d is made anew.", count, of_these, num_frames)
    return Conditioning([video], [Condition(length=vae.latent_frames(video.shape[1]), edit_ratio=ratio)])


def encode_references(vae: VideoVAE, references: Sequence[Tensor], seed: int, prompt_index: int) -> list[Tensor]:
    """Scaled latents [C, t_i, h, w], fp32, of references [3, T_i, H, W], on the VAE's device.

    The posterior's noise depends on seed, prompt and place of the reference, and on nothing else.
    """
    device = next(vae.parameters()).device
    with torch.no_grad():
        return [
            vae.encode(x[None].to(device), [generator(seed, "reference", prompt_index, i)])[0].float()
            for i, x in enumerate(references)
        ]


def read_reference(
    path: Path,
    vae: VideoVAE,
    image_size: tuple[int, int],
    num_frames: int | None = None,
    *,
    rate: float | None = None,
    end: bool = False,
) -> Tensor:
    """A picture or a video as [3, T, H, W] in [-1, 1], cut to the size, and to a length that the VAE takes.

    Args:
        path: the file.
        vae: knows the lengths it takes; where even the shortest is longer than the file, the last frame is repeated.
        image_size: height and width.
        num_frames: at most so many frames; None = all.
        rate: frames a second to take, as a player would show them; None = every frame.
        end: take the video's last frames instead of its first.

    Raises:
        BadFile: it cannot be read.
        UserError: it has more frames than fit into memory.
    """
    with open_clip(path) as clip:
        indices = _frames_at(path, clip, rate, end=end)
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


class _Loader:
    """Reads files and URLs at the size of one run's videos."""

    def __init__(self, cache: Path, vae: VideoVAE, image_size: tuple[int, int]) -> None:
        self.cache, self.vae, self.image_size = cache, vae, image_size

    def __call__(
        self, source: str, num_frames: int | None = None, *, rate: float | None = None, end: bool = False
    ) -> Tensor:
        """[3, T, H, W]; see `read_reference`."""
        path = fetch(source, self.cache)
        return read_reference(path, self.vae, self.image_size, num_frames, rate=rate, end=end)

    def picture(self, source: str | None) -> Tensor | None:
        """[3, T, H, W]: a picture, or the first frame of a video, as often as the VAE's shortest video needs it."""
        return None if source is None else self(source, 1)


def _by_shortcut(cfg: InferenceConfig, load: _Loader, vae: VideoVAE, num_frames: int) -> Conditioning:
    """What --image, --last-image, --extend and --edit say."""
    if cfg.edit is not None:
        return edit(load(cfg.edit, num_frames, rate=saved_rate(cfg)), vae, num_frames, cfg.edit_ratio)
    last = load.picture(cfg.last_image)
    if cfg.extend is not None:
        shared = overlap(vae, num_frames, cfg.condition_frame_length)
        end = load(cfg.extend, shared.num_frames, rate=saved_rate(cfg), end=True)
        extended = extension(end, vae, last, num_frames=num_frames, loop=cfg.loop)
        begins_with = extended.references[0].shape[1]
        logger.info("extend: the video begins with the last %d frames of %s.", begins_with, cfg.extend)
        return extended
    return first_and_last(load.picture(cfg.image), last, cfg.loop)


def _shortcuts(cfg: InferenceConfig) -> list[str]:
    """Those that the config uses."""
    return [name for name in SHORTCUTS if getattr(cfg, name) is not None]


def _end(loop: int) -> Condition:
    """Where the picture goes that ends a video of so many segments."""
    return Condition(loop=loop - 1, target_start=-1)


def _by_strategy(cfg: InferenceConfig, item: PromptItem, load: _Loader) -> Conditioning:
    """What reference_path and mask_strategy say."""
    where = f"prompt {item.index}: mask_strategy"
    conditions = parse_mask_strategy(item.mask_strategy, cfg.mask_strategy_format, where)
    check_references(conditions, len(item.references), where)
    return Conditioning([load(source) for source in item.references], conditions)


def piece_of(vae: VideoVAE, align: int | None = None) -> int:
    """Latent frames to whose multiples references are moved: as the config says, or the VAE's pieces, or any."""
    return align or vae.chunk_latent_frames or 1


def _frames_at(path: Path, clip: Clip, rate: float | None, *, end: bool) -> np.ndarray:
    """Indices [N] of a clip's frames: all of them, or those shown at `rate`, counted from its first or from its last."""
    if rate is None or clip.num_frames == 1:
        return np.arange(clip.num_frames)
    if rate > MAX_REPEATED * clip.fps:
        logger.warning("reference %s has %g frames a second; some are repeated to make %g.", path, clip.fps, rate)
    seconds = clip.seconds()
    wanted = np.arange(math.floor((seconds[-1] + CLOSE) * rate) + 1) / rate
    if end:
        wanted += seconds[-1] - wanted[-1]
    return np.searchsorted(seconds, wanted + CLOSE, side="right") - 1
