"""Long videos: segments of a length that the model knows, each of which begins with the end of the one before.

`loop` segments of N frames that share P frames with their neighbours make a video of loop (N - P) + P frames. The overlap is
set in latent frames, L; P is what the VAE makes of them.

What a segment takes over are latents. Where the VAE codes the end of a segment apart from its beginning (every frame
by itself, or in chunks), they are the latents themselves, so that nothing is lost from segment to segment. Where it does
not, as a video is one chunk there, the last P decoded frames are encoded anew.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


class Overlap(NamedTuple):
    """What neighbouring segments share."""

    latent_frames: int  # L
    num_frames: int  # P
    keeps_latents: bool  # the latents are taken over as they are


def overlap(vae: Any, num_frames: int, latent_frames: int | None = None) -> Overlap:
    """How segments of `num_frames` can overlap.

    Args:
        vae: knows its latent frames, and the chunks in which it makes them (`chunk_latent_frames`).
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
    if vae.legal_num_frames(shared) != shared or vae.latent_frames(shared) != latent_frames:
        raise UserError(
            f"condition_frame_length={latent_frames}: no video of this VAE has that many latent frames; the nearest length is "
            f"{vae.legal_num_frames(shared)} frames, {vae.latent_frames(vae.legal_num_frames(shared))} latent ones."
        )
    before = total - latent_frames
    keeps = chunk is not None and before % step == 0 and vae.video_frames(before) == num_frames - shared
    return Overlap(latent_frames, shared, keeps)


def begin_with(taken: Tensor, z: Tensor, mask: Tensor | None, edit_ratio: float) -> tuple[Tensor, Tensor]:
    """A segment's initial z and mask with the frames that it takes over.

    Args:
        taken: [B, C, L, h, w] latents of the end of the segment before.
        z: [B, C, t, h, w] noise, perhaps with other conditioning frames; it is not changed.
        mask: [B, t] of those, or None; the frames taken over win, which is logged.
        edit_ratio: 0 keeps them, above 0 they are edited from that noise level on.

    Returns:
        z, and a mask [B, t]: bool, or fp32 where frames are edited.
    """
    length = taken.shape[2]
    z = z.clone()
    z[:, :, :length] = taken.to(z)
    if mask is None:
        mask = torch.ones(z.shape[0], z.shape[2], dtype=torch.bool, device=z.device)
    if lost := int((mask[:, :length] < 1).sum()):
        logger.warning("%d latent frames of references have no effect: they lie in what a loop takes over.", lost)
    mask = mask.float() if edit_ratio else mask.clone()
    mask[:, :length] = edit_ratio
    return z, mask
