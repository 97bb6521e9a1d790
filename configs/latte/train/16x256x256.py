"""Train Latte-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Blocks attend over the tokens of a frame and over the frames at a position in turn. Start from DiT's ImageNet
weights, whose classes are left out.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/latte/train/16x256x256.py \
        --data-path clips.csv --ckpt-path DiT-XL-2-256x256.pt

Weights: DiT's ImageNet weights.
Hardware: 8 GPUs, 18 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/clip.py"]
num_frames = 16
frame_interval = 3  # sample every 3rd frame
image_size = (256, 256)

model = dict(
    type="Latte-XL/2",
    condition="text",  # a caption is one vector
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

batch_size = 8
lr = 2e-5
