"""Train STDiT-XL/2 on 16 frames of 256x256 as a rectified flow, otherwise as 16x256x256.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256-rflow.py \
        --data-path clips.csv

Sample with configs/opensora/inference/16x256x256-rflow.py: some 30 steps do for a flow, against 100 of iddpm.

Weights: random, or PixArt-XL-2-512x512.pth.
Hardware: 8 GPUs, 22 GiB each.
"""

_base_ = ["16x256x256.py"]

scheduler = dict(
    _delete_=True,
    type="rflow",
    timestep_sampling="logit-normal",  # mostly the middle of the time
    shift="resolution",  # larger latents at noisier times
)
