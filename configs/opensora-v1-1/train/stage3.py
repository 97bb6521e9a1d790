"""Train STDiT2-XL/2 on images and videos up to 720p: the third stage of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/stage3.py \
        --data-path clips.csv --ckpt-path STAGE_2

Weights: from stage2.py.
Hardware: 8 GPUs of 80 GB (its authors' batch sizes).
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit2.py"]
frame_interval = 3  # sample every 3rd frame

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (1.0, 200), 16: (1.0, 36), 32: (1.0, 18), 64: (1.0, 9), 128: (1.0, 4)},
    "256": {1: (0.8, 200), 16: (0.5, 22), 32: (0.5, 11), 64: (0.5, 6), 128: (0.8, 4)},
    "240p": {1: (0.8, 200), 16: (0.5, 22), 32: (0.5, 10), 64: (0.5, 6), 128: (0.5, 3)},
    "360p": {1: (0.5, 120), 16: (0.5, 9), 32: (0.5, 4), 64: (0.5, 2), 128: (0.5, 1)},
    "512": {1: (0.5, 120), 16: (0.5, 9), 32: (0.5, 4), 64: (0.5, 2), 128: (0.8, 1)},
    "480p": {1: (0.4, 80), 16: (0.6, 6), 32: (0.6, 3), 64: (0.6, 1), 128: (0.0, None)},
    "720p": {1: (0.4, 40), 16: (0.6, 3), 32: (0.6, 1), 96: (0.0, None)},
    "1024": {1: (0.3, 40)},
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
