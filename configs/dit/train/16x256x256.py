"""Train DiT-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Every token of the clip attends to every other. Start from DiT's ImageNet weights (their classes are left out) or from
configs/dit/train/1x256x256.py.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/16x256x256.py \
        --data-path clips.csv --ckpt-path DiT-XL-2-256x256.pt

Weights: DiT's ImageNet weights, or those of configs/dit/train/1x256x256.py.
Hardware: 8 GPUs, 54 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/clip.py"]
num_frames = 16
frame_interval = 3  # sample every 3rd frame
image_size = (256, 256)

grad_checkpoint = "none"

model = dict(
    type="DiT-XL/2",
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
