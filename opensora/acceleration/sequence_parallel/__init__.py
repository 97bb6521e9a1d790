"""Sequence parallelism: several processes shard the tokens of a sample, by hooks that every denoiser and attention has.

`parallelise(model, group)` is all that a program calls. See docs/how-to/sequence-parallelism.md.
"""

import warnings
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.sequence_parallel.collectives import Ranks, process_group
from opensora.acceleration.sequence_parallel.exchange import DSP, SelfAttention, Ulysses, UlyssesShortKV
from opensora.utils.errors import UserError

Method = Literal["auto", "dsp", "ulysses"]
WASTE = 0.25
"""A share of the attention's work on padding that deserves a warning."""
CHECKSUM_PERIOD = 8191
"""Of the weights of the checksum, which make it see the order of the elements."""


def parallelise(model: Any, group: dist.ProcessGroup | None, *, method: Method = "auto") -> None:
    """Let the processes of `group` share every sample that the model sees. None puts it back into one process.

    All processes then call the model together, with the same inputs, and all get the whole prediction; with the first
    inputs it is checked that they are the same. The mean over processes of the gradients of parameters is the gradient
    that one process would have, so every engine works as if all processes were data-parallel.

    Args:
        model: a denoiser, before or after `compile_blocks` and `checkpoint_activations`, not yet in an engine.
        group: whose ranks share a sample, such as `World.sp_group`.
        method: what attention within frames shards: "dsp" frames, "ulysses" heads; "auto" takes the cheaper, "dsp".
            Attention among all tokens always shards heads.

    Raises:
        UserError: see `check_sequence_parallel`.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1 and not hasattr(model, "sp_ranks"):
        return  # it is in one process, and cannot be otherwise
    check_sequence_parallel(model, size, method=method)
    ranks = None if group is None or size == 1 else Ranks.of(group)
    model.sp_ranks = ranks
    for attn in self_attentions(model):
        attn.exchange = None if ranks is None else exchange_of(attn, ranks, method)
    if ranks is not None:
        _compare_first_batch(model, ranks)


def check_sequence_parallel(model: nn.Module, sp_size: int, *, method: Method = "auto") -> None:
    """Refuse what cannot work, and warn of what wastes much.

    Any number of frames, tokens, heads and text tokens works with any `sp_size`, as what does not divide is padded.

    Raises:
        UserError: sp_size or method is not legal, or the model has no hooks.
    """
    if sp_size < 1:
        raise UserError(f"sp_size={sp_size}: it is a number of processes, 1 or more.")
    if method not in get_args(Method):
        raise UserError(f"method={method!r} is not one of {', '.join(get_args(Method))}.")
    name, attentions = type(model).__name__, self_attentions(model)
    if not hasattr(model, "sp_ranks"):
        raise UserError(
            f"{name} cannot be sharded over processes: it is no denoiser, or already inside of an engine. Call parallelise before "
            "build_engine, or use sp_size=1."
        )
    if not attentions:
        raise UserError(
            f"{name} cannot be sharded over processes: none of its layers is a self-attention of opensora.models.layers, which exchange "
            "tokens. Use sp_size=1."
        )
    in_all = [attn for attn in attentions if attn.axis == "all"]
    if method == "dsp" and in_all:
        raise UserError(
            f"method='dsp' shards frames while tokens attend within them, but those of {name} attend to all frames at once: use "
            "'ulysses' or 'auto'."
        )
    by_heads = in_all if method != "ulysses" else [attn for attn in attentions if attn.axis != "time"]
    if by_heads:
        num_heads = by_heads[0].num_heads
        padded = -(-num_heads // sp_size) * sp_size
        if (waste := 1 - num_heads / padded) > WASTE:
            good = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
            warnings.warn(
                f"sp_size={sp_size} shards {num_heads} heads: {waste:.0%} of the attention's work is padding. Nothing is "
                f"lost with {', '.join(good)}.",
                stacklevel=3,
            )


def self_attentions(model: nn.Module) -> list[SelfAttention]:
    """The self-attentions of a denoiser, in forward order; each has a hook `exchange`."""
    return [module for module in model.modules() if hasattr(module, "exchange")]


def exchange_of(attn: SelfAttention, ranks: Ranks, method: Method = "auto") -> Ulysses | None:
    """How this attention exchanges; None = not at all."""
    if attn.axis == "time":  # each process has all frames of its tokens
        return None
    if not attn.keeps_keys:
        return UlyssesShortKV(ranks)
    return DSP(ranks) if attn.axis == "space" and method != "ulysses" else Ulysses(ranks)


def _compare_first_batch(model: nn.Module, ranks: Ranks) -> None:
    """Compare the inputs of the model's next call over the processes: other samples would fail nowhere, and teach nothing."""

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        mine = {name: checksum(value) for name, value in named.items() if isinstance(value, Tensor)}
        each: list[dict[str, Any]] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(each, mine, group=process_group(ranks.group))
        names = sorted({name for one in each for name in one})
        different = [name for name in names if any(one.get(name) != each[0].get(name) for one in each)]
        if different:
            raise UserError(
                f"the {ranks.size} processes that share a sample were given different {', '.join(different)}. Data must be "
                "chosen by the data-parallel rank (World.dp_rank) and noise by the sample's index, never by the process."
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def checksum(tensor: Tensor) -> tuple[tuple[int, ...], float, float]:
    """Shape, sum, and sum weighted by position; the same tensor gives the same three on devices of one kind."""
    flat = tensor.detach().flatten().double().nan_to_num()
    weights = torch.arange(len(flat), device=flat.device) % CHECKSUM_PERIOD + 1
    return tuple(tensor.shape), float(flat.sum()), float((flat * weights).sum())
