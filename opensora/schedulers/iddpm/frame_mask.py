"""Frames that are given: kept, or edited from some way into the sampling on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.iddpm.diffusion import q_sample
from opensora.schedulers.iddpm.schedule import Coefficients
from opensora.utils.seed import generator, randn_like


class FrameMask:
    """mask [B, T]: 1 (True) generates a frame from the noise in z, 0 (False) keeps the frame of z bit for bit.

    A value between 0 and 1 edits (Meng et al. 2022, SDEdit): the frame of z is a reference; it is kept until the last
    `round(value * num_steps)` steps, noised to the level of the first of these, and denoised from there on.
    """

    def __init__(self, mask: Tensor, num_steps: int, z: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        if tuple(mask.shape) != (z.shape[0], z.shape[2]):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected [B, T] = [{z.shape[0]}, {z.shape[2]}].")
        self.num_active_steps = torch.round(mask.float() * num_steps)  # [B, T]
        self.edit_noise = None
        if mask.is_floating_point():
            self.edit_noise = _edit_noise(z, generators)
            self.edited = (mask > 0) & (mask < 1)

    def active(self, step: int) -> Tensor:
        """[B, T] bool: the frames that the sampler moves at this step (steps count down to 0)."""
        return self.num_active_steps > step

    def noise_entering(self, x: Tensor, step: int, c: Coefficients) -> Tensor:
        """x with the edited frames noised whose first active step this is."""
        if self.edit_noise is None:
            return x
        entering = self.edited & (self.num_active_steps == step + 1)
        return torch.where(per_frame(entering), q_sample(x, self.edit_noise, c), x)


def per_frame(mask: Tensor) -> Tensor:
    """[B, T] -> [B, 1, T, 1, 1]."""
    return mask[:, None, :, None, None]


def _edit_noise(z: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
    if generators is None:
        raise ValueError("a fractional mask draws noise: pass one generator per sample, or a boolean mask.")
    # forked, so that the steps' noise of a sample is the same whether or not a frame of it is edited
    return randn_like(z, [generator(g.initial_seed(), "edit", device=g.device) for g in generators])
