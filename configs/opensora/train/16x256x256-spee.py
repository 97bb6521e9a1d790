"""Train STDiT-XL/2 on 16 frames of 256x256 with SpeeDiT's timesteps and weights, otherwise as 16x256x256.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256-spee.py \
        --data-path clips.csv

It changes which timesteps are trained, not the model: sample with configs/opensora/inference/16x256x256.py.

Weights: random, or PixArt-XL-2-512x512.pth.
Hardware: 8 GPUs, 22 GiB each.
"""

_base_ = ["16x256x256.py"]

scheduler = dict(
    _delete_=True,
    type="iddpm-speed",
    timestep_respacing="",  # all 1000 timesteps
)
