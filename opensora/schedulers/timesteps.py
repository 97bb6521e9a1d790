"""Which noise levels training visits, and how much each counts: strategies named in the config, for every scheduler.

A sampling strategy is a density over the T timesteps (over T equal parts of the time, where time is continuous). Each
sample draws one value from its own generator and the distribution's quantile function maps it, so that a timestep does
not depend on the batch. A weight multiplies the MSE of a sample.

SpeeDiT and SpeeD (Wang et al. 2025, "A closer look at time steps", arXiv:2405.17403) mirror half of a batch around a
timestep m ("dual sampling"). Here that half is folded into the density: the same distribution, without pairs.

All tables come from abar, the signal's part of the power of x_t: abar = SNR / (1 + SNR), which defines it for a rectified
flow too.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.seed import rand, randint

Choice = str | Mapping[str, Any]  # a name, or dict(type=NAME, option=...)
Generators = Sequence[torch.Generator]
LAST = 1 - 2**-24  # the largest fp32 below 1


class TimestepSampling:
    """How training draws its T timesteps."""

    def __init__(self, num_timesteps: int) -> None:
        self.num_timesteps = num_timesteps

    def draw_time(self, generators: Generators, device: torch.device) -> Tensor:
        """[B] fp32 in [0, 1): one from each generator."""
        return rand(generators, device)

    def draw(self, generators: Generators, device: torch.device) -> Tensor:
        """[B] int64 in [0, T): one from each generator."""
        return self.bin(self.draw_time(generators, device))

    def bin(self, time: Tensor) -> Tensor:
        """The timestep that a time in [0, 1] lies in."""
        return (time * self.num_timesteps).long().clamp(0, self.num_timesteps - 1)


class Uniform(TimestepSampling):
    """Every timestep as often."""

    def draw(self, generators: Generators, device: torch.device) -> Tensor:
        return randint(self.num_timesteps, generators, device)


class LogitNormal(TimestepSampling):
    """sigmoid(N(loc, scale^2)): mostly the middle (Esser et al. 2024, section 3.1)."""

    def __init__(self, num_timesteps: int, loc: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(num_timesteps)
        if scale <= 0:
            raise UserError(f"scheduler.timestep_sampling: scale={scale} of logit-normal must be positive.")
        self.loc, self.scale = loc, scale

    def draw_time(self, generators: Generators, device: torch.device) -> Tensor:
        normal = torch.cat([torch.randn(1, generator=g, device=g.device) for g in generators]).to(device)
        return torch.sigmoid(self.loc + self.scale * normal).clamp(max=LAST)


class Tabulated(TimestepSampling):
    """Any density, constant within a timestep."""

    def __init__(self, density: np.ndarray) -> None:
        """density: [T] fp64, positive, with the sum 1."""
        super().__init__(len(density))
        self.density = torch.from_numpy(density)
        self._on_device: dict[torch.device, Tensor] = {}  # copied once: a copy at every step would stall the GPU

    def draw_time(self, generators: Generators, device: torch.device) -> Tensor:
        if device not in self._on_device:
            cumulative = self.density.cumsum(dim=0)
            self._on_device[device] = torch.cat([cumulative.new_zeros(1), cumulative]).to(device)
        return quantile(self._on_device[device], rand(generators, device))


def quantile(cumulative: Tensor, u: Tensor) -> Tensor:
    """The time in [0, 1) below which a part u [B] of a density lies; cumulative [T + 1] fp64, from 0 to 1."""
    last = len(cumulative) - 2
    i = (torch.searchsorted(cumulative, u.double(), right=True) - 1).clamp(0, last)
    within = (u.double() - cumulative[i]) / (cumulative[i + 1] - cumulative[i])
    return ((i + within.clamp(0, 1)) / (last + 1)).float().clamp(max=LAST)


def speedit_density(abar: np.ndarray, threshold: float = 1e-4) -> np.ndarray:
    """SpeeDiT: 5 times as likely where sqrt(1 - abar) still rises by more than `threshold` a timestep; mirrored."""
    p = np.tanh(1e6 * (_rise(abar) - threshold)) + 1.5
    return _with_duals(p / p.sum(), meaningful_steps(abar, threshold))


def speed_density(abar: np.ndarray, k: float = 5.0, tau: float = 700, mirrored: float = 0.5) -> np.ndarray:
    """SpeeD: timesteps below tau k times as likely as those from there on.

    tau is a timestep, or up to 1 a part of the training time. `mirrored` of the draws, half as in the published runs, are
    mirrored around m as in SpeeDiT; 0 is the paper's formula alone.
    """
    if k <= 0 or not 0 <= mirrored <= 0.5:
        raise UserError(f"scheduler.timestep_sampling: k={k} must be positive, mirrored={mirrored} in [0, 0.5].")
    p = np.where(np.arange(len(abar)) < _timestep(tau, len(abar)), k, 1.0)
    p /= p.sum()
    if not mirrored:
        return p
    return (1 - 2 * mirrored) * p + 2 * mirrored * _with_duals(p, meaningful_steps(abar))


def meaningful_steps(abar: np.ndarray, threshold: float = 1e-4) -> int:
    """m: one more than the first timestep at which sqrt(1 - abar) rises less than `threshold`."""
    below = _rise(abar) < threshold
    if not below.any():
        raise UserError(
            f"scheduler.timestep_sampling: sqrt(1 - abar) never rises by less than threshold={threshold} a timestep "
            "here, so there is nothing to visit less. Raise the threshold, or use dict(type='speed', k=5, tau=0.7)."
        )
    return min(int(below.argmax()) + 1, len(abar) - 1)  # at most T - 1: t = 0 is mirrored to m


def _rise(abar: np.ndarray) -> np.ndarray:
    """Of sqrt(1 - abar), for a thousandth of the time."""
    return np.gradient(np.sqrt(1 - abar)) * (len(abar) / 1000)


def _with_duals(p: np.ndarray, m: int) -> np.ndarray:
    """Half of the draws mirrored: t -> m - t below m, t - m from there on."""
    t = np.arange(len(p))
    return (p + np.bincount(np.where(t < m, m - t, t - m), weights=p, minlength=len(p))) / 2


def _timestep(tau: float, num_timesteps: int) -> int:
    step = round(tau * num_timesteps) if tau <= 1 else round(tau)
    if not 0 < step <= num_timesteps:
        raise UserError(f"scheduler: tau={tau} is not in (0, {num_timesteps}]; up to 1 it is a part of the time.")
    return step


def flow_alphas_cumprod(num_timesteps: int) -> np.ndarray:
    """abar of a rectified flow, (1 - tau)^2 / ((1 - tau)^2 + tau^2), in the middle of each of T parts of the time."""
    tau = (np.arange(num_timesteps) + 0.5) / num_timesteps
    return (1 - tau) ** 2 / ((1 - tau) ** 2 + tau**2)


def _p2_weights(abar: np.ndarray, prediction: str, k: float = 1.0, gamma: float = 1.0) -> np.ndarray:
    """1 / (k + SNR)^gamma (Choi et al. 2022, P2); 1 - abar with the defaults."""
    return (k + abar / (1 - abar)) ** -gamma


def _min_snr_weights(abar: np.ndarray, prediction: str, gamma: float = 5.0) -> np.ndarray:
    """min(SNR, gamma) on the loss of x_0 (Hang et al. 2023), as a weight of what the model predicts."""
    snr = abar / (1 - abar)
    of_x_0 = np.minimum(snr, gamma)
    if prediction == "eps":
        return np.minimum(1.0, gamma / np.maximum(snr, 1e-20))
    if prediction == "v":
        return of_x_0 / (snr + 1)
    if prediction == "velocity":  # v = x_0 - noise; the error of x_0 is tau times its own, tau = 1 / (1 + sqrt(SNR))
        return of_x_0 / (np.sqrt(snr) + 1) ** 2
    return of_x_0


def _speed_weights(abar: np.ndarray, prediction: str, lam: float = 0.6, tau: float | None = 700) -> np.ndarray:
    """SpeeD: the slope of 1 - abar, mapped to [1 - lam, lam]; 1 from tau on (None: nowhere)."""
    if not 0.5 <= lam <= 1:
        raise UserError(f"scheduler.loss_weighting: lam={lam} is not in [0.5, 1]; weights lie in [1 - lam, lam].")
    slope = np.gradient(1 - abar)
    weights = (1 - lam) + (2 * lam - 1) * (slope - slope.min()) / np.ptp(slope)
    if tau is not None:
        weights[_timestep(tau, len(abar)) :] = 1
    return weights


class LossWeights:
    """The weight of each timestep's MSE: `table` [T] fp32."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(table).float()
        self._on_device: dict[torch.device, Tensor] = {}

    def __call__(self, t: Tensor) -> Tensor:
        """t [B] int64 -> [B]."""
        if t.device not in self._on_device:
            self._on_device[t.device] = self.table.to(t.device)
        return self._on_device[t.device][t]


SAMPLING: dict[str, Callable[..., Any]] = {
    "uniform": Uniform,
    "logit-normal": LogitNormal,
    "speedit": speedit_density,
    "speed": speed_density,
}
WEIGHTING: dict[str, Callable[..., np.ndarray]] = {
    "none": lambda abar, prediction: np.ones_like(abar),
    "p2": _p2_weights,
    "min-snr": _min_snr_weights,
    "speed": _speed_weights,
}
OWN_WEIGHTING = {"speedit": "p2", "speed": "speed"}  # where loss_weighting is not set


def build_sampling(choice: Choice, abar: np.ndarray) -> TimestepSampling:
    """The strategy named by `timestep_sampling`, for timesteps of these abar [T]."""
    name, options = _checked(choice, "timestep_sampling", SAMPLING)
    if name in ("speedit", "speed"):
        return Tabulated(SAMPLING[name](abar, **options))
    return SAMPLING[name](len(abar), **options)


def build_weights(choice: Choice | None, sampling: Choice, abar: np.ndarray, prediction: str) -> LossWeights | None:
    """The weights named by `loss_weighting`; None, no weights. A choice of None takes the sampling strategy's own."""
    if choice is None:
        choice = OWN_WEIGHTING.get(sampling if isinstance(sampling, str) else sampling["type"], "none")
    name, options = _checked(choice, "loss_weighting", WEIGHTING)
    return None if name == "none" else LossWeights(WEIGHTING[name](abar, prediction, **options))


def _checked(choice: Choice, field: str, table: Mapping[str, Callable[..., Any]]) -> tuple[str, dict[str, Any]]:
    """Name and options of a choice, or a UserError."""
    options: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {"type": choice}
    name = str(options.pop("type", None))
    if name == "loss-second-moment":
        raise UserError(
            f"scheduler.{field}={name!r} was removed: no published model is trained with it. Use 'uniform'."
        )
    if name not in table:
        raise UserError(
            f"scheduler.{field}={choice!r}: expected one of {', '.join(table)}, or dict(type=one of them, ...)."
            f"{did_you_mean(name, list(table))}"
        )
    known = set(inspect.signature(table[name]).parameters) - {"num_timesteps", "abar", "prediction"}
    for key, value in options.items():
        if key not in known:
            raise UserError(
                f"scheduler.{field}: {name!r} takes no {key!r}.{did_you_mean(key, sorted(known))} It takes: "
                f"{', '.join(sorted(known)) or 'nothing'}."
            )
        if value is not None and not isinstance(value, int | float):
            raise UserError(f"scheduler.{field}.{key}={value!r}: expected a number.")
    return name, options
