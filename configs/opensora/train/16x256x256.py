"""Train STDiT-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Open-Sora 1.0 starts from PixArt-XL-2-512x512 and took 80,000 steps on 64 GPUs (its authors' figure).

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256.py \
        --data-path clips.csv

Weights: random, or PixArt-XL-2-512x512.pth as Open-Sora 1.0.
Hardware: 8 GPUs, 22 GiB each.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 16
frame_interval = 3  # sample every 3rd frame
image_size = (256, 256)

model = dict(
    type="STDiT-XL/2",
    space_scale=0.5,  # new / old height
    time_scale=1.0,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
text_encoder = dict(shardformer=True)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

batch_size = 8
lr = 2e-5
