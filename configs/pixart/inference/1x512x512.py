"""Sample images of 512x512 from captions with PixArt-XL/2 and its released weights (Chen et al. 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x512x512.py \
        --ckpt-path PixArt-XL-2-512x512.pth --prompt-path assets/texts/t2i_samples.txt

20 steps of DPM-Solver, as PixArt samples; `--scheduler.type iddpm --num-sampling-steps 100` is its other way.

Weights: released by PixArt's authors.
Hardware: 1 GPU.
"""

_base_ = "1x256x256.py"

image_size = (512, 512)
