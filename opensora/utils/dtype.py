"""Names of dtypes, as configs spell them."""

import torch

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
}
HALF = (torch.bfloat16, torch.float16)


def to_torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """`"bf16"` -> `torch.bfloat16`; a torch dtype is returned as it is."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[name]
