from opensora.models.vae.vae import VideoAutoencoderKL, VideoAutoencoderKLTemporalDecoder
from opensora.models.vae.video import DiffusersVideoVAE
