"""Masked autoregression with a diffusion head, the training and sampling of NOVA."""

from opensora.schedulers.nova.nova import MaskedAutoregression

__all__ = ["MaskedAutoregression"]
