"""`fsdp2`: weights, gradients and optimizer state are sharded over processes by PyTorch's `fully_shard`.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) as in Zhao et al. 2023 (arXiv:2304.11277): each block of the model
gathers its weights before it runs. "zero2" then keeps them until its backward pass; "zero3" drops them at once and gathers
them again. With `shard_size` below the number of processes the state is sharded over groups of neighbours, and these
are replicas of each other (HSDP).

Weights travel in fp32 and autocast casts them to the dtype of the computation, as with `ddp`: one process, several,
and `ddp` compute the same. With `fsdp_gather="bf16"` those of the blocks travel in bf16, which is half the traffic; it also rounds what
autocast keeps in fp32 there, such as norms and tables of modulation. What is in no block stays as it is. Frozen weights travel as they
are stored (`frozen_weights` of the config).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from opensora.acceleration.distributed import World, check_group_size, join_alone, own_group
from opensora.acceleration.engines.base import MastersEngine
from opensora.acceleration.engines.partition import node_size
from opensora.registry import PLUGINS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError


@PLUGINS.register_module(name="fsdp2")
class FSDP2Engine(MastersEngine):
    """Sharded data parallelism; the model is changed in place, its parameters become DTensors.

    Args:
        model, optimizer, world, dtype, grad_clip: see `build_engine`; blocks are those of the model's `transformer_blocks()`.
        fsdp_reshard: "zero2" or "zero3", see the module.
        fsdp_gather: "fp32" or "bf16", see the module; "bf16" is for a computation in bf16.
        fsdp_reduce: dtype in which gradients are summed over the processes, "fp32" or "bf16".
        shard_size: processes that share the state; None = all.
        hybrid_zero: `shard_size` is the number of processes of a node.
        optimizer_offload: take the step on the CPU, see `MastersEngine`.

    Raises:
        UserError: `shard_size` does not divide the number of processes.
    """

    def __init__(  # noqa: PLR0913 - what all engines take, and one name for each choice
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        dtype: str = "bf16",
        grad_clip: float = 0.0,
        *,
        fsdp_reshard: Literal["zero2", "zero3"] = "zero2",
        fsdp_gather: Literal["fp32", "bf16"] = "fp32",
        fsdp_reduce: Literal["fp32", "bf16"] = "fp32",
        shard_size: int | None = None,
        hybrid_zero: bool = False,
        optimizer_offload: bool = False,
    ) -> None:
        if fsdp_reshard not in ("zero2", "zero3"):
            raise UserError(f"fsdp_reshard={fsdp_reshard!r} is not one of 'zero2', 'zero3'.")
        self.reshard = fsdp_reshard == "zero3"
        self.mesh = make_mesh(world, shard_size or (node_size(world.size) if hybrid_zero else world.size))
        given = dict(model.named_parameters())

        def policy(gather: str) -> MixedPrecisionPolicy:
            param_dtype = None if gather == "fp32" else to_torch_dtype(gather)  # None: as they are stored
            return MixedPrecisionPolicy(param_dtype, to_torch_dtype(fsdp_reduce), cast_forward_inputs=False)

        # about changing the prediction in place, which no loss does
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for block in model.transformer_blocks() if hasattr(model, "transformer_blocks") else []:  # type: ignore[operator]
            fully_shard(block, mesh=self.mesh, reshard_after_forward=self.reshard, mp_policy=policy(fsdp_gather))
        # needed again at once
        self.model: FSDPModule = fully_shard(
            model, mesh=self.mesh, reshard_after_forward=False, mp_policy=policy("fp32")
        )
        if hasattr(model, "null_condition"):
            register_fsdp_forward_method(model, "null_condition")  # may use an embedder's weights
        super().__init__(model, optimizer, given, world, dtype, grad_clip, offload=optimizer_offload,
                         norm_group=self.mesh.get_group("shard"))  # fmt: skip

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """See `Engine.micro_step`. Until the last micro-batch, gradients stay where they are, and with "zero2" weights do."""
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        self.model.set_reshard_after_backward(last or self.reshard)
        # a kept cast would outlive the weights that "zero3" has just dropped
        with self.autocast(keep_casts=not self.reshard):
            yield


def make_mesh(world: World, shard_size: int) -> DeviceMesh:
    """The processes as a mesh with an axis "shard" and, if there is more than one group of `shard_size`, "replicate".

    Raises:
        UserError: `shard_size` does not divide the number of processes.
    """
    check_group_size("shard_size", shard_size, world.size)
    join_alone(world.device)
    if shard_size == world.size:
        return init_device_mesh(world.device.type, (shard_size,), mesh_dim_names=("shard",))
    ranks = torch.arange(world.size).view(-1, shard_size)  # a row is a group of neighbours, a column their replicas
    groups = [own_group(lines.tolist(), world.rank, world.timeout) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))
