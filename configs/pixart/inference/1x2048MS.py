"""Sample images of about 2048x2048 pixels with PixArt-Sigma-XL/2 and its released weights (Chen et al. 2024).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x2048MS.py \
        --ckpt-path PixArt-Sigma-XL-2-2K-MS.pth --prompt-path assets/texts/t2i_samples.txt

Weights: released by PixArt's authors.
Hardware: 1 GPU.
"""

_base_ = "1x1024-sigma.py"
image_size = (2560, 1536)

model = dict(
    space_scale=4.0,  # new / old height: the base model is 512x512
    base_size=128,  # 2048 pixels in patches of 16; other sizes see the same range of positions
)
scheduler = dict(num_sampling_steps=14)
