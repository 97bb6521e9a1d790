"""`ddp`: every process holds the whole model, in fp32; gradients are averaged after the last micro-batch of a step.

With `hybrid_zero` the processes of a node shard the optimizer's state: each takes the step for some of the weights
and gives the others the result. Gradients still go over all processes, while weights travel inside a node only.

With `cuda_graphs` no hook of PyTorch's DistributedDataParallel sees a gradient, since autograd does not run: all are averaged in
one go before the optimizer's step, not during the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from opensora.acceleration.compile.cuda_graphs import capture_training
from opensora.acceleration.distributed import World, check_group_size, neighbours
from opensora.acceleration.engines.base import MastersEngine
from opensora.acceleration.engines.partition import broadcast_from_owners, gather_from_owners, node_size, share_out
from opensora.registry import PLUGINS


@PLUGINS.register_module(name="ddp")
class DDPEngine(MastersEngine):
    """Data parallelism by PyTorch's DistributedDataParallel, in one process or in several.

    Args:
        model, optimizer, world, dtype, grad_clip: see `build_engine`.
        hybrid_zero: shard the optimizer's state over `shard_size` neighbouring processes.
        shard_size: None = the processes of a node.
        optimizer_offload: take the step on the CPU, see `MastersEngine`.
        cuda_graphs: capture the passes of each size and replay them, see `compile/cuda_graphs.py`. A CPU has no graphs, and
            takes the same path without.

    Raises:
        UserError: `shard_size` does not divide the number of processes.
    """

    def __init__(  # noqa: PLR0913  (keywords of build_engine)
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        dtype: str = "bf16",
        grad_clip: float = 0.0,
        *,
        hybrid_zero: bool = False,
        shard_size: int | None = None,
        optimizer_offload: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        weights = dict(model.named_parameters())
        self.owner: dict[str, int] = {}
        self.group: dist.ProcessGroup | None = None  # that shards the optimizer's state
        mine = None
        if hybrid_zero and world.size > 1:
            shard_size = shard_size or node_size(world.size)
            check_group_size("shard_size", shard_size, world.size)
            self.group = neighbours(world.rank, world.size, shard_size, world.timeout)
            self.owner = share_out({name: w.numel() for name, w in weights.items() if w.requires_grad}, shard_size)
            mine = [name for name, owner in self.owner.items() if owner == world.rank % shard_size]
        super().__init__(model, optimizer, weights, world, dtype, grad_clip, mine=mine, offload=optimizer_offload)
        self.model: nn.Module = model
        self.average: Callable[[], None] | None = None
        if cuda_graphs:
            gradients = capture_training(model).gradients
            self.average = gradients.average if world.size > 1 else None
        elif world.size > 1:  # messages are gradients themselves, not copies; `build_engine` has sent the weights
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        alone = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if alone else nullcontext(), self.autocast():  # type: ignore[operator]
            yield

    def step(self) -> Tensor:
        if self.average is not None:
            self.average()
        norm = super().step()
        if self.group is not None:
            broadcast_from_owners(self.weights, self.owner, self.group)
        return norm

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_state`; with `hybrid_zero` gathered from the node, on the CPU."""
        state = super().optimizer_state()
        if self.group is None:
            return state
        own = {name: tensor for name, tensor in state.items() if not name.startswith("/")}
        gathered = gather_from_owners(own, self.group, self.device)
        return {name: tensor.cpu() for name, tensor in gathered} | self.loss_scale.state()
