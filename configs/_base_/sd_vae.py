"""Stable Diffusion's image VAE, frame by frame: 8x8, 4 channels."""

vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sd-vae-ft-ema")
