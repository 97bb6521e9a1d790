"""Sample images of about 2048x2048 pixels with PixArt-1B/2, which is wider: 1.6 billion parameters.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x20481B.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2i_samples.txt

Weights: from configs/pixart/train/1x2048x2048.py.
Hardware: 1 GPU.
"""

_base_ = "1x1024-sigma.py"
image_size = (2560, 1536)

model = dict(
    type="PixArt-1B/2",
    space_scale=4.0,  # new / old height: the base model is 512x512
    base_size=128,  # 2048 pixels in patches of 16; other sizes see the same range of positions
)
scheduler = dict(num_sampling_steps=14)
