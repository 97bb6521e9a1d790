"""Noise schedules and the coefficients that follow from them: beta_t, abar_t and the posterior q(x_{t-1} | x_t, x_0).

Equations of Ho et al. 2020 ("Ho") and Nichol & Dhariwal 2021 ("Nichol"). abar is `alphas_cumprod`.
"""

import math
from collections.abc import Sequence
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
    """The coefficients of every timestep, fp64 on the CPU until asked for."""

    def __init__(self, alphas_cumprod: np.ndarray) -> None:
        """alphas_cumprod: abar of each visited timestep, [num_timesteps] fp64, falling."""
        self.table = _table(alphas_cumprod)
        self.num_timesteps = len(alphas_cumprod)
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


NAMES = ("linear", "squaredcos_cap_v2", "cosine", "scaled_linear", "quad", "warmup10", "warmup50", "const", "jsd")


def named_schedule(name: str, diffusion_steps: int) -> Schedule:
    """One of `NAMES`: "linear" (Ho, section 4), "squaredcos_cap_v2" or "cosine" (Nichol eq. 17), "scaled_linear" (Stable
    Diffusion), and OpenAI's "quad", "warmup10", "warmup50", "const" and "jsd".

    All betas but those of the cosine and "jsd" are scaled by 1000 / diffusion_steps, so that the last timestep is as
    noisy whatever their number. "jsd" ends in pure noise, abar = 0.
    """
    if name not in NAMES:
        raise UserError(
            f"scheduler.noise_schedule={name!r} is not one of {', '.join(NAMES)}.{did_you_mean(str(name), list(NAMES))}"
        )
    betas = _betas(name, diffusion_steps) if diffusion_steps > 0 else np.empty(0)
    if not len(betas) or betas.max() > 1 or (betas.max() == 1 and name != "jsd"):
        raise UserError(
            f"scheduler.diffusion_steps={diffusion_steps} is too few for noise_schedule={name!r}, whose betas are "
            "scaled by 1000 / diffusion_steps and must stay below 1; use more than 20."
        )
    return Schedule(np.cumprod(1 - betas))


def _betas(name: str, steps: int) -> np.ndarray:
    """[steps] fp64."""
    scale = 1000 / steps
    first, last = (0.00085, 0.012) if name == "scaled_linear" else (1e-4, 0.02)  # Rombach et al. 2022; Ho, section 4
    if name == "linear":
        return np.linspace(first * scale, last * scale, steps)
    if name in ("scaled_linear", "quad"):  # linear in the square root of beta
        return np.linspace(first**0.5, last**0.5, steps) ** 2 * scale
    if name == "jsd":
        return 1 / np.linspace(steps, 1, steps)
    if name in ("cosine", "squaredcos_cap_v2"):

        def alphas_cumprod(u: float) -> float:
            return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

        betas = np.array([1 - alphas_cumprod((t + 1) / steps) / alphas_cumprod(t / steps) for t in range(steps)])
        return np.minimum(betas, 0.999)
    betas = np.full(steps, last)
    length = int(steps * {"const": 0.0, "warmup10": 0.1, "warmup50": 0.5}[name])
    betas[:length] = np.linspace(first, last, length)
    return betas * scale


def _table(alphas_cumprod: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of `Coefficients`, each [num_timesteps] fp64."""
    prev = np.append(1.0, alphas_cumprod[:-1])
    betas = 1 - alphas_cumprod / prev
    posterior_variance = betas * (1 - prev) / (1 - alphas_cumprod)
    # the posterior at t = 0 is a point; a schedule of one step has no t = 1 to borrow from
    second = posterior_variance[1] if len(betas) > 1 else betas[0]
    return {
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
