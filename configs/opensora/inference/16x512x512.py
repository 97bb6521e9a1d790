"""Sample 16 frames of 512x512 with STDiT-XL/2, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora/inference/16x512x512.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

Weights: Open-Sora 1.0's, or from configs/opensora/train/16x512x512.py.
Hardware: 1 GPU.
"""

_base_ = "16x256x256.py"

image_size = (512, 512)

model = dict(space_scale=1.0)
vae = dict(micro_batch_size=128)
