"""Train STDiT-XL/2 on 64 frames of 512x512, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/64x512x512.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Weights: from configs/opensora/train/16x512x512.py.
Hardware: 8 GPUs, 54 GiB each.
"""

_base_ = "16x512x512.py"
num_frames = 64
frame_interval = 2  # sample every 2nd frame

grad_checkpoint = "block"

model = dict(time_scale=2 / 3)  # new / old frame interval

ckpt_every = 250
batch_size = 4
