"""Train STDiT2-XL/2 on videos of 240p to 720p and on images: the bucket example of Open-Sora's documentation.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/video.py \
        --data-path clips.csv --ckpt-path PixArt-XL-2-1024-MS.pth

Weights: PixArt's, or from image.py.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit2.py"]
frame_interval = 3  # sample every 3rd frame
num_workers = 4

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "240p": {16: (1.0, 16), 32: (1.0, 8), 64: (1.0, 4), 128: (1.0, 2)},
    "256": {1: (1.0, 256)},
    "512": {1: (1.0, 80)},
    "480p": {1: (1.0, 52), 16: (0.5, 4), 32: (0.0, None)},
    "720p": {16: (1.0, 2), 32: (0.0, None)},
    "1024": {1: (1.0, 20)},
    "1080p": {1: (1.0, 8)},
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

scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

ckpt_every = 500
lr = 2e-5
