"""Train PixArt-XL/2 on captioned images of 256x256 as a rectified flow with uniform times, with the settings of Open-Sora 1.2.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/image_rflow.py \
        --data-path images.csv --ckpt-path PixArt-XL-2-512x512.pth

Sample with configs/pixart/inference/1x512x512-rflow.py `--image-size 256 256 --text_encoder.model_max_length 200`.

Weights: PixArt's.
Hardware: 8 GPUs, 34 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 1
frame_interval = 1
image_size = (256, 256)

use_image_transform = True
num_workers = 16

model = dict(
    type="PixArt-XL/2",
    space_scale=1.0,
    time_scale=1.0,
    no_temporal_pos_emb=True,  # an image has no time
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(micro_batch_size=4)
text_encoder = dict(model_max_length=200)
scheduler = dict(type="rflow")

epochs = 10
ckpt_every = 500
batch_size = 100
lr = 2e-5
