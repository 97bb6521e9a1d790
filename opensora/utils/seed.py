"""All randomness is a function of one seed and of what it is for; no global generator is ever used.

A generator is made from a path of ids, for example `generator(seed, "noise", step, position)`. So a sample's crop, a
step's noise or a video's initial latent do not depend on batch size, worker, rank or on what was drawn before.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*path: int | str) -> int:
    """A 63-bit seed for a path of ids; the same path gives the same seed on every machine and in every run."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in path)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for a path of ids."""
    return torch.Generator(device=device).manual_seed(derive_seed(*path))


def generators(*path: int | str, ids: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """One generator for each sample of a batch: `generator(*path, id)`."""
    return [generator(*path, i, device=device) for i in ids]


def randn_like(x: Tensor, generators: Sequence[torch.Generator] | torch.Generator | None) -> Tensor:
    """Normal noise of x's shape and dtype [B, ...]; with a list, row b is drawn from the b-th generator alone."""
    if not isinstance(generators, Sequence):
        return torch.randn(x.shape, generator=generators, device=x.device, dtype=x.dtype)
    if len(generators) != len(x):
        raise ValueError(f"{len(generators)} generators for a batch of {len(x)}")
    # a generator's own device decides where its numbers are drawn: a CPU generator gives the same noise on any device
    drawn = generators[0].device if generators else x.device
    pinned = x.is_cuda and drawn.type == "cpu"  # from pageable memory the host would wait for the copy
    noise = torch.empty(x.shape, dtype=x.dtype, device=drawn, pin_memory=pinned)
    for row, g in zip(noise, generators, strict=True):
        row.normal_(generator=g)
    return noise.to(x.device, non_blocking=pinned)


def randint(high: int, generators: Sequence[torch.Generator], device: torch.device | str) -> Tensor:
    """One integer in [0, high) from each generator: [B] int64."""
    return torch.cat([torch.randint(high, (1,), generator=g, device=g.device) for g in generators]).to(device)


def rand(generators: Sequence[torch.Generator], device: torch.device | str) -> Tensor:
    """One number in [0, 1) from each generator: [B] float32."""
    return torch.cat([torch.rand(1, generator=g, device=g.device) for g in generators]).to(device)
