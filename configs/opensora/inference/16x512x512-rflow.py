"""Sample 16 frames of 512x512 with an STDiT-XL/2 that was trained as a rectified flow.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora/inference/16x512x512-rflow.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

Weights: from a training of your own.
Hardware: 1 GPU.
"""

_base_ = ["16x512x512.py"]

scheduler = dict(
    _delete_=True,
    type="rflow",
    shift="resolution",  # as in training
    num_sampling_steps=30,
    cfg_scale=7.0,
)
