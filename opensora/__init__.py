"""Train and sample video diffusion transformers."""

import os

# How OpenMP's threads wait for each other: torch's OpenMP reads it once, when torch is loaded. By default a thread keeps its core busy
# for milliseconds at every wait; where other programs want the core too, a training step then takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.2.0"
