"""Train PixArt-XL/2 on captioned images of 512x512 as a rectified flow, otherwise as 1x512x512.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/pixart/train/1x512x512-rflow.py \
        --data-path images.csv --ckpt-path PixArt-XL-2-512x512.pth

Sample with configs/pixart/inference/1x512x512-rflow.py.

Weights: PixArt's.
Hardware: 8 GPUs, 34 GiB each.
"""

_base_ = ["1x512x512.py"]

scheduler = dict(
    _delete_=True,
    type="rflow",
    timestep_sampling="logit-normal",  # mostly the middle of the time
)
