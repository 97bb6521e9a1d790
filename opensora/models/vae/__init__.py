from opensora.models.vae.vae import VideoAutoencoderKL
