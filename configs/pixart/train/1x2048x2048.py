"""Train PixArt-1B/2 on captioned images of 2048x2048, with the settings of Open-Sora 1.2.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/pixart/train/1x2048x2048.py \
        --data-path images.csv --ckpt-path WEIGHTS

Sample with configs/pixart/inference/1x20481B.py.

Weights: random, or any of PixArt-1B/2.
Hardware: 8 GPUs, 62 GiB each.
"""

_base_ = "1x512x512.py"
image_size = (2048, 2048)

model = dict(type="PixArt-1B/2", space_scale=4.0)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    subfolder="vae",
)
text_encoder = dict(model_max_length=300)

batch_size = 4
