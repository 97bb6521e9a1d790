"""An exponential moving average of a model's weights, always in fp32, laid out as the weights are.

With decay 0.9999 the increment of a bf16 average is below half a unit in the last place, so it would never move. Each
process averages its own shard of sharded weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from opensora.checkpoint.tensors import full_tensor, load_into, shard_of
from opensora.utils.errors import UserError


class EMA:
    """`ema <- decay * ema + (1 - decay) * weights` after every optimizer step; buffers and frozen weights are copied.

    The decay warms up as `min(decay, (1 + step) / (10 + step))`: without it the average is mostly the initialisation
    for the first ten thousand steps.

    Args:
        model: after its engine was built, which may shard its weights.
        decay: for each optimizer step.
        every: take in the weights after every so many steps only, with the product of their decays: cheaper, and as slow.
        device: "model", or "cpu" to save 4 bytes a weight on the GPU.
        masters: gives the fp32 weights that an engine keeps apart from the model's, see `Engine.masters`.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        every: int = 1,
        device: Literal["model", "cpu"] = "model",
        masters: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self.decay, self.every, self.masters = decay, every, masters
        own = model.state_dict()
        self.shapes = {name: tensor.shape for name, tensor in own.items()}
        self.shadow: dict[str, Tensor] = {}
        for name, tensor in {**own, **masters()}.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            target = tensor.device if device == "model" else torch.device("cpu")
            self.shadow[name] = torch.empty_like(tensor, dtype=dtype, device=target, requires_grad=False)
            _local(self.shadow[name]).copy_(_local(tensor))

    @torch.no_grad()
    def update(self, model: nn.Module, step: int, *, taken: bool = True) -> None:
        """Take in the weights after optimizer step number `step` (the first is 1); nothing where it was not `taken`.

        With `every` above 1 they are taken in then too: of the steps before, some were.
        """
        if step % self.every or (not taken and self.every == 1):
            return
        decay = math.prod(min(self.decay, (1 + i) / (10 + i)) for i in range(step - self.every + 1, step + 1))
        parameters = model.named_parameters(remove_duplicate=False)  # the state has all names of tied weights
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, tensor in {**model.state_dict(), **self.masters()}.items():
            own, new = _local(self.shadow[name]), _local(tensor)
            if name not in trained:
                own.copy_(new)
            elif own.numel():
                averages.append(own)
                weights.append(new.to(own))
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the EMA weights; afterwards the trained ones again, bit for bit.

        For forward passes only. All processes enter and leave together, and run the model equally often inside: sharded
        weights are gathered by all.
        """
        _reshard(model)
        own = model.state_dict()
        trained = {name: _local(own[name]).to(_local(self.shadow[name]).device, copy=True) for name in own}
        try:
            with torch.no_grad():
                for name, tensor in own.items():
                    shadow = self.shadow[name]
                    sharded_alike = isinstance(shadow, DTensor) == isinstance(tensor, DTensor)
                    _local(tensor).copy_(_local(shadow) if sharded_alike else self._full(name))
            yield
        finally:
            _reshard(model)
            with torch.no_grad():
                for name, tensor in own.items():
                    _local(tensor).copy_(trained[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The EMA weights, named as the model's; plain or DTensors as those are. All processes call it together."""
        return {
            name: tensor if tensor.shape == self.shapes[name] else self._full(name)
            for name, tensor in self.shadow.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load saved EMA weights, in full shapes.

        Raises:
            UserError: names or shapes differ.
        """
        if differ := sorted(set(state) ^ self.shadow.keys()):
            raise UserError(
                f"the EMA weights are of another model: {len(differ)} names are only here or only there, such as "
                f"{', '.join(differ[:5])}. Check model.type and its sizes in the config."
            )
        for name, tensor in self.shadow.items():
            flat = tensor.shape != self.shapes[name]
            try:
                load_into(tensor, {name: state[name].flatten()} if flat else state, name)
            except ValueError as error:
                raise UserError(f"the EMA weights are of another model: {error}.") from error

    def _full(self, name: str) -> Tensor:
        """The EMA of a weight that is kept flat and sharded, in the weight's shape."""
        shadow = self.shadow[name]
        assert isinstance(shadow, DTensor)
        return full_tensor(shadow).view(self.shapes[name])


def _local(tensor: Tensor) -> Tensor:
    return shard_of(tensor).local


def _reshard(model: nn.Module) -> None:
    """Free the weights that fsdp2 gathered in a forward pass without a backward pass; they are about to be outdated."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
