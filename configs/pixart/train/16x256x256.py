"""Train PixArt-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Every token of the clip attends to every other.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/pixart/train/16x256x256.py \
        --data-path clips.csv --ckpt-path PixArt-XL-2-512x512.pth

Weights: PixArt's.
Hardware: 8 GPUs, 77 GiB each as Open-Sora 1.0 sets it, 34 with `--grad-checkpoint block`.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 16
frame_interval = 3  # sample every 3rd frame
image_size = (256, 256)

grad_checkpoint = "none"

model = dict(
    type="PixArt-XL/2",
    space_scale=0.5,  # new / old height
    time_scale=1.0,
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
