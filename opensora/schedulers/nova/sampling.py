"""The loop of NOVA's sampling - over frames, over sets of patches, over noise levels - and its guidance."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensora.schedulers.guidance import Condition
from opensora.schedulers.sampling import SamplingStep

AUTOCAST_LAYERS = (nn.Linear, nn.Conv2d)
"""Layers that autocast computes in its dtype; those derived from them round as they like."""


class Scales(NamedTuple):
    """Guidance; see the arguments of the scheduler "nova". `trunc` is a noise level.

    The head's velocity is predicted with text, without it (classifier-free guidance), without text and earlier frames
    (v_0 + image (v_frames - v_0) + scale (v - v_frames), as Brooks et al. 2022, arXiv:2211.09800, eq. 3), and by a weaker
    encoder (after Hyung et al. 2024, spatiotemporal skip guidance, arXiv:2411.18664).
    """

    scale: float = 5.0
    first: float | None = None
    trunc: float = 0.0
    renorm: float = 1.0
    image: float = 0.0
    spatiotemporal: float = 0.0
    skip: tuple[int, ...] = ()

    @property
    def needs_null(self) -> bool:
        """Whether a prediction without text is needed, at any step of a frame."""
        return self.scale != 1 or self.first not in (None, 1) or self.image != 0

    def combine(
        self, velocities: dict[str, Tensor], step: int, num_steps: int, level: float, rest: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        """One velocity `[B, n, c]` of those of the branches, in a step of a frame at a noise level.

        And the factor, [B, 1, 1] or 1, by which renormalisation shrank what guidance by text gives. As published, the
        lengths that it compares are of a whole frame: the noise of all other patches, `rest [B, 1, 1]` squared, counts.
        """
        text = out = velocities["text"]
        if level < self.trunc:
            return text, 1.0
        if "null" in velocities:
            scale = self.scale
            if self.first is not None:
                scale = self.first + (self.scale - self.first) * (step + 1) / num_steps
            out = torch.lerp(velocities["null"], text, scale)
        if "nothing" in velocities:
            out = out + (velocities["nothing"] - velocities["null"])
        factor: Tensor | float = 1.0
        if out is not text and self.renorm < 1:
            lengths = [(velocity.square().sum((1, 2), keepdim=True) + rest).sqrt() for velocity in (text, out)]
            factor = (lengths[0] / lengths[1].clamp(min=torch.finfo(text.dtype).tiny)).clamp(self.renorm, 1.0)
            out = out * factor
        if "nothing" in velocities:
            out = out + self.image * (velocities["null"] - velocities["nothing"])
        if "skip" in velocities:
            out = out + self.spatiotemporal * (text - velocities["skip"])
        return out, factor


class Plan(NamedTuple):
    """What is decided before sampling."""

    order: Tensor  # [B, N] int64: the patches of a frame in the order in which they appear
    known: list[int]  # how many are there before each step, and at the end
    levels: list[float]  # of the noise, falling from 1; the last is 0
    num_timesteps: int
    temperature: float  # of the noise that patches are made from
    scales: Scales


@torch.no_grad()
def generate(
    model: Any, z: Tensor, cond: Condition, null: Condition | None, keep: Tensor, plan: Plan
) -> Iterator[SamplingStep]:
    """Frame after frame; conditioning frames (`keep [B, T]` True) are those of z. `model`: a NOVA.

    Under autocast the weights are in its dtype until the steps are exhausted or closed.
    """
    with weights_cast(model, z.device):
        T, size, num_steps, scales = z.shape[2], (z.shape[3], z.shape[4]), len(plan.known) - 1, plan.scales
        texts = {"text": _text_tokens(model, cond)}
        if null is not None and scales.needs_null:
            uncond = {**cond, **null}
            if "mask" not in null and null["y"] is not None:
                uncond["mask"] = None  # "no text" is as long as the text
            texts["null"] = _text_tokens(model, uncond)
            if scales.image != 0:
                texts["nothing"] = texts["null"]  # and no earlier frames
        full = len(texts)  # branches that take all blocks of the image encoder
        if scales.spatiotemporal:
            texts["skip"] = texts["text"]
        pasts: dict[str, Any] = dict.fromkeys(texts)
        head, levels = model.image_decoder, torch.tensor(plan.levels[:-1], device=z.device)
        times = head.time_cond_embed.timestep_embedding(levels * plan.num_timesteps)  # [levels, D]
        x = torch.zeros_like(z)
        all_kept = keep.all(dim=0).tolist()  # one wait for the device, before the loops
        for t in range(T):
            conditions = []  # [B, Nc, D] of each branch
            for name, text in texts.items():
                blank = name == "nothing"
                frame = None if t == 0 or blank else x[:, :, t - 1]
                condition, pasts[name] = model.next_condition(
                    frame,
                    text,
                    t,
                    (T, *size),
                    pasts[name],
                    with_positions=not blank,  # as published
                )
                conditions.append(condition)
            if all_kept[t]:
                x[:, :, t] = z[:, :, t]
                continue
            noise = plan.temperature * model.to_patches(z[:, :, t])  # [B, N, c]
            patches = torch.zeros_like(noise)
            for k in range(num_steps):
                visible, new = (
                    plan.order[:, : plan.known[k]],
                    plan.order[:, plan.known[k] : plan.known[k + 1]],
                )  # [B, n]
                tokens = model.image_tokens(
                    x[:, :, t].repeat(full, 1, 1, 1), visible.repeat(full, 1), torch.cat(conditions[:full]), size
                )  # [branches B, N, D]
                if scales.spatiotemporal:
                    weaker = model.image_tokens(x[:, :, t], visible, conditions[-1], size, scales.skip)
                    tokens = torch.cat([tokens, weaker])
                tokens = head.time_cond_embed.condition_proj(_pick(tokens, new.repeat(len(texts), 1)))
                made = _pick(noise, new)
                rest = (noise.square().sum((1, 2), True) - made.square().sum((1, 2), True)).clamp(min=0)  # [B, 1, 1]
                for level, after, time in zip(plan.levels, plan.levels[1:], times, strict=False):
                    out = head.denoise(made.repeat(len(texts), 1, 1), tokens + time).to(made.dtype)
                    velocities = dict(zip(texts, out.chunk(len(texts)), strict=True))
                    velocity, factor = scales.combine(velocities, k, num_steps, level, rest)
                    made = torch.add(made, velocity, alpha=after - level)
                    if scales.renorm < 1:  # as published, where the velocity of other patches is their noise itself
                        rest = rest * (1 + (after - level) * factor) ** 2
                patches = patches.scatter(1, new[..., None].expand_as(made), made)
                frame = model.to_frames(patches, size)
                x[:, :, t] = torch.where(keep[:, t, None, None, None], z[:, :, t], frame)
                timestep = (1 - plan.known[k + 1] / plan.known[-1]) * plan.num_timesteps
                timesteps = torch.full((len(z),), timestep, device=z.device)
                yield SamplingStep(t * num_steps + k, T * num_steps, timesteps, x.clone(), x)


def _text_tokens(model: Any, cond: Condition) -> Tensor:
    return model.text_tokens(cond["y"], cond.get("mask"), cond.get("fps"), cond.get("flow"))


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    """`[B, N, D]` at `ids [B, n]` -> `[B, n, D]`."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))


@contextmanager
def weights_cast(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside autocast, its dtype for the fp32 weights and biases of linear and convolutional layers on `device`.

    Autocast rounds a weight whenever it is used, and keeps the result only where gradients are asked for and blocks are
    not compiled. Sampling calls NOVA's head thousands of times with few patches, so that rounding would be more than
    half of all kernel launches. Results are the same; weights take half as much memory again.

    Weights that are elsewhere (block by block offload) or sharded (FSDP) are left to autocast, and what has been
    replaced in the meantime stays as it is. Outside autocast nothing is done.
    """
    swapped = []
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        layers = [module for module in model.modules() if type(module) in AUTOCAST_LAYERS]
        unique = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}  # weights may be tied
        for parameter in unique.values():
            wide = parameter.data
            if type(wide) is Tensor and wide.dtype == torch.float32 and wide.device.type == device.type:
                parameter.data = narrow = wide.to(dtype)
                swapped.append((parameter, wide, narrow))
    try:
        yield
    finally:
        for parameter, wide, narrow in swapped:
            if parameter.data.data_ptr() == narrow.data_ptr():
                parameter.data = wide
