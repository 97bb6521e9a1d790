"""The denoiser of a training run, as the config has it: built, given its adapters, compiled, checkpointed, streamed, parallelised."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.sequence_parallel import parallelise
from opensora.acceleration.streaming import stream_blocks
from opensora.config.load import TrainConfig
from opensora.config.schema import LoraOptions
from opensora.models.loading import store_frozen
from opensora.registry import DENOISERS, build_module
from opensora.training.lora import add_lora


def build_model(
    cfg: TrainConfig, sizes: Mapping[str, int | None], device: torch.device, sp_group: dist.ProcessGroup | None = None
) -> Any:
    """A `Denoiser` on `device`, but for the weights that `weight_streaming` leaves in host memory.

    Args:
        sizes: arguments that VAE and text encoder determine.
        sp_group: of processes that share a sample; None = each has its own.
    """
    streamed = cfg.weight_streaming > 0
    torch.manual_seed(cfg.seed)  # initial weights; nothing later draws from the global generator
    made_on = device if device.type == "cuda" and not streamed else None
    model = build_module(cfg.model, DENOISERS, frozen_weights=cfg.frozen_weights, device=made_on, **sizes)
    store_frozen(model, cfg.frozen_weights)
    if not streamed:
        model.to(device)
    if cfg.lora is not None:
        add_lora(model, LoraOptions.of(cfg.lora), seed=cfg.seed)
    if cfg.compile:
        compile_blocks(model.transformer_blocks())
    checkpoint_activations(model.transformer_blocks(), cfg.grad_checkpoint, getattr(model, "stack_depths", None))
    stream_blocks(
        model,
        device,
        resident=cfg.weight_streaming,
        adapters=cfg.lora is not None,
        activations=cfg.activation_offload,
    )
    if sp_group is not None:
        parallelise(model, sp_group)
    return model
