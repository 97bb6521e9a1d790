"""An average of the weights of which each process keeps a share: Optix's `ShardedEMA`.

Whole parameters are shared out, the largest first, so that the shares are nearly equal (Optix fills them in the order of
declaration, and may leave one with everything). The model is whole in each process, so nothing is sent until the average is
saved. Without other processes it is a plain average.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.engines.partition import share_out


class ShardedEMA:
    """fp32 averages of a model's parameters, over the processes of a group.

    Args:
        model: whole in each process, and the same in all; it may be wrapped in DistributedDataParallel.
        group: the processes; None = all.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.owner = share_out({name: p.numel() for name, p in _parameters(model).items()}, self.size)
        self.shadow = {
            name: p.detach().float().clone() for name, p in _parameters(model).items() if self.owner[name] == self.rank
        }

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float = 0.9999, *, only_trainable: bool = True) -> None:
        """`ema <- decay * ema + (1 - decay) * weights`; with decay 0 it is the weights.

        Args:
            only_trainable: frozen parameters are copied, not averaged, so that they are right even if they were loaded late.
        """
        for name, parameter in _parameters(model).items():
            if name not in self.shadow:
                continue
            if only_trainable and not parameter.requires_grad:
                self.shadow[name].copy_(parameter)
            else:
                self.shadow[name].lerp_(parameter.float(), 1 - decay)

    @torch.no_grad()
    def state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """All averages, and the buffers of `model`, in the first process; {} in the others. All processes call it."""
        whole: dict[str, Tensor] = {}
        for name, owner in self.owner.items():
            tensor = self._received(name, owner)
            if tensor is not None:
                whole[name] = tensor
        if model is not None and self.rank == 0:
            whole |= {name: buffer.detach().clone() for name, buffer in _inner(model).named_buffers()}
        return whole

    def verify_with_gt(self, averages: dict[str, Tensor]) -> bool:
        """Whether this process' share equals an average that was kept whole, bit for bit."""
        return all(torch.equal(tensor, averages[name]) for name, tensor in self.shadow.items())

    def _received(self, name: str, owner: int) -> Tensor | None:
        """A tensor in the first process, sent by its owner if that is another one."""
        if owner == 0 or self.size == 1:
            return self.shadow[name].clone() if self.rank == 0 else None
        assert self.group is not None, "there are several processes"
        first, sender = (dist.get_global_rank(self.group, r) for r in (0, owner))
        if self.rank == owner:
            dist.send_object_list([tuple(self.shadow[name].shape)], dst=first, group=self.group)
            dist.send(self.shadow[name].contiguous(), dst=first, group=self.group)
        if self.rank != 0:
            return None
        shape = [None]
        dist.recv_object_list(shape, src=sender, group=self.group)
        tensor = torch.empty(shape[0] or (), device=next(iter(self.shadow.values())).device)
        dist.recv(tensor, src=sender, group=self.group)
        return tensor


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(_inner(model).named_parameters())
