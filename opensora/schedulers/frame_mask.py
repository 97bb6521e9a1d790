"""Conditioning frames, which are kept, and frames that are edited from some noise level on. The same in every sampler."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from opensora.utils.seed import generator, randn_like

Noising = Callable[[Tensor, Tensor, int], Tensor]  # (x_0, noise, step index) -> x_t at the level that enters the step


class FrameMask:
    """mask [B, T]: 1 (True) generates a frame from the noise in z, 0 (False) keeps the frame of z bit for bit.

    A value between 0 and 1 edits (Meng et al. 2022, SDEdit): the frame of z is a reference, which is kept until the
    sampler comes down to the step whose level is nearest to the value, noised to that level, and denoised from there
    on. Even the smallest value edits in the last step.

    Args:
        levels: of each step, falling in (0, 1]: how far into the noise x is before it, as a part of the training time.
        noised: the scheduler's forward process, to the level before a step.
        z: [B, C, T, H, W], noise in frames to generate, latents in the others.
        generators: one per sample; needed by a mask of floats, which may ask for edits.

    Attributes:
        all_denoised: of each step, whether all frames of all samples are denoised in it.
    """

    def __init__(
        self,
        mask: Tensor,
        levels: Sequence[float],
        z: Tensor,
        generators: Sequence[torch.Generator] | None,
        noised: Noising,
    ) -> None:
        if tuple(mask.shape) != (z.shape[0], z.shape[2]):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected [B, T] = [{z.shape[0]}, {z.shape[2]}].")
        self.mask = mask.to(z.device)
        self.noised = noised
        # a frame is denoised in the steps whose bound is below its value: half-way to the next level
        self.bounds = [*((level + after) / 2 for level, after in pairwise(levels)), 0.0]
        self.edit_noise = None
        bounds = torch.zeros(len(levels))
        if mask.is_floating_point():
            if generators is None:
                raise ValueError("a fractional mask draws noise: pass one generator per sample, or a boolean mask.")
            # forked, so that the steps' noise of a sample is the same whether or not a frame of it is edited
            forked = [generator(g.initial_seed(), "edit", device=g.device) for g in generators]
            self.edit_noise = randn_like(z, forked)
            bounds = torch.tensor(self.bounds, dtype=mask.dtype)
        # read once, so that the steps in which nothing changes launch nothing; after that nobody waits for the device
        values = mask.cpu()
        denoised = values > bounds[:, None, None]  # [num_steps, B, T]
        self.all_denoised: list[bool] = denoised.flatten(1).all(dim=1).tolist()
        edited = (denoised & (values < 1)).flatten(1).sum(dim=1).tolist()
        self._enters = [before < now for before, now in pairwise([0, *edited])]
        changes = [0, *(denoised[1:] != denoised[:-1]).flatten(1).any(dim=1).tolist()]
        self._stage = list(accumulate(changes))  # steps of one stage denoise the same frames
        self._active: dict[int, Tensor] = {}

    def active(self, index: int) -> Tensor:
        """[B, T] bool: the frames that are denoised in this step (0 is the first, the noisiest).

        Steps that denoise the same frames give the same tensor.
        """
        stage = self._stage[index]
        if stage not in self._active:
            active = self.mask > self.bounds[index] if self.mask.is_floating_point() else self.mask.bool()
            self._active[stage] = active
        return self._active[stage]

    def noise_entering(self, x: Tensor, index: int) -> Tensor:
        """x with the edited frames noised whose first active step this is."""
        if self.edit_noise is None or not self._enters[index]:
            return x
        before = self.bounds[index - 1] if index > 0 else 1.0
        entering = (self.mask > self.bounds[index]) & (self.mask <= before) & (self.mask < 1)
        return torch.where(expand_frames(entering), self.noised(x, self.edit_noise, index), x)


def expand_frames(mask: Tensor) -> Tensor:
    """[B, T] -> [B, 1, T, 1, 1]."""
    return mask[:, None, :, None, None]
