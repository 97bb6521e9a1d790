"""Activation checkpointing: what the backward pass needs is recomputed. To keep it in the host's memory: `streaming.py`.

Applied to a denoiser from outside, after `compile_blocks`. Inside a compiled block the compiler decides: it recomputes what carries
the tag that checkpointing gives an operation.
The forward pass draws nothing at random (docs/adr/0006), so no generator has to be restored. Chen et al. 2016
(arXiv:1604.06174); by operation as in Korthikanti et al. 2022 (arXiv:2205.05198), where what is cheap to compute for its
size is recomputed.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import wrap as wrap_operator
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from opensora.acceleration.patching import wrap_forward
from opensora.config.schema import checkpointed_parts
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
"""Whose results "attention" keeps, with our own kernels'."""

PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "opensora::quantised_linear")
"""Whose results "selective" keeps as well. Not `bmm`: scores of an unfused attention are [B, H, N, N]."""

CHEAP = {"opensora::norm_heads"}
"""Kernels of our own that only pass over memory."""

TAGS_MISS_FUNCTIONS = "2.10" <= torch.__version__ < "2.12"
"""Whether this PyTorch, compiling a checkpoint without a policy, does not recompute what a `torch.autograd.Function` computes."""


def checkpoint_activations(
    blocks: Iterable[nn.Module], level: str = "block", stacks: Sequence[int] | None = None
) -> None:
    """Checkpoint what `level` says (see `opensora.config.schema.checkpointed_parts`); nothing happens without gradients.

    Args:
        blocks: of a denoiser, in forward order.
        level: a value of the config's `grad_checkpoint`.
        stacks: how many of the blocks are in each of the model's three stacks, if it has these (`stack_depths`).

    Raises:
        UserError: there is no such level, or it means MLPs and the blocks have no `mlp`.
    """
    blocks = list(blocks)
    for block, kind in zip(blocks, checkpointed_parts(level, len(blocks), stacks), strict=True):
        if kind == "nothing":
            continue
        eager, compiled = (KEEPING[kind],) * 2 if kind in KEEPING else ({}, _WHOLE_COMPILED)
        names = ("mlp", "ffn", "ff")  # ours and diffusers'
        mlp = next((getattr(block, name) for name in names if hasattr(block, name)), None)
        part = mlp if kind == "mlp" else block
        if part is None:
            raise UserError(
                f"grad_checkpoint={level!r} means MLPs, and a {type(block).__name__} has none; try 'block'."
            )
        wrap_forward(part, partial(_checkpointed, eager=eager, compiled=compiled))


# PyTorch warns whoever compiles a checkpoint with a policy of operations that are done in place, of which ours has none
getattr(wrap_operator, "log", logger).addFilter(
    lambda record: "context_fn is passed to torch" not in record.getMessage()
)


def _keep(kept: tuple[str, ...], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name: str = op.name()
    ours = name.startswith("opensora::") and not name.endswith("backward") and name not in {*CHEAP, *PRODUCTS}
    return CheckpointPolicy.MUST_SAVE if ours or name in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


_recompute_all.cache_hash = "opensora: everything again"  # type: ignore[attr-defined]  # else no program is cached on disk
# arguments of `checkpoint`
KEEPING: dict[str, dict[str, Any]] = {
    kind: {"context_fn": partial(create_selective_checkpoint_contexts, partial(_keep, kept))}
    for kind, kept in (("attention", ATTENTION), ("selective", (*ATTENTION, *PRODUCTS)))
}
_WHOLE_COMPILED: dict[str, Any] = {"context_fn": _recompute_all} if TAGS_MISS_FUNCTIONS else {}


def _checkpointed(forward: Callable[..., Any], eager: dict[str, Any], compiled: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        more = compiled if torch.compiler.is_compiling() else eager
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **more, **kwargs)

    return wrapped
