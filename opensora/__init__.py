"""Train and sample video diffusion transformers."""

__version__ = "0.2.0"
