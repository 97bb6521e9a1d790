"""Spread a denoiser over the processes of a group, from outside: by hooks that every denoiser and attention offers."""

import warnings
from collections.abc import Callable
from typing import Literal, Protocol, cast, get_args

import torch.distributed as dist
from torch import nn

from opensora.acceleration.sequence_parallel.collectives import Ranks
from opensora.acceleration.sequence_parallel.exchange import (
    ByFrames,
    ByHeads,
    ByHeadsOfFewerKeys,
    Exchange,
    SelfAttention,
)
from opensora.acceleration.sequence_parallel.same_batch import check_first_batch
from opensora.utils.errors import UserError

Method = Literal["auto", "dsp", "ulysses"]
WASTE = 0.25
"""A share of the attention's work on padding that deserves a warning."""


class Spreadable(Protocol):
    """A denoiser, see `opensora.models.denoiser.Denoiser`."""

    spread: Ranks | None


class Hooked(SelfAttention, Protocol):
    """A self-attention with its hook."""

    exchange: Exchange | None


def parallelise(model: nn.Module, group: dist.ProcessGroup | None, *, method: Method = "auto") -> None:
    """Let the processes of `group` share every sample that the model sees. None puts it back into one process.

    All processes then call the model together, with the same inputs, and all get the whole prediction; with the first
    inputs it is checked that they are the same. The mean over processes of the gradients of parameters is the gradient
    that one process would have, so every engine works as if all processes were data-parallel.

    Args:
        model: a denoiser, before or after `compile_blocks` and `checkpoint_activations`, not yet in an engine.
        group: whose ranks share a sample, such as `World.sp_group`.
        method: how attention within frames exchanges: "dsp" spreads frames, "ulysses" heads; "auto" takes the cheaper,
            "dsp". Attention among all tokens always spreads heads.

    Raises:
        UserError: see `check_sequence_parallel`.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1 and not hasattr(model, "spread"):
        return  # it is in one process, and cannot be otherwise
    check_sequence_parallel(model, size, method=method)
    ranks = None if group is None or size == 1 else Ranks.of(group)
    cast(Spreadable, model).spread = ranks
    for attn in self_attentions(model):
        attn.exchange = None if ranks is None else exchange_of(attn, ranks, method)
    if ranks is not None:
        check_first_batch(model, ranks)


def check_sequence_parallel(model: nn.Module, sp_size: int, *, method: Method = "auto") -> None:
    """Refuse what cannot work, and warn of what wastes much.

    Any number of frames, places, heads and text tokens works with any `sp_size`, as what does not divide is padded. That
    `sp_size` divides the number of processes is checked by `opensora.acceleration.distributed.init_world`.

    Raises:
        UserError: sp_size or method is not legal, or the model has no hooks.
    """
    if sp_size < 1:
        raise UserError(f"sp_size={sp_size}: it is a number of processes, 1 or more.")
    if method not in get_args(Method):
        raise UserError(f"method={method!r} is not one of {', '.join(get_args(Method))}.")
    attentions = self_attentions(model)
    if not hasattr(model, "spread"):
        raise UserError(
            f"{type(model).__name__} cannot be spread over processes: it is no denoiser, or already inside of an engine. Call "
            "parallelise before build_engine, or use sp_size=1."
        )
    if not attentions:
        raise UserError(
            f"{type(model).__name__} cannot be spread over processes: none of its layers is a self-attention of opensora.models.layers, "
            "which exchange tokens. Use sp_size=1."
        )
    in_all = [attn for attn in attentions if attn.axis == "all"]
    if method == "dsp" and in_all:
        raise UserError(
            f"method='dsp' spreads frames while tokens attend within them, but those of {type(model).__name__} attend to "
            "all frames at once: use 'ulysses' or 'auto'."
        )
    by_heads = in_all if method != "ulysses" else [attn for attn in attentions if attn.axis != "time"]
    if by_heads:
        _warn_of_waste(by_heads[0].num_heads, sp_size)


def self_attentions(model: nn.Module) -> list[Hooked]:
    """The self-attentions of a denoiser, in forward order."""
    return [cast(Hooked, module) for module in model.modules() if hasattr(module, "exchange")]


def exchange_of(attn: SelfAttention, ranks: Ranks, method: Method = "auto") -> Exchange | None:
    """How this attention exchanges; None = not at all."""
    if attn.axis == "time":  # each process has all frames of its places
        return None
    by: Callable[[Ranks], Exchange] = ByHeads
    if not attn.keeps_keys:
        by = ByHeadsOfFewerKeys
    elif attn.axis == "space" and method != "ulysses":
        by = ByFrames
    return by(ranks)


def _warn_of_waste(num_heads: int, sp_size: int) -> None:
    padded = -(-num_heads // sp_size) * sp_size
    if (waste := 1 - num_heads / padded) > WASTE:
        good = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        warnings.warn(
            f"sp_size={sp_size} spreads {num_heads} heads: {waste:.0%} of the attention's work is padding. Nothing is "
            f"lost with {', '.join(map(str, good))}.",
            stacklevel=4,
        )
