"""Sample 16 frames of 256x256 with an STDiT-XL/2 that configs/opensora/train/16x256x256-rflow.py trained.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora/inference/16x256x256-rflow.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

Weights: from configs/opensora/train/16x256x256-rflow.py.
Hardware: 1 GPU.
"""

_base_ = ["16x256x256.py"]

scheduler = dict(
    _delete_=True,
    type="rflow",
    shift="resolution",  # as in training
    num_sampling_steps=30,
    cfg_scale=7.0,
)
