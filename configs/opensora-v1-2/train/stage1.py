"""Train STDiT3-XL/2 on images and videos of 144p to 360p, up to 408 frames: the first stage of Open-Sora 1.2.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/train/stage1.py \
        --data-path clips.csv --ckpt-path ADAPTED

Weights: from adapt.py.
Hardware: 8 GPUs of 80 GB (its authors' batch sizes).
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit3.py"]

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 0.1), 5), 408: ((0.5, 0.1), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 0.1), 5), 408: ((0.4, 0.1), 2)},
    "360p": {1: (0.2, 141), 51: (0.15, 8), 102: ((0.15, 0.33), 4), 204: ((0.15, 0.1), 2), 408: ((0.15, 0.1), 1)},
    "512": {1: (0.1, 141)},
    "480p": {1: (0.1, 89)},
    "720p": {1: (0.05, 36)},
    "1024": {1: (0.05, 36)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.1, 5)},
}

# frames given at random, so that the model learns to continue and to fill in; the rest, 80 %, get none
mask_ratios = {
    "random": 0.05,
    "interpolate": 0.005,
    "quarter_random": 0.005,
    "quarter_head": 0.005,
    "quarter_tail": 0.005,
    "quarter_head_tail": 0.005,
    "image_random": 0.025,
    "image_head": 0.05,
    "image_tail": 0.025,
    "image_head_tail": 0.025,
}

model = dict(freeze_y_embedder=True)
scheduler = dict(
    type="rflow",
    shift="resolution",
    timestep_sampling="logit-normal",
)

ckpt_every = 200
lr = 1e-4
warmup_steps = 1000
adam_eps = 1e-15
ema_decay = 0.99
