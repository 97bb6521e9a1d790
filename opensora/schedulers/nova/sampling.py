"""The loops of NOVA's sampling: over frames, over sets of patches, over noise levels; with its guidance."""

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

    The head's velocity is predicted with text, without it (classifier-free guidance), without text and earlier frames,
    and by a weaker encoder (after Hyung et al. 2024, spatiotemporal skip guidance, arXiv:2411.18664).
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

    def combine(self, velocities: dict[str, Tensor], step: int, num_steps: int, level: float) -> Tensor:
        """One velocity `[B, n, c]` of those of the branches, in a step of a frame at a noise level."""
        text = out = velocities["text"]
        if level < self.trunc:
            return text
        if "null" in velocities:
            scale = self.scale
            if self.first is not None and num_steps > 1:
                scale = self.first + (self.scale - self.first) * step / (num_steps - 1)
            out = torch.lerp(velocities["null"], text, scale)
        if "nothing" in velocities:
            out = out + self.image * (velocities["null"] - velocities["nothing"])
        if "skip" in velocities:
            out = out + self.spatiotemporal * (text - velocities["skip"])
        if out is text or self.renorm >= 1:
            return out
        lengths = [velocity.norm(dim=-1, keepdim=True) for velocity in (text, out)]  # [B, n, 1]
        return out * (lengths[0] / lengths[1].clamp(min=torch.finfo(text.dtype).tiny)).clamp(self.renorm, 1.0)


class Plan(NamedTuple):
    """What is decided before sampling."""

    order: Tensor  # [B, N] int64: the patches of a frame in the order in which they appear
    known: list[int]  # how many are there before each step, and at the end
    levels: list[float]  # of the noise, from 1 to 0
    num_timesteps: int
    temperature: float  # of the noise that patches are made from
    scales: Scales


class Branch(NamedTuple):
    """One way to condition: the caption, whether earlier frames are seen, and blocks of the encoder to skip."""

    text: Tensor
    sees_frames: bool = True
    skip: tuple[int, ...] = ()


@torch.no_grad()
def generate(
    model: Any, z: Tensor, cond: Condition, null: Condition | None, keep: Tensor, plan: Plan
) -> Iterator[SamplingStep]:
    """Frame after frame; conditioning frames (`keep [B, T]` True) are those of z. `model`: a NOVA.

    Under autocast the weights are in its dtype until the steps are exhausted or closed.
    """
    with weights_cast(model, z.device):
        T, num_steps = z.shape[2], len(plan.known) - 1
        size = (T, z.shape[3], z.shape[4])
        branches = _branches(model, cond, null, plan.scales)
        pasts: dict[str, Any] = dict.fromkeys(branches)
        levels = torch.tensor(plan.levels[:-1], device=z.device)
        times = model.image_decoder.time_cond_embed.timestep_embedding(levels * plan.num_timesteps)  # [levels, D]
        x = torch.zeros_like(z)
        all_kept = keep.all(dim=0).tolist()  # one wait for the device, before the loops
        for t in range(T):
            conditions = {}
            for name, branch in branches.items():
                first = t == 0 or not branch.sees_frames
                previous, past = (None, None) if first else (x[:, :, t - 1], pasts[name])
                conditions[name], pasts[name] = model.next_condition(
                    previous, branch.text, t if branch.sees_frames else 0, size, past
                )
            if all_kept[t]:
                x[:, :, t] = z[:, :, t]
                continue
            noise = plan.temperature * model.to_patches(z[:, :, t])  # [B, N, c]
            patches = torch.zeros_like(noise)
            for k in range(num_steps):
                new = plan.order[:, plan.known[k] : plan.known[k + 1]]  # [B, n]
                tokens = _image_tokens(model, x[:, :, t], plan.order[:, : plan.known[k]], conditions, branches)
                tokens = {name: _pick(value, new) for name, value in tokens.items()}
                denoised = _denoise(model.image_decoder, _pick(noise, new), tokens, times, plan, (k, num_steps))
                patches = patches.scatter(1, new[..., None].expand_as(denoised), denoised)
                frame = model.to_frames(patches, size[1:])
                x[:, :, t] = torch.where(keep[:, t, None, None, None], z[:, :, t], frame)
                level = 1 - plan.known[k + 1] / plan.known[-1]
                timestep = torch.full((len(z),), level * plan.num_timesteps, device=z.device)
                yield SamplingStep(t * num_steps + k, T * num_steps, timestep, x.clone(), x)


def _branches(model: Any, cond: Condition, null: Condition | None, scales: Scales) -> dict[str, Branch]:
    def text(entries: Condition) -> Tensor:
        return model.text_tokens(entries["y"], entries.get("mask"), entries.get("fps"), entries.get("flow"))

    branches = {"text": Branch(text(cond))}
    if null is not None and scales.needs_null:
        uncond = {**cond, **null}
        if "mask" not in null and null["y"] is not None:
            uncond["mask"] = None  # "no text" is as long as the text
        branches["null"] = Branch(text(uncond))
        if scales.image != 0:
            branches["nothing"] = Branch(branches["null"].text, sees_frames=False)
    if scales.spatiotemporal:
        branches["skip"] = Branch(branches["text"].text, skip=scales.skip)
    return branches


def _image_tokens(
    model: Any, frame: Tensor, visible: Tensor, conditions: dict[str, Tensor], branches: dict[str, Branch]
) -> dict[str, Tensor]:
    """The image encoder's token of every patch, `[B, N, D]` for each branch; those with all blocks in one batch."""
    size = (frame.shape[2], frame.shape[3])
    full = [name for name, branch in branches.items() if not branch.skip]
    n = len(full)
    out = model.image_tokens(
        frame.repeat(n, 1, 1, 1), visible.repeat(n, 1), torch.cat([conditions[name] for name in full]), size
    )
    tokens = dict(zip(full, out.chunk(n), strict=True))
    for name in branches.keys() - tokens.keys():
        tokens[name] = model.image_tokens(frame, visible, conditions[name], size, branches[name].skip)
    return tokens


def _denoise(
    head: Any, x: Tensor, tokens: dict[str, Tensor], times: Tensor, plan: Plan, step: tuple[int, int]
) -> Tensor:
    """Patches `[B, n, c]` out of noise by Euler steps, conditioned on each branch's tokens; `times [levels, D]`."""
    condition = head.time_cond_embed.condition_proj(torch.cat(list(tokens.values())))  # [branches B, n, D]
    for level, after, time in zip(plan.levels, plan.levels[1:], times, strict=False):
        out = head.denoise(x.repeat(len(tokens), 1, 1), condition + time).to(x.dtype)
        velocities = dict(zip(tokens, out.chunk(len(tokens)), strict=True))
        x = torch.add(x, plan.scales.combine(velocities, *step, level), alpha=after - level)
    return x


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
