"""Train STDiT2-XL/2 on images and videos of 144p to 240p: the first stage of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/stage1.py \
        --data-path clips.csv --ckpt-path PixArt-XL-2-1024-MS.pth

Weights: PixArt's.
Hardware: 8 GPUs of 80 GB (its authors' batch sizes).
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit2.py"]
frame_interval = 3  # sample every 3rd frame

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (0.5, 48), 16: (1.0, 6), 32: (1.0, 3), 96: (1.0, 1)},
    "256": {1: (0.5, 24), 16: (0.5, 3), 48: (0.5, 1), 64: (0.0, None)},
    "240p": {16: (0.3, 2), 32: (0.3, 1), 64: (0.0, None)},
    "512": {1: (0.4, 12)},
    "1024": {1: (0.3, 3)},
}

# frames given at random, so that the model learns to continue and to fill in; the rest, 75 %, get none
mask_ratios = {
    "quarter_random": 0.025,
    "quarter_head": 0.025,
    "quarter_tail": 0.025,
    "quarter_head_tail": 0.05,
    "image_random": 0.025,
    "image_head": 0.025,
    "image_tail": 0.025,
    "image_head_tail": 0.05,
}

grad_checkpoint = "none"

scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

ckpt_every = 500
lr = 2e-5
