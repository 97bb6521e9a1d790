"""Train and sample video diffusion transformers."""

import os

# How OpenMP's threads wait for each other: torch's OpenMP reads it once, when torch is loaded. By default a thread keeps its core busy
# for milliseconds at every wait; where other programs want the core too, a training step then takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Inductor's fusion of a sum over columns with one over rows gives wrong gradients of modulation tables (of Wan's `scale_shift_table`
# at 32,760 tokens, torch 2.11 on an H200: off by a factor of 5,000), see https://github.com/pytorch/pytorch/issues/190796. Read when
# torch._inductor is loaded.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")

__version__ = "0.2.0"
