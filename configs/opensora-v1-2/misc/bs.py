"""Find batch sizes for the buckets of Open-Sora 1.2 whose steps take as long as one of 408 frames of 512x512.

    python -m tools.search_batch_size configs/opensora-v1-2/misc/bs.py outputs/bs.py --goal even --base 512:408 \
        --data-path clips.csv

Weights: random.
Hardware: 1 GPU of 80 GB.
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit3.py"]

# resolution: {frames: (probability, batch size of each process, where the search starts)}
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: (1.0, 27), 204: (1.0, 13), 408: (1.0, 6)},
    "240p": {1: (1.0, 297), 51: (1.0, 20), 102: (1.0, 10), 204: (1.0, 5), 408: (1.0, 2)},
    "512": {1: (1.0, 141), 51: (1.0, 8), 102: (1.0, 4), 204: (1.0, 2), 408: (1.0, 1)},
    "480p": {1: (1.0, 89), 51: (1.0, 5), 102: (1.0, 2), 204: (1.0, 1)},
    "1024": {1: (1.0, 36), 51: (1.0, 1)},
    "1080p": {1: (1.0, 5)},
    "2048": {1: (1.0, 5)},
}

# frames given at random, so that the model learns to continue and to fill in; the rest, 50 %, get none
mask_ratios = {
    "random": 0.2,
    "interpolate": 0.01,
    "quarter_random": 0.01,
    "quarter_head": 0.01,
    "quarter_tail": 0.01,
    "quarter_head_tail": 0.01,
    "image_random": 0.05,
    "image_head": 0.1,
    "image_tail": 0.05,
    "image_head_tail": 0.05,
}

scheduler = dict(
    type="rflow",
    shift="resolution",
    timestep_sampling="logit-normal",
)

ckpt_every = 500
lr = 2e-4
adam_eps = 1e-15
ema_decay = 0.99
