"""How many bytes sequence parallelism sends, counted from shapes alone."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from opensora.acceleration.sequence_parallel import Method, exchange_of, self_attentions
from opensora.acceleration.sequence_parallel.collectives import Ranks


class Volume(NamedTuple):
    """What one process sends to others in a forward pass, without the gather at its end; a backward pass sends as much."""

    all_to_alls: int
    all_to_all_bytes: int


@torch.no_grad()
def volume(
    model: nn.Module,
    sp_size: int,
    latent_size: Sequence[int],
    *,
    batch: int = 1,
    itemsize: int = 2,
    method: Method = "auto",
) -> Volume:
    """What a forward pass sends with `sp_size` processes. Needs no process group, and no memory for a model on "meta".

    Args:
        model: a denoiser.
        sp_size: processes that share a sample.
        latent_size: (T, H, W) of the latent.
        batch: samples of a forward pass.
        itemsize: bytes of an element of the activations: 2 in bf16.
        method: see `parallelise`.
    """
    ranks = _CountingRanks("", sp_size, 0)
    T, H, W = cast(Any, model).grid(latent_size)
    for attn in self_attentions(model):
        exchange = exchange_of(attn, ranks, method)
        if exchange is not None:
            x = torch.empty(batch, T, ranks.share(H * W), attn.num_heads * attn.head_dim, device="meta")
            exchange(copy.deepcopy(cast(nn.Module, attn)).to("meta"), x, None, (H, W))
    return Volume(len(ranks.elements), sum(ranks.elements) * (sp_size - 1) // sp_size * itemsize)


@dataclass(frozen=True)
class _CountingRanks(Ranks):
    """Counts elements instead of exchanging them."""

    elements: list[int] = field(default_factory=list)  # of each all-to-all, padding included

    def all_to_all(self, x: Tensor, *, scatter: int, gather: int, length: int) -> Tensor:
        """See `Ranks.all_to_all`; without content."""
        shape = list(x.shape)
        shape[scatter] = self.share(shape[scatter])
        self.elements.append(self.size * prod(shape))
        shape[gather] = length
        return x.new_empty(shape)
