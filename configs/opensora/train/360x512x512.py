"""Train STDiT-XL/2 on 360 frames of 512x512, two processes to a clip, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/360x512x512.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Weights: from configs/opensora/train/64x512x512.py.
Hardware: 8 GPUs, 43 GiB each.
"""

_base_ = "64x512x512.py"
num_frames = 360
frame_interval = 3  # sample every 3rd frame

sp_size = 2

batch_size = 1
