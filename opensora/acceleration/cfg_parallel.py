"""Guidance on two processes: one predicts with the prompt, the other without, and they exchange the predictions.

Classifier-free guidance calls the model on [cond; null] as one batch. Here each of two groups of processes computes its
half of that batch, so that each device has half the work and half the activations. The rest is the same on all of them, and the
videos are those of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World, broadcast_from_rank0, own_group
from opensora.acceleration.step_cache.steps import computing
from opensora.utils.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelPlan:
    """How the processes that make one video divide its work: a replica of consecutive ranks.

    Its first half predicts with the prompt, the second without (with `cfg_group`); each shards the tokens (with `sp_group`).

    Attributes:
        dp_rank, dp_size: which replica this process is in, and how many there are: data parallelism.
        is_leader: whether this process decodes and writes its replica's videos.
        sp_group: processes that shard the tokens; None: one process has all of them.
        cfg_group: this process and its partner of the other half, in this order: with the prompt, without; None: both
            halves are one batch.
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_leader: bool = True
    sp_group: dist.ProcessGroup | None = None
    cfg_group: dist.ProcessGroup | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Both groups, those that there are."""
        return tuple(group for group in (self.sp_group, self.cfg_group) if group is not None)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The leader's tensor, on all processes of the replica; of one shape everywhere."""
        tensor = tensor.contiguous()
        for group in self.groups:  # first within each half, then to the half without the prompt
            dist.broadcast(tensor, group=group, group_src=0)
        return tensor

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """What `make` gives in the leader, on all processes of the replica; an error of it is raised in all."""
        return broadcast_from_rank0(make, self.groups, is_leader=self.is_leader)


def make_parallel_plan(world: World, sp_size: int = 1, *, cfg_parallel: bool = False) -> ParallelPlan:
    """Cut the world into replicas; all processes must call this together.

    Raises:
        UserError: a replica's size does not divide the number of processes.
    """
    size = sp_size * (2 if cfg_parallel else 1)
    if world.size % size:
        raise UserError(
            f"sp_size={sp_size}{' with cfg_parallel' if cfg_parallel else ''} takes {size} processes for a video, which "
            f"does not divide the number of processes, {world.size}: start a multiple of {size} with torchrun "
            "--nproc_per_node."
        )
    halves = [range(first, first + sp_size) for first in range(0, world.size, sp_size)]
    pairs = [(first + i, first + i + sp_size) for first in range(0, world.size, size) for i in range(sp_size)]
    return ParallelPlan(
        dp_rank=world.rank // size,
        dp_size=world.size // size,
        is_leader=world.rank % size == 0,
        sp_group=own_group(halves, world.rank, world.timeout) if sp_size > 1 else None,
        cfg_group=own_group(pairs, world.rank, world.timeout) if cfg_parallel else None,
    )


def split_guidance(model: Callable[..., Tensor], group: dist.ProcessGroup, batch: int) -> Callable[..., Tensor]:
    """A model that computes one half of [cond; null] here and gets the other half from the partner, with the same results on both.

    Args:
        model: called as `model(x, timestep, **cond)`, every entry [B, ...] or None.
        group: two processes; rank 0 of it computes the first half.
        batch: the number of samples. A call with twice as many is guidance's; any other is computed by both processes.
    """

    def halved(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        if len(x) != 2 * batch:
            return model(x, timestep, **cond)
        first = dist.get_rank(group) == 0
        half = slice(0, batch) if first else slice(batch, None)
        mine = {name: None if value is None else value[half] for name, value in cond.items()}
        with computing("first half" if first else "second half"):  # a step cache must not take it for an unguided call
            own = model(x[half], timestep[half], **mine).contiguous()
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts)

    return halved
