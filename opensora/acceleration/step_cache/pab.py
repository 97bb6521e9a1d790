"""Pyramid attention broadcast (Zhao et al. 2024, arXiv:2408.12588): attention outputs are reused over several steps.

Outputs of attention change little in the middle of sampling, those of cross-attention least, of spatial attention most. Each kind
is computed every n-th step, and its output - before gate and residual - is reused in step i if i mod n != 0 and low < t < high, so
that it is never older than n - 1 steps. In a few blocks the MLP is skipped likewise, from given timesteps on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.patching import Forward
from opensora.acceleration.step_cache.steps import CallNumber, StepCache, fits, part_of_batch, tokens_of

KINDS = ("spatial", "temporal", "cross")


@dataclass(frozen=True)
class PABOptions:
    """How much is reused.

    Attributes:
        ranges: every how many steps spatial, temporal and cross-attention are computed; 1: always. Attention over all
            tokens counts as spatial.
        thresholds: (low, high) of each of them: reuse is between these timesteps, of 0 to 1000.
        mlp: for each timestep at which MLP outputs are stored: in which blocks, and for how many steps after it. Spatial
            and temporal blocks are numbered apart. The step nearest to the timestep is meant.
    """

    ranges: tuple[int, int, int]
    thresholds: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    mlp: Mapping[int, tuple[Sequence[int], int]]


_FIRST_FIVE = (tuple(range(5)), 2)
PRESETS: dict[str, PABOptions] = {
    "opensora": PABOptions((2, 4, 6), ((450, 930),) * 3, dict.fromkeys((676, 788, 864), _FIRST_FIVE)),
    "latte": PABOptions((2, 3, 6), ((100, 800),) * 3, dict.fromkeys((720, 640, 560, 480, 400), _FIRST_FIVE)),
    "cogvideox": PABOptions((2, 1, 1), ((100, 850),) * 3, {}),
}
"""The seed systems' settings; the last is for models that attend to all tokens at once."""


class _Layer:
    """One attention layer or MLP with its memory: for each call of a step an output, its step, and its part of the batch."""

    def __init__(self, cache: "PAB", kind: str, block: int, forward: Forward) -> None:
        self.cache, self.kind, self.block, self.forward = cache, kind, block, forward
        self.kept: dict[int, tuple[Tensor, int, str]] = {}
        self.sources: list[int] = []
        self.number = CallNumber()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index = self.cache.index
        if index is None:
            return self.forward(*args, **kwargs)
        if not self.sources:
            self.sources = sources_of(self.cache.options, self.kind, self.block, self.cache.timesteps)
        call, source = self.number(index), self.sources[index]
        if source < index and call in self.kept:
            output, step, part = self.kept[call]
            # it is older than its source where a size changed and came back, or a call was left out of a step
            if step >= source and fits(output, part, tokens_of(args, kwargs)):
                self.cache.reused[self.kind] += 1
                return output
        self.cache.computed[self.kind] += 1
        output = self.forward(*args, **kwargs)
        if index + 1 < len(self.sources) and self.sources[index + 1] <= index:  # the next step uses it
            self.kept[call] = output, index, part_of_batch.get()
        else:
            self.kept.pop(call, None)
        return output

    def forget(self) -> None:
        self.kept, self.sources, self.number = {}, [], CallNumber()


class PAB(StepCache):
    """Pyramid attention broadcast; see the module's docstring."""

    inside_blocks = True

    def __init__(self, options: PABOptions) -> None:
        super().__init__()
        self.options = options
        self._layers: list[_Layer] = []

    def install(self, blocks: Sequence[nn.Module], *, compiled: bool = False) -> None:
        for kind, block, module in layers_of(blocks):
            if kind.startswith("mlp"):
                reuses = any(block in numbers for numbers, _ in self.options.mlp.values())
            else:
                reuses = self.options.ranges[KINDS.index(kind)] > 1
            if not reuses:
                continue

            def around(forward: Forward, kind: str = kind, block: int = block) -> Forward:
                inner = torch.compile(forward, fullgraph=True) if compiled else forward
                layer = _Layer(self, kind, block, inner)
                self._layers.append(layer)
                # decisions are Python's: a graph must not record one of them
                return torch.compiler.disable(layer.__call__) if compiled else layer

            self._wrap(module, around)

    @property
    def num_kept(self) -> int:
        """One for each layer."""
        return len(self._layers)

    def forget(self) -> None:
        for layer in self._layers:
            layer.forget()

    def remove(self) -> None:
        super().remove()
        self._layers.clear()


def sources_of(options: PABOptions, kind: str, block: int, timesteps: Sequence[float]) -> list[int]:
    """For each step, the one whose output a layer uses: the same step, or an earlier one."""
    if kind.startswith("mlp"):
        stored = {
            min(range(len(timesteps)), key=lambda i, t=t: abs(timesteps[i] - t)): skip  # type: ignore[misc]
            for t, (blocks, skip) in options.mlp.items()
            if block in blocks
        }
        skipped = {index + n for index, skip in stored.items() for n in range(1, skip + 1)}
        reuse = [index in skipped and index not in stored for index in range(len(timesteps))]
    else:
        every, (low, high) = options.ranges[KINDS.index(kind)], options.thresholds[KINDS.index(kind)]
        reuse = [index % every != 0 and low < t < high for index, t in enumerate(timesteps)]
    sources: list[int] = []
    for index, again in enumerate(reuse):
        sources.append(sources[-1] if again and sources else index)
    return sources


def layers_of(blocks: Sequence[nn.Module]) -> Iterator[tuple[str, int, nn.Module]]:
    """(kind, number of the block, layer) of every attention layer and MLP of a denoiser's blocks.

    By the names that all blocks of this project use: `attn`, `attn_temp`, `cross_attn`, `mlp`, and those of diffusers' Wan: `attn1`,
    `attn2`, `ffn`; an attention's `axis` says whether it looks over time. MLPs are "mlp spatial" or "mlp temporal", as their block's
    attention is.
    """
    numbers = {"spatial": 0, "temporal": 0}
    for block in blocks:
        first = getattr(block, "attn", None) or block.attn1
        along = "temporal" if first.axis == "time" else "spatial"  # type: ignore[union-attr]
        number = numbers[along]
        numbers[along] += 1
        names = (
            ("attn", along), ("attn1", along), ("attn_temp", "temporal"), ("cross_attn", "cross"), ("attn2", "cross"),
            ("mlp", f"mlp {along}"), ("ffn", f"mlp {along}"),
        )  # fmt: skip
        for name, kind in names:
            layer = getattr(block, name, None)
            if layer is not None:
                yield kind, number, layer
