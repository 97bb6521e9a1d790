from opensora.acceleration.vae_slicing import sliced_vae
from opensora.models.vae.discriminator import PatchDiscriminator
from opensora.models.vae.opensora_v1_2 import OpenSoraVAE_V1_2, VAE_Temporal, VideoAutoencoderPipeline
from opensora.models.vae.scale_only import ScaleOnlyVAE
from opensora.models.vae.vae import VideoAutoencoderKL, VideoAutoencoderKLTemporalDecoder
from opensora.models.vae.video import DiffusersVideoVAE
