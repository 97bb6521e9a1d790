"""Train PixArt-XL/2 on captioned images of 512x512, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/pixart/train/1x512x512.py \
        --data-path images.csv --ckpt-path PixArt-XL-2-512x512.pth

Weights: PixArt's.
Hardware: 8 GPUs, 34 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 1
frame_interval = 1
image_size = (512, 512)

use_image_transform = True

model = dict(
    type="PixArt-XL/2",
    space_scale=1.0,
    no_temporal_pos_emb=True,  # an image has no time
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

batch_size = 32
lr = 2e-5
