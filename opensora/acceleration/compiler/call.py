"""What stands around a compiled call: its switches, its rules, and the sizes that it has seen.

Rules that can only be told while it runs: frozen weights want no gradients and no change. A CUDA graph writes its result
into the same memory each time, so that it is copied out; samplers keep earlier predictions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from opensora.acceleration.compiler.flags import flags_of, switched
from opensora.acceleration.compiler.options import Options
from opensora.utils.errors import UserError

Sizes = tuple[tuple[int, ...], ...]


class CompiledCall:
    """A compiled function with what its options ask for around it.

    Attributes:
        sizes: of the tensors of each call so far, as a set.
    """

    def __init__(self, compiled: Callable[..., Any], name: str, options: Options, weights: Iterable[Tensor]) -> None:
        self.compiled, self.name = compiled, name
        self.flags = flags_of(options)
        self.frozen = list(weights) if "freezing" in options.words else None
        self.graphs = "cudagraphs" in options.words
        self.sizes: set[Sizes] = set()
        self._stamp: list[tuple[int, int]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        self.sizes.add(
            tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        )
        if self.frozen is not None:
            self._check_frozen(self.frozen)
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with switched(self.flags):
            out = self.compiled(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, out) if self.graphs else out

    def _check_frozen(self, weights: list[Tensor]) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                f"{self.name} was compiled with freezing, which is for inference: call it under torch.no_grad(), or compile it "
                "without freezing."
            )
        stamp = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._stamp is None:
            self._stamp = stamp
        elif stamp != self._stamp:
            raise UserError(
                f"{self.name} was compiled with freezing, and its weights changed since; the program has the old ones. Compile it "
                "again after every change (a checkpoint, an average, an adapter), or without freezing."
            )
