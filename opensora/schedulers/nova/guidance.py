"""Guidance of NOVA's head: which predictions are made, and how they make one velocity.

Without text (classifier-free guidance), without text and frames, and by a weaker encoder (after Hyung et al. 2024,
spatiotemporal skip guidance, arXiv:2411.18664).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    """See the arguments of the scheduler "nova"; `trunc` is a noise level."""

    scale: float = 5.0
    first: float | None = None
    trunc: float = 0.0
    renorm: float = 1.0
    image: float = 0.0
    spatiotemporal: float = 0.0
    skip: tuple[int, ...] = ()

    def at(self, step: int, num_steps: int) -> float:
        """The scale of a step of a frame."""
        if self.first is None or num_steps < 2:
            return self.scale
        return self.first + (self.scale - self.first) * step / (num_steps - 1)

    @property
    def needs_null(self) -> bool:
        """Whether a prediction without text is asked for, at any step of a frame."""
        return self.scale != 1 or self.first not in (None, 1) or self.image != 0

    def branches(self, *, has_null: bool) -> list[str]:
        """The predictions that are needed: "text" and, as the scales ask, "null", "nothing", "skip"."""
        wanted = {"null": has_null and self.needs_null, "nothing": has_null and self.image != 0}
        return [
            "text",
            *(name for name, needed in wanted.items() if needed),
            *(["skip"] if self.spatiotemporal else []),
        ]

    def combine(self, velocities: dict[str, Tensor], step: int, num_steps: int, level: float) -> Tensor:
        """One velocity `[B, n, c]` of those of the branches, at a noise level."""
        text = velocities["text"]
        if level < self.trunc:
            return text
        out = text
        if "null" in velocities:
            out = torch.lerp(velocities["null"], text, self.at(step, num_steps))
        if "nothing" in velocities:
            out = out + self.image * (velocities["null"] - velocities["nothing"])
        if "skip" in velocities:
            out = out + self.spatiotemporal * (text - velocities["skip"])
        return out if out is text or self.renorm >= 1 else out * _shrink(text, out, self.renorm)


def _shrink(text: Tensor, guided: Tensor, least: float) -> Tensor:
    """[B, n, 1]: what makes each patch as long as without guidance, from `least` to 1."""
    lengths = [velocity.norm(dim=-1, keepdim=True) for velocity in (text, guided)]
    return (lengths[0] / lengths[1].clamp(min=torch.finfo(text.dtype).tiny)).clamp(least, 1.0)
