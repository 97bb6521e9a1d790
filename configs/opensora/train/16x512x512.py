"""Train STDiT-XL/2 on 16 frames of 512x512, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x512x512.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Weights: from configs/opensora/train/16x256x256.py.
Hardware: 8 GPUs, 250 GiB each as Open-Sora 1.0 sets it, 36 with `--grad-checkpoint block`.
"""

_base_ = "16x256x256.py"

image_size = (512, 512)

grad_checkpoint = "none"

model = dict(space_scale=1.0)
vae = dict(micro_batch_size=128)

ckpt_every = 500
