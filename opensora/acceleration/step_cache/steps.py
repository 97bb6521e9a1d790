"""What step caches share: the current step, what is kept for each call of the model, and counts."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from opensora.acceleration.patching import Forward, wrap_forward

logger = logging.getLogger(__name__)

part_of_batch: ContextVar[str] = ContextVar("part of a batch", default="whole")
"""What calls of the model are for, see `computing`; "whole" = for all of its batch."""


class StepCache(ABC):
    """Base of the step caches.

    A step may call the model several times, as with and without the prompt. Each such call is compared with the call of the
    same number in the step before.

    Attributes:
        per_sample: whether it decides by looking at the samples, so that only batches of one keep samples independent.
        inside_blocks: whether it wraps layers within the blocks, which are then compiled with graph breaks, or whole blocks.
        computed, reused: how often each kind of thing was, since `sampling` began.
        timesteps, index: of this sampling run, and the current step's; None outside of one.
    """

    per_sample = False
    inside_blocks = False

    def __init__(self) -> None:
        self.computed: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.timesteps: list[float] = []
        self.index: int | None = None
        self._undo: list[Callable[[], None]] = []

    @abstractmethod
    def install(self, blocks: Sequence[nn.Module], *, compiled: bool = False) -> None:
        """Put the cache around a model's blocks, in forward order.

        `compiled`: they will be compiled around a cache that is inside them, which compiles what it wraps.
        """

    @property
    @abstractmethod
    def num_kept(self) -> int:
        """At most so many tensors of all tokens, [B, T, S, D], are kept at a time."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything that is kept."""

    def remove(self) -> None:
        """Take the cache off the model; what `compiled` compiled inside the blocks goes with it."""
        self.forget()
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def sampling(self, timesteps: Sequence[float]) -> Iterator[None]:
        """One sampling run, at these timesteps (falling, on the scale 0 to 1000). Nothing is kept from one to the next."""
        self.forget()
        self.computed.clear()
        self.reused.clear()
        self.timesteps = [float(t) for t in timesteps]
        try:
            yield
            if self.computed and not self.reused:
                name, count = type(self).__name__, len(self.timesteps)
                logger.warning(
                    "step_cache: %s reused nothing in %d steps: take more, or other thresholds.", name, count
                )
        finally:
            self.index = None
            self.forget()

    def step(self, index: int) -> None:
        """The calls that follow belong to step `index`."""
        self.index = index

    def _wrap(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        self._undo.append(wrap_forward(module, wrap))


class CallNumber:
    """Numbers the calls of one module within step `index`: 0, 1, ..."""

    def __init__(self) -> None:
        self._index, self._calls = -1, 0

    def __call__(self, index: int) -> int:
        self._calls = self._calls + 1 if index == self._index else 0
        self._index = index
        return self._calls


@contextmanager
def computing(part: str) -> Iterator[None]:
    """Inside, calls of the model are for this part of guidance's batch, such as those without the prompt."""
    token = part_of_batch.set(part)
    try:
        yield
    finally:
        part_of_batch.reset(token)


def fits(kept: Tensor, part: str, x: Tensor) -> bool:
    """Whether a tensor that was kept in a call for `part` fits tokens x; another batch, part of it, or size is unrelated."""
    return kept.shape == x.shape and kept.device == x.device and part == part_of_batch.get()


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens [B, T, S, D] that a layer or block is called with: its first argument."""
    return args[0] if args else kwargs["x"]
