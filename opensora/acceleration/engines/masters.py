"""The fp32 weights that an optimizer changes: the model's own memory, a shard of it, or a copy on the CPU.

The optimizer works on plain tensors whatever the engine: whole weights, or this process's shards of them. So any
optimizer runs at its full speed, fused, with fsdp2 as with ddp.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from opensora.checkpoint.tensors import SavedTensors, load_into
from opensora.utils.errors import UserError

COUNTER = "step"
"""The state of PyTorch's optimizers that is no part of a weight's arithmetic: `Optimizer.load_state_dict` knows it by this name too.

By its shape it would be taken for a moment where the weight is a scalar, as a learned scale is, and counted in that weight's
dtype. Of the others, those with the shape of the weight are laid out as the weight is.
"""


class Master(NamedTuple):
    """A trained weight: the model's parameter, and what the optimizer has in its place."""

    weight: Tensor
    leaf: nn.Parameter


class Masters:
    """What the optimizer of an engine works on, by the names of the model's parameters.

    Args:
        optimizer: over `given`, not used yet; from now on it changes the masters.
        given: name -> parameter, those that the optimizer was made with.
        weights: name -> the model's parameter now, plain or a DTensor.
        mine: names that this process's optimizer changes; None = all.
        offload: keep masters and the optimizer's state on the CPU and take the step there. It saves 8 bytes for each
            fp32 weight on the device with AdamW, and takes time for copies and the slower step.

    Raises:
        UserError: the optimizer has parameters that the model does not have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        given: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        *,
        mine: Iterable[str] | None = None,
        offload: bool = False,
    ) -> None:
        self.optimizer, self.offload = optimizer, offload
        self.weights = weights
        names = {parameter: name for name, parameter in given.items()}
        groups = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if any(name is None for group in groups for name in group):
            raise UserError("the optimizer has parameters that the model does not have: make it from this model's.")
        kept = None if mine is None else set(mine)
        self.trained = [name for group in groups for name in group if name is not None]
        self.by_name = {
            name: Master(weights[name], self._leaf(weights[name]))
            for name in self.trained
            if kept is None or name in kept
        }
        for group, parameters in zip(groups, optimizer.param_groups, strict=True):
            parameters["params"] = [self.by_name[name].leaf for name in group if name in self.by_name]
        self._up_to_date = not offload  # a copy is made as late as possible: weights may be loaded before

    def gradients(self) -> list[Tensor]:
        """This process's parts of the gradients of all trained weights, those that other optimizers change too."""
        return [local(g) for name in self.trained if (g := self.weights[name].grad) is not None]

    @torch.no_grad()
    def receive(self) -> list[Tensor]:
        """Give the optimizer's parameters their gradients, and return those."""
        if not self._up_to_date:
            for weight, leaf in self.by_name.values():
                leaf.copy_(local(weight))
            self._up_to_date = True
        for weight, leaf in self.by_name.values():
            if leaf is weight:
                continue
            gradient = None if weight.grad is None else local(weight.grad)
            leaf.grad = _to_cpu(gradient, leaf.grad) if self.offload and gradient is not None else gradient
        self._wait()
        return [leaf.grad for _, leaf in self.by_name.values() if leaf.grad is not None]

    @torch.no_grad()
    def deliver(self) -> None:
        """Let the model have what the optimizer made, and forget the gradients."""
        for weight, leaf in self.by_name.values():
            if self.offload:
                local(weight).copy_(leaf, non_blocking=True)  # done before the next `receive` waits
            elif leaf is not weight:
                leaf.grad = None
        for name in self.trained:
            self.weights[name].grad = None

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors of this process's masters, as `<parameter>/<state>`."""
        return {
            f"{name}/{key}": self._placed(master, key, torch.as_tensor(value))
            for name, master in self.by_name.items()
            for key, value in self.optimizer.state.get(master.leaf, {}).items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of whole tensors; names that begin with `/` are others' business.

        Raises:
            UserError: the state is of another model.
        """
        self.optimizer.state.clear()
        self._up_to_date = not self.offload
        for path in state:
            name, key = path.rsplit("/", 1)
            if not name:
                continue
            if name not in self.weights:
                raise UserError(f"the optimizer state is of another model: there is no parameter {name!r}.")
            if name in self.by_name:
                self.optimizer.state[self.by_name[name].leaf][key] = self._loaded(self.by_name[name], key, state, path)

    def _leaf(self, weight: Tensor) -> nn.Parameter:
        if self.offload:
            part = local(weight)
            return nn.Parameter(torch.empty_like(part, device="cpu", pin_memory=part.is_cuda))
        if isinstance(weight, DTensor):
            return nn.Parameter(local(weight))  # the same memory
        assert isinstance(weight, nn.Parameter)
        return weight

    def _wait(self) -> None:
        """Copies to the CPU are asynchronous."""
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _placed(self, master: Master, key: str, value: Tensor) -> Tensor:
        """A state as what it is: part of a DTensor laid out as the weight, or the same in all processes."""
        weight = master.weight
        if not isinstance(weight, DTensor) or key == COUNTER or value.shape != master.leaf.shape:
            return value
        if value.device.type == weight.device_mesh.device_type:
            return DTensor.from_local(
                value, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
            )
        placed = torch.empty_like(weight, device=value.device, requires_grad=False)
        local(placed).copy_(value)
        return placed

    def _loaded(self, master: Master, key: str, state: Mapping[str, Tensor], path: str) -> Tensor:
        shape = tuple((state.meta(path) if isinstance(state, SavedTensors) else state[path]).shape)
        if key == COUNTER:  # AdamW counts in fp32, and on the CPU unless it is fused
            defaults = self.optimizer.defaults
            on_device = defaults.get("fused") or defaults.get("capturable")
            value = torch.zeros(shape, device=master.leaf.device if on_device else "cpu")
        elif shape == tuple(master.weight.shape):
            value = torch.zeros_like(master.leaf, requires_grad=False)
        else:
            value = torch.zeros(shape, device=master.leaf.device)
        placed = self._placed(master, key, value)
        load_into(placed, state, path)
        return local(placed)


def local(tensor: Tensor) -> Tensor:
    """This process's part, without autograd, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_cpu(gradient: Tensor, buffer: Tensor | None) -> Tensor:
    buffer = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda) if buffer is None else buffer
    return buffer.copy_(gradient, non_blocking=True)
