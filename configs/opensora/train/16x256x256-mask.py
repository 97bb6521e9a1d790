"""Train STDiT-XL/2 on 16 frames of 256x256, with conditioning frames in three of ten clips, otherwise as 16x256x256.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256-mask.py \
        --data-path clips.csv --ckpt-path PixArt-XL-2-512x512.pth

Sample with configs/opensora/inference/16x256x256.py, from references too (`--image`, `--extend`; docs/how-to/conditioning.md).

Weights: PixArt's.
Hardware: 8 GPUs, 22 GiB each.
"""

_base_ = ["16x256x256.py"]

# frames given at random, so that the model learns to continue and to fill in; the rest, 70 %, get none
mask_ratios = {
    "random": 0.15,
    "quarter_head": 0.05,
    "quarter_tail": 0.05,
    "quarter_head_tail": 0.05,
}
