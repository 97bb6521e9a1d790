"""Adapt PixArt-Sigma's weights to STDiT3-XL/2 on 480p images: the first step of Open-Sora 1.2.

STDiT3 has spatial and temporal blocks; images train the spatial ones.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/train/adapt.py \
        --data-path images.csv --ckpt-path PixArt-Sigma-XL-2-2K-MS.pth

Weights: PixArt-Sigma's.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit3.py"]
use_image_transform = True
num_workers = 4

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "480p": {1: (1.0, 14)},
}

grad_checkpoint = "none"

vae = dict(
    _delete_=True,
    type="VideoAutoencoderKL",
    from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    subfolder="vae",
    micro_batch_size=4,
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

ckpt_every = 500
lr = 2e-5
