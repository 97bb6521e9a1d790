"""Code under it that reads a value back from the device fails."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoReading(TorchDispatchMode):
    """Fails on what would make the host wait for a GPU: reading a value, or shapes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        if name == "index":  # a boolean index has as many results as it has ones
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean indexing waits for the device"
        return func(*args, **(kwargs or {}))
