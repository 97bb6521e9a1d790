"""Train STDiT2-XL/2 on images and videos up to 480p: the second stage of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/stage2.py \
        --data-path clips.csv --ckpt-path STAGE_1

Weights: from stage1.py.
Hardware: 8 GPUs of 80 GB (its authors' batch sizes).
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit2.py"]
frame_interval = 3  # sample every 3rd frame

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (1.0, 48), 16: (1.0, 17), 32: (1.0, 9), 64: (1.0, 4), 128: (1.0, 1)},
    "256": {1: (0.8, 254), 16: (0.5, 17), 32: (0.5, 9), 64: (0.5, 4), 128: (0.5, 1)},
    "240p": {1: (0.1, 20), 16: (0.9, 17), 32: (0.8, 9), 64: (0.8, 4), 128: (0.8, 2)},
    "512": {1: (0.5, 86), 16: (0.2, 4), 32: (0.2, 2), 64: (0.2, 1), 128: (0.0, None)},
    "480p": {1: (0.4, 54), 16: (0.4, 4), 32: (0.0, None)},
    "720p": {1: (0.1, 20), 16: (0.1, 2), 32: (0.0, None)},
    "1024": {1: (0.3, 20)},
    "1080p": {1: (0.4, 8)},
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
