"""Counts of matrix products."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Counts matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))
