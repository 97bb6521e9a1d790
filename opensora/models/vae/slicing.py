"""Moments of one of our VAEs in micro-batches; `opensora.acceleration.vae_slicing` says why."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from opensora.acceleration.vae_slicing import autocast_to, images_at_a_time
from opensora.models.vae.base import VideoVAE


def sliced_moments(
    vae: VideoVAE,
    x: Tensor,
    micro_bs: int | None = None,
    use_autocast: bool | torch.dtype = False,  # noqa: FBT001, FBT002
    nhwc: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """`vae.moments(x)` for videos [B, 3, T, H, W], in micro-batches: the VAE's own, or by the size of the pictures.

    A VAE that is made of VAEs cuts by videos, and its parts may have to cut on: one video can have many pictures.
    """
    layout, batches = _layout(vae, channels_last=nhwc), _micro_batches(vae, x, micro_bs)
    with autocast_to(x.device, use_autocast), layout, batches:
        return vae.moments(x)


class SlicedEncoder:
    """A VAE as those see it who only store moments: encoding is `sliced_moments`."""

    def __init__(self, vae: VideoVAE) -> None:
        self.vae = vae

    def moments(self, x: Tensor) -> Tensor:
        """See `sliced_moments`."""
        return sliced_moments(self.vae, x)

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """See `VideoVAE.latent_size`."""
        return self.vae.latent_size(size)

    def fingerprint(self) -> str:
        """See `VideoVAE.fingerprint`."""
        return self.vae.fingerprint()


@contextmanager
def _micro_batches(vae: VideoVAE, x: Tensor, pictures: int | None) -> Iterator[None]:
    """So many `pictures` at a time; None: by their size, where a VAE or a part of it has no number of its own."""
    before = [(part, part.micro_batch_size) for part in vae.modules() if isinstance(part, VideoVAE)]
    size = pictures or images_at_a_time(x.shape[3], x.shape[4])
    for part, chosen in before:
        if pictures is not None or chosen is None:
            part.micro_batch_size = part.units_of(size, x.shape[2])
    try:
        yield
    finally:
        for part, chosen in before:
            part.micro_batch_size = chosen


@contextmanager
def _layout(vae: VideoVAE, *, channels_last: bool) -> Iterator[None]:
    """Inputs in the layout that `nhwc` asks for."""
    before = [(part, part.memory_format) for part in vae.modules() if isinstance(part, VideoVAE)]
    for part, chosen in before:
        part.memory_format = "channels_last" if channels_last else chosen
    try:
        yield
    finally:
        for part, chosen in before:
            part.memory_format = chosen
