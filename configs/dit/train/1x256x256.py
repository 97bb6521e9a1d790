"""Train DiT-XL/2 on captioned images of 256x256 from random weights, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/1x256x256.py \
        --data-path images.csv

Weights: random.
Hardware: 8 GPUs, 54 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/clip.py"]
num_frames = 1
frame_interval = 1
image_size = (256, 256)

use_image_transform = True
grad_checkpoint = "none"

model = dict(
    type="DiT-XL/2",
    condition="text",  # a caption is one vector
    no_temporal_pos_emb=True,  # an image has no time
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

batch_size = 128
lr = 1e-4
