"""How long a reference may be, so that its latents mean in the video what they mean in the reference.

A VAE may take any number of frames and yet make one latent frame of several: Open-Sora 1.2's fills the beginning of a piece up
to a multiple of 4. The first latent frame of 10 frames stands for two of them, that of a whole piece of 17 for one. Put into a
whole piece, latents of 10 frames would be seen a frame late, and one be lost. So a reference that ends with a part of
a piece is cut to where that part has the causal padding (`vae.causal_padding`) of the piece of the video that it is put to.
"""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.inference.mask_strategy import Condition, describe, resolve
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


def fitted(
    references: Sequence[Tensor],
    conditions: Sequence[Condition],
    vae: VideoVAE,
    num_frames: int,
    align: int,
    where: str,
) -> tuple[list[Tensor], list[Condition]]:
    """References [3, T_i, H, W] of lengths that fit, and their conditions; what is left out or repeated is told.

    Args:
        references, conditions: of one prompt.
        vae: knows its pieces.
        num_frames: of the video, or of a segment of it.
        align: latent frames to whose multiples references are moved.
        where: what messages call the conditions.

    Raises:
        UserError: a condition is outside its reference or the video, or two of one reference need it at different lengths.
    """
    videos, places = list(references), list(conditions)
    for i, video in enumerate(references):
        uses = [k for k, condition in enumerate(conditions) if condition.reference == i]
        count = video.shape[1]
        length = _common_length(vae, count, [conditions[k] for k in uses], num_frames, align, where)
        if length == count:
            continue
        done = f"{count - length} are left out" if length < count else "the last is repeated"
        logger.info(
            "%s: reference %d has %d frames, and %s: with %d its last piece begins as the video's does.",
            where,
            i,
            count,
            done,
            length,
        )
        videos[i] = to_length(video, length)
        before, after = vae.latent_frames(count), vae.latent_frames(length)
        for k in uses if before != after else ():  # "from its end" is meant of the whole file
            places[k] = conditions[k]._replace(ref_start=conditions[k].ref_start % before)
    return videos, places


def fitting_length(
    vae: VideoVAE, count: int, condition: Condition, num_frames: int | None = None, align: int | None = None
) -> int:
    """The number of frames to which a reference must be cut, or repeated, for one condition.

    Args:
        vae: knows its pieces.
        count: frames of the reference, which the VAE takes.
        condition: what the video takes from it.
        num_frames: of the video, or of a segment of it; None: as many whole pieces as the reference needs.
        align: latent frames to whose multiples references are moved; None: the VAE's pieces.
    """
    chunk = vae.chunk_latent_frames
    size = max(count, num_frames or 0) if chunk is None else vae.video_frames(chunk)
    if num_frames is None:
        num_frames = count if chunk is None else math.ceil(count / size) * size
    latents, target = vae.latent_frames(count), vae.latent_frames(num_frames)
    place = resolve(condition, latents, target, align or chunk or 1)
    chunk = chunk or max(latents, target)
    if place.ref_start % chunk or place.target_start % chunk:
        return count  # inside a piece, which only `align` asks for: no length makes it fit
    for k in range(math.ceil(place.length / chunk)):
        begin, target_begin = (start // chunk * size + k * size for start in (place.ref_start, place.target_start))
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


def to_length(video: Tensor, length: int, *, end: bool = False) -> Tensor:
    """[3, T, H, W] -> [3, length, H, W]: the first frames, or the last; where there are too few, the outermost is repeated."""
    count = video.shape[1]
    if length <= count:
        return video[:, count - length :] if end else video[:, :length]
    edge = (video[:, :1] if end else video[:, -1:]).expand(-1, length - count, -1, -1)
    return torch.cat([edge, video] if end else [video, edge], dim=1)


def _common_length(
    vae: VideoVAE, count: int, conditions: Sequence[Condition], num_frames: int, align: int, where: str
) -> int:
    """A length of a reference that fits all of its conditions."""
    lengths = sorted({fitting_length(vae, count, condition, num_frames, align) for condition in conditions})
    before = vae.latent_frames(count)
    fixed = [condition._replace(ref_start=condition.ref_start % before) for condition in conditions]
    for length in lengths:
        if len(lengths) == 1 or all(_fits(vae, length, condition, num_frames, align) for condition in fixed):
            return length
    if not lengths:
        return count
    raise UserError(
        f"{where}: groups take {count} frames of one reference to pieces of the VAE that begin differently "
        f"({'; '.join(map(describe, conditions))}): name its file twice in reference_path, once for each group."
    )


def _fits(vae: VideoVAE, length: int, condition: Condition, num_frames: int, align: int) -> bool:
    within = condition.ref_start < vae.latent_frames(length)
    return within and fitting_length(vae, length, condition, num_frames, align) == length
