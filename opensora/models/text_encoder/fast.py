"""The faster path of a T5: compiled blocks, and weights that the processes of a node share.

Every process of a node keeps a part of each block's weights, and has the whole block only while it computes it (PyTorch's
`fully_shard`). So all of them must encode at the same time and equally often, as they do in a train loop.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def compile_blocks_of(model: Any, *, varying_sizes: bool, backend: str = "inductor") -> None:
    """Compile the forward of each block. Not `module.compile`, which would take FSDP's hooks into the program."""
    for block in model.encoder.block:
        block.forward = torch.compile(block.forward, dynamic=True if varying_sizes else None, backend=backend)


def shard_inside_node(model: Any, device: torch.device) -> bool:
    """Spread the weights over the processes of this node; False where there is only one."""
    if not dist.is_initialized():
        return False
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    if local < 2:
        return False
    shape = (dist.get_world_size() // local, local)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "local"))["local"]
    for block in model.encoder.block:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return True
