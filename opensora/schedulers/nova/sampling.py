"""The loops of NOVA's sampling: over frames, over sets of patches, over noise levels."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.schedulers.guidance import Condition
from opensora.schedulers.nova.guidance import Scales
from opensora.schedulers.nova.model import AutoregressiveModel
from opensora.schedulers.sampling import SamplingStep


class Plan(NamedTuple):
    """What is decided before sampling."""

    order: Tensor  # [B, N] int64: the patches of a frame in the order in which they appear
    known: list[int]  # how many are there before each step, and at the end
    levels: list[float]  # of the noise, from 1 to 0
    num_timesteps: int
    temperature: float = 1.0  # of the noise that patches are made from


class Branch(NamedTuple):
    """One way to condition: its caption, and whether it sees the frames before."""

    text: Tensor
    sees_frames: bool
    skip: tuple[int, ...]


@torch.no_grad()
def generate(
    model: AutoregressiveModel,
    z: Tensor,
    cond: Condition,
    null: Condition | None,
    given: Tensor,
    plan: Plan,
    scales: Scales,
) -> Iterator[SamplingStep]:
    """Frame after frame; frames that are `given [B, T]` come from z as they are."""
    T, num_steps = z.shape[2], len(plan.known) - 1
    size = (T, z.shape[3], z.shape[4])
    branches = _branches(model, cond, null, scales)
    pasts: dict[str, Any] = dict.fromkeys(branches)
    head: Any = model.image_decoder
    times = head.time_cond_embed.timestep_embedding(
        torch.tensor(plan.levels[:-1], device=z.device) * plan.num_timesteps
    )
    x = torch.zeros_like(z)
    all_given = given.all(dim=0).tolist()  # one wait for the device, before the loops
    for t in range(T):
        conditions = {}
        for name, branch in branches.items():
            first = t == 0 or not branch.sees_frames
            previous, past = (None, None) if first else (x[:, :, t - 1], pasts[name])
            conditions[name], pasts[name] = model.next_condition(
                previous, branch.text, t if branch.sees_frames else 0, size, past
            )
        if all_given[t]:
            x[:, :, t] = z[:, :, t]
            continue
        noise = plan.temperature * model.to_patches(z[:, :, t])  # [B, N, c]
        patches = torch.zeros_like(noise)
        for k in range(num_steps):
            new = plan.order[:, plan.known[k] : plan.known[k + 1]]  # [B, n]
            says = _what_should_be(model, x[:, :, t], plan.order[:, : plan.known[k]], conditions, branches)
            made = _denoise(
                model,
                _pick(noise, new),
                {b: _pick(s, new) for b, s in says.items()},
                times,
                plan,
                scales,
                (k, num_steps),
            )
            patches = patches.scatter(1, new[..., None].expand_as(made), made)
            frame = model.to_frames(patches, size[1:])
            x[:, :, t] = torch.where(given[:, t, None, None, None], z[:, :, t], frame)
            level = 1 - plan.known[k + 1] / plan.known[-1]
            timestep = torch.full((len(z),), level * plan.num_timesteps, device=z.device)
            yield SamplingStep(t * num_steps + k, T * num_steps, timestep, x.clone(), x)


def _branches(model: AutoregressiveModel, cond: Condition, null: Condition | None, scales: Scales) -> dict[str, Branch]:
    without = {**cond, **(null or {})}
    if null is not None and "mask" not in null and null["y"] is not None:
        without["mask"] = None  # "no text" is as long as the text
    texts = {
        side: model.text_tokens(of["y"], of.get("mask"), of.get("fps"), of.get("flow"))  # type: ignore[arg-type]
        for side, of in (("text", cond), ("null", without))
    }
    kinds = {
        "text": Branch(texts["text"], sees_frames=True, skip=()),
        "null": Branch(texts["null"], sees_frames=True, skip=()),
        "nothing": Branch(texts["null"], sees_frames=False, skip=()),
        "skip": Branch(texts["text"], sees_frames=True, skip=scales.skip),
    }
    return {name: kinds[name] for name in scales.branches(has_null=null is not None)}


def _what_should_be(
    model: AutoregressiveModel,
    frame: Tensor,
    visible: Tensor,
    conditions: dict[str, Tensor],
    branches: dict[str, Branch],
) -> dict[str, Tensor]:
    """The image encoder's word on every patch, `[B, N, D]` for each branch; those without skipped blocks in one batch."""
    size = (frame.shape[2], frame.shape[3])
    whole = [name for name, branch in branches.items() if not branch.skip]
    n = len(whole)
    out = model.image_tokens(
        frame.repeat(n, 1, 1, 1), visible.repeat(n, 1), torch.cat([conditions[b] for b in whole]), size
    )
    says = dict(zip(whole, out.chunk(n), strict=True))
    for name in branches.keys() - says.keys():
        says[name] = model.image_tokens(frame, visible, conditions[name], size, branches[name].skip)
    return says


def _denoise(
    model: AutoregressiveModel,
    x: Tensor,
    says: dict[str, Tensor],
    times: Tensor,
    plan: Plan,
    scales: Scales,
    place: tuple[int, int],
) -> Tensor:
    """Patches `[B, n, c]` out of noise by Euler steps, told by each branch what they should be; `times [levels, D]`."""
    head: Any = model.image_decoder
    words = head.time_cond_embed.condition_proj(torch.cat(list(says.values())))  # [branches B, n, D], for all levels
    for level, after, time in zip(plan.levels, plan.levels[1:], times, strict=False):
        out = head.denoise(x.repeat(len(says), 1, 1), words + time).to(x.dtype)
        velocities = dict(zip(says, out.chunk(len(says)), strict=True))
        x = torch.add(x, scales.combine(velocities, *place, level), alpha=after - level)
    return x


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    """`[B, N, D]` at `ids [B, n]` -> `[B, n, D]`."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
