"""Noise schedules, the coefficients that follow from them, and which timesteps a sampler visits.

Equations of Ho et al. 2020 ("Ho") and Nichol & Dhariwal 2021 ("Nichol"). abar is `alphas_cumprod`.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Scalar = float | Tensor


class Coefficients(NamedTuple):
    """The schedule at a timestep t: floats, or a tensor [B, 1, ...] each for the timesteps of a batch."""

    alphas_cumprod: Scalar
    alphas_cumprod_prev: Scalar  # at t - 1; 1 where there is none
    sqrt_alphas_cumprod: Scalar
    sqrt_one_minus_alphas_cumprod: Scalar
    posterior_mean_coef_x_0: Scalar  # Ho eq. 7
    posterior_mean_coef_x_t: Scalar
    log_posterior_variance: Scalar  # Ho eq. 7; at t = 0, where it is -inf, the value at t = 1
    log_beta: Scalar
    log_fixed_large: Scalar  # log beta; at t = 0 the posterior's at t = 1, as OpenAI's code has it


class Schedule:
    """The coefficients of every timestep: `table` holds the fields of `Coefficients`, each [num_timesteps] fp64."""

    def __init__(self, alphas_cumprod: np.ndarray) -> None:
        """alphas_cumprod: abar of each visited timestep, [num_timesteps] fp64, falling."""
        self.num_timesteps = len(alphas_cumprod)
        prev = np.append(1.0, alphas_cumprod[:-1])
        betas = 1 - alphas_cumprod / prev
        posterior_variance = betas * (1 - prev) / (1 - alphas_cumprod)
        # the posterior at t = 0 is a point; a schedule of one step has no t = 1 to borrow from
        second = posterior_variance[1] if len(betas) > 1 else betas[0]
        self.table: dict[str, np.ndarray] = {
            "alphas_cumprod": alphas_cumprod,
            "alphas_cumprod_prev": prev,
            "sqrt_alphas_cumprod": np.sqrt(alphas_cumprod),
            "sqrt_one_minus_alphas_cumprod": np.sqrt(1 - alphas_cumprod),
            "posterior_mean_coef_x_0": np.sqrt(prev) * betas / (1 - alphas_cumprod),
            "posterior_mean_coef_x_t": np.sqrt(1 - betas) * (1 - prev) / (1 - alphas_cumprod),
            "log_posterior_variance": np.log(np.append(second, posterior_variance[1:])),
            "log_beta": np.log(betas),
            "log_fixed_large": np.log(np.append(second, betas[1:])),
        }
        self._on_device: dict[torch.device, Tensor] = {}  # copied once: a copy at every step would stall the GPU

    def at(self, step: int) -> Coefficients:
        """Python floats for one step: they reach the device as kernel arguments, without a copy."""
        return Coefficients(*(float(self.table[name][step]) for name in Coefficients._fields))

    def gather(self, t: Tensor, ndim: int) -> Coefficients:
        """t [B] int64 -> fp32 tensors [B, 1, ...] with ndim axes, on t's device."""
        if t.device not in self._on_device:
            rows = np.stack([self.table[name] for name in Coefficients._fields])
            self._on_device[t.device] = torch.from_numpy(rows).float().to(t.device)
        columns = self._on_device[t.device][:, t]  # [num_coefficients, B]
        return Coefficients(*columns.reshape(*columns.shape, *[1] * (ndim - 1)))

    def respaced(self, timesteps: Sequence[int]) -> "Schedule":
        """The schedule of a sampler that visits only `timesteps`: the same abar, betas that follow from it (Nichol eq. 19)."""
        return Schedule(self.table["alphas_cumprod"][list(timesteps)])


NAMES = ("linear", "squaredcos_cap_v2", "scaled_linear")


def named_schedule(name: str, diffusion_steps: int) -> Schedule:
    """One of `NAMES`: "linear" (Ho, section 4), "squaredcos_cap_v2" (the cosine, Nichol eq. 17) or "scaled_linear" (linear in
    the square root of beta, as Stable Diffusion).

    The betas but those of the cosine are scaled by 1000 / diffusion_steps, so that the last timestep is as noisy whatever
    their number.
    """
    if name not in NAMES:
        raise UserError(
            f"scheduler.noise_schedule={name!r} is not one of {', '.join(NAMES)}.{did_you_mean(str(name), list(NAMES))}"
        )
    if diffusion_steps < 1 or (name != "squaredcos_cap_v2" and diffusion_steps <= 20):
        raise UserError(
            f"scheduler.diffusion_steps={diffusion_steps} is too few for noise_schedule={name!r}, whose betas are scaled by "
            "1000 / diffusion_steps and must stay below 1; use more than 20."
        )
    scale = 1000 / diffusion_steps
    if name == "linear":
        betas = np.linspace(1e-4 * scale, 0.02 * scale, diffusion_steps)
    elif name == "scaled_linear":
        betas = np.linspace(0.00085**0.5, 0.012**0.5, diffusion_steps) ** 2 * scale  # Rombach et al. 2022
    else:
        abar = [math.cos((t / diffusion_steps + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(diffusion_steps + 1)]
        betas = np.minimum([1 - after / before for before, after in pairwise(abar)], 0.999)
    return Schedule(np.cumprod(1 - betas))


def spaced_timesteps(diffusion_steps: int, respacing: str | None) -> list[int]:
    """Which of the T training timesteps a sampler visits, ascending (Nichol, section 4).

    Args:
        respacing: None or "" visits all; "N" visits N, first and last included; "a,b,c" cuts [0, T) in three equal
            sections and visits a, b and c timesteps in them; "ddimN" visits 0, s, 2s, ... for an integer stride s (Song et
            al. 2021).
    """
    if not respacing:
        return list(range(diffusion_steps))
    what = f"num_sampling_steps / timestep_respacing {respacing!r}"
    texts = respacing.removeprefix("ddim").split(",")
    if not all(text.strip().isdecimal() and int(text) for text in texts):
        raise UserError(f"{what}: expected positive integers; write 'N', 'a,b,c' or 'ddimN'.")
    counts = [int(text) for text in texts]
    if diffusion_steps > 1 and counts == [1]:
        raise UserError(
            f"{what} keeps timestep 0 only, where the input is almost clean: sampling from noise needs at least 2 steps."
        )
    if respacing.startswith("ddim"):
        strides = {len(range(0, diffusion_steps, s)): s for s in range(diffusion_steps, 0, -1)}  # the smallest stride
        num_steps = counts[0]
        if num_steps in strides and len(counts) == 1:
            return list(range(0, diffusion_steps, strides[num_steps]))
        nearby = sorted(sorted(strides, key=lambda n: abs(n - num_steps))[:4])
        raise UserError(
            f"{what}: no integer stride visits exactly {num_steps} of {diffusion_steps} timesteps. Nearby counts that work: "
            f"{', '.join(f'ddim{n}' for n in nearby)}; or '{num_steps}', whose stride is fractional."
        )
    size, num_longer = divmod(diffusion_steps, len(counts))
    timesteps: list[int] = []
    start = 0
    for i, count in enumerate(counts):
        length = size + (i < num_longer)
        if count > length:
            raise UserError(
                f"{what} asks for {count} of the {length} timesteps of section {i + 1} (diffusion_steps={diffusion_steps}); "
                f"lower it to at most {length}."
            )
        stride = (length - 1) / max(count - 1, 1)
        # a running sum, not i * stride: the two round differently at halves, and OpenAI's code sums
        timesteps += [start + round(x) for x in accumulate(repeat(stride, count - 1), initial=0.0)]
        start += length
    return timesteps
