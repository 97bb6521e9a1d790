"""Train STDiT2-XL/2 on captioned images from 256x256 to 1080p, with the buckets of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/image.py \
        --data-path images.csv --ckpt-path PixArt-XL-2-1024-MS.pth

Weights: PixArt's.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit2.py"]
use_image_transform = True
num_workers = 4

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "256": {1: (1.0, 256)},
    "512": {1: (1.0, 80)},
    "480p": {1: (1.0, 52)},
    "1024": {1: (1.0, 20)},
    "1080p": {1: (1.0, 8)},
}

scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

ckpt_every = 500
lr = 2e-5
