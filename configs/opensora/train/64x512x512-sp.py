"""Train STDiT-XL/2 on 64 frames of 512x512, two processes to a clip, otherwise as 64x512x512.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/64x512x512-sp.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Weights: from configs/opensora/train/16x512x512.py.
Hardware: 8 GPUs, 22 GiB each.
"""

_base_ = "64x512x512.py"

sp_size = 2

ckpt_every = 1000
batch_size = 1
