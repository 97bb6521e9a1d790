"""NOVA: autoregressive generation of images and videos, patch by patch."""

from opensora.models.nova.nova import NOVA

__all__ = ["NOVA"]
