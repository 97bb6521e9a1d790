"""Sample images of 512x512 with a PixArt-XL/2 that configs/pixart/train/1x512x512-rflow.py trained.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x512x512-rflow.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2i_samples.txt

Weights: from configs/pixart/train/1x512x512-rflow.py.
Hardware: 1 GPU.
"""

_base_ = ["1x512x512.py"]

scheduler = dict(
    _delete_=True,
    type="rflow",
    num_sampling_steps=20,
    cfg_scale=7.0,
)
