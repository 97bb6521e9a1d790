"""Diffusion algorithms, one a folder; importing this package registers them."""

from opensora.schedulers import dpms, iddpm, nova, rf
