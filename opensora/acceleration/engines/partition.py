"""Hybrid ZeRO: which of a node's processes changes which weights, and how the others get them.

ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054) inside groups of neighbours, such as the processes of a node.
Whole weights are shared out, the largest first, each to the process with the least so far.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE_BYTES = 64 * 2**20  # of a copy, of which there may be two at a time


def node_size(world_size: int) -> int:
    """Processes that torchrun started on this node; all, if something else started them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def share_out(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Name -> number of its part, so that the parts' sizes are nearly equal; the same in every process."""
    load = [0] * parts
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


@torch.no_grad()
def broadcast_from_owners(weights: Mapping[str, Tensor], owner: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Each owner sends its weights to the group, in messages of up to `MESSAGE_BYTES`: a model has hundreds of small ones."""
    for rank in sorted(set(owner.values())):
        theirs = [weights[name].detach() for name, its in owner.items() if its == rank]
        dist._broadcast_coalesced(group, theirs, MESSAGE_BYTES, rank)  # as DistributedDataParallel does


@torch.no_grad()
def gather_from_owners(
    own: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The `own` tensors of all processes of a group (None = all) by name, in each process and one at a time, on `device`.

    All processes use them up.
    """
    for owner in range(dist.get_world_size(group)):
        mine = owner == dist.get_rank(group)
        box: list[Any] = [{name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()} if mine else None]
        dist.broadcast_object_list(box, group=group, group_src=owner)
        for name, (shape, dtype) in box[0].items():
            tensor = own[name].to(device).contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group=group, group_src=owner)
            yield name, tensor
