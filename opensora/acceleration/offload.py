"""Weights that wait in the CPU's memory while they are not used: text encoder, denoiser, VAE, or block by block.

The CPU keeps the weights for good. To load is to copy them to the device, to unload is to forget that copy, so that
nothing is ever copied back. Under the policy "block" the denoiser's blocks are copied one ahead of the computation (`streaming.py`):
at any time two of them are on the device, and the first, which step caches look into. Where the device is the CPU, all of this
happens too and changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opensora.acceleration.streaming import BlockStreams, StreamedWeights

Policy = Literal["none", "model", "block"]


class OffloadedModule:
    """Parameters and buffers that stay in the CPU's memory and are copied to the device while they are used.

    Args:
        tensors: of one module or several; tied ones are copied once.
        device: where they are used.
        pin: pin the CPU's memory for a GPU. False: for what is used too rarely to take memory from the other processes.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, *, pin: bool = True) -> None:
        self.device, self.loaded = device, False
        unique = {id(tensor): tensor for tensor in tensors}  # weights may be tied
        self.pairs: list[tuple[Tensor, Tensor]] = []  # with the host copy
        for tensor in unique.values():
            host = tensor.data.to("cpu")
            tensor.data = host.pin_memory() if pin and device.type == "cuda" and not host.is_pinned() else host
            self.pairs.append((tensor, tensor.data))

    def load(self) -> None:
        if not self.loaded:
            for tensor, host in self.pairs:
                tensor.data = host.to(self.device, non_blocking=True, copy=True)
        self.loaded = True

    def unload(self) -> None:
        if self.loaded:
            for tensor, host in self.pairs:
                tensor.data = host
        self.loaded = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """With the tensors on the device; where they are loaded already, nothing moves."""
        if self.loaded:
            yield
            return
        self.load()
        try:
            yield
        finally:
            self.unload()


class Placement:
    """Where the parts of a pipeline are.

    Args:
        parts: by name; those without weights are left alone. `model` has `transformer_blocks()`.
        device: where they work.
        policy: "none" keeps all there, "model" brings each when it works, "block" also the denoiser's blocks one by one.
    """

    def __init__(self, parts: Mapping[str, Any], device: torch.device, policy: Policy = "none") -> None:
        self.policy = policy
        self.blocks: StreamedWeights | None = None
        self._offloaded: dict[str, OffloadedModule] = {}
        for name, part in parts.items():
            module = getattr(part, "encoder", part) if name == "text_encoder" else part
            if not isinstance(module, nn.Module):
                continue
            if policy == "none" or getattr(module, "between_uses", "keep") != "keep":  # has an order of its own
                if isinstance(part, nn.Module):
                    part.to(device)
                continue
            blocks = module.transformer_blocks()[1:] if name == "model" and policy == "block" else []  # type: ignore[operator]
            if blocks:
                self.blocks = StreamedWeights(list(map(_tensors, blocks)), min(2, len(blocks)), device)
                BlockStreams(blocks, device, weights=self.blocks)
            streamed = {id(tensor) for block in blocks for tensor in _tensors(block)}
            self._offloaded[name] = OffloadedModule((t for t in _tensors(module) if id(t) not in streamed), device)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """With the part `name` on the device."""
        part = self._offloaded.get(name)
        if part is not None:
            part.load()
        try:
            yield
        finally:
            if part is not None:
                part.unload()
            if name == "model" and self.blocks is not None:
                self.blocks.release()


def offload_between_calls(
    module: nn.Module, methods: Iterable[str], device: torch.device, *, pin: bool = True
) -> OffloadedModule:
    """Keep a module in the CPU's memory, and load it to `device` for each call of one of its `methods`, in place.

    Args:
        pin: see `OffloadedModule`.
    """
    offloaded = OffloadedModule(_tensors(module), device, pin=pin)
    for name in methods:
        setattr(module, name, offloaded.in_use()(getattr(module, name)))
    return offloaded


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
