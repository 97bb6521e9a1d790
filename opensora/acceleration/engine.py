"""Engines: how a model's gradients are computed, shared and used. One small interface, several names in configs.

| name | weights, gradients, optimizer state | file in `engines/` |
|---|---|---|
| `ddp` | whole in each process; `hybrid_zero` shards the optimizer's state over a node | ddp.py |
| `fsdp2` | sharded over the processes by PyTorch's `fully_shard`; like ZeRO-2 or ZeRO-3, with replicas (HSDP) or without | fsdp2.py |
| `zero2`, `zero2-seq` | weights whole in bf16 or fp16, the rest sharded, by ColossalAI | low_level_zero.py |

All keep fp32 master weights, and average gradients over the whole world: sequence parallelism scales its own to fit.
"""

import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opensora.acceleration.distributed import World, broadcast_params
from opensora.acceleration.engines import ddp, fsdp2, low_level_zero
from opensora.acceleration.engines.partition import node_size
from opensora.registry import PLUGINS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

ENGINES = (ddp.DDPEngine, fsdp2.FSDP2Engine, low_level_zero.LowLevelZeroEngine)


class Engine(Protocol):
    """What a train loop needs of distributed training."""

    model: nn.Module

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for the forward and backward pass of one micro-batch; gradients are shared after the last."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""

    def step(self) -> Tensor:
        """Clip, take the optimizer step, clear the gradients.

        When the gradient is not finite, weights and optimizer state stay as they were, bit for bit, in all processes.

        Returns:
            The global gradient norm before clipping, fp32 [] on the device; inf or nan when the step was dropped.
        """

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled (fp16), whose scale a norm that is not finite halves."""

    def masters(self) -> Mapping[str, Tensor]:
        """fp32 weights by name, where they are kept apart from the model's; flat DTensors. Empty for most engines."""

    def model_state(self) -> dict[str, Tensor]:
        """The weights, fp32, as they lie in memory: plain, or DTensors."""

    def load_model_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Take whole weights that were read from `source`; strict in names and shapes."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `<parameter>/<state>`, plain or DTensors, and the loss scale as `/<state>`."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `optimizer_state`, from whole tensors; after the weights. UserError: they are of another model."""


def check_engine(name: str, sp_size: int = 1, *, device: torch.device | None = None, dtype: str = "bf16") -> None:
    """Refuse what cannot work here, before anything is loaded.

    Raises:
        UserError: the engine cannot run on this device or in this dtype, or its package is not installed.
    """
    if name in low_level_zero.NAMES:
        right = "zero2-seq" if sp_size > 1 else "zero2"
        if name != right:
            raise UserError(f"plugin={name!r} with sp_size={sp_size}: use --plugin {right}, or another --sp-size.")
        low_level_zero.check(name, device or torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def build_engine(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    dtype: str = "bf16",
    grad_clip: float = 0.0,
    **settings: Any,
) -> Engine:
    """Make the engine called `name` (a config's `plugin`).

    Build it before anything else keeps the model's parameters: some engines exchange them for shards.

    Args:
        name: see the table above.
        model: on its device, in fp32.
        optimizer: over the model's trainable parameters, not used yet; the engine makes it work on its own.
        world: this process and the others.
        dtype: of the computation.
        grad_clip: largest global gradient norm; 0 = no clipping.
        settings: more arguments of the engine. Those that are False or None may be left to an engine without them.

    Raises:
        UserError: the engine cannot run here, or has no such setting.
    """
    taken = inspect.signature(PLUGINS.get(name)).parameters if PLUGINS.get(name) else {}
    for key, value in settings.items():
        if key not in taken and value not in (None, False):
            raise UserError(f"{key}={value!r} has no effect with plugin={name!r}: leave it out.")
    on_cpu, shards = world.device.type == "cpu", min(settings.get("shard_size") or node_size(world.size), world.size)
    for key, is_idle, why in (
        ("hybrid_zero", shards == 1, f"of {world.size} processes, each has a group of its own"),
        ("optimizer_offload", on_cpu, "the optimizer's state is a copy in a CPU's memory anyway"),
        ("cuda_graphs", on_cpu, "a CPU has no graphs, and the passes are only called in another way"),
    ):
        if settings.get(key) and is_idle and world.is_main:
            logger.warning("%s=True has no effect here: %s.", key, why)
    if world.size > 1:  # what a process read or drew otherwise would stay apart for ever
        broadcast_params(model, device=world.device)
    return PLUGINS.build(
        {"type": name}, model=model, optimizer=optimizer, world=world, dtype=dtype, grad_clip=grad_clip, **settings
    )
