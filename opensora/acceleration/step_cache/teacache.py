"""Skipping steps by looking at the timestep's effect on the input, after TeaCache (Liu et al. 2024, arXiv:2411.19108).

The input of the first attention, modulated by the timestep, is cheap to compute and moves as the output does. Its relative L1
distance from step to step is added up,

    d_i = |m_i - m_{i-1}|_1 / |m_{i-1}|_1,        m = norm(x) (1 + scale(t)) + shift(t),

and as long as the sum stays below a threshold, all blocks are skipped: their common residual, out - in, of the last
computed step is added to the tokens. Then the sum starts again. The first and the last step are always computed.

Deviation: the published method maps d through a polynomial that is fitted to each model; here d itself is added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.patching import Forward
from opensora.acceleration.step_cache.steps import CallNumber, StepCache, fits, part_of_batch, tokens_of


@dataclass
class _Call:
    """What is kept for the calls of one number."""

    modulated: Tensor | None = None  # of the step before
    distance: float = 0.0  # added up since the blocks were computed
    residual: Tensor | None = None
    entered: Tensor | None = None  # the blocks' input in this step
    part: str = ""  # of the batch, in the step before
    skipping: bool = False


class TeaCache(StepCache):
    """See the module's docstring. Looks at the whole batch, and waits for the device once a step.

    Args:
        threshold: of the added distances; 0 computes every step.
        groups: process groups that work on the same samples, which must decide alike.
    """

    per_sample = True

    def __init__(self, threshold: float, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        super().__init__()
        self.threshold, self.groups = threshold, tuple(groups)
        self.forget()

    def install(self, blocks: Sequence[nn.Module], *, compiled: bool = False) -> None:
        """See `StepCache.install`; blocks that are compiled must be so already."""
        first, last = blocks[0], blocks[-1]

        def call(block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if self.index is None:
                return forward(*args, **kwargs)
            x = tokens_of(args, kwargs)
            if block is first:
                self._decide(self.index, x, modulated_input(block, x, args[1:]))
            out = x if self._now.skipping else forward(*args, **kwargs)
            return self._leave(out) if block is last else out

        for block in blocks:
            self._wrap(block, lambda forward, block=block: partial(call, block, forward))  # type: ignore[misc]

    @property
    def num_kept(self) -> int:
        """The residual, the modulated input, and the blocks' input during a step."""
        return 3

    def forget(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._now = _Call()
        self._number = CallNumber()

    def _decide(self, index: int, x: Tensor, modulated: Tensor) -> None:
        now = self._now = self._calls.setdefault(self._number(index), _Call())
        before, now.modulated, now.entered = now.modulated, modulated, x
        known = before is not None and now.residual is not None and fits(before, now.part, modulated)
        now.part = part_of_batch.get()
        if known:
            assert before is not None
            change = (modulated - before).abs().sum(dtype=torch.float32)
            sums = torch.stack([change, before.abs().sum(dtype=torch.float32)])
            for group in self.groups:
                dist.all_reduce(sums, group=group)
            difference, size = sums.tolist()
            now.distance += difference / max(size, 1e-12)
        at_an_end = index in (0, len(self.timesteps) - 1)
        now.skipping = known and not at_an_end and now.distance < self.threshold
        if not now.skipping:
            now.distance = 0.0
        (self.reused if now.skipping else self.computed)["step"] += 1

    def _leave(self, out: Tensor) -> Tensor:
        """After the last block; what the model adds between its blocks is a part of the residual."""
        now, self._now = self._now, _Call()
        assert now.entered is not None
        if now.skipping:
            assert now.residual is not None
            out = now.entered + now.residual
        else:
            now.residual = out - now.entered
        now.entered = None
        return out


def modulated_input(block: Any, x: Tensor, others: Sequence[Any]) -> Tensor:
    """What the first attention of a block sees, from the block's input x [B, T, S, D] and its further arguments.

    Blocks with a `scale_shift_table` (PixArt, STDiT) get (y, t), where t [B, K, D] is added to the table; blocks with an
    `adaLN_modulation` (DiT) get c [B, D]; those of diffusers' Wan, whose x is [B, N, D], get (text, t [B, 6, D] or [B, N, 6, D]).
    Conditioning frames count like the others.
    """
    table = getattr(block, "scale_shift_table", None)
    if hasattr(block, "attn1"):
        shift, scale = (table + others[1]).movedim(-2, 0)[:2]  # [B, D] or [B, N, D] each
        shift, scale = (part.reshape(len(x), -1, part.shape[-1]) for part in (shift, scale))
        return block.norm1(x.float()) * (1 + scale) + shift
    vectors = block.adaLN_modulation(others[0]) if table is None else table[:2] + others[1][:, :2]  # [B, 2 or more, D]
    shift, scale = vectors[:, 0, None, None].to(x.dtype), vectors[:, 1, None, None].to(x.dtype)  # each [B, 1, 1, D]
    return block.norm1(x) * (1 + scale) + shift
