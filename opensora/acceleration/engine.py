"""Engines: how a model's gradients are computed and shared. One small interface, several names in configs.

`ddp` is here: fp32 weights, which are their own masters, and a forward pass in bf16, fp16 or fp32 by autocast, in one
process or in several under torchrun. The names `fsdp2`, `zero2` and `zero2-seq` are known and refused with advice.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from opensora.acceleration.distributed import World
from opensora.registry import PLUGINS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

SCALER_STATE = {"scale", "_growth_tracker"}
NOT_YET = ("fsdp2", "zero2", "zero2-seq")


class Engine(Protocol):
    """What a train loop needs to know about how training is spread over devices."""

    model: nn.Module

    def micro_step(self, *, last: bool) -> Any:
        """A context for the forward and backward pass of one micro-batch; gradients are shared after the last."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""

    def step(self) -> Tensor:
        """Clip, take the optimizer step, clear the gradients; returns the global gradient norm before clipping."""

    def model_state(self) -> dict[str, Tensor]:
        """The whole weights, fp32."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `<parameter>/<state>`."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `optimizer_state`."""


def check_engine(name: str, sp_size: int = 1) -> None:
    """Refuse what this version cannot do, before anything is loaded.

    Raises:
        UserError: the engine, or sequence parallelism (`sp_size > 1`), does not exist in this version.
    """
    if name in NOT_YET:
        raise UserError(
            f"plugin={name!r} is not available in this version. Use --plugin ddp: it runs in one process or under "
            "torchrun, on CPUs and GPUs."
        )
    if sp_size > 1:
        raise UserError(f"sp_size={sp_size}: sequence parallelism is not available in this version; use --sp-size 1.")


def build_engine(
    name: str, model: nn.Module, optimizer: Optimizer, world: World, *, dtype: str = "bf16", grad_clip: float = 0.0
) -> Engine:
    """Make the engine called `name` (a config's `plugin`); raises what `check_engine` raises."""
    check_engine(name)
    return PLUGINS.build(
        {"type": name}, model=model, optimizer=optimizer, world=world, dtype=dtype, grad_clip=grad_clip
    )


@PLUGINS.register_module(name="ddp")
class DDPEngine:
    """Every process holds the whole model; gradients are averaged after the last micro-batch of a step.

    Args:
        model: on its device, in fp32.
        optimizer: over the model's trainable parameters.
        world: this process and the others.
        dtype: of the forward pass.
        grad_clip: largest global gradient norm; 0 = no clipping.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, dtype: str = "bf16", grad_clip: float = 0.0
    ) -> None:
        self.raw_model = model
        self.optimizer = optimizer
        self.device = world.device
        self.dtype = to_torch_dtype(dtype)
        self.grad_clip = grad_clip
        self.model: nn.Module = DistributedDataParallel(model) if world.size > 1 else model
        # fp16 gradients underflow unless the loss is scaled; bf16 and fp32 do not need it
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == torch.float16)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """See `Engine.micro_step`."""
        share = isinstance(self.model, DistributedDataParallel) and not last
        autocast = self.dtype != torch.float32
        with (
            self.model.no_sync() if share else nullcontext(),  # type: ignore[operator]
            torch.autocast(self.device.type, self.dtype, enabled=autocast),
        ):
            yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        self.scaler.scale(loss).backward()

    def step(self) -> Tensor:
        """See `Engine.step`."""
        self.scaler.unscale_(self.optimizer)
        limit = self.grad_clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.raw_model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def model_state(self) -> dict[str, Tensor]:
        """See `Engine.model_state`."""
        return self.raw_model.state_dict()

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_state`."""
        tensors = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in self.raw_model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        scaler = self.scaler.state_dict()  # empty unless fp16
        return tensors | {
            f"/{key}": torch.tensor(scaler[key], dtype=torch.float64) for key in SCALER_STATE & scaler.keys()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Engine.load_optimizer_state`."""
        named = dict(self.raw_model.named_parameters())
        scaler = {path[1:]: float(tensor) for path, tensor in state.items() if path.startswith("/")}
        if self.scaler.is_enabled() and scaler:
            scaler["_growth_tracker"] = int(scaler["_growth_tracker"])
            self.scaler.load_state_dict({**self.scaler.state_dict(), **scaler})
        for path, tensor in state.items():
            name, key = path.rsplit("/", 1)
            if not name:
                continue
            if name not in named:
                raise UserError(f"the optimizer state is of another model: there is no parameter {name!r}.")
            # AdamW keeps its step count on the CPU unless it is fused, where it lives beside the parameter
            device = named[name].device if tensor.ndim or self.optimizer.defaults.get("fused") else torch.device("cpu")
            self.optimizer.state[named[name]][key] = tensor.to(device)
