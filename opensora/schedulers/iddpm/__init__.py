"""Improved DDPM (Nichol & Dhariwal 2021): discrete-time diffusion with DDPM and DDIM sampling."""

from opensora.schedulers.iddpm.iddpm import IDDPM
