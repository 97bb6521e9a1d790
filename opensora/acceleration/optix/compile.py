"""`optix.compile`: see `opensora.acceleration.optix`.

Keywords and their defaults are those of Optix's README. Different from its code: weights stay fp32 (`model_dtype=torch.bfloat16`
is its way, and warns, for AdamW's steps at a learning rate of 1e-5 are below bf16's resolution); `ddp=False` and
`compile_unet=True` do what they say; what is asked for and not there is told.
"""

import logging
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import STEP_TIMEOUT, neighbours, send_from_first
from opensora.acceleration.engines.partition import node_size
from opensora.acceleration.optix.fused_norm import fuse_layer_norms
from opensora.acceleration.optix.sharded_ema import ShardedEMA
from opensora.acceleration.sliced_vae import encoders_of, to_channels_last
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    "use_ema": False,
    "compile_vae": True,
    "ddp": True,
    "dp_group": None,
    "gradient_checkpointing": True,
    "xformer": True,
    "fusedln": True,
    "compile_unet": False,
    "vae_channels_last": True,
    "optim": "adamw",
    "learning_rate": 1e-5,
    "weight_decay": 0,
    "hybrid_zero": True,
    "model_dtype": None,  # None: as the model is
}
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
ALIASES = {"compile_model": "compile_unet"}  # the name that Optix's code reads


def compile(
    model: nn.Module, vae: nn.Module, config: object = None, **options: Any
) -> tuple[nn.Module, nn.Module, Optimizer, ShardedEMA | None]:
    """Prepare a denoiser and its VAE for training.

    Args:
        model: a denoiser of ours or of diffusers, on its device; changed in place.
        vae: is frozen, in fp32, on the model's device.
        config: an object or mapping with values of the keywords; what it lacks has its default.
        options: the keywords, which win over `config`:
            use_ema: make an average of the weights, shared out over the processes.
            compile_vae, vae_channels_last: of the VAE's encoder.
            ddp: wrap the model in DistributedDataParallel, if there are several processes.
            dp_group: the processes that average gradients and share the optimizer's state; None = all.
            gradient_checkpointing: compute activations again in the backward pass.
            xformer: ask diffusers' models for xformers' attention. Where it is not installed PyTorch's own is as good.
            fusedln: apex's LayerNorm, where it is installed and the model is not compiled.
            compile_unet (or compile_model): torch.compile the denoiser, block by block where it has blocks.
            optim, learning_rate, weight_decay: "adam", "adamw" or "sgd".
            hybrid_zero: share out the optimizer's state inside each node; with a dp_group inside that.
            model_dtype: cast the model's weights; fp32 masters are lost.

    Returns:
        The model (wrapped, with several processes), the VAE, the optimizer, and the average or None.

    Raises:
        UserError: there is no such keyword or optimizer, a keyword and its other name contradict each other, or the model
            has nothing to train.
    """
    chosen = _chosen(config, options)
    device = _trained(model)[0].device
    torch.set_float32_matmul_precision("high")  # TF32, which is part of what Optix measured
    torch.backends.cudnn.allow_tf32 = True
    _prepare_vae(vae, device, compiled=chosen["compile_vae"], channels_last=chosen["vae_channels_last"])
    _cast(model, chosen["model_dtype"])
    _speed_up(model, chosen)
    model = _with_one_start(model, chosen)  # before what copies weights, or shares out their state
    average = ShardedEMA(model, chosen["dp_group"]) if chosen["use_ema"] else None
    return model, vae, _optimizer(_trained(model), chosen), average


def _chosen(config: object, options: Mapping[str, Any]) -> dict[str, Any]:
    names = [*DEFAULTS, *ALIASES]
    given = (
        config
        if isinstance(config, Mapping)
        else {name: getattr(config, name) for name in names if hasattr(config, name)}
    )
    for name in [*given, *options]:
        if name not in names:
            raise UserError(
                f"optix.compile has no keyword {name!r}.{did_you_mean(name, names)} It has: {', '.join(DEFAULTS)}."
            )
    keywords = _without_aliases(options)
    rest = {name: value for name, value in given.items() if ALIASES.get(name, name) not in keywords}
    chosen = {**DEFAULTS, **_without_aliases(rest), **keywords}
    if chosen["optim"] not in OPTIMIZERS:
        raise UserError(f"optix.compile: optim={chosen['optim']!r} is not one of {', '.join(OPTIMIZERS)}.")
    return chosen


def _without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in values.items():
        own = ALIASES.get(name, name)
        if named.setdefault(own, value) != value:
            alias = next(alias for alias in values if ALIASES.get(alias) == own)
            raise UserError(
                f"optix.compile: {alias}={values[alias]!r} and {own}={values[own]!r} are one keyword: give one of them."
            )
    return named


def _trained(model: nn.Module) -> list[nn.Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"optix.compile: {type(model).__name__} has nothing to train: it has no parameters, or all of them are frozen. Call "
            "requires_grad_(True) on what is to learn."
        )
    return trained


def _prepare_vae(vae: nn.Module, device: torch.device, *, compiled: bool, channels_last: bool) -> None:
    vae.requires_grad_(False).eval().to(device, torch.float32)
    for encoder in encoders_of(vae):
        if channels_last:
            to_channels_last(encoder)
        if compiled:
            encoder.compile()


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if dtype != torch.float32:
        warnings.warn(
            f"model_dtype={dtype}: steps that are small beside a weight are lost in it. Leave it out to keep fp32 weights and "
            "compute in bf16 by autocast.",
            stacklevel=4,
        )
    model.to(dtype)


def _speed_up(model: nn.Module, chosen: Mapping[str, Any]) -> None:
    blocks: list[nn.Module] | None = cast(Any, model).transformer_blocks() if _has_blocks(model) else None
    if chosen["xformer"] and hasattr(model, "enable_xformers_memory_efficient_attention"):
        _use_xformers(model)
    if chosen["fusedln"] and chosen["compile_unet"]:
        logger.info("fusedln: a compiled model fuses its LayerNorms itself; apex's would interrupt it.")
    elif chosen["fusedln"] and fuse_layer_norms(model) is None:
        logger.info("fusedln: apex is not installed, PyTorch's LayerNorm is used.")
    if chosen["compile_unet"]:
        compile_blocks(blocks) if blocks is not None else model.compile()
    if chosen["gradient_checkpointing"] and blocks is not None:
        checkpoint_activations(blocks)
    elif chosen["gradient_checkpointing"] and hasattr(model, "enable_gradient_checkpointing"):
        cast(Any, model).enable_gradient_checkpointing()
    elif chosen["gradient_checkpointing"]:
        raise UserError(
            f"optix.compile: {type(model).__name__} has no way to checkpoint activations; pass gradient_checkpointing=False."
        )


def _has_blocks(model: nn.Module) -> bool:
    """Whether it is one of our denoisers; in diffusers, `transformer_blocks` is a list."""
    return not isinstance(getattr(model, "transformer_blocks", nn.ModuleList()), nn.ModuleList)


def _use_xformers(model: Any) -> None:
    try:
        model.enable_xformers_memory_efficient_attention()
    except (ImportError, ModuleNotFoundError, ValueError, AttributeError) as error:  # diffusers' ways to say no
        logger.info("xformer: not used (%s); PyTorch's own attention is.", str(error).split("\n")[0])


def _with_one_start(model: nn.Module, chosen: Mapping[str, Any]) -> nn.Module:
    """The model with the first process' weights in all of a group: DDP sends them, and here they are sent without it."""
    group = chosen["dp_group"]
    if _processes(group) == 1:
        return model
    if chosen["ddp"]:
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if chosen["use_ema"] or chosen["hybrid_zero"]:  # each process answers for a share of what all have
        send_from_first(model, group)
    return model


def _optimizer(trained: list[nn.Parameter], chosen: Mapping[str, Any]) -> Optimizer:
    kind = OPTIMIZERS[chosen["optim"]]
    settings = {"lr": chosen["learning_rate"], "weight_decay": chosen["weight_decay"], "fused": trained[0].is_cuda}
    if not chosen["hybrid_zero"] or _processes(chosen["dp_group"]) == 1:
        return kind(trained, **settings)
    group = chosen["dp_group"] or _node_group()
    return ZeroRedundancyOptimizer(trained, kind, process_group=group, **settings)


def _node_group() -> dist.ProcessGroup | None:
    """The processes of this node; all, where the world is no whole number of nodes."""
    size, world = node_size(dist.get_world_size()), dist.get_world_size()
    if size == world or world % size:
        return None
    return neighbours(dist.get_rank(), world, size, STEP_TIMEOUT)


def _processes(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1
