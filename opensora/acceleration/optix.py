"""Optix's interface: one call that prepares denoiser, VAE, optimizer and EMA for memory-efficient training.

    from opensora.acceleration import optix

    model, vae, opt, ema = optix.compile(model, vae, learning_rate=1e-5, weight_decay=1e-5, use_ema=True)
    latents = optix.sliced_vae(vae, pixels, use_autocast=True, nhwc=True)

It works on our models and on diffusers', for a plain optimizer and a loop of one's own: hence its own ZeRO stage 1 and EMA. Keywords and
defaults are those of Optix's README; docs/how-to/optix.md lists what differs from its code.
"""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks, is_ours
from opensora.acceleration.distributed import STEP_TIMEOUT, broadcast_params, neighbours
from opensora.acceleration.engines.partition import gather_from_owners, node_size, share_out
from opensora.acceleration.vae_slicing import encoders_of, sliced_vae, to_channels_last
from opensora.registry import did_you_mean
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

__all__ = ["DEFAULTS", "ShardedEMA", "compile", "sliced_vae"]

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
) -> tuple[nn.Module, nn.Module, Optimizer, "ShardedEMA | None"]:
    """Prepare a denoiser and its VAE for training.

    Args:
        model: a denoiser of ours or of diffusers, on its device; changed in place.
        vae: is frozen, in fp32, on the model's device.
        config: an object or mapping with values of the keywords, and others; what it lacks has its default.
        options: the keywords, which win over `config`; see docs/how-to/optix.md.

    Returns:
        The model (wrapped, with several processes), the VAE, the optimizer, and the EMA or None.

    Raises:
        UserError: there is no such keyword or optimizer, or the model has nothing to train, or no way to checkpoint activations.
    """
    chosen = _keywords(config, options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"optix.compile: {type(model).__name__} has nothing to train: call requires_grad_(True) on what is to learn."
        )
    torch.set_float32_matmul_precision("high")  # TF32, which is part of what Optix measured
    torch.backends.cudnn.allow_tf32 = True
    vae.requires_grad_(False).eval().to(trained[0].device, torch.float32)
    for encoder in encoders_of(vae):
        if chosen["vae_channels_last"]:
            to_channels_last(encoder)
        if chosen["compile_vae"]:
            encoder.compile()
    if (dtype := chosen["model_dtype"]) is not None:
        if dtype != torch.float32:
            advice = "Leave it out to keep fp32 weights and compute in bf16 by autocast."
            warnings.warn(
                f"model_dtype={dtype}: steps that are small compared with a weight are lost in it. {advice}",
                stacklevel=2,
            )
        model.to(dtype)
    _speed_up(model, chosen)

    # all processes of a group begin with the first one's weights, before anything copies these or shards their state
    group = chosen["dp_group"]
    several = dist.is_initialized() and dist.get_world_size(group) > 1
    if several and chosen["ddp"]:
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    elif several and (chosen["use_ema"] or chosen["hybrid_zero"]):
        broadcast_params(model, group)
    ema = ShardedEMA(model, group) if chosen["use_ema"] else None

    kind = OPTIMIZERS[chosen["optim"]]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": chosen["learning_rate"], "weight_decay": chosen["weight_decay"], "fused": trained[0].is_cuda}
    if not several or not chosen["hybrid_zero"]:
        return model, vae, kind(trained, **settings), ema
    world = dist.get_world_size()
    size = node_size(world)
    if group is None and size < world and world % size == 0:  # else the nodes' processes are not a group each
        group = neighbours(dist.get_rank(), world, size, STEP_TIMEOUT)
    return model, vae, ZeroRedundancyOptimizer(trained, kind, process_group=group, **settings), ema


def _keywords(config: object, options: Mapping[str, Any]) -> dict[str, Any]:
    names, chosen = [*DEFAULTS, *ALIASES], dict(DEFAULTS)
    if isinstance(config, Mapping):  # of a whole training: what is not near a keyword is for something else
        config = {
            name: value for name, value in config.items() if name in names or did_you_mean(str(name), names, 0.85)
        }
    else:
        config = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for given in (config, options):
        for alias, name in ALIASES.items():
            if given.get(alias, given.get(name)) != given.get(name, given.get(alias)):
                raise UserError(f"optix.compile: {alias} and {name} are one keyword: give one of them.")
    for name, value in (*config.items(), *options.items()):
        if name not in names:
            raise UserError(
                f"optix.compile has no keyword {name!r}.{did_you_mean(name, names)} It has: {', '.join(DEFAULTS)}."
            )
        chosen[ALIASES.get(name, name)] = value
    if chosen["optim"] not in OPTIMIZERS:
        raise UserError(f"optix.compile: optim={chosen['optim']!r} is not one of {', '.join(OPTIMIZERS)}.")
    if chosen["model_dtype"] is not None:
        try:
            chosen["model_dtype"] = to_torch_dtype(str(chosen["model_dtype"]).removeprefix("torch."))
        except ValueError as error:
            raise UserError(f"optix.compile: model_dtype: {error}") from error
    return chosen


def _speed_up(model: Any, chosen: Mapping[str, Any]) -> None:
    """Attention, LayerNorm, compilation and activation checkpointing."""
    blocks = model.transformer_blocks() if is_ours(model) else None  # in diffusers, it is a list
    if chosen["xformer"] and hasattr(model, "enable_xformers_memory_efficient_attention"):
        try:
            model.enable_xformers_memory_efficient_attention()
        except (ImportError, ValueError, AttributeError) as error:  # diffusers' ways to say no
            logger.info("xformer: not used (%s); PyTorch's own attention is.", str(error).split("\n")[0])
    if chosen["fusedln"] and not chosen["compile_unet"]:  # compiled, they are fused as they are
        _fuse_layer_norms(model)
    if chosen["compile_unet"]:
        model.compile() if blocks is None else compile_blocks(blocks)
    if chosen["gradient_checkpointing"]:
        if blocks is not None:
            checkpoint_activations(blocks)
        elif hasattr(model, "enable_gradient_checkpointing"):
            model.enable_gradient_checkpointing()
        else:
            raise UserError(
                f"optix.compile: {type(model).__name__} has no way to checkpoint activations; pass gradient_checkpointing=False."
            )


def _fuse_layer_norms(model: nn.Module) -> None:
    """Exchange every `nn.LayerNorm` for apex's fused one, with its weights; subclasses do something else, and stay."""
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError:
        logger.info("fusedln: apex is not installed, PyTorch's LayerNorm is used.")
        return
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm) is nn.LayerNorm:
                fused = FusedLayerNorm(norm.normalized_shape, eps=norm.eps, elementwise_affine=norm.elementwise_affine)
                fused.weight, fused.bias = norm.weight, norm.bias
                setattr(parent, name, fused)


class ShardedEMA:
    """fp32 EMA of a model's parameters, of which each process of a group (None = all) keeps a share.

    The model, which may be wrapped in DistributedDataParallel, is whole and the same in all. Nothing is sent until it is saved.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.group = group or (dist.group.WORLD if dist.is_initialized() else None)
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        parameters = dict(_inner(model).named_parameters())
        self.device = next(iter(parameters.values())).device
        owner = share_out({name: p.numel() for name, p in parameters.items()}, size)
        self.shadow = {name: p.detach().float().clone() for name, p in parameters.items() if owner[name] == self.rank}

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float = 0.9999, only_trainable: bool = True) -> None:  # noqa: FBT001, FBT002
        """`ema <- decay * ema + (1 - decay) * weights`; `only_trainable` copies frozen ones, which may have been loaded late."""
        for name, parameter in _inner(model).named_parameters():
            if name not in self.shadow:
                continue
            if only_trainable and not parameter.requires_grad:
                self.shadow[name].copy_(parameter)
            else:
                self.shadow[name].lerp_(parameter.float(), 1 - decay)

    @torch.no_grad()
    def state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The whole EMA, and the buffers of `model`, in the first process; {} in the others. All processes call it."""
        gathered = (
            self.shadow.items() if self.group is None else gather_from_owners(self.shadow, self.group, self.device)
        )
        state = {name: tensor.clone() for name, tensor in gathered if self.rank == 0}
        if model is not None and self.rank == 0:
            state |= {name: buffer.detach().clone() for name, buffer in _inner(model).named_buffers()}
        return state


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
