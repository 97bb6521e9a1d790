"""One matrix product for query, key and value, where diffusers can; and back.

diffusers adds the joined layers beside the single ones, and leaves them there when it goes back; here they go.
"""

import logging
from typing import Any

from torch import nn

from opensora.acceleration.compiler.regions import is_ours
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

JOINED = ("to_qkv", "to_kv", "to_added_qkv")


def fuse_qkv_projections(pipe: Any) -> None:
    """By the pipeline's own method, or its denoisers'. Ours have one matrix as they are.

    Raises:
        UserError: it has no way to do it.
    """
    able = _able(pipe, "fuse_qkv_projections")
    for one in able:
        one.fuse_qkv_projections()
    if able:
        return
    if any(is_ours(one) for one in _modules(pipe)):
        logger.info("fuse_qkv_projections: our denoisers have one matrix for query, key and value as they are.")
        return
    raise UserError(f"fuse_qkv_projections: {type(pipe).__name__} has no way to do it; leave it out.")


def unfuse_qkv_projections(pipe: Any) -> None:
    """Undo it; the state dicts have their first names again."""
    for one in _able(pipe, "unfuse_qkv_projections"):
        one.unfuse_qkv_projections()
    for layer in (inner for module in _modules(pipe) for inner in module.modules()):
        if getattr(layer, "fused_projections", None) is True:
            for name in JOINED:
                if hasattr(layer, name):
                    delattr(layer, name)
            layer.fused_projections = False  # type: ignore[assignment]


def _able(pipe: Any, method: str) -> list[Any]:
    return [pipe] if hasattr(pipe, method) else [one for one in _modules(pipe) if hasattr(one, method)]


def _modules(pipe: Any) -> list[nn.Module]:
    return [part for part in vars(pipe).values() if isinstance(part, nn.Module)]
