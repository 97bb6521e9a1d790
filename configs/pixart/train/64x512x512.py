"""Train PixArt-XL/2 on 64 frames of 512x512, with the settings of Open-Sora 1.0.

Every token of the clip attends to every other. A clip has 65,536 of them,
so this is far slower than STDiT on such clips (configs/opensora/train/64x512x512.py).

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/pixart/train/64x512x512.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Weights: PixArt's.
Hardware: 8 GPUs, 64 GiB each.
"""

_base_ = "16x256x256.py"
num_frames = 64
frame_interval = 2  # sample every 2nd frame
image_size = (512, 512)

grad_checkpoint = "block"

model = dict(
    space_scale=1.0,
    time_scale=2 / 3,  # new / old frame interval
)
vae = dict(micro_batch_size=128)

ckpt_every = 250
batch_size = 4
