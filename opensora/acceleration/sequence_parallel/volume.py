"""How many bytes sequence parallelism sends, counted from shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import nn

from opensora.acceleration.sequence_parallel.apply import Method, exchange_of, self_attentions
from opensora.acceleration.sequence_parallel.collectives import Ranks
from opensora.acceleration.sequence_parallel.exchange import Traffic


class Sized(Protocol):
    """What counting needs of a denoiser; see `opensora.models.denoiser.Denoiser`."""

    out_channels: int
    patch_size: tuple[int, int, int]

    def grid(self, latent_size: Sequence[int]) -> tuple[int, int, int]: ...

    def transformer_blocks(self) -> list[nn.Module]: ...


@dataclass(frozen=True)
class Volume:
    """What one process does in one forward pass; a backward pass sends as much again, but for the gather."""

    all_to_alls: int
    all_to_all_bytes: int  # sent to other processes
    gather_bytes: int  # received from other processes, at the end

    def per_block(self, blocks: int) -> float:
        """Bytes that an average block sends."""
        return self.all_to_all_bytes / blocks


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
    sized, ranks = cast(Sized, model), Ranks("", sp_size, 0)
    T, H, W = sized.grid(latent_size)
    total = Traffic(0, 0)
    for attn in self_attentions(model):
        exchange = exchange_of(attn, ranks, method)
        if exchange is not None:
            total = total + exchange.traffic(attn, batch, T, (H, W))
    pt, ph, pw = sized.patch_size
    part = batch * T * ranks.share(H * W) * pt * ph * pw * sized.out_channels
    sent = total.elements * (sp_size - 1) // sp_size
    return Volume(total.calls, sent * itemsize, (sp_size - 1) * part * itemsize)
