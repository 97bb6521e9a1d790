"""Train and sample video diffusion transformers."""

__version__ = "0.1.0"
