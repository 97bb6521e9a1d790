"""Optix's interface: one call that prepares denoiser, VAE, optimizer and average for memory-efficient training.

    from opensora.acceleration import optix

    model, vae, opt, ema = optix.compile(model, vae, learning_rate=1e-5, weight_decay=1e-5, use_ema=True)
    latents = optix.sliced_vae(vae, pixels, use_autocast=True, nhwc=True)

It works on our models and on diffusers' U-Nets and transformers, and is made of the parts that `scripts/train.py` uses.
"""

from opensora.acceleration.optix.compile import DEFAULTS, compile
from opensora.acceleration.optix.sharded_ema import ShardedEMA
from opensora.acceleration.sliced_vae import sliced_vae

__all__ = ["DEFAULTS", "ShardedEMA", "compile", "sliced_vae"]
